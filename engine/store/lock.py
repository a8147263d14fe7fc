"""The one writer of the state: a lock on a file that holds the writer's pid.

The kernel drops it with the process, however that ends, so it cannot go stale; the pid is for the message alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from engine.errors import StateError

WAIT_S = 10.0
_PAUSE_S = 0.005


class WriteLock:
    """Held inside its `with`, which waits for it `wait_s` at most and raises StateError naming the holder's pid."""

    def __init__(
        self,
        path: Path,
        *,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._path = path
        self._wait_s = wait_s
        self._clock = clock
        self._sleep = sleep
        self._descriptor: int | None = None

    def __enter__(self) -> None:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as fault:
            why = fault.strerror or str(fault)
            raise StateError("the state cannot be locked", where=str(self._path), why=why) from fault
        try:
            self._take(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        # A full disk has no room for a pid, and no reason to refuse the lock.
        with contextlib.suppress(OSError):
            os.pwrite(descriptor, b"%-19d\n" % os.getpid(), 0)
        self._descriptor = descriptor

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, descriptor: int) -> None:
        until = self._clock() + self._wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._clock() >= until:
                    pid = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
                    holder = f"pid {pid}" if pid.isdecimal() else "an unknown pid"
                    raise StateError(
                        "the state is being written by another process",
                        where=str(self._path),
                        why=f"{holder} has held it for {self._wait_s:g} s or more",
                        todo="try again, or end that process when it hangs",
                    ) from None
                self._sleep(_PAUSE_S)
            else:
                return
