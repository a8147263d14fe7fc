"""A file on a host as its agent sends it: a window of it, filled by the link and emptied by the mirror."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

WINDOW_BYTES = 1 << 20
"""Of one file, at most in memory and under way."""

Order = Callable[[str, int | None, int], None]
"""(file, from, until): the standing order for the agent; `from` None goes on where the last one was."""


class AgentFile:
    """A NodeFile. Its two sides are two threads."""

    def __init__(self, name: str, order: Order) -> None:
        self._name = name
        self._order = order
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._start = -1
        """Offset of the buffer's first byte; -1 before anybody has asked."""
        self._until = 0
        self._at_end = False
        self._size: int | None = None
        self._problem: str | None = None
        self._generation = 0

    @property
    def generation(self) -> int:
        """Another number with each connection."""
        return self._generation

    def size(self) -> int | None:
        """Known when nothing will be added any more."""
        return self._size

    def read_from(self, offset: int, size: int) -> bytes:
        """What has come of `size` bytes from `offset`. Raises OSError for what keeps the agent from reading."""
        with self._lock:
            self._go_to(offset)
            return bytes(self._buffer[:size])

    def read_whole(self, offset: int, size: int) -> bytes | None:
        """`size` bytes from `offset`, fewer only at the file's end; None while they have not come."""
        with self._lock:
            self._go_to(offset)
            return bytes(self._buffer[:size]) if len(self._buffer) >= size or self._at_end else None

    def take(self, begin: int, data: bytes, *, end: bool) -> None:
        """What the agent has sent. What is here already, or was under way when the order changed, is left out."""
        with self._lock:
            known = self._start + len(self._buffer) - begin
            if not 0 <= known <= len(data):
                return
            self._buffer += data[known:]
            self._at_end = end
            self._problem = None

    def fail(self, problem: str) -> None:
        """The agent cannot read it."""
        self._problem = problem

    def settle(self, size: int) -> None:
        """Nobody is left who could add to its `size` bytes."""
        self._size = size

    def reconnect(self) -> tuple[int, int] | None:
        """There is a new agent: the order that it is to be given, (from, until); None when nothing was ordered yet."""
        with self._lock:
            self._generation += 1
            self._problem = None
            if self._start < 0:
                return None
            self._until = self._start + WINDOW_BYTES
            return self._start + len(self._buffer), self._until

    def _go_to(self, offset: int) -> None:
        if self._problem is not None:
            raise OSError(errno.EIO, f"the node cannot read it: {self._problem}")
        passed = offset - self._start
        if self._start < 0 or not 0 <= passed <= len(self._buffer):
            self._buffer.clear()
            self._start, self._until, self._at_end = offset, offset + WINDOW_BYTES, False
            self._order(self._name, offset, self._until)
            return
        del self._buffer[:passed]
        self._start = offset
        if offset + WINDOW_BYTES - self._until >= WINDOW_BYTES // 2:
            self._until = offset + WINDOW_BYTES
            self._order(self._name, None, self._until)
