"""Checkpoints on a real disk: whole or not at all, and whatever is wrong with one is said and the one before used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.worker.checkpoint import store, streams
from engine.worker.checkpoint.errors import Refused
from engine.worker.checkpoint.manifest import NAME, Manifest

Groups = Mapping[str, Mapping[str, mx.array]]


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
    return store.write(
        folder,
        written,
        update=update,
        config_hash="c",
        world_size=2,
        state={"iteration": update * 4, "rng": [[1, 2], [3, 4]]},
        versions={"mlx": "0.32.4"},
        compression=compression,
    )


def same(first: Groups, second: Groups) -> bool:
    names = {(group, name) for group in first for name in first[group]}
    if names != {(group, name) for group in second for name in second[group]}:
        return False
    pairs = [(first[group][name], second[group][name]) for group, name in names]
    return all(one.dtype == other.dtype and mx.array_equal(one, other).item() for one, other in pairs)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_what_is_written_comes_back_bit_by_bit(tmp_path: Path, compression: str) -> None:
    commit(tmp_path, 3, compression=compression)
    found = store.newest(tmp_path, never)
    assert found is not None and found.manifest.state == {"iteration": 12, "rng": [[1, 2], [3, 4]]}
    assert same(store.load(found), arrays(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000003"], "nothing else is left there"


def test_zstd_works_where_it_is_and_is_refused_by_name_where_not(tmp_path: Path) -> None:
    try:
        streams._zstd()
    except ValueError as lacking:
        with pytest.raises(ValueError, match="backports"):
            commit(tmp_path, 1, compression="zstd")
        assert "gzip" in str(lacking) and list(tmp_path.iterdir()) == []
    else:
        commit(tmp_path, 1, compression="zstd")
        found = store.newest(tmp_path, never)
        assert found is not None and same(store.load(found), arrays(1))


def test_one_of_the_same_update_is_replaced(tmp_path: Path) -> None:
    commit(tmp_path, 3, arrays(1.0))
    commit(tmp_path, 3, arrays(2.0))
    found = store.newest(tmp_path, never)
    assert found is not None and same(store.load(found), arrays(2.0))
    assert len(list(tmp_path.iterdir())) == 1


def change_byte(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] ^= 0x10
    path.write_bytes(raw)


def rewrite(path: Path, **changed: object) -> None:
    said = json.loads((path / NAME).read_text())
    (path / NAME).write_text(json.dumps({**said, **changed}))


def first_file(path: Path, **changed: object) -> None:
    files = json.loads((path / NAME).read_text())["files"]
    rewrite(path, files=[{**files[0], **changed}, *files[1:]])


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


WEIGHTS = "weights.safetensors"
FAULTS: dict[str, Callable[[Path], object]] = {
    "it has no manifest": lambda path: (path / NAME).unlink(),
    "is missing": lambda path: (path / WEIGHTS).unlink(),
    "and its manifest says": lambda path: os.truncate(path / WEIGHTS, 100),
    "its hash is not the manifest's": lambda path: change_byte(path / WEIGHTS, 50_000),
    "no JSON": lambda path: (path / NAME).write_bytes(b"[" * 100_000),
    "too long": lambda path: (path / NAME).write_bytes(b" " * (5 << 20)),
    "no object": lambda path: (path / NAME).write_text("[]"),
    "its format is 2": lambda path: rewrite(path, format=2),
    "no files": lambda path: rewrite(path, files=[]),
    "names a file twice": lambda path: rewrite(path, files=json.loads((path / NAME).read_text())["files"][:1] * 2),
    "which is no file of a checkpoint": lambda path: first_file(path, name="../../etc/passwd.json"),
    "no hash": lambda path: first_file(path, sha256="0" * 63),
    "compressed by": lambda path: first_file(path, compression="rar"),
    "says stored_bytes = -1": lambda path: first_file(path, stored_bytes=-1),
    "says world_size = 0": lambda path: rewrite(path, world_size=0),
    "is of update 7": lambda path: rewrite(path, update=7),
    "another job": lambda path: rewrite(path, config_hash="d"),
    "no plain file": lambda path: replaced(path / WEIGHTS, os.mkfifo),
    "Too many levels of symbolic links": lambda path: replaced(
        path / WEIGHTS, lambda link: link.symlink_to("/etc/passwd")
    ),
    "no folder": lambda path: path.rename(path.with_name("kept")).with_name(path.name).symlink_to("kept"),
}


@pytest.mark.parametrize("words", FAULTS)
def test_one_that_is_not_whole_is_refused_aloud_and_the_one_before_used(tmp_path: Path, words: str) -> None:
    commit(tmp_path, 1)
    FAULTS[words](commit(tmp_path, 2).path)
    told: list[tuple[Path, str]] = []
    found = store.newest(tmp_path, lambda path, why: told.append((path, why)), config_hash="c")
    assert found is not None and found.manifest.update == 1
    assert [path.name for path, _ in told] == ["step-000000002"]
    assert words in told[0][1], told


def test_a_file_that_unpacks_to_more_than_it_says_is_refused(tmp_path: Path) -> None:
    checkpoint = commit(tmp_path, 1, compression="gzip")
    first_file(checkpoint.path, bytes=1000)
    found = store.newest(tmp_path, never)
    assert found is not None
    with pytest.raises(Refused, match="holds more"):
        store.load(found)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"], "what was unpacked is gone"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.one_of(st.binary(max_size=300), st.text(max_size=200).map(str.encode)), update=st.integers(0, 3))
def test_no_manifest_whatever_upsets_the_reader(raw: bytes, update: int) -> None:
    try:
        Manifest.from_json(raw)
    except Refused:
        return
    raise AssertionError("random bytes are no manifest")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10**6))
def test_a_byte_that_is_flipped_anywhere_is_found(tmp_path_factory: pytest.TempPathFactory, at: int) -> None:
    folder = tmp_path_factory.mktemp("flip")
    path = commit(folder, 1).path
    files = sorted(file for file in path.iterdir() if file.name != NAME)
    change_byte(files[at % len(files)], at)
    with pytest.raises(Refused):
        store.prove(path)


def test_the_newest_are_kept_and_one_that_is_torn_is_none_of_them(tmp_path: Path) -> None:
    for update in range(1, 7):
        commit(tmp_path, update)
    os.truncate(tmp_path / "step-000000005" / WEIGHTS, 10)
    removed = store.retain(tmp_path, 3, 6, never)
    assert [path.name[-1] for path in removed] == ["2", "1"]
    assert [path.name[-1] for path in store.listed(tmp_path)] == ["3", "4", "5", "6"]
    commit(tmp_path, 7)
    commit(tmp_path, 8)
    assert [path.name[-1] for path in store.retain(tmp_path, 3, 8, never)] == ["5", "4", "3"]


def test_the_one_just_committed_stays_and_those_of_a_later_update_go(tmp_path: Path) -> None:
    """The training has gone back behind them, as when they were refused."""
    for update in (3, 4, 7, 8, 9):
        commit(tmp_path, update)
    assert [path.name[-1] for path in store.retain(tmp_path, 1, 4, never)] == ["9", "8", "7", "3"]
    assert [path.name[-1] for path in store.listed(tmp_path)] == ["4"]


WRITER = """
import sys
from pathlib import Path
import mlx.core as mx
from engine.worker.checkpoint import store
folder, update = Path(sys.argv[1]), 1
while True:
    groups = {"weights": {f"w{n}": mx.full((100_000,), update + n, dtype=mx.float32) for n in range(20)}}
    mx.eval(groups)
    store.write(folder, groups, update=update, config_hash="c", world_size=1, state={}, versions={})
    print(update, flush=True)
    update += 1
"""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_writer_that_is_killed_anywhere_leaves_the_last_committed_one(tmp_path: Path, seed: int) -> None:
    import random

    moments = random.Random(seed)
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        said = writer.stdout.readline()
        # Any moment of the next writes; what is awaited is the kill itself.
        time.sleep(moments.uniform(0, 0.1))
        os.kill(writer.pid, signal.SIGKILL)
        said = (writer.stdout.read() or said).split()[-1]
        writer.stdout.close()
        writer.wait()
        found = store.newest(tmp_path, never)
        assert found is not None and found.manifest.update >= int(said)
        loaded = store.load(found)["weights"]
        assert all(mx.all(loaded[f"w{n}"] == found.manifest.update + n).item() for n in range(20))
    commit(tmp_path, 999)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], "torn ones are cleared away"


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
    found = store.newest(tmp_path, never)
    assert found is not None and found.manifest.update == 1
