"""Copies the ranks' logs and events from their nodes to the head by offset, and indexes every line as it arrives.

The node's file is the truth and the head's size is the offset to go on from, so a mirror may be killed at any moment:
the next one copies what is missing, verifies what is there, and derives what the indices lack.
Nothing here raises for a fault of a disk or a node: it is reported once, retried at each pump, and reported again when
it is over."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from engine.cluster.host_connection import HostConnection, NodeFile
from engine.protocol.attempt import open_regular, regular_descriptor
from engine.run.json_lines import DescriptorOwner
from engine.run.logs.index_writer import IndexFile, SourceIndex, complete_merged
from engine.run.logs.line_index import HEADER, LAST_CENTISECOND, read_header
from engine.run.run_context import AttemptContext
from engine.store.layout import LAUNCHER_SOURCE, RunDir

CHUNK_BYTES: Final = 1 << 20
ROUNDS: Final = 8
"""Chunks per file and pump: a flood is taken in bounded bites, each file in its turn."""
VERIFIED_BYTES: Final = 64 * 1024
"""The part of the mirror's tail that is compared with the node's file when a mirror goes on."""
MOST_BYTES: Final = 8 << 30
"""A file's limit in one attempt: a node that sends without end does not fill the head's disk."""
WAITING_BYTES: Final = 1 << 20
"""Index records that a full disk did not take: with more, the log waits as well."""
_LATE_BYTES_S: Final = 10.0
"""The end of a log may take as long to come, after the last byte that came."""
_POLL_S: Final = 0.025

T = TypeVar("T")


@dataclass(frozen=True)
class Gap:
    """Something could not be copied or indexed. Its bytes are still on the node, and will be copied when they can."""

    file: str
    """Name of the head's file."""
    problem: str
    """One line without the file's name; the same as before when it is over."""
    over: bool = False
    lasting: bool = False
    """The rest is not copied later, either."""


class FileMirror(DescriptorOwner):
    """One file of one attempt: the head's copy from `base` on is the node's file from 0 on."""

    def __init__(self, path: Path, node: NodeFile, base: int) -> None:
        self.path = path
        self._node = node
        self._base = base
        self._verified: int | None = None
        """The node file's generation when the tail was last compared."""
        self.size = 0
        """Bytes in the head's file."""
        self.cut = False
        """The head's file has just been cut, because it contradicted the node's."""

    def pull(self) -> bytes:
        """Copy the next chunk; the bytes that were stored, none when it has just been `cut`. Raises OSError; a part
        may be stored by then."""
        if self._descriptor < 0:
            self._open()
        if self._verified != self._node.generation and (not self._verify() or self.cut):
            # After a cut nothing is copied yet: the index must first see the file as short as it is.
            return b""
        data = self._node.read_from(self.size - self._base, CHUNK_BYTES)
        if data and self.is_full:
            raise OSError(errno.EFBIG, f"over {MOST_BYTES >> 20:,} MiB in one attempt: the rest stays on its node")
        data = data[: MOST_BYTES - (self.size - self._base)]
        stored = 0
        try:
            while stored < len(data):
                stored += os.write(self._descriptor, memoryview(data)[stored:])
        except OSError:
            if not stored:
                raise
        self.size += stored
        return data[:stored]

    def _open(self) -> None:
        self._descriptor = regular_descriptor(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.size = os.fstat(self._descriptor).st_size
        if self.size < self._base:
            # An earlier attempt's tail did not survive a power cut: offsets of this attempt count from `base` anyway.
            os.ftruncate(self._descriptor, self._base)
            self.size = self._base

    @property
    def is_full(self) -> bool:
        """No more of this attempt is copied."""
        return self.size - self._base >= MOST_BYTES

    @property
    def missing(self) -> int | None:
        """Bytes that the node has and the head lacks; None while that is not known."""
        there = 0 if self.is_full else self._node.size()
        return None if there is None else max(0, there - max(0, self.size - self._base))

    def _verify(self) -> bool:
        """Compare the tail with the node's file, and cut back to the last byte that agrees. False while the node has
        not answered."""
        generation = self._node.generation
        end = self.size
        while end > self._base:
            start = max(self._base, end - VERIFIED_BYTES)
            here = os.pread(self._descriptor, end - start, start)
            there = self._node.read_whole(start - self._base, end - start)
            if there is None:
                return False
            if len(there) < len(here) and end == self.size:
                raise OSError(errno.ENODATA, "the node's file is shorter than its mirror")
            if here == there:
                break
            agreed = start + next(at for at, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1])
            if agreed > start:
                end = agreed
                break
            end = start
        if end < self.size:
            os.ftruncate(self._descriptor, end)
            self.size, self.cut = end, True
        self._verified = generation
        return True


class Mirror:
    """The mirrored files of one attempt, and the indices of the run's logs. Not thread safe, and not for the event
    loop: every call may wait for the head's disk."""

    def __init__(
        self, run_dir: RunDir, on_gap: Callable[[Gap], object], clock: Callable[[], float] = time.time
    ) -> None:
        """`on_gap` gets what the head could not keep."""
        self._run_dir = run_dir
        self._on_gap = on_gap
        self._clock = clock
        self._began_at = _began_at(run_dir, clock())
        self._newest = (0, 0)
        """When the newest line arrived, centiseconds, and its source."""
        self._logs: dict[int, FileMirror | None] = {}
        self._events: dict[int, FileMirror] = {}
        self._indices: dict[int, SourceIndex] = {}
        self._merged: IndexFile | None = None
        self._problems: dict[str, str] = {}
        self._try(run_dir.merged_index, self._prepare)

    @classmethod
    def of_attempt(cls, context: AttemptContext, on_gap: Callable[[Gap], object]) -> Mirror:
        """Follows all that the attempt's ranks and its launcher print."""
        attempt, mirror = context.attempt, cls(context.run_dir, on_gap)
        for rank in range(len(context.plan.nodes)):
            connection, files = context.connections.to(rank), attempt.files(context.plan.run_id, rank)
            mirror.follow(rank, connection.file(files.log(rank).name), attempt.log_bases[rank])
            mirror.follow_events(rank, connection.file(files.events(rank).name), attempt.event_bases[rank])
        mirror.follow(LAUNCHER_SOURCE, None, attempt.log_bases[LAUNCHER_SOURCE])
        return mirror

    def follow(self, source: int, node: NodeFile | None, base: int) -> None:
        """Mirror the log of `source` onto the head's log from byte `base` on, where the attempt begins. None: the
        head's log is written by another process and only indexed."""
        self._logs[source] = None if node is None else FileMirror(self._run_dir.log(source), node, base)
        index = self._indices.get(source)
        if index is not None and index.scanned == base:
            index.line_begins = True

    def follow_events(self, rank: int, node: NodeFile, base: int) -> None:
        """Mirror the events of a rank, likewise; they are not indexed."""
        self._events[rank] = FileMirror(self._run_dir.events(rank), node, base)

    def pump(self) -> int:
        """Copy and index what is new, at most ROUNDS chunks per file; the number of bytes."""
        total = 0
        for _ in range(ROUNDS):
            moved = sum(self._take_log(source, log) for source, log in self._logs.items())
            moved += sum(map(self._take_events, self._events.values()))
            self._flush()
            total += moved
            if not moved:
                break
        return total

    def settle(self) -> dict[str, int | None]:
        """Copy and index all that is there now; as `missing`."""
        while self.pump():
            pass
        return self.missing()

    def missing(self) -> dict[str, int | None]:
        """The head's files that lack bytes, and how many; None where that is not known."""
        return {file.path.name: lacking for file in self._files() if (lacking := file.missing) != 0}

    def incomplete(self, *connections: HostConnection) -> bool:
        """These nodes have not sent all of their files yet."""
        theirs = tuple(f"rank{rank}." for connection in connections for rank in connection.ranks)
        return any(name.startswith(theirs) for name in self.missing())

    def await_the_rest(self, connections: Sequence[HostConnection]) -> None:
        """Copy what these nodes have not sent yet, as long as it comes."""
        moved_at = time.monotonic()
        while self.incomplete(*connections):
            if self.pump():
                moved_at = time.monotonic()
            elif time.monotonic() - moved_at > _LATE_BYTES_S:
                return
            else:
                time.sleep(_POLL_S)

    def close(self) -> None:
        """`settle`, and follow nothing any more: the next attempt writes the same files."""
        self.settle()
        for file in self._files():
            file.close()
        self._logs.clear()
        self._events.clear()
        self._close_indices()

    def _files(self) -> list[FileMirror]:
        return [file for file in (*self._logs.values(), *self._events.values()) if file is not None]

    def _take_log(self, source: int, log: FileMirror | None) -> int:
        index = self._index(source)
        if index is None or len(index.waiting) > WAITING_BYTES:
            return 0
        before = index.scanned
        data = self._pull(log) if log is not None else b""
        if log is not None and log.cut:
            self._tell_cut(log)
            self._close_indices()
            return self._take_log(source, log)
        at = self._arrival(source, self._clock())
        if log is None:
            added = index.scan_log(at, CHUNK_BYTES)
        elif index.scanned + len(data) == log.size:
            added = index.feed(data, at)
        else:
            added = index.scan_log(at)
        if added and self._merged is not None:
            self._newest = (at, source)
            self._merged.waiting += added
        return index.scanned - before

    def _take_events(self, events: FileMirror) -> int:
        data = self._pull(events)
        if events.cut:
            self._tell_cut(events)
            data = self._pull(events)
        return len(data)

    def _pull(self, file: FileMirror) -> bytes:
        return self._try(file.path, file.pull) or b""

    def _arrival(self, source: int, moment: float) -> int:
        """Centiseconds, of lines that have come at a `moment`: never less than before, whatever the wall clock does,
        and more than those of a later source."""
        at, newest_source = self._newest
        return min(max(at + (source < newest_source), int(100 * (moment - self._began_at))), LAST_CENTISECOND)

    def _index(self, source: int) -> SourceIndex | None:
        """The index of a source, None while the disk does not let us have one."""
        if self._merged is None:
            self._try(self._run_dir.merged_index, self._prepare)
        if self._merged is None:
            return None
        if source not in self._indices:
            self._try(self._run_dir.index(source), lambda: self._open_index(source))
        return self._indices.get(source)

    def _open_index(self, source: int) -> None:
        run_dir = self._run_dir
        self._indices[source] = SourceIndex(source, run_dir.log(source), run_dir.index(source), self._began_at)

    def _prepare(self) -> None:
        """Repair all indices that are there, enter the lines that they lack, and make the merged one agree."""
        sources = self._run_dir.sources()
        for source in sources:
            if source not in self._indices:
                self._open_index(source)
            self._newest = max(self._newest, (self._indices[source].last_at, source))
        for source in sources:
            index = self._indices[source]
            index.scan_log(self._arrival(source, self._run_dir.log(source).stat().st_mtime))
            index.flush()
            self._newest = max(self._newest, (index.last_at, source))
        merged = IndexFile(self._run_dir.merged_index, self._began_at)
        self._merged = complete_merged(merged, self._indices.values())

    def _flush(self) -> None:
        for index in self._indices.values():
            self._try(index.path, index.flush)
        if self._merged is not None:
            self._try(self._merged.path, self._merged.flush)

    def _close_indices(self) -> None:
        for index in self._indices.values():
            index.close()
        if self._merged is not None:
            self._merged.close()
        self._indices.clear()
        self._merged = None

    def _try(self, path: Path, action: Callable[[], T]) -> T | None:
        """`action`'s result, None when the disk or the node fails; reported when that begins and when it is over."""
        try:
            result = action()
        except OSError as error:
            problem = _in_words(error)
            if self._problems.get(path.name) != problem:
                self._problems[path.name] = problem
                self._tell(Gap(path.name, problem, lasting=error.errno == errno.EFBIG))
            return None
        if problem := self._problems.pop(path.name, ""):
            self._tell(Gap(path.name, problem, over=True))
        return result

    def _tell_cut(self, file: FileMirror) -> None:
        """Once: the file's tail was not the node's."""
        self._tell(Gap(file.path.name, "the mirror's tail was not the node's and is copied again", over=True))
        file.cut = False

    def _tell(self, gap: Gap) -> None:
        # The journal may be on the very disk that is full; mirroring goes on all the same.
        with contextlib.suppress(Exception):
            self._on_gap(gap)


def _in_words(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk full on the head, copying waits for room"
    return error.strerror or str(error)


def _began_at(run_dir: RunDir, now: float) -> float:
    """The time that this run's indices count from: all of them share it, so that their records are the same."""
    for path in (run_dir.merged_index, *sorted(run_dir.path.glob("*.idx"))):
        try:
            with open_regular(path) as file:
                began_at = read_header(file.read(HEADER.size))
        except OSError:
            continue
        if began_at is not None:
            return began_at
    return now
