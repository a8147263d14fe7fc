"""Finds a training that hangs: no step for max(`hang_s`, 5 × the 99th percentile of the updates so far).

Loading, validating, saving and the first steps have a limit of their own, `stall_s`. Time counts on the head's
monotonic clock and only while events could come: some node of the attempt answers, and the head takes what it sends.
A node whose disk is full loses its events; as long as one rank's come, that is no hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.supervision.progress import SLOW_PHASES, Progress

_TIMES = 5.0


@dataclass(frozen=True)
class Hang:
    """That nothing moves, and which rank was the first to stand still where that can be told."""

    silent_s: float
    limit_s: float
    doing: str
    """ "training", or the slow phase that it is in."""
    iteration: int
    """The last one that any rank finished."""
    rank: int | None = None

    @classmethod
    def told(cls, entries: Sequence[Mapping[str, Any]]) -> Hang | None:
        """The one that these entries of an attempt's journal tell of."""
        entry = next((entry for entry in entries if entry["event"] == "hung"), None)
        return cls(**{each.name: entry[each.name] for each in fields(cls)}) if entry is not None else None


class Watchdog:
    """Of one attempt. `look` at every tick."""

    def __init__(self, progress: Progress, ranks: Sequence[int], hang_s: float, stall_s: float, now: float) -> None:
        self._progress = progress
        self._ranks = tuple(ranks)
        self._hang_s = hang_s
        self._stall_s = stall_s
        self._since = self._looked_at = now

    def look(self, now: float, *, hearing: bool) -> Hang | None:
        """`hearing`: events could have come since the last look."""
        if not hearing:
            # Nobody knows what happened meanwhile: that time does not count.
            self._since += now - self._looked_at
        self._since = max(self._since, self._progress.moved_at or self._since)
        self._looked_at = now
        doing, limit = self._limit()
        silent = now - self._since
        if silent <= limit:
            return None
        return Hang(silent, limit, doing, self._progress.furthest, self._behind())

    def _limit(self) -> tuple[str, float]:
        slow = sorted(set(self._progress.phases.values()) & SLOW_PHASES)
        if slow:
            return slow[0], self._stall_s
        long_step = self._progress.long_step_s()
        if long_step is None:
            return ("training" if self._progress.steps else "starting"), self._stall_s
        return "training", max(self._hang_s, _TIMES * long_step)

    def _behind(self) -> int | None:
        """The one rank that is behind all others; None when there is no such."""
        reached = {rank: self._progress.reached.get(rank, 0) for rank in self._ranks}
        last = min(reached.values())
        behind = [rank for rank, iteration in reached.items() if iteration == last]
        return behind[0] if len(behind) == 1 and len(reached) > 1 else None
