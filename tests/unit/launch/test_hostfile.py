"""What we write as a hostfile is what MLX's own parser reads, and mlx.launch accepts, for every backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.launch.hostfile import port_count, ports_of, write_hostfile
from engine.planning.wiring import LaunchHost, Wiring

ADDRESSES = st.ip_addresses(v=4).map(str)
DEVICES = st.from_regex(r"rdma_en[0-9]", fullmatch=True)


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    """What mlx.launch takes: addresses for the ring, for jaccl a device towards each other rank."""
    backend = draw(st.sampled_from(["ring", "jaccl", "jaccl-ring", "nccl"]))
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
    return Wiring(backend=backend, hosts=tuple(hosts))


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
    written: list[Wiring] = []

    @settings(max_examples=80, database=None)
    @given(wirings())
    def write(wiring: Wiring) -> None:
        write_hostfile(tmp_path / f"{len(written)}.json", wiring)
        written.append(wiring)

    write()
    assert {wiring.backend for wiring in written} == {"ring", "jaccl", "jaccl-ring", "nccl"}
    paths = [str(tmp_path / f"{number}.json") for number in range(len(written))]
    done = subprocess.run([sys.executable, "-c", ASK_MLX, *paths], capture_output=True, text=True, check=True)
    for wiring, line in zip(written, done.stdout.splitlines(), strict=True):
        hosts = [[rank, host.ssh, list(host.ips), list(host.rdma or ())] for rank, host in enumerate(wiring.hosts)]
        assert json.loads(line) == [wiring.backend, [host.ssh for host in wiring.hosts], hosts]


@given(wirings(), st.integers(1024, 60_000))
def test_every_port_is_counted_once_and_without_a_gap(wiring: Wiring, first: int) -> None:
    counted = [port for rank in range(len(wiring.hosts)) for port in ports_of(rank, wiring, first)]
    assert counted == list(range(first, first + port_count(wiring)))


@given(wirings(), st.integers(1024, 60_000))
def test_the_ring_listens_on_every_address_and_the_others_on_rank_0_alone(wiring: Wiring, first: int) -> None:
    ports = [len(ports_of(rank, wiring, first)) for rank in range(len(wiring.hosts))]
    ring = [len(host.ips) for host in wiring.hosts]
    assert ports == (ring if wiring.backend == "ring" else [1] + [0] * (len(wiring.hosts) - 1))
