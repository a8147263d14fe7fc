"""Checkpoints on a real disk: complete or not at all; a bad one is reported and the one before used."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.protocol.safetensors import CheckpointError
from engine.trainer.checkpoint import store
from engine.training import checkpoint_files
from engine.training.checkpoint_files import MANIFEST_NAME, Manifest, Origin
from tests.unit.trainer.checkpoint.latest import latest

Groups = dict[str, dict[str, mx.array]]
ORIGIN = Origin("c", world_size=2, part=0, parts=1, inputs={})


def arrays(value: float = 1.0) -> Groups:
    return {
        "weights": {"w": mx.full((300, 200), value, dtype=mx.bfloat16), "b": mx.arange(7)},
        "optimizer": {"w.m": mx.full((300, 200), value / 3, dtype=mx.float32)},
    }


def never(path: Path, why: str) -> None:
    raise AssertionError(f"{path} was refused: {why}")


def commit(folder: Path, update: int, groups: Groups | None = None, compression: str = "none") -> store.Checkpoint:
    written = groups if groups is not None else arrays(update)
    mx.eval(written)
    snapshot = store.Snapshot(update * 4, update, {"losses": 2}, written)
    return store.write(folder, snapshot, ORIGIN, compression)


def same(first: Groups, second: Groups) -> bool:
    names = {(group, name) for group in first for name in first[group]}
    if names != {(group, name) for group in second for name in second[group]}:
        return False
    pairs = [(first[group][name], second[group][name]) for group, name in names]
    return all(one.dtype == other.dtype and mx.array_equal(one, other).item() for one, other in pairs)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_checkpoint_is_read_back_bit_for_bit(tmp_path: Path, compression: str) -> None:
    commit(tmp_path, 3, compression=compression)
    found = latest(tmp_path, never)
    assert found is not None
    assert (found.manifest.iteration, found.manifest.window) == (12, {"losses": 2})
    assert (found.manifest.part, found.manifest.parts) == (0, 1)
    assert same(store.load(found), arrays(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000003"], "nothing else is left there"


def test_zstd_works_where_available_and_is_refused_by_name_elsewhere(tmp_path: Path) -> None:
    try:
        checkpoint_files._zstd()
    except ValueError as lacking:
        with pytest.raises(ValueError, match="backports"):
            commit(tmp_path, 1, compression="zstd")
        assert "gzip" in str(lacking) and list(tmp_path.iterdir()) == []
    else:
        commit(tmp_path, 1, compression="zstd")
        found = latest(tmp_path, never)
        assert found is not None and same(store.load(found), arrays(1))


def test_a_checkpoint_of_the_same_update_is_replaced(tmp_path: Path) -> None:
    commit(tmp_path, 3, arrays(1.0))
    commit(tmp_path, 3, arrays(2.0))
    found = latest(tmp_path, never)
    assert found is not None and same(store.load(found), arrays(2.0))
    assert len(list(tmp_path.iterdir())) == 1


def change_byte(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] ^= 0x10
    path.write_bytes(raw)


def rewrite(path: Path, **changed: object) -> None:
    manifest = json.loads((path / MANIFEST_NAME).read_text())
    (path / MANIFEST_NAME).write_text(json.dumps({**manifest, **changed}))


def first_file(path: Path, **changed: object) -> None:
    files = json.loads((path / MANIFEST_NAME).read_text())["files"]
    rewrite(path, files=[{**files[0], **changed}, *files[1:]])


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


WEIGHTS = "weights.safetensors"
FAULTS: dict[str, Callable[[Path], object]] = {
    "it has no manifest": lambda path: (path / MANIFEST_NAME).unlink(),
    "is missing": lambda path: (path / WEIGHTS).unlink(),
    "and its manifest says": lambda path: os.truncate(path / WEIGHTS, 100),
    "its hash is not the manifest's": lambda path: change_byte(path / WEIGHTS, 50_000),
    "not JSON": lambda path: (path / MANIFEST_NAME).write_bytes(b"[" * 100_000),
    "too long": lambda path: (path / MANIFEST_NAME).write_bytes(b" " * (5 << 20)),
    "not an object": lambda path: (path / MANIFEST_NAME).write_text("[]"),
    # As the format was before part and parts were facts of their own.
    "its format is 1, and this release reads 4": lambda path: rewrite(path, format=1, part=None, parts=None),
    "has files = []": lambda path: rewrite(path, files=[]),
    "lists a file twice": lambda path: rewrite(
        path, files=json.loads((path / MANIFEST_NAME).read_text())["files"][:1] * 2
    ),
    "has name = '../../etc/passwd.json'": lambda path: first_file(path, name="../../etc/passwd.json"),
    "has sha256 = ": lambda path: first_file(path, sha256="0" * 63),
    "has compression = 'rar'": lambda path: first_file(path, compression="rar"),
    "has stored_bytes = -1": lambda path: first_file(path, stored_bytes=-1),
    "has world_size = 0": lambda path: rewrite(path, world_size=0),
    "is of update 7": lambda path: rewrite(path, update=7),
    "another job": lambda path: rewrite(path, config_hash="d"),
    "not a regular file": lambda path: replaced(path / WEIGHTS, os.mkfifo),
    "Too many levels of symbolic links": lambda path: replaced(
        path / WEIGHTS, lambda link: link.symlink_to("/etc/passwd")
    ),
    "not a folder": lambda path: path.rename(path.with_name("kept")).with_name(path.name).symlink_to("kept"),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_bad_checkpoint_is_reported_and_the_one_before_is_used(tmp_path: Path, message: str) -> None:
    commit(tmp_path, 1)
    FAULTS[message](commit(tmp_path, 2).path)
    refused: list[tuple[Path, str]] = []
    found = latest(tmp_path, lambda path, why: refused.append((path, why)), config_hash="c")
    assert found is not None and found.manifest.update == 1
    assert [path.name for path, _ in refused] == ["step-000000002"]
    assert message in refused[0][1], refused


def test_a_file_that_unpacks_to_more_than_the_manifest_says_is_refused(tmp_path: Path) -> None:
    checkpoint = commit(tmp_path, 1, compression="gzip")
    first_file(checkpoint.path, bytes=1000)
    found = latest(tmp_path, never)
    assert found is not None
    with pytest.raises(CheckpointError, match="holds more"):
        store.load(found)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"], "the unpacked file is removed"


@pytest.mark.needs("linux")
def test_a_file_is_read_on_where_the_system_gives_less_than_asked_for() -> None:
    """As network file systems may; /proc does."""
    with checkpoint_files.open_stored(Path("/proc/self/maps")) as file:
        assert len(file.read(20_000)) == 20_000


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.one_of(st.binary(max_size=300), st.text(max_size=200).map(str.encode)), update=st.integers(0, 3))
def test_random_bytes_are_refused_as_a_manifest(raw: bytes, update: int) -> None:
    try:
        Manifest.from_json(raw)
    except CheckpointError:
        return
    raise AssertionError("random bytes are not a manifest")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10**6))
def test_a_flipped_byte_anywhere_is_detected(tmp_path_factory: pytest.TempPathFactory, at: int) -> None:
    folder = tmp_path_factory.mktemp("flip")
    path = commit(folder, 1).path
    files = sorted(file for file in path.iterdir() if file.name != MANIFEST_NAME)
    change_byte(files[at % len(files)], at)
    with pytest.raises(CheckpointError):
        store.verify(path)


def test_the_newest_are_kept_and_an_incomplete_one_does_not_count(tmp_path: Path) -> None:
    for update in range(1, 7):
        commit(tmp_path, update)
    os.truncate(tmp_path / "step-000000005" / WEIGHTS, 10)
    assert store.retain(tmp_path, 3, 6) == []
    assert [path.name[-1] for path in store.list_checkpoints(tmp_path)] == ["3", "4", "5", "6"]
    commit(tmp_path, 7)
    commit(tmp_path, 8)
    assert store.retain(tmp_path, 3, 8) == []
    assert [path.name[-1] for path in store.list_checkpoints(tmp_path)] == ["6", "7", "8"]


def test_a_new_checkpoint_is_kept_and_later_updates_are_removed(tmp_path: Path) -> None:
    """The training has resumed from an earlier one."""
    for update in (3, 4, 7, 8, 9):
        commit(tmp_path, update)
    assert store.retain(tmp_path, 1, 4) == []
    assert [path.name[-1] for path in store.list_checkpoints(tmp_path)] == ["4"]


WRITER = """
import sys
from pathlib import Path
import mlx.core as mx
from engine.trainer.checkpoint import store
from engine.training.checkpoint_files import Origin
folder, update = Path(sys.argv[1]), 1
while True:
    groups = {"weights": {f"w{n}": mx.full((100_000,), update + n, dtype=mx.float32) for n in range(20)}}
    mx.eval(groups)
    store.write(folder, store.Snapshot(update, update, {}, groups), Origin("c", 1, 0, 1, {}))
    print(update, flush=True)
    update += 1
"""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_writer_that_is_killed_anywhere_leaves_the_last_committed_one(tmp_path: Path, seed: int) -> None:
    moments = random.Random(seed)
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        output = writer.stdout.readline()
        # Any moment of the next writes.
        time.sleep(moments.uniform(0, 0.1))
        os.kill(writer.pid, signal.SIGKILL)
        committed = (writer.stdout.read() or output).split()[-1]
        writer.stdout.close()
        writer.wait()
        found = latest(tmp_path, never)
        assert found is not None and found.manifest.update >= int(committed)
        loaded = store.load(found)["weights"]
        assert all(mx.all(loaded[f"w{n}"] == found.manifest.update + n).item() for n in range(20))
    commit(tmp_path, 999)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], "incomplete ones are removed"


def test_a_full_disk_leaves_the_older_ones_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, 1)
    real, room = os.write, [200_000]

    def write(descriptor: int, data: bytes) -> int:
        if len(data) > room[0]:
            raise OSError(28, "No space left on device")
        room[0] -= len(data)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        commit(tmp_path, 2)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
    found = latest(tmp_path, never)
    assert found is not None and found.manifest.update == 1
