"""From the trainers' mirrored events to the head's metrics, and to what the supervisor itself must know."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

from engine.run.consistency_watch import ConsistencyWatch
from engine.run.events import Figures
from engine.run.json_lines import LineFile, LineTail, parse_json_line
from engine.run.watchdog import AttemptProgress
from engine.store.layout import RunDir

_METRICS = {"report": "train", "validation": "val"}
_ENVELOPE = frozenset({"event", "rank", "seq", "t", "at", "attempt"})
_STEP = b'"event": "step"'
_NAME_END = 32
"""The name of an event stands in the first bytes of its line."""


class EventIntake:
    """Follows the event files of one attempt. Rank 0's reports become metrics.jsonl, each once, over restarts too."""

    def __init__(
        self,
        run_dir: RunDir,
        attempt: int,
        bases: dict[int, int],
        consistency: ConsistencyWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bases`: rank → where the attempt begins in the head's event file."""
        self._consistency = consistency
        self._clock = clock
        self.progress = AttemptProgress()
        self._attempt = attempt
        self._file = LineFile(run_dir.metrics)
        self._written = sum(1 for row in _rows(run_dir) if row.get("attempt") == attempt)
        self._tails = {}
        for rank, base in bases.items():
            self._tails[rank] = LineTail(run_dir.events(rank))
            self._tails[rank].offset = base
        self.latest = _latest(run_dir)

    @property
    def saving(self) -> bool:
        """A rank is in the middle of saving."""
        return "saving" in self.progress.phases.values()

    @property
    def blocked(self) -> bool:
        """The head's disk is full: nothing is read."""
        return self._file.waits

    def poll(self) -> None:
        """Read what is new. While the head's disk is full nothing is read, so nothing piles up."""
        if self._file.waits and not self._file.flush():
            return
        for rank, tail in self._tails.items():
            for line in tail.lines():
                # Most lines are steps, which are only parsed where they are needed.
                if _STEP in line[:_NAME_END]:
                    self.progress.step(rank, line, self._clock())
                    if self._consistency is not None:
                        self._consistency.step(rank, line)
                elif (event := parse_json_line(line)) is not None:
                    self._take(rank, event)
        if self._consistency is not None:
            self._consistency.poll()

    def close(self) -> None:
        self._file.close()

    def _take(self, rank: int, event: dict[str, Any]) -> None:
        self.progress.take(rank, event, self._clock())
        match event.get("event"):
            case "checkpoint" if self._consistency is not None:
                self._consistency.checkpoint(event)
            case "replica_check" if self._consistency is not None:
                self._consistency.replica_check(event)
            case ("report" | "validation") as name if rank == 0:
                self._keep(_METRICS[name], event)

    def _keep(self, kind: str, event: dict[str, Any]) -> None:
        figures = {key: value for key, value in event.items() if key not in _ENVELOPE}
        self.latest = _updated(self.latest, figures)
        if self._written > 0:
            # An earlier supervisor wrote it.
            self._written -= 1
            return
        at = datetime.fromtimestamp(float(event.get("at", 0.0)), UTC).isoformat()
        row = {"kind": kind, "attempt": self._attempt, "at": at, **figures}
        self._file.append(json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace"))


def _rows(run_dir: RunDir) -> list[dict[str, Any]]:
    return [row for line in LineTail(run_dir.metrics).lines() if (row := parse_json_line(line)) is not None]


def _latest(run_dir: RunDir) -> Figures:
    return functools.reduce(_updated, _rows(run_dir), Figures())


def _updated(latest: Figures, row: Mapping[str, Any]) -> Figures:
    """A command of the user's own may report anything: only numbers are taken."""
    known = {each.name: row[each.name] for each in fields(Figures) if isinstance(row.get(each.name), int | float)}
    if not isinstance(known.get("iteration", 0), int):
        del known["iteration"]
    return replace(latest, **known)
