"""Virtual time: what is due, in order. Nothing here sleeps."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    __slots__ = ("_due", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the launch, also while a machine sleeps."""
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, moment: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call it then; a moment that is over is now."""
        self._number += 1
        heapq.heappush(self._due, (max(moment, self.now), self._number, call, arguments))

    def after(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._due, (self.now + delay_s, self._number, call, arguments))

    @property
    def next_due(self) -> float:
        """Infinite when nothing is."""
        return self._due[0][0] if self._due else float("inf")

    def run_next(self) -> None:
        moment, _, call, arguments = heapq.heappop(self._due)
        self.now = moment
        call(*arguments)

    def run_until(self, moment: float, stop: Callable[[], bool] | None = None) -> None:
        """Everything that is due until then; after which `stop` is asked whether to leave earlier."""
        due = self._due
        while due and due[0][0] <= moment:
            self.run_next()
            if stop is not None and stop():
                return
        self.now = max(self.now, moment)
