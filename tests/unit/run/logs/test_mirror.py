"""The head's logs are the nodes' logs, byte for byte, and the indices agree with them, whatever happened in between."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.cluster.host_connection import LocalFile
from engine.run.logs.line_index import IndexEntry, LogIndex
from engine.run.logs.mirror import Gap, Mirror
from engine.store.layout import LAUNCHER_SOURCE, RunDir

SOURCES = (0, 1, LAUNCHER_SOURCE)
chunks = st.lists(
    st.tuples(st.sampled_from(SOURCES), st.text("ab\n", max_size=6).map(str.encode)), min_size=1, max_size=12
)


class Ticking:
    """A clock that advances by one second at each call."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        self.now += 1
        return self.now


def node_log(root: Path, source: int) -> Path:
    return root / f"node-rank{source}.log"


def written(run_dir: RunDir, source: int) -> Path:
    """Where the source's program writes: the launcher's log is on the head itself."""
    return run_dir.log(source) if source == LAUNCHER_SOURCE else node_log(run_dir.path.parent, source)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def following(run_dir: RunDir, gaps: list[Gap] | None = None) -> Mirror:
    mirror = Mirror(run_dir, (gaps if gaps is not None else []).append, Ticking())
    for source in SOURCES:
        node = None if source == LAUNCHER_SOURCE else LocalFile(node_log(run_dir.path.parent, source))
        mirror.follow(source, node, 0)
    return mirror


def entries(path: Path) -> list[IndexEntry]:
    index = LogIndex(path)
    return index.entries(0, index.count)


def line_starts(log: bytes) -> list[int]:
    return [0, *(at + 1 for at, byte in enumerate(log[:-1]) if byte == ord("\n"))] if log else []


def assert_true(run_dir: RunDir, sources: tuple[int, ...] = SOURCES) -> None:
    """Logs and indices are what the programs wrote."""
    merged = entries(run_dir.merged_index)
    assert [entry.centiseconds for entry in merged] == sorted(entry.centiseconds for entry in merged)
    total = 0
    for source in sources:
        log = written(run_dir, source).read_bytes() if written(run_dir, source).exists() else b""
        if log:
            assert run_dir.log(source).read_bytes() == log
        own = entries(run_dir.index(source))
        assert [entry.offset for entry in own] == line_starts(log)
        assert [entry for entry in merged if entry.source == source] == own
        total += len(own)
    assert len(merged) == total


@contextlib.contextmanager
def fresh_run() -> Iterator[RunDir]:
    with TemporaryDirectory() as directory:
        run_dir = RunDir(Path(directory) / "run")
        run_dir.path.mkdir()
        yield run_dir


@given(chunks)
def test_every_line_is_copied_and_entered_once_in_order_of_arrival(parts: list[tuple[int, bytes]]) -> None:
    with fresh_run() as run_dir:
        mirror = following(run_dir)
        for source, data in parts:
            append(written(run_dir, source), data)
            assert mirror.pump() == len(data)
        assert mirror.settle() == {}
        mirror.close()
        assert_true(run_dir)
        arrived = [entry.source for entry in entries(run_dir.merged_index)]
        lines: dict[int, bytes] = dict.fromkeys(SOURCES, b"")
        expected = []
        for source, data in parts:
            before = len(line_starts(lines[source]))
            lines[source] += data
            expected += [source] * (len(line_starts(lines[source])) - before)
        assert arrived == expected


@given(chunks, chunks, st.data())
def test_a_mirror_killed_anywhere_is_repaired_by_the_next(
    before: list[tuple[int, bytes]], after: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    with fresh_run() as run_dir:
        mirror = following(run_dir)
        for source, part in before:
            append(written(run_dir, source), part)
            mirror.pump()
        mirror.close()
        for path in sorted(run_dir.path.iterdir()):
            if path.name != "launcher.log":
                kept = data.draw(st.integers(0, path.stat().st_size), label=path.name)
                with path.open("r+b") as file:
                    file.truncate(kept)
        for source, part in after:
            append(written(run_dir, source), part)
        assert following(run_dir).settle() == {}
        assert_true(run_dir)


@given(st.binary(min_size=1, max_size=40), st.integers(0, 40))
@example(b"-" * 24 + b"\n", 26)
def test_a_tail_that_is_not_the_nodes_is_copied_again(garbage: bytes, at: int) -> None:
    """Also where the garbage has a newline beyond the place where the log is cut (the example)."""
    with fresh_run() as run_dir:
        mirror = following(run_dir)
        append(node_log(run_dir.path.parent, 0), b"one\ntwo\nthree\n" * 4)
        mirror.close()
        with run_dir.log(0).open("r+b") as file:
            file.seek(at)
            file.write(garbage[: 56 - at])
        append(node_log(run_dir.path.parent, 0), b"four\n" * 20)
        following(run_dir).close()
        assert_true(run_dir, (0,))


def test_attempts_follow_one_another_in_the_same_log(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    first, second = tmp_path / "1.log", tmp_path / "2.log"
    mirror = Mirror(run_dir, print, Ticking())
    mirror.follow(0, LocalFile(first), 0)
    append(first, b"first attempt, no newline at its end")
    mirror.settle()
    base = run_dir.log(0).stat().st_size
    mirror.follow(0, LocalFile(second), base)
    append(second, b"second attempt\n")
    mirror.pump()
    del mirror
    again = Mirror(run_dir, print, Ticking())
    again.follow(0, LocalFile(second), base)
    append(second, b"goes on\n")
    assert again.settle() == {}
    again.close()
    assert run_dir.log(0).read_bytes() == first.read_bytes() + second.read_bytes()
    assert [entry.offset for entry in entries(run_dir.index(0))] == [0, base, base + 15]


def test_a_full_disk_is_reported_once_and_nothing_is_lost(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    gaps: list[Gap] = []
    mirror = following(run_dir, gaps)
    append(node_log(tmp_path, 0), b"a line of the log\n" * 1_000)
    append(node_log(tmp_path, 1), b"another\n" * 10)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_192, before[1]))
    try:
        for _ in range(3):
            mirror.pump()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run_dir.log(0).stat().st_size == 8_192
    assert [(gap.file, gap.over) for gap in gaps] == [("rank0.log", False)]
    assert mirror.settle() == {}
    mirror.close()
    assert [(gap.file, gap.over) for gap in gaps[1:]] == [("rank0.log", True)]
    assert_true(run_dir)


def test_an_index_without_room_waits_and_the_log_goes_on(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    gaps: list[Gap] = []
    mirror = following(run_dir, gaps)
    append(node_log(tmp_path, 0), b"\n" * 1_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
    try:
        mirror.pump()
        mirror.settle()
        assert [(gap.file, gap.over) for gap in gaps] == [("rank0.idx", False), ("merged.idx", False)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run_dir.log(0).stat().st_size == 1_000
    assert LogIndex(run_dir.index(0)).count < 1_000
    assert mirror.settle() == {}
    mirror.close()
    assert_true(run_dir)


def test_the_next_mirror_keeps_the_order_of_lines_that_came_at_one_time(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    mirror = Mirror(run_dir, print, lambda: 1_000.0)
    for source in (0, 1):
        mirror.follow(source, LocalFile(node_log(tmp_path, source)), 0)
    for source in (0, 1, 0, 1, 1, 0):
        append(node_log(tmp_path, source), b"line\n")
        mirror.pump()
    mirror.close()
    assert [entry.source for entry in entries(run_dir.merged_index)] == [0, 1, 0, 1, 1, 0]
    whole = run_dir.merged_index.stat()
    with run_dir.merged_index.open("r+b") as file:
        file.truncate(whole.st_size - 13)
    following(run_dir).close()
    assert run_dir.merged_index.stat().st_ino == whole.st_ino, "only what it lacked is added"
    assert_true(run_dir, (0, 1))


class Memory:
    """A node's file in memory; `here` is false while nothing of it comes."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.generation = 0
        self.here = True
        self.compared: list[int] = []

    def read_from(self, offset: int, size: int) -> bytes:
        return self.content[offset : offset + size] if self.here else b""

    def read_whole(self, offset: int, size: int) -> bytes | None:
        self.compared.append(offset)
        return self.read_from(offset, size) if self.here else None

    def size(self) -> int | None:
        return len(self.content) if self.here else None


def test_a_node_that_is_away_is_no_gap_and_its_tail_is_compared_when_it_is_back(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    gaps: list[Gap] = []
    mirror = Mirror(run_dir, gaps.append, Ticking())
    node = Memory(b"one\n")
    mirror.follow(0, node, 0)
    assert mirror.pump() == 4
    assert node.compared == [], "there was nothing to compare yet"
    node.here = False
    node.generation = 1
    node.content += b"two\n"
    assert mirror.pump() == 0
    assert mirror.missing() == {"rank0.log": None}
    node.here = True
    assert mirror.pump() == 4
    assert node.compared == [0, 0]
    assert mirror.missing() == {}
    assert mirror.settle() == {}
    mirror.close()
    assert (run_dir.log(0).read_bytes(), gaps) == (b"one\ntwo\n", [])


def test_a_node_that_came_back_with_another_file_is_copied_again(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    gaps: list[Gap] = []
    mirror = Mirror(run_dir, gaps.append, Ticking())
    node = Memory(b"one\ntwo\n")
    mirror.follow(0, node, 0)
    mirror.pump()
    node.generation, node.content = 1, b"one\nTWO\n"
    assert mirror.settle() == {}
    mirror.close()
    assert run_dir.log(0).read_bytes() == b"one\nTWO\n"
    assert "copied again" in gaps[0].problem


def test_a_node_that_cannot_be_read_is_reported_and_tried_again(tmp_path: Path) -> None:
    class Flaky(Memory):
        broken = True

        def read_from(self, offset: int, size: int) -> bytes:
            if self.broken:
                raise ConnectionResetError(104, "Connection reset by peer")
            return super().read_from(offset, size)

    run_dir = RunDir(tmp_path)
    gaps: list[Gap] = []
    mirror = Mirror(run_dir, gaps.append, Ticking())
    node = Flaky(b"line\n")
    mirror.follow(0, node, 0)
    assert mirror.pump() == mirror.pump() == 0
    node.broken = False
    assert mirror.settle() == {}
    mirror.close()
    assert run_dir.log(0).read_bytes() == b"line\n"
    assert [(gap.problem, gap.over) for gap in gaps] == [
        ("Connection reset by peer", False),
        ("Connection reset by peer", True),
    ]


def test_a_node_file_that_became_shorter_loses_nothing_here(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    append(node_log(tmp_path, 0), b"all of it\n" * 10)
    following(run_dir).close()
    node_log(tmp_path, 0).write_bytes(b"")
    gaps: list[Gap] = []
    following(run_dir, gaps).close()
    assert run_dir.log(0).read_bytes() == b"all of it\n" * 10
    assert "shorter" in gaps[0].problem
    assert [gap.over for gap in gaps] == [False]


def test_a_gap_that_cannot_be_reported_stops_nothing(tmp_path: Path) -> None:
    def full_journal(gap: Gap) -> None:
        raise OSError(28, "No space left on device")

    class Gone(Memory):
        def read_from(self, offset: int, size: int) -> bytes:
            raise OSError(5, "Input/output error")

    mirror = Mirror(RunDir(tmp_path), full_journal)
    mirror.follow(0, Gone(b""), 0)
    assert mirror.pump() == 0


def test_events_are_copied_and_not_indexed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    events = tmp_path / "events.jsonl"
    mirror = Mirror(run_dir, print)
    mirror.follow_events(1, LocalFile(events), 0)
    append(events, b'{"event": "start"}\n')
    assert mirror.settle() == {}
    mirror.close()
    assert run_dir.events(1).read_bytes() == events.read_bytes()
    assert not run_dir.index(1).exists()


FOLLOW = """
import sys
from pathlib import Path
from engine.run.logs.mirror import Mirror
from engine.store.layout import RunDir
from engine.cluster.host_connection import LocalFile
run_dir = RunDir(Path(sys.argv[1]))
mirror = Mirror(run_dir, print)
for rank in (0, 1):
    mirror.follow(rank, LocalFile(run_dir.path.parent / f"node-rank{rank}.log"), 0)
print("ready", flush=True)
while True:
    mirror.pump()
"""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_supervisor_killed_while_it_mirrors_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    line = 0
    for kill in range(3):
        with subprocess.Popen([sys.executable, "-c", FOLLOW, str(run_dir.path)], stdout=subprocess.PIPE) as supervisor:
            assert supervisor.stdout is not None
            assert supervisor.stdout.readline() == b"ready\n"
            deadline = time.monotonic() + 0.05 + 0.013 * (seed + kill)
            while time.monotonic() < deadline:
                for rank in (0, 1):
                    text = "".join(f"rank {rank} line {line + k}\n" for k in range(200))
                    append(node_log(tmp_path, rank), text.encode())
                line += 200
            supervisor.send_signal(signal.SIGKILL)
    mirror = Mirror(run_dir, print)
    for rank in (0, 1):
        mirror.follow(rank, LocalFile(node_log(tmp_path, rank)), 0)
    assert mirror.settle() == {}
    mirror.close()
    assert_true(run_dir, (0, 1))


def test_a_node_that_sends_without_end_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.run.logs.mirror.MOST_BYTES", 10)
    run_dir, gaps = RunDir(tmp_path / "run"), list[Gap]()
    run_dir.path.mkdir()
    mirror = following(run_dir, gaps)
    append(node_log(tmp_path, 0), b"0123456789")
    assert (mirror.settle(), gaps) == ({}, [])
    append(node_log(tmp_path, 0), b"and more\n" * 10)
    append(node_log(tmp_path, 1), b"as ever\n")
    assert mirror.settle() == {}, "what is not copied is not waited for"
    assert mirror.settle() == {}
    assert (run_dir.log(0).read_bytes(), run_dir.log(1).read_bytes()) == (b"0123456789", b"as ever\n")
    (gap,) = gaps
    assert (gap.file, gap.lasting, "the rest stays on its node" in gap.problem) == ("rank0.log", True, True)
    mirror.close()
    again = Mirror(run_dir, gaps.append, Ticking())
    again.follow(0, LocalFile(node_log(tmp_path, 0)), 10)
    again.settle()
    assert run_dir.log(0).read_bytes() == b"01234567890123456789", "the next attempt has the same room"
