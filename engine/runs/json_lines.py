"""Reads a growing file of JSON lines, each line once, however long the file has become."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 4 << 20
_LONGEST_LINE = 64 << 20


class LineTail:
    """The complete lines that have come since they were last asked for. A torn last line waits for its end, and is read
    anew then: a supervisor that takes over cuts it off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Where the next line begins."""

    def lines(self) -> Iterator[bytes]:
        """New complete lines without their ends, to the end of the file; none while it is missing."""
        for block in self.blocks():
            yield from block.split(b"\n")

    def blocks(self) -> Iterator[bytes]:
        """The same, several lines at a time; the last newline of a block is left out."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        size = _BLOCK
        with file:
            while True:
                file.seek(self.offset)
                block = file.read(size)
                whole, newline, _torn = block.rpartition(b"\n")
                if newline:
                    self.offset += len(whole) + 1
                    yield whole
                    size = _BLOCK
                elif len(block) < size:
                    return
                elif size < _LONGEST_LINE:
                    size *= 2
                else:
                    # No line of ours is that long; what claims to be one is passed over.
                    self.offset += len(block)


class JsonLinesTail:
    """The objects of a JSON lines file as they come; a line that is no JSON object is counted and passed over."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self.unreadable = 0

    def objects(self) -> Iterator[dict[str, Any]]:
        for line in self._tail.lines():
            entry = parse(line)
            if entry is not None:
                yield entry
            elif line.strip():
                self.unreadable += 1


def parse(line: bytes) -> dict[str, Any] | None:
    """The object in one line; None when there is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
