"""How far an attempt has come, as its ranks' events tell: steps, what it went on from, and what its ranks rescue.

Times of arrival are the head's own; how long steps take is read from each rank's monotonic clock. So neither a clock
that is set nor events that come late and all at once look like slow steps.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIRST_STEPS = 5
"""They may take longer than all others: nothing is compiled or cached yet."""
STEPS_KEPT = 512
"""Of their durations, the last."""
_ITERATION = re.compile(rb'"iteration": (\d{1,18})[,}]')
_MONOTONIC = re.compile(rb'"t": (\d{1,15}(?:\.\d{1,20})?)[,}]')
_UPDATE = b'"update":'
"""In the line of an update's last micro-batch alone. All of an update's lines come at its end, in one burst."""
SLOW_PHASES = frozenset({"loading", "validating", "saving"})


@dataclass(frozen=True)
class Resumed:
    """What an attempt went on from, as its trainers say."""

    source: str
    """ "rescue", "checkpoint", "adapter" or "none"."""
    iteration: int = 0
    update: int | None = None
    from_rank: int | None = None


class Progress:
    """Of one attempt. Takes its events in the order of their arrival."""

    def __init__(self) -> None:
        self.reached: dict[int, int] = {}
        """Rank → the last iteration that it has told of."""
        self.phases: dict[int, str] = {}
        self._announced: dict[int, str] = {}
        """Rank → the last phase that its trainer has named."""
        self.rescues: dict[int, str] = {}
        """Rank → "begin" or "committed"."""
        self.rescue_bytes: dict[int, int] = {}
        """Rank → size of the state that it has begun to rescue."""
        self.resumed: Resumed | None = None
        self.moved_at: float | None = None
        """When the last step or change of phase came, or any event while loading, monotonic seconds of the head."""
        self.steps = 0
        """Iterations that the foremost rank has made."""
        self._durations: deque[float] = deque(maxlen=STEPS_KEPT)
        self._told_at: dict[int, float] = {}
        """Rank → its own monotonic time of its last update, until it does something else."""
        self._tells_updates = False
        self._timed = 0
        """Updates that the foremost rank has made; iterations, where no line tells of updates."""

    @property
    def furthest(self) -> int:
        """The last iteration that any rank finished, or that the attempt went on from; 0 when none."""
        return max((*self.reached.values(), self.resumed.iteration if self.resumed is not None else 0), default=0)

    def step(self, rank: int, line: bytes, now: float) -> None:
        """One line of a `step` event, not parsed."""
        found, told = _ITERATION.search(line), _MONOTONIC.search(line)
        if found is None:
            return
        iteration = int(found[1])
        foremost = iteration > max(self.reached.values(), default=0)
        self.steps += foremost
        self.reached[rank] = max(iteration, self.reached.get(rank, 0))
        self.moved_at = now
        if told is not None and self._ends_an_update(line):
            self._time(rank, float(told[1]), foremost=foremost)

    def take(self, rank: int, event: Mapping[str, Any], now: float) -> None:
        """Any other event."""
        match event.get("event"):
            case "phase":
                self._announced[rank] = str(event.get("phase"))
                self._enter(rank, self._announced[rank], now)
            case "checkpoint" if not event.get("background"):
                # Several files may belong to one phase of saving: the trainer says itself when it goes on.
                announced = self._announced.get(rank, "training")
                self._enter(rank, "saving" if event.get("phase") == "begin" else announced, now)
            case "end" | "failure":
                self._enter(rank, "ended", now)
            case "rescue":
                self.rescues[rank] = str(event.get("phase"))
                if (size := _whole(event.get("bytes"))) is not None:
                    self.rescue_bytes[rank] = size
            case "resumed" if self.resumed is None:
                self.resumed = _resumed(event)
                self.moved_at = now
        if self.phases.get(rank) == "loading":
            # What it fetches may be large: as long as it tells of it, it moves.
            self.moved_at = now

    def long_step_s(self) -> float | None:
        """The 99th percentile of the updates' durations, by their nearest rank, without the first ones; None while
        there are none."""
        steps = sorted(self._durations)
        return steps[(99 * len(steps) - 1) // 100] if steps else None

    def _ends_an_update(self, line: bytes) -> bool:
        if _UPDATE not in line:
            return not self._tells_updates
        if not self._tells_updates:
            # What came before the first update's end were micro-batches.
            self._tells_updates, self._timed = True, 0
            self._durations.clear()
            self._told_at.clear()
        return True

    def _time(self, rank: int, at: float, *, foremost: bool) -> None:
        self._timed += foremost
        if rank in self._told_at and self._timed > FIRST_STEPS:
            self._durations.append(max(0.0, at - self._told_at[rank]))
        self._told_at[rank] = at

    def _enter(self, rank: int, phase: str, now: float) -> None:
        if self.phases.get(rank) != phase:
            self.phases[rank] = phase
            self.moved_at = now
            if phase != "training":
                # What lies between two steps then is no step.
                self._told_at.pop(rank, None)


def _resumed(event: Mapping[str, Any]) -> Resumed:
    return Resumed(
        source=str(event.get("source"))[:40],
        iteration=_whole(event.get("iteration")) or 0,
        update=_whole(event.get("update")),
        from_rank=_whole(event.get("from_rank")),
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
