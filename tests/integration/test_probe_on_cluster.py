"""Four nodes over real ssh, with four users, homes and pythons, say what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.api import Engine
from engine.cluster.facts import probe
from engine.config.load import load_config
from engine.models import Late
from tests.cluster.cluster import Cluster
from tests.cluster.demo_job import write_toml


async def test_four_nodes_are_known_and_wired(cluster: Cluster, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    config = load_config(write_toml(cluster))
    async with Engine(home) as engine:
        for _ in range(5):
            found = await engine.nodes.probe(config)
            # A busy machine's nodes may be late with one of their facts.
            if not any(isinstance(why, Late) for facts in found for why in facts.unknown.values()):
                break
        assert [(facts.problem, facts.unknown) for facts in found] == [(None, {})] * 4
        for facts, node in zip(found, cluster.nodes, strict=True):
            assert facts.node == node.name
            if cluster.isolated:
                assert (facts.user, facts.home) == (node.user, node.home)
            assert facts.mlx and facts.mlx_lm and "ring" in facts.backends
            assert facts.cores and facts.memory_total_bytes and facts.disk_free_bytes
            assert facts.round_trip_s is not None and facts.round_trip_s < 20
            assert facts.clock_skew_s is not None and abs(facts.clock_skew_s) < 10
        if cluster.isolated:
            unset = tuple(node.model_copy(update={"ips": ()}) for node in config.nodes)
            network = engine.nodes.network_plan(config.model_copy(update={"nodes": unset}), found)
            assert network.backend == "ring"
            assert [host.ips for host in network.hosts] == [(node.ip,) for node in cluster.nodes]
        assert engine.nodes.last_facts(config) == found


async def test_a_node_that_is_cut_off_or_has_no_such_python_says_why_and_the_others_answer(
    cluster: Cluster, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    config = load_config(write_toml(cluster))
    async with Engine(home) as engine:
        wrong = config.nodes[1].model_copy(update={"python": "~/nowhere/python"})
        cluster.nodes[2].stop_sshd()
        nodes = (config.nodes[0], wrong, config.nodes[2], config.nodes[3])
        found = await engine.nodes.probe(config.model_copy(update={"nodes": nodes}))
        assert [facts.problem is None for facts in found] == [True, False, False, True]
        assert found[1].problem == "no such interpreter: ~/nowhere/python"
        assert found[2].problem
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.cluster.facts.TIME_LIMIT_S", 0.001)
            late = await probe(config.nodes[3], engine.fleet.agent(config.nodes[3]))
        assert "within 0.001 s" in (late.problem or "")
