"""The same Macs and cables give the same answer here and in the installed MLX's `mlx.distributed_config`."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx._distributed_utils import config as mlx_config
from mlx._distributed_utils.common import Host

from engine.cluster.topology import ring_order, topology
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.plan.addresses import assign_subnets, setup_commands
from engine.plan.network import plan_network
from tests.cluster.mac.personality import CABLINGS, documents
from tests.unit.cluster.macs import Cabled, Macs, cablings, mesh, ring


class Upstream:
    """What MLX works out for these Macs."""

    def __init__(self, macs: Macs) -> None:
        self.macs = macs
        self.hosts = [Host(rank, name, [], []) for rank, name in enumerate(macs.names)]
        with self._answering():
            self.tb_hosts, self.index = mlx_config.extract_connectivity(self.hosts, False)
        self.connectivity: list[list[int]] = mlx_config.make_connectivity_matrix(self.tb_hosts, self.index)
        self.ips = mlx_config.IPConfigurator(self.hosts, self.tb_hosts, self.index)

    @property
    def rings(self) -> list[tuple[list[int], int]]:
        found: list[tuple[list[int], int]] = mlx_config.extract_rings(self.connectivity)
        return found

    @property
    def whole_ring(self) -> list[int] | None:
        rings = self.rings
        return rings[0][0] if mlx_config.check_valid_ring(self.hosts, rings, False) else None

    @property
    def mesh(self) -> bool:
        return bool(mlx_config.check_valid_mesh(self.hosts, self.connectivity, False))

    @property
    def backend(self) -> str | None:
        """What it chooses by itself; None where it gives up."""
        rdma = all("rdma_" in self.macs.answers(mac).get("ibv_devices", "") for mac in range(len(self.hosts)))
        if rdma and self.mesh:
            return "jaccl"
        if self.whole_ring is None:
            return None
        return "jaccl-ring" if rdma else "ring"

    def setup(self) -> dict[str, list[str]]:
        """Per host, the commands that it asks a person to run."""
        printed: list[str] = []
        with (
            patch.object(mlx_config, "print", lambda *words: printed.append(" ".join(words)), create=True),
            patch.object(mlx_config, "input", lambda _: "", create=True),
        ):
            self.ips.setup()
        texts = [text for text in printed if text.startswith("sudo")]
        return {name: text.strip().splitlines() for name, text in zip(self.macs.names, texts, strict=True)}

    def hostfile(self, backend: str, directory: Path) -> list[dict[str, Any]]:
        """The hosts of the hostfile that it writes for the backend."""
        path = directory / f"{backend}.json"
        arguments = argparse.Namespace(verbose=False, env=[], auto_setup=False, output_hostfile=str(path))
        steps: dict[str, Callable[[], None]] = {
            "jaccl": lambda: mlx_config.configure_jaccl(arguments, self.hosts, self.ips, []),
            "jaccl-ring": lambda: mlx_config.configure_jaccl_ring(arguments, self.hosts, self.ips, self.rings[0], []),
            "ring": lambda: mlx_config.configure_ring(arguments, self.hosts, self.ips, self.rings[0], []),
        }
        with self._answering(), patch.object(self.ips, "setup", lambda **_: None):
            steps[backend]()
        hosts: list[dict[str, Any]] = json.loads(path.read_text())["hosts"]
        return hosts

    @contextmanager
    def _answering(self) -> Iterator[None]:
        def run(argv: list[str], **_: object) -> SimpleNamespace:
            number = self.macs.names.index(argv[1])
            if "system_profiler" in argv:
                return SimpleNamespace(stdout=self.macs.thunderbolt(number).encode())
            if "networksetup" in argv:
                return SimpleNamespace(stdout=self.macs.networksetup(number).encode())
            return SimpleNamespace(stdout=f"10.0.0.{number + 1}\n")

        with patch.object(mlx_config, "run", run):
            yield


SOME = settings(suppress_health_check=[HealthCheck.too_slow])


def shuffled(macs: Macs, seed: int) -> Macs:
    """The same cables, with the interfaces named in another order."""
    chooser = random.Random(seed)
    for devices in macs.devices:
        chooser.shuffle(devices)
    return macs


def addressed(macs: Macs) -> Macs:
    """With the addresses that the set-up commands give, and those alone."""
    for cable, a_ip, b_ip in assign_subnets(topology(macs.facts())):
        macs.addresses[f"{cable.a} {cable.a_device}"] = f"{a_ip}/30"
        macs.addresses[f"{cable.b} {cable.b_device}"] = f"{b_ip}/30"
    return macs


def config(macs: Macs, backend: str = "auto") -> Config:
    nodes = [NodeConfig(name=name, ssh=f"{name}.local", ips=(), python="/p", workdir="/") for name in macs.names]
    cluster = ClusterConfig.model_validate({"backend": backend})
    return Config(cluster=cluster, nodes=tuple(nodes), job=JobConfig(name="job", command=("true",)))


@SOME
@given(cablings())
def test_any_cabling_has_the_same_connections_mesh_and_ring(macs: Macs) -> None:
    upstream, found = Upstream(macs), topology(macs.facts())
    counts = [[0] * len(macs.names) for _ in macs.names]
    for cable in found.cables:
        a, b = macs.names.index(cable.a), macs.names.index(cable.b)
        counts[a][b] += 1
        counts[b][a] += 1
    assert counts == upstream.connectivity
    assert (found.shape == "mesh") == upstream.mesh
    order = ring_order(found)
    whole = upstream.whole_ring
    assert order == (whole and tuple(macs.names[number] for number in whole))
    if not upstream.mesh:
        assert (found.shape == "ring") == (whole is not None)
    assert (found.shape == "none") == (sum(map(sum, counts)) == 0)
    assert len(found.strangers) == len(macs.strangers)


@SOME
@given(cablings())
def test_any_cabling_has_the_same_set_up_commands(macs: Macs) -> None:
    theirs = {name: lines for name, lines in Upstream(macs).setup().items() if len(lines) > 1}
    assert setup_commands(topology(macs.facts())) == theirs


@pytest.mark.parametrize(("number", "cables"), [(2, 1), (2, 3), (3, 1), (3, 2), (4, 1), (5, 1), (8, 1)])
def test_a_mesh_has_the_same_rdma_rows(number: int, cables: int, tmp_path: Path) -> None:
    macs = addressed(shuffled(mesh(number, cables), number))
    facts = macs.facts()
    network = plan_network(config(macs), facts, topology(facts))
    assert (network.backend, network.warnings) == ("jaccl", ())
    theirs = Upstream(macs).hostfile("jaccl", tmp_path)
    assert json.loads(json.dumps([host.rdma for host in network.hosts])) == [host["rdma"] for host in theirs]
    assert network.hosts[0].ips == tuple(theirs[0]["ips"])


@pytest.mark.parametrize("number", [4, 5, 8, 11])
def test_a_ring_has_the_same_rdma_rows(number: int, tmp_path: Path) -> None:
    macs = addressed(shuffled(ring(number), number))
    facts = macs.facts()
    network = plan_network(config(macs), facts, topology(facts))
    assert (network.backend, network.warnings) == ("jaccl-ring", ())
    theirs = Upstream(macs).hostfile("jaccl-ring", tmp_path)
    assert [list(host.rdma or ()) for host in network.hosts] == [host["rdma"] for host in theirs]


@pytest.mark.parametrize("macs", [mesh(2), mesh(2, 3), mesh(3), ring(4), ring(7)], ids=lambda macs: str(macs.ports))
def test_tcp_over_the_cables_has_the_same_addresses(macs: Macs, tmp_path: Path) -> None:
    macs = addressed(macs)
    facts = macs.facts()
    network = plan_network(config(macs, "ring"), facts, topology(facts))
    theirs = Upstream(macs).hostfile("ring", tmp_path)
    assert [list(host.ips) for host in network.hosts] == [host["ips"] for host in theirs]


@SOME
@given(st.integers(4, 8).flatmap(lambda number: st.permutations(range(number))))
def test_a_ring_in_another_order_than_the_nodes_is_named_in_mlx_order(order: list[int]) -> None:
    macs = addressed(ring(len(order), list(order)))
    facts = macs.facts()
    network = plan_network(config(macs), facts, topology(facts))
    whole = Upstream(macs).whole_ring
    assert whole is not None
    if whole in (list(range(len(order))), [0, *reversed(range(1, len(order)))]):
        assert network.backend == "jaccl-ring"
    else:
        assert network.backend == "ring"
        assert any(f"in the order {', '.join(macs.names[at] for at in whole)}" in text for text in network.warnings)


STUDIOS = ["m4-max-128"], ["m3-ultra-512"], ["m3-ultra-512", "m4-max-128"], ["m5-max-macos27"], ["m1-air-8"]


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("cabling", CABLINGS)
@pytest.mark.parametrize("kinds", STUDIOS, ids="+".join)
def test_each_personality_of_the_test_cluster_is_planned_as_mlx_does(
    kinds: list[str], cabling: str, number: int, tmp_path: Path
) -> None:
    names = [f"mac{at}" for at in range(number)]
    if (kinds, cabling, number) == (["m1-air-8"], "mesh", 4):
        with pytest.raises(ValueError, match=r"mac0 \(MacBookAir10,1\) has too few Thunderbolt ports"):
            documents(names, kinds, cabling)
        return
    macs = Cabled(documents(names, kinds, cabling))
    upstream, facts = Upstream(macs), macs.facts()
    setup = setup_commands(topology(facts), facts)
    if cabling == "bridge":
        assert setup == {name: lines for name, lines in upstream.setup().items() if len(lines) > 1}
        # The same cables, once a person has run these commands.
        facts = Cabled(documents(names, kinds, "chain")).facts()
    else:
        assert setup == {}
    network = plan_network(config(macs), facts, topology(facts))
    backend = upstream.backend
    if backend is None:
        assert network.backend == "ring"
        assert [host.ips for host in network.hosts] == [(f"10.0.0.{at + 1}",) for at in range(number)]
        return
    theirs = upstream.hostfile(backend, tmp_path)
    assert network.backend == backend
    if backend == "ring":
        assert [list(host.ips) for host in network.hosts] == [host["ips"] for host in theirs]
    else:
        assert [list(host.rdma or ()) for host in network.hosts] == [host["rdma"] for host in theirs]
