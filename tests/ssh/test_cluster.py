"""Nodes that vanish from the network and come back, at the keepalive that is really used."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from engine.cluster.transport.fleet import Fleet
from engine.errors import NodeUnreachable
from tests.cluster.cluster import Cluster


@pytest.fixture
def home(isolated_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(isolated_cluster.ssh_config))
    return tmp_path / "home"


async def test_four_nodes_of_different_users_and_homes(isolated_cluster: Cluster, home: Path) -> None:
    nodes = isolated_cluster.nodes
    argv = ["/bin/sh", "-c", 'echo "$(id -un) $1"', "sh", "~/x"]
    async with Fleet(home) as fleet:
        done = await asyncio.gather(*(fleet.reach(node.ssh).run(argv, timeout_s=10) for node in nodes))
    assert [one.stdout.decode() for one in done] == [f"{node.user} {node.home}/x\n" for node in nodes]


async def test_connections_that_are_reset_are_made_anew(isolated_cluster: Cluster, home: Path) -> None:
    node = isolated_cluster.nodes[0]
    async with Fleet(home) as fleet:
        way = fleet.reach(node.ssh)
        for _ in range(3):
            assert (await way.run(["true"], timeout_s=10)).code == 0
            node.reset_ssh()


@pytest.mark.slow
async def test_a_black_hole_is_told_within_25_s_and_the_node_is_reached_again_when_it_is_gone(
    isolated_cluster: Cluster, home: Path
) -> None:
    node = isolated_cluster.nodes[1]
    async with Fleet(home) as fleet:
        way = fleet.reach(node.ssh)
        channel = await way.open(["cat"])
        node.cut()
        began = time.monotonic()
        with pytest.raises(NodeUnreachable):
            await channel.read(1)
        assert 10 < time.monotonic() - began < 25
        began = time.monotonic()
        with pytest.raises(NodeUnreachable, match="no answer within 10 s"):
            await way.run(["true"], timeout_s=5)
        assert time.monotonic() - began < 20
        await channel.close()
        node.flush_rules()
        assert (await way.run(["true"], timeout_s=5)).code == 0


@pytest.mark.slow
async def test_a_hole_of_10_s_loses_nothing(isolated_cluster: Cluster, home: Path) -> None:
    node = isolated_cluster.nodes[2]
    async with Fleet(home) as fleet:
        channel = await fleet.reach(node.ssh).open(
            ["/bin/sh", "-c", "for n in $(seq 300); do echo $n; sleep 0.05; done"]
        )
        assert await channel.read(1) == b"1"
        node.cut()
        await asyncio.sleep(10)
        node.flush_rules()
        output = b"1"
        while block := await channel.read(1 << 16):
            output += block
        assert output.split() == [b"%d" % n for n in range(1, 301)]
        assert await channel.close() == 0
