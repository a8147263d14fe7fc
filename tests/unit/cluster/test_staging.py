"""The staged bundle is the node's code, whole and verified."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cluster.bundle import SOURCE
from engine.cluster.staging import prepare
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import LaunchError
from engine.node.bootstrap import bundle_hash
from tests.bundles import stage_bundle


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


async def test_a_place_that_cannot_be_written_is_one_line(home: Path) -> None:
    (home / "node").mkdir(parents=True)
    (home / "node" / "bundles").write_text("in the way")
    node = NodeConfig(name="here", python=sys.executable, workdir="/")
    async with Fleet((node,), home) as fleet:
        with pytest.raises(LaunchError, match=r"/node/bundles: the node bundle could not be staged on here"):
            await prepare(fleet, [node])


def test_what_a_node_holds_is_its_owners_alone(tmp_path: Path) -> None:
    stage_bundle(tmp_path / "new" / "node")
    (tmp_path / "old").mkdir(mode=0o755)
    stage_bundle(tmp_path / "old")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new/node", "old")]
    assert modes == [0o700, 0o700]
