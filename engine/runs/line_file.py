"""An append-only file of whole lines, for one writer: torn tails are cut, a full disk makes lines wait."""

from __future__ import annotations

import errno
import os
from pathlib import Path

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class LineFile:
    """The writing side. What a full disk did not take waits in memory, in order, for the next append or flush."""

    def __init__(self, path: Path) -> None:
        """Opens or makes the file (0600); what a killed writer left of a line is cut off."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._waiting = b""
        self._cut_torn_line()

    @property
    def waits(self) -> bool:
        """There are lines that the disk has not taken yet."""
        return bool(self._waiting)

    def append(self, line: bytes, *, sync: bool = False) -> bool:
        """Write `line`, given without its newline, by one write; with `sync` it is on the disk when this returns.

        False when the disk is full and the line waits. Raises OSError for any other fault.
        """
        self._waiting += line + b"\n"
        return self.flush(sync=sync)

    def flush(self, *, sync: bool = False) -> bool:
        """Write what waits; False while there is no room."""
        if not self._waiting:
            return True
        size = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, self._waiting) < len(self._waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            os.ftruncate(self._descriptor, size)
            return False
        self._waiting = b""
        return True

    def close(self) -> None:
        """What waits is tried once more. To close it again does nothing."""
        if self._descriptor < 0:
            return
        try:
            self.flush(sync=True)
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)

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
