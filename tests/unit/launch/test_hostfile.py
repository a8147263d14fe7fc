"""The hostfile, the ports that are counted from it, and fresh blocks of them."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import LaunchError
from engine.launch import hostfile
from engine.launch.hostfile import port_count, ports_of, write_hostfile
from engine.node.probes.network import bindable, find_port_holder
from engine.plan.network import LaunchHost, NetworkPlan
from tests.unit.launch.host_layouts import configured_network, ring_ports

BACKENDS = ("ring", "jaccl", "jaccl-ring", "nccl")
ADDRESSES = st.ip_addresses(v=4).map(str)
DEVICES = st.from_regex(r"rdma_en[0-9]", fullmatch=True)


@st.composite
def networks(draw: st.DrawFn, backend: str | None = None) -> NetworkPlan:
    """What mlx.launch takes: addresses for the ring, for jaccl a device towards each other rank."""
    backend = backend or draw(st.sampled_from(BACKENDS))
    size = draw(st.integers(1, 8))
    hosts = []
    for rank in range(size):
        ips = draw(st.lists(ADDRESSES, min_size=1, max_size=3))
        rdma = None
        if backend.startswith("jaccl"):
            beside = {(rank - 1) % size, (rank + 1) % size}
            rdma = tuple(
                None if peer == rank or (backend == "jaccl-ring" and peer not in beside) else draw(DEVICES)
                for peer in range(size)
            )
        hosts.append(LaunchHost(ssh=draw(st.text(min_size=1, max_size=20)), ips=tuple(ips), rdma=rdma))
    return NetworkPlan(backend=backend, hosts=tuple(hosts))


ASK_MLX = """
import json, sys
from mlx._distributed_utils import launch
from mlx._distributed_utils.common import Hostfile

started = []
launch._launch_with_io = lambda kind, arguments, verbose: started.append([args for args, _ in arguments])
for path in sys.argv[1:]:
    parsed = Hostfile.from_file(path)
    sys.argv = ["mlx.launch", "--hostfile", path, "--", "true"]
    launch.main()
    ranks = [args[1] for args in started.pop()]
    print(json.dumps([parsed.backend, ranks, [[h.rank, h.ssh_hostname, h.ips, h.rdma] for h in parsed.hosts]]))
"""
"""mlx.launch up to the moment in which it would start something."""


def test_whatever_is_written_mlx_launch_reads_and_accepts(tmp_path: Path) -> None:
    written: list[NetworkPlan] = []

    for backend in BACKENDS:

        @settings(database=None, max_examples=settings().max_examples // 4)
        @given(networks(backend))
        def write(network: NetworkPlan) -> None:
            write_hostfile(tmp_path / f"{len(written)}.json", network)
            written.append(network)

        write()
    paths = [str(tmp_path / f"{number}.json") for number in range(len(written))]
    done = subprocess.run([sys.executable, "-c", ASK_MLX, *paths], capture_output=True, text=True, check=True)
    for network, line in zip(written, done.stdout.splitlines(), strict=True):
        hosts = [[rank, host.ssh, list(host.ips), list(host.rdma or ())] for rank, host in enumerate(network.hosts)]
        assert json.loads(line) == [network.backend, [host.ssh for host in network.hosts], hosts]


@given(networks(), st.integers(1024, 60_000))
def test_every_port_is_counted_once_and_without_a_gap(network: NetworkPlan, first: int) -> None:
    counted = [port for rank in range(len(network.hosts)) for port in ports_of(rank, network, first)]
    assert counted == list(range(first, first + port_count(network)))


@given(networks(), st.integers(1024, 60_000))
def test_the_ring_listens_on_every_address_and_the_others_on_rank_0_alone(network: NetworkPlan, first: int) -> None:
    ports = [len(ports_of(rank, network, first)) for rank in range(len(network.hosts))]
    ring = [len(host.ips) for host in network.hosts]
    assert ports == (ring if network.backend == "ring" else [1] + [0] * (len(network.hosts) - 1))


@contextmanager
def listening(ip: str, port: int = 0) -> Iterator[int]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ip, port))
        listener.listen(1)
        yield listener.getsockname()[1]


NODES = [NodeConfig(name=f"n{rank}", python=sys.executable, workdir="/") for rank in range(4)]
FLEET = Fleet(Path("/"))


async def chosen(*, starting_port: int | None = None, seed: int | None = None) -> int:
    random.seed(seed)
    return await hostfile.fresh_ports(FLEET, NODES, configured_network(NODES), starting_port)


async def test_the_whole_block_can_be_bound() -> None:
    first = await chosen()
    assert all(hostfile.LOWEST <= port < hostfile.HIGHEST for port in (first, first + 3))
    assert all(bindable("127.0.0.1", port) for port in range(first, first + 4))


async def test_a_block_with_a_busy_port_is_passed_over() -> None:
    first = await chosen(seed=7)
    with listening("127.0.0.1", first + 2):
        another = await chosen(seed=7)
    assert first + 2 not in range(another, another + 4)


async def test_a_configured_port_is_taken_as_it_is() -> None:
    with listening("127.0.0.1") as busy:
        assert await chosen(starting_port=busy) == busy


async def test_no_free_block_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfile, "bindable", lambda _ip, _port: False)
    with pytest.raises(LaunchError, match="no 4 consecutive ports are free"):
        await chosen()


async def test_attempts_do_not_share_their_first_port() -> None:
    assert len({await chosen() for _ in range(20)}) > 1


def test_the_holder_of_a_port_is_named_by_pid_and_command() -> None:
    with listening("127.0.0.1") as busy:
        held = find_port_holder("", busy)
    assert held is not None and held["holder"].startswith(f"pid {os.getpid()} (") and "py" in held["holder"]


def test_nobody_holds_a_free_port() -> None:
    assert find_port_holder("", ring_ports(1)) is None
