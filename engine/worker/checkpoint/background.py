"""Writes checkpoints beside the training: one in flight, none waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ended(Generic[Result]):
    """A write that has come to its end."""

    result: Result | None
    error: Exception | None
    seconds: float


class Background(Generic[Result]):
    """A thread per write. For one user, who asks it between two steps."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ended: Ended[Result] | None = None

    @property
    def busy(self) -> bool:
        """Whether one is in flight: another is not begun then, it would only pile up memory."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, work: Callable[[], Result]) -> None:
        """Begin `work`, which touches nothing that changes meanwhile. Not while busy, or before `ended` was taken."""
        assert not self.busy and self._ended is None
        # Not a daemon: the interpreter's end waits for what is half written.
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint")
        self._thread.start()

    def ended(self, *, wait: bool = False) -> Ended[Result] | None:
        """What has ended since the last call, told once; with `wait` after the one in flight has."""
        if self._thread is None or (self.busy and not wait):
            return None
        self._thread.join()
        self._thread = None
        ended, self._ended = self._ended, None
        return ended

    def _run(self, work: Callable[[], Result]) -> None:
        begun = time.perf_counter()
        result: Result | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as fault:  # told by `ended`: what it means is for the training to decide
            error = fault
        self._ended = Ended(result, error, time.perf_counter() - begun)
