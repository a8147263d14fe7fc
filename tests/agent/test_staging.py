"""The staged bundle is the node's code, whole and verified."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from engine.cluster import agent_client, staging
from engine.cluster.bundle import SOURCE, NodeBundle, node_bundle
from engine.cluster.staging import prepare
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import LaunchError, NodeUnreachable
from engine.node.bootstrap import bundle_hash, install, prepare_root
from tests.bundles import stage_bundle
from tests.unit.cluster.fake_agent import FakeFleet, FakeNode


def package(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / "node" / name.replace("__slash__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)
    return root


def test_the_staged_keeper_runs_from_its_bundle(tmp_path: Path) -> None:
    bundle = stage_bundle(tmp_path)
    asked = [sys.executable, "-m", "engine.node.keeper", "--help"]
    assert b"--spec" in subprocess.run(asked, cwd=bundle, capture_output=True, check=True).stdout


def test_it_lies_below_the_hash_of_its_files(tmp_path: Path) -> None:
    assert stage_bundle(tmp_path) == tmp_path / "bundles" / bundle_hash(SOURCE)
    assert bundle_hash(stage_bundle(tmp_path) / "engine") == bundle_hash(SOURCE)


def test_it_is_staged_only_when_missing(tmp_path: Path) -> None:
    keeper = stage_bundle(tmp_path) / "engine" / "node" / "keeper.py"
    before = keeper.stat().st_mtime_ns, keeper.stat().st_ino
    assert stage_bundle(tmp_path) == keeper.parents[2]
    assert (keeper.stat().st_mtime_ns, keeper.stat().st_ino) == before


def test_a_damaged_bundle_is_replaced(tmp_path: Path) -> None:
    keeper = stage_bundle(tmp_path) / "engine" / "node" / "keeper.py"
    keeper.write_text("torn")
    stage_bundle(tmp_path)
    assert keeper.read_bytes() == (SOURCE / "node" / "keeper.py").read_bytes()
    assert [path.name for path in (tmp_path / "bundles").iterdir()] == [bundle_hash(SOURCE)]


@pytest.mark.parametrize("opened", ["", "node", "node/bundles"])
def test_a_node_root_that_others_can_write_is_not_used(tmp_path: Path, opened: str) -> None:
    root = tmp_path / "node"
    stage_bundle(root)
    (tmp_path / opened).chmod(0o757)
    prepared = prepare_root(root, node_bundle().name)
    assert prepared["missing"], "the agent runs from memory"
    assert prepared["problem"] == f"other users can write there: chmod go-w {tmp_path / opened}"
    (tmp_path / opened).chmod(0o755)
    assert prepare_root(root, node_bundle().name) == {"missing": False}
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_names_and_contents_both_count(tmp_path: Path) -> None:
    hashes = {
        bundle_hash(package(tmp_path / "1", a="bc")),
        bundle_hash(package(tmp_path / "2", ab="c")),
        bundle_hash(package(tmp_path / "3", a="b")),
        bundle_hash(package(tmp_path / "4", a="bc", b="")),
        bundle_hash(package(tmp_path / "5", sub__slash__a="bc")),
    }
    assert len(hashes) == 5


def test_what_python_leaves_beside_the_sources_does_not_count(tmp_path: Path) -> None:
    source = package(tmp_path / "worker", a="1")
    before = bundle_hash(source)
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "a.pyc").write_bytes(b"x")
    assert bundle_hash(source) == before


def test_a_damaged_bundle_stays_until_there_is_another_to_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running attempt may import from it."""
    bundle = stage_bundle(tmp_path)
    (bundle / "engine" / "node" / "keeper.py").write_text("torn")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space left"):
            stage_bundle(tmp_path)
    assert (bundle / "engine" / "node" / "agent.py").exists()
    assert [path.name for path in bundle.parent.iterdir()] == [bundle.name]


def test_a_process_goes_on_with_the_bundle_that_it_began_with(tmp_path: Path) -> None:
    """The package may be upgraded under it."""
    source = shutil.copytree(SOURCE, tmp_path / "engine")
    bundle = NodeBundle(source)
    before = bundle.bootstrap
    for path in (source / "node").glob("*.py"):
        path.write_text("an upgrade")
    size, _, packed = bundle.packed.partition(b"\n")
    assert int(size) == len(packed)
    place = tmp_path / bundle.name
    install(place, json.loads(zlib.decompress(packed)))
    assert bundle_hash(place / "engine") == bundle.name
    assert (place / "engine" / "node" / "bootstrap.py").read_text() == before


HERE = NodeConfig(name="here", python=sys.executable, workdir="/")


async def test_a_lost_bundle_is_staged_again_and_nobody_loses_an_agent(home: Path) -> None:
    asked = f"until [ -e {home}/staged ]; do sleep 0.05; done; echo done"
    async with Fleet(home) as fleet:
        (layout,) = await prepare(fleet, [HERE])
        running = asyncio.create_task(fleet.agent(HERE).run(["/bin/sh", "-c", asked], timeout_s=30))
        shutil.rmtree(layout.bundle)
        assert await prepare(fleet, [HERE]) == (layout,)
        assert bundle_hash(Path(layout.bundle) / "engine") == Path(layout.bundle).name
        (home / "staged").touch()
        assert (await running).stdout == b"done\n"


async def test_a_bundle_that_could_not_be_verified_is_not_taken_for_a_missing_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Fleet(home) as fleet:
        await prepare(fleet, [HERE])
        session = await fleet.agent(HERE).session()
        monkeypatch.setattr(staging, "_VERIFY_LIMIT_S", 0.0)
        with pytest.raises(LaunchError, match=r"could not be verified.*gave no answer within 0 s"):
            await prepare(fleet, [HERE])
        assert await fleet.agent(HERE).session() is session


async def test_a_node_that_went_away_from_an_open_connection_is_asked_for_no_more_than_a_short_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, ana = (
        FakeNode({"hashes": {"node bundle": node_bundle().name}}),
        NodeConfig(name="ana", ssh="ana", python="/p", workdir="/"),
    )
    async with FakeFleet(ana=node) as fleet:
        await prepare(fleet, [ana])
        await prepare(fleet, [ana])
        assert [request.probe for request in node.probes] == ["hashes"]
        node.channels[0].acknowledges = False
        monkeypatch.setattr(agent_client, "_ANSWER_S", 0.1)
        with pytest.raises(NodeUnreachable, match=r"does not answer: no answer within 0\.1 s"):
            await prepare(fleet, [ana])
        assert len(node.probes) == 1


async def test_a_place_that_cannot_be_written_is_one_line(home: Path) -> None:
    (home / "node").mkdir(parents=True)
    (home / "node" / "bundles").write_text("in the way")
    node = NodeConfig(name="here", python=sys.executable, workdir="/")
    async with Fleet(home) as fleet:
        with pytest.raises(LaunchError, match=r"/node/bundles: the node bundle could not be staged on here"):
            await prepare(fleet, [node])


def test_what_a_node_holds_is_its_owners_alone(tmp_path: Path) -> None:
    stage_bundle(tmp_path / "new" / "node")
    (tmp_path / "old").mkdir(mode=0o755)
    stage_bundle(tmp_path / "old")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new/node", "old")]
    assert modes == [0o700, 0o700]
