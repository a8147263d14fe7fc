"""logs: what the ranks printed, sanitised for a terminal, or the bytes as they were."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import BinaryIO

from engine.errors import InputError
from engine.runs.layout import LAUNCHER_SOURCE, RunDir
from engine.runs.log_reader import LogLine, LogReader
from engine.session import Engine, RunWatch
from tui.commands.follow import Rescue
from tui.commands.terminal import Lines, print_json

OK = 0
_POLL_S = 0.1
_BLOCK_LINES = 2_000
_BLOCK_BYTES = 1 << 20


def logs(options: argparse.Namespace, engine: Engine) -> int:
    """Print a run's log; with --follow until the run has ended and everything has been printed."""
    directory = engine.find(options.run)
    watch = engine.watch(directory.id)
    source: int | None = LAUNCHER_SOURCE if options.launcher else options.rank
    ranks = watch.poll().record.world_size
    if options.rank is not None and options.rank >= ranks:
        raise InputError(f"no rank {options.rank}", where=directory.id, why=f"it has ranks 0 to {ranks - 1}")
    rescue = Rescue(engine, directory.id, Lines(sys.stderr))
    if options.raw:
        if source is None:
            raise InputError("--raw needs --rank or --launcher", why="the ranks' bytes are files of their own")
        if options.json or options.lines is not None:
            raise InputError("--raw gives the whole file", todo="leave out --json and --lines")
        _copy(directory, source, watch, rescue, sys.stdout.buffer, follow=options.follow)
        return OK
    lines = LogFollower(directory, source, watch, rescue).lines(last=options.lines, follow=options.follow)
    if options.json:
        if options.follow:
            raise InputError("--json is one document", todo="leave out --follow")
        print_json([_document(line) for line in lines])
        return OK
    for line in lines:
        label = "" if source is not None else f"{source_label(line.source):>{len(str(ranks - 1))}} | "
        print(label + line.text, flush=options.follow)
    return OK


class LogFollower:
    """The lines of a run in order of arrival, each once: what was given out is remembered by byte offset."""

    def __init__(self, directory: RunDir, source: int | None, watch: RunWatch, rescue: Rescue) -> None:
        self._reader = LogReader(directory, source)
        self._watch = watch
        self._rescue = rescue
        self._given: dict[int, int] = {}
        """Source → offset of its last line that was given out."""
        self._partial: list[int] = []
        """Numbers of lines whose end had not come when they were looked at."""
        self._next = 0

    def lines(self, *, last: int | None = None, follow: bool = False) -> Iterator[LogLine]:
        """All lines, or the `last` ones; with `follow` until the run has ended."""
        self._reader.refresh()
        if last is not None:
            self._next = max(0, self._reader.line_count - last)
        while True:
            # Asked before reading: what a run that has ended left is all there by then.
            ended = not follow or self._ended()
            if self._reader.refresh():
                # Numbers begin anew; offsets do not.
                self._next, self._partial = 0, []
            yield from self._fresh(whole=ended)
            if ended:
                return
            time.sleep(_POLL_S)

    def _ended(self) -> bool:
        snapshot = self._watch.poll()
        self._rescue.look(snapshot)
        return snapshot.record.state.ended

    def _fresh(self, *, whole: bool) -> Iterator[LogLine]:
        """What has come; `whole` gives out lines without an end too."""
        waiting, self._partial = self._partial, []
        for number in waiting:
            yield from self._give(self._reader.lines(number, number + 1), whole)
        while self._next < self._reader.line_count:
            block = self._reader.lines(self._next, self._next + _BLOCK_LINES)
            if not block:
                return
            self._next = block[-1].number + 1
            yield from self._give(block, whole)

    def _give(self, lines: list[LogLine], whole: bool) -> Iterator[LogLine]:
        for line in lines:
            if line.offset <= self._given.get(line.source, -1):
                continue
            if line.partial and not whole:
                self._partial.append(line.number)
                continue
            self._given[line.source] = line.offset
            yield line


def source_label(source: int) -> str:
    return "launcher" if source == LAUNCHER_SOURCE else str(source)


def _document(line: LogLine) -> dict[str, object]:
    rank = None if line.source == LAUNCHER_SOURCE else line.source
    return {"rank": rank, "at": datetime.fromtimestamp(line.at, UTC).isoformat(), "text": line.text}


def _copy(directory: RunDir, source: int, watch: RunWatch, rescue: Rescue, out: BinaryIO, *, follow: bool) -> None:
    """The bytes of one log file as they are, by offset."""
    offset = 0
    while True:
        snapshot = watch.poll()
        ended = not follow or snapshot.record.state.ended
        if not ended:
            rescue.look(snapshot)
        path = directory.log(source)
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                while block := file.read(_BLOCK_BYTES):
                    out.write(block)
                    offset += len(block)
            out.flush()
        if ended:
            return
        time.sleep(_POLL_S)
