"""Append-only files of JSON lines: the writer, which cuts torn tails and holds lines back while the disk is full,
and readers that follow a growing file and read each line once."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import StateError
from engine.protocol.attempt import open_regular, regular_descriptor, sync_file
from engine.security.sanitise import json_or_none

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class DescriptorOwner:
    """Owns a file descriptor, -1 while there is none, which is closed with it at the latest."""

    _descriptor = -1

    def close(self) -> None:
        """Closing again does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __del__(self) -> None:
        DescriptorOwner.close(self)


class LineFile(DescriptorOwner):
    """The writing side. What a full disk did not take waits in memory, in order, for the next append or flush."""

    def __init__(self, path: Path) -> None:
        """Opens or makes the file (0600); what a killed writer left of a line is cut off."""
        self._descriptor = regular_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._waiting = b""
        self._cut_torn_line()

    @property
    def waits(self) -> bool:
        """There are lines that the disk has not taken yet."""
        return bool(self._waiting)

    def append(self, line: bytes, *, sync: bool = False) -> None:
        """Write `line`, given without its newline, by one write; with `sync` it is on the disk when this returns. While
        the disk is full it waits. Raises OSError for any other fault."""
        self._waiting += line + b"\n"
        self.flush(sync=sync)

    def flush(self, *, sync: bool = False) -> bool:
        """Write what waits; False while there is no room."""
        if not self._waiting:
            return True
        size = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, self._waiting) < len(self._waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                sync_file(self._descriptor)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            os.ftruncate(self._descriptor, size)
            return False
        self._waiting = b""
        return True

    def close(self) -> None:
        """Tries once more to write what waits. Closing again does nothing."""
        try:
            if self._descriptor >= 0:
                self.flush(sync=True)
        finally:
            super().close()

    def _cut_torn_line(self) -> None:
        size = os.fstat(self._descriptor).st_size
        position = size
        while position > 0:
            start = max(0, position - 4096)
            newline = os.pread(self._descriptor, position - start, start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < size:
            os.ftruncate(self._descriptor, position)


_BLOCK = 4 << 20
_LONGEST_LINE = 64 << 20


class LineTail:
    """The complete lines that have come since the last call. A torn last line waits for its end, and is read
    anew then: a supervisor that takes over cuts it off."""

    def __init__(self, path: Path, offset: int = 0, *, block: int = _BLOCK) -> None:
        """`block`: bytes that are read at a time."""
        self.path = path
        self._block = block
        self.offset = offset
        """Where the next line begins."""

    def objects(self) -> Iterator[dict[str, Any]]:
        """The objects in the new lines; a line that is no JSON object is passed over."""
        return (entry for line in self.lines() if (entry := parse_json_line(line)) is not None)

    def lines(self) -> Iterator[bytes]:
        """New complete lines without their ends; none while the file is missing. Raises StateError for one that cannot
        be read."""
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StateError("the file cannot be read", where=str(self.path), why=error) from error
        size = self._block
        with file:
            while True:
                file.seek(self.offset)
                block = file.read(size)
                whole, newline, _torn = block.rpartition(b"\n")
                if newline:
                    self.offset += len(whole) + 1
                    yield from whole.split(b"\n")
                    size = self._block
                elif len(block) < size:
                    return
                elif size < _LONGEST_LINE:
                    size *= 2
                else:
                    # No line of ours is that long; what claims to be one is passed over.
                    self.offset += len(block)


_LONGEST_OBJECT = 4 << 20
"""Bytes: no program of ours writes a longer one."""


def parse_json_line(line: bytes) -> dict[str, Any] | None:
    """The object in one line; None when there is none."""
    entry = json_or_none(line) if len(line) <= _LONGEST_OBJECT else None
    return entry if isinstance(entry, dict) else None
