"""flightdeck init and telemetry on four real nodes over ssh: other users, homes and pythons."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cluster.telemetry import telemetry
from engine.cluster.transport.fleet import Fleet
from engine.config.load import load_config
from engine.models import NodeTelemetry
from tests.cluster.cluster import Cluster
from tests.tui.commands import flightdeck, shell
from tests.waiting import wait_until

PATIENCE_S = 150.0


@pytest.fixture
def studio(cluster: Cluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which the cluster's nodes are reached, and nothing else."""
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    monkeypatch.setenv("FLIGHTDECK_BONJOUR", "off")
    folder = tmp_path / "studio"
    folder.mkdir()
    return folder


def test_init_finds_every_node_and_its_python(cluster: Cluster, home: Path, studio: Path) -> None:
    cluster["bea"].noisy_bashrc()
    done = flightdeck(home, "init", "--from-ssh-config", "--yes", "--json", cwd=studio)
    assert done.code == 0, done.err
    nodes = {node["name"]: node for node in json.loads(done.out)["nodes"]}
    assert [node.name for node in cluster.nodes if node.name not in nodes] == []
    config = load_config(studio / "flightdeck.toml")
    pythons = {node.ssh: node.python for node in config.nodes}
    for node in cluster.nodes:
        assert nodes[node.name]["problem"] is None
        assert nodes[node.name]["about"].startswith("python 3.")
        # dov's is the same interpreter by its shorter name.
        assert Path(pythons[node.name]).parent == Path(node.python).parent


def test_a_key_that_nobody_has_accepted_is_shown_and_the_node_is_not_asked(
    cluster: Cluster, home: Path, studio: Path
) -> None:
    known = cluster.known_hosts.read_text()
    ana = cluster["ana"]
    try:
        cluster.known_hosts.write_text("".join(line for line in known.splitlines(True) if ana.ip not in line))
        done = flightdeck(home, "init", "ana", "bea", cwd=studio)
    finally:
        cluster.known_hosts.write_text(known)
    assert done.code == 0, done.err
    assert "ana  not verified: " in done.out
    assert "SHA256:" in done.out.split("accept these host keys")[1]
    ana_table = (studio / "flightdeck.toml").read_text().split("\n[[node]]")[1]
    assert "NOT VERIFIED" in ana_table


def agents_on(cluster: Cluster) -> list[str]:
    """The agents on the nodes, and their probes."""
    processes = [(node.home, process.command) for node in cluster.nodes for process in node.processes()]
    return [command for home, command in processes if command.startswith(home) and "engine.node.agent" in command]


async def test_telemetry_of_four_nodes_ends_on_all_of_them(cluster: Cluster, home: Path, studio: Path) -> None:
    done = shell(home, "init", *(node.name for node in cluster.nodes), cwd=studio)
    assert done.code == 0, done.err
    config = load_config(studio / "flightdeck.toml")
    names = {node.name for node in config.nodes}
    seen: dict[str, NodeTelemetry] = {}

    async with asyncio.timeout(PATIENCE_S), Fleet(home) as fleet:
        values = telemetry(config, fleet, interval_s=0.2191)

        async def until(holds: Callable[[], bool]) -> None:
            async for value in values:
                seen[value.node] = value
                if holds():
                    return

        await until(lambda: names == seen.keys() and all(value.cpu_use is not None for value in seen.values()))
        assert all(value.memory_used_bytes for value in seen.values())
        # An agent and its probe on each; the probe runs commands of its own, which begin as a copy of it.
        await asyncio.to_thread(wait_until, lambda: len(agents_on(cluster)) == 2 * len(names))
        cluster["cyd"].reset_ssh()
        await until(lambda: seen["cyd"].problem is not None)
        assert seen["ana"].problem is None
        await until(lambda: seen["cyd"].cpu_use is not None)
        await values.aclose()  # type: ignore[attr-defined]
        # The probes end; the agents stay for whoever asks next.
        while len(agents_on(cluster)) > len(names):
            await asyncio.sleep(0.05)
    async with asyncio.timeout(PATIENCE_S):
        while agents_on(cluster):
            await asyncio.sleep(0.05)
