"""Preflight on the test cluster: all is well there; a fault of one node is found, and blamed on that node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config.models import (
    ClusterConfig,
    FlightConfig,
    JobConfig,
    NodeConfig,
    PreflightConfig,
)
from engine.models import CheckResult, CheckStatus
from engine.preflight import connectivity, data, gradient, hostfile, model, ports, program, versions
from engine.preflight.check import Look
from engine.preflight.scene import Scene
from engine.transport.fleet import Fleet
from tests.cluster.cluster import Cluster
from tests.cluster.faults import Traffic
from tests.cluster.node import Node

MODEL = {"config.json": '{"model_type": "llama"}', "tokenizer.json": "{}", "model.safetensors": "x" * 1000}
LINES = "".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(12))
LISTEN = """
import socket, time
listener = socket.socket()
listener.bind(("0.0.0.0", {port}))
listener.listen()
print("up", flush=True)
time.sleep(60)
"""
PORT = 23456


def config_of(cluster: Cluster, *, starting_port: int | None = None, command: bool = False) -> FlightConfig:
    nodes = tuple(
        NodeConfig(
            name=node.name,
            ssh=node.ssh,
            ips=(node.ip,),
            python=node.python,
            workdir="~",
            model="~/models/tiny",
            data="~/data",
        )
        for node in cluster.nodes
    )
    job = JobConfig(name="job", mlx_lm={"batch_size": 4, "iters": 10})
    if command:
        job = JobConfig(name="job", command=("python", "mine.py"))
    return FlightConfig(
        cluster=ClusterConfig(starting_port=starting_port),
        nodes=nodes,
        job=job,
        preflight=PreflightConfig(all_sum_s=0.3),
    )


def furnish(node: Node) -> None:
    """A model and data where the configuration says."""
    for name, text in MODEL.items():
        node.write(f"~/models/tiny/{name}", text)
    for name in ("train", "valid"):
        node.write(f"~/data/{name}.jsonl", LINES)


def runs_of(node: Node) -> str:
    """The folders of runs there; other tests have left theirs."""
    return node.run(["/bin/sh", "-c", "ls ~/.flightdeck/runs"]).stdout


async def looked(look: Look, config: FlightConfig, fleet: Fleet) -> CheckResult:
    scene = Scene(config, fleet)
    try:
        return await look(scene)
    finally:
        await scene.close()


async def test_what_is_there_and_alike_on_all_nodes_passes(cluster: Cluster, fleet: Fleet) -> None:
    config = config_of(cluster)
    for node in cluster.nodes:
        furnish(node)
    scene = Scene(config, fleet)
    for check in (connectivity, hostfile, model, data, ports):
        result = await check.look(scene)
        assert result.status is CheckStatus.PASS, result
        assert len(result.evidence) in (0, 4)
    await scene.close()


async def test_a_real_sum_over_four_homes_leaves_nothing_on_any_node(cluster: Cluster, fleet: Fleet) -> None:
    before = [runs_of(node) for node in cluster.nodes]
    result = await looked(gradient.look, config_of(cluster), fleet)
    assert result.status is CheckStatus.PASS, result
    assert result.summary.startswith("4 ranks, exact")
    assert [runs_of(node) for node in cluster.nodes] == before
    for node in cluster.nodes:
        assert [process for process in node.processes() if "worker" in process.command] == []


async def test_a_missing_shard_and_a_differing_line_are_blamed_on_their_node(cluster: Cluster, fleet: Fleet) -> None:
    for node in cluster.nodes:
        furnish(node)
    third = cluster.nodes[2]
    third.run(["/bin/sh", "-c", 'rm ~/models/tiny/model.safetensors; echo \'{"text": "more"}\' >> ~/data/train.jsonl'])
    lost = await looked(model.look, config_of(cluster), fleet)
    assert (lost.status, lost.blames) == (CheckStatus.FAIL, (2, third.name))
    assert "no weights" in lost.summary
    other = await looked(data.look, config_of(cluster), fleet)
    assert (other.status, other.blames) == (CheckStatus.FAIL, (2, third.name))
    assert "train.jsonl 13 lines against 12" in other.summary


async def test_a_busy_port_names_its_holder_there(isolated_cluster: Cluster, fleet: Fleet) -> None:
    second = isolated_cluster.nodes[1]
    channel = await fleet.reach(second.ssh).open([second.python, "-c", LISTEN.format(port=PORT + 1)])
    assert await channel.read(10) == b"up\n"
    result = await looked(ports.look, config_of(isolated_cluster, starting_port=PORT), fleet)
    await channel.close()
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, second.name))
    assert f"{second.ip}:{PORT + 1} on {second.name} is held by pid " in result.summary
    assert result.fixes[second.name].startswith("kill ")


async def test_a_missing_script_is_looked_for_on_the_node(cluster: Cluster, fleet: Fleet) -> None:
    for node in cluster.nodes[:3]:
        node.run(["/bin/sh", "-c", "touch ~/mine.py"])
    result = await looked(program.look, config_of(cluster, command=True), fleet)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (3, cluster.nodes[3].name))
    for node in cluster.nodes[:3]:
        node.run(["/bin/sh", "-c", "rm ~/mine.py"])


async def test_an_interpreter_without_mlx_is_named_with_its_install(cluster: Cluster, fleet: Fleet) -> None:
    config = config_of(cluster)
    nodes = (*config.nodes[:3], config.nodes[3].model_copy(update={"python": "/usr/bin/env"}))
    result = await looked(versions.look, config.model_copy(update={"nodes": nodes}), fleet)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (3, cluster.nodes[3].name))


async def test_a_cut_between_two_ranks_is_found_before_anything_is_launched(
    isolated_cluster: Cluster, fleet: Fleet
) -> None:
    first, second = isolated_cluster.nodes[:2]
    first.cut(Traffic.RING, peer=second.ip)
    result = await looked(hostfile.look, config_of(isolated_cluster), fleet)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (0, first.name))
    assert f"does not reach {second.name} on {second.ip} (no answer within" in result.summary


async def test_an_unknown_key_and_a_refused_connection_say_what_to_do(
    cluster: Cluster, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody_known = tmp_path / "ssh_config"
    config = cluster.ssh_config.read_text().replace(str(cluster.known_hosts), str(tmp_path / "none"))
    nobody_known.write_text(config)
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(nobody_known))
    cluster.nodes[3].stop_sshd()
    result = await looked(connectivity.look, config_of(cluster), fleet)
    assert (result.status, result.blames) == (CheckStatus.FAIL, (0, cluster.nodes[0].name))
    assert "the host key is not known" in result.evidence[cluster.nodes[0].name]
    assert "SHA256:" in result.evidence[cluster.nodes[0].name]
    assert (result.fix_command, result.fixes) == ("flightdeck nodes --trust", {})
    assert "connection refused" in result.evidence[cluster.nodes[3].name]
