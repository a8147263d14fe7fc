"""Hosts are prepared over SSH: the bundle is put when it is missing, and believed for its hash alone."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any, cast

import pytest

from engine.cluster.agent_client import AgentClient
from engine.cluster.bundle import SOURCE
from engine.cluster.staging import prepare
from engine.cluster.transport.base import Transport
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import LaunchError
from engine.launch import hostfile
from engine.launch.hostfile import fresh_ports
from engine.node.bootstrap import bundle_hash
from tests.cluster.cluster import Cluster
from tests.integration.over_ssh import on
from tests.unit.launch.host_layouts import configured_network

NAMES = ("ana", "bea", "cyd", "dov")


class Counted:
    """A fleet that counts what is asked of its transports."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.asked = fleet, list[str]()

    def to(self, node: NodeConfig) -> Transport:
        return cast(Transport, CountedWay(self.fleet.to(node), self.asked))

    def agent(self, node: NodeConfig) -> AgentClient:
        return AgentClient(node, self.to(node))


class CountedWay:
    """One transport of it."""

    def __init__(self, way: Transport, asked: list[str]) -> None:
        self._way, self._asked = way, asked

    def __getattr__(self, name: str) -> Any:
        self._asked.append(name)
        return getattr(self._way, name)


def bundle_of(cluster: Cluster, name: str) -> Path:
    """The bundle on a node's disk, as the head sees it."""
    node = cluster[name]
    return node.disk.seen_from_head(f"{node.home}/.flightdeck/bundles/{bundle_hash(SOURCE)}")


async def test_every_host_has_one_place_with_absolute_paths(cluster: Cluster, fleet: Fleet) -> None:
    nodes = on(cluster, "ana", "bea", "ana", "head")
    ana, bea, head = await prepare(fleet, nodes)
    assert [(place.target, place.ranks) for place in (ana, bea, head)] == [
        *(("ana", (0, 2)), ("bea", (1,)), ("127.0.0.1", (3,))),
    ]
    for place in (ana, bea):
        node = cluster[place.target]
        assert (place.home, place.root) == (node.home, f"{node.home}/.flightdeck")
        assert place.python == node.home + node.python.removeprefix("~")
        assert bundle_hash(bundle_of(cluster, place.target) / "engine") == bundle_hash(SOURCE)
        root = node.disk.seen_from_head(place.root)
        assert [stat.S_IMODE(path.stat().st_mode) for path in (root, root / "bundles")] == [0o700, 0o700]


async def test_a_bundle_that_is_there_costs_one_connection_and_is_left_alone(cluster: Cluster, fleet: Fleet) -> None:
    nodes = on(cluster, "ana")
    await prepare(fleet, nodes)
    before = (bundle_of(cluster, "ana") / "engine" / "node" / "keeper.py").stat().st_ino
    counted = Counted(fleet)
    await prepare(cast(Fleet, counted), nodes)
    assert counted.asked == ["target", "open"]
    assert (bundle_of(cluster, "ana") / "engine" / "node" / "keeper.py").stat().st_ino == before


@pytest.mark.parametrize("damage", ["torn", "added", "a file in its place"])
async def test_a_damaged_bundle_is_replaced(damage: str, cluster: Cluster, fleet: Fleet) -> None:
    nodes = on(cluster, "bea")
    await prepare(fleet, nodes)
    bundle = bundle_of(cluster, "bea")
    if damage == "a file in its place":
        bundle.rename(bundle.with_name("elsewhere"))
        bundle.write_text("no folder")
    else:
        (bundle / "engine" / "node" / ("keeper.py" if damage == "torn" else "more.py")).write_text("import evil")
    await prepare(fleet, nodes)
    assert bundle_hash(bundle / "engine") == bundle_hash(SOURCE)
    assert not [path for path in bundle.parent.iterdir() if path.name.startswith(".")]


async def test_several_may_stage_at_once(cluster: Cluster, fleet: Fleet, tmp_path: Path) -> None:
    nodes = on(cluster, "cyd")
    async with Fleet(tmp_path) as another:
        first, *others = await asyncio.gather(*(prepare(way, nodes) for way in (fleet, another, fleet, another)))
    assert others == [first] * 3
    assert bundle_hash(bundle_of(cluster, "cyd") / "engine") == bundle_hash(SOURCE)
    assert [path.name for path in bundle_of(cluster, "cyd").parent.iterdir()] == [bundle_hash(SOURCE)]


async def test_a_full_disk_says_node_path_and_what_to_do(cluster: Cluster, fleet: Fleet) -> None:
    dov = cluster["dov"]
    await fleet.to(on(cluster, "dov")[0]).run(["rm", "-rf", "~/.flightdeck"], timeout_s=10)
    dov.fill_disk(20_000)
    with pytest.raises(LaunchError) as raised:
        await prepare(fleet, on(cluster, "ana", "dov"))
    assert "dov1" in str(raised.value) and ".flightdeck" in str(raised.value)
    assert "kB are free on its disk" in raised.value.why and raised.value.todo == "make room there"
    dov.free_disk()
    await prepare(fleet, on(cluster, "dov"))


async def test_a_root_that_cannot_be_written_is_named(cluster: Cluster, fleet: Fleet) -> None:
    bea = cluster["bea"]
    root = bea.disk.seen_from_head(f"{bea.home}/.flightdeck")
    await prepare(fleet, on(cluster, "bea"))
    kept = root.with_name("kept")
    root.rename(kept)
    root.write_text("a file in its place")
    try:
        with pytest.raises(LaunchError, match=rf"bea:{bea.home}/\.flightdeck"):
            await prepare(fleet, on(cluster, "bea"))
    finally:
        root.unlink()
        kept.rename(root)


async def test_a_python_that_is_not_there_is_named_with_its_node(cluster: Cluster, fleet: Fleet) -> None:
    (node,) = on(cluster, "ana")
    with pytest.raises(LaunchError, match="~/nowhere/python cannot be run on ana0") as raised:
        await prepare(fleet, [node.model_copy(update={"python": "~/nowhere/python"})])
    assert "set python in its [[node]]" in raised.value.todo


@pytest.mark.parametrize("home", ["../../..", "/Users/../etc", "/a\nb\x1b[2J", "", None, 7, ["/Users/ana"]])
async def test_a_node_that_lies_about_its_home_is_refused(home: object, cluster: Cluster, fleet: Fleet) -> None:
    """And it is not asked where on it we are to write."""
    (node,) = on(cluster, "ana")
    lie = json.dumps({"kind": "bootstrap", "home": home, "root": "/etc", "bundle": "/etc/evil", "missing": True})
    liar = f"#!/bin/sh\ncat <<'LIE'\n{lie}\nLIE\n"
    script = 'printf %s "$1" >"$2" && chmod 700 "$2"'
    await fleet.to(node).run(["/bin/sh", "-c", script, "sh", liar, "~/liar"], timeout_s=10)
    with pytest.raises(LaunchError, match="the home on ana0 cannot be used") as raised:
        await prepare(fleet, [node.model_copy(update={"python": "~/liar"})])
    assert str(raised.value).isprintable()


async def test_output_of_a_login_shell_is_skipped(cluster: Cluster, fleet: Fleet) -> None:
    cluster["cyd"].noisy_bashrc()
    (place,) = await prepare(fleet, on(cluster, "cyd"))
    assert place.home == cluster["cyd"].home


async def test_ports_are_free_on_every_host_that_listens(
    cluster: Cluster, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = on(cluster, *NAMES, "head")
    network = configured_network(nodes)
    # One place alone is left to choose from, and on one host somebody is in the way.
    monkeypatch.setattr(hostfile, "LOWEST", 23_000)
    monkeypatch.setattr(hostfile, "HIGHEST", 23_000 + 5 + 2)
    assert await fresh_ports(fleet, nodes, network) in (23_000, 23_001)
    holder = (
        "import socket,sys; s=socket.socket(); s.bind(('', 23002)); s.listen(); print(1, flush=True); sys.stdin.read()"
    )
    (place,) = await prepare(fleet, nodes[1:2])
    channel = await fleet.to(nodes[1]).open([place.python, "-c", holder])
    try:
        assert await channel.read(1) == b"1"
        # Rank 1 would listen on 23001 or 23002.
        assert {await fresh_ports(fleet, nodes, network) for _ in range(3)} == {23_000}
        monkeypatch.setattr(hostfile, "LOWEST", 23_001)
        with pytest.raises(LaunchError, match="no 5 consecutive ports are free on all hosts"):
            await fresh_ports(fleet, nodes, network)
        assert await fresh_ports(fleet, nodes, network, 23_002) == 23_002
    finally:
        await channel.close()
