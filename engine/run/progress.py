"""How far an attempt has come, from the trainers' mirrored events; rank 0's reports become the head's metrics.

Arrival times are by the head's clock; step durations come from each rank's monotonic clock. So neither a clock that is
set nor events that arrive late in one burst look like slow steps."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from engine.job.kinds import JobKind
from engine.protocol.events import STEP_FIELD, UPDATE_FIELD
from engine.run.command_watch import CommandWatch
from engine.run.consistency_watch import ConsistencyWatch
from engine.run.events import (
    UNSTAMPED,
    Event,
    Figures,
    ResultReported,
    Resumed,
    SavedFiles,
    StateSaved,
    TrainingStarted,
    WeightsSaved,
)
from engine.run.history import MANIFESTS_KEPT
from engine.run.json_lines import LineFile, LineTail, parse_json_line
from engine.run.metrics import figures
from engine.run.observation import ProgressView
from engine.run.rank_events import NAME_END, PHASE_LIMIT
from engine.security.sanitise import count_or_none, moment_or_none, number_or_none, plain, text_or_none
from engine.store.layout import RunDir

STEPS_KEPT = 512
"""The newest step durations that count."""
_ITERATION = re.compile(rb'"iteration": (\d{1,18})[,}]')
_MONOTONIC = re.compile(rb'"t": (\d{1,15}(?:\.\d{1,20})?)[,}]')
_WALL = re.compile(rb'"at": (\d{1,15}(?:\.\d{1,20})?)[,}]')


class UpdateDurations:
    """How long the updates of an attempt take, by the ranks' own monotonic clocks."""

    def __init__(self) -> None:
        self.first_steps = JobKind.first_steps
        self._durations: deque[float] = deque(maxlen=STEPS_KEPT)
        self._updated_at: dict[int, float] = {}
        """Rank → its own time of its last update, until it does something else, s."""
        self._reports_updates = False
        self._timed = 0
        """Updates made by the foremost rank; iterations, where no line reports updates."""

    def long_step_s(self) -> float | None:
        """The 99th percentile of the updates' durations, by their nearest rank, without the first ones; None while
        there are none."""
        steps = sorted(self._durations)
        return steps[(99 * len(steps) - 1) // 100] if steps else None

    def step(self, rank: int, line: bytes, at: float, *, foremost: bool) -> None:
        """One line of a `step` event, not parsed; `at` by its rank's clock, s."""
        if UPDATE_FIELD in line:
            if not self._reports_updates:
                # What came before the first update's end were micro-batches.
                self._reports_updates, self._timed = True, 0
                self._durations.clear()
                self._updated_at.clear()
        elif self._reports_updates:
            # All lines of an update come at its end, in one burst.
            return
        self._timed += foremost
        if rank in self._updated_at and self._timed > self.first_steps:
            self._durations.append(max(0.0, at - self._updated_at[rank]))
        self._updated_at[rank] = at

    def interrupt(self, rank: int) -> None:
        """The time until its next update is none of an update."""
        self._updated_at.pop(rank, None)


class AttemptProgress:
    """How far one attempt has come. Takes its events in the order of their arrival."""

    def __init__(self) -> None:
        self.first_iteration: int | None = None
        """The first that was reported."""
        self.updates = UpdateDurations()
        self._announced: dict[int, str] = {}
        """Rank → the last phase that its trainer reported."""
        self._newest = ProgressView()
        """Changed in place, since a copy takes longer than all else that is done for a line: nobody else has it."""
        self._view: ProgressView | None = None
        """None when something has changed since."""

    @property
    def view(self) -> ProgressView:
        if self._view is None:
            self._view = replace(self._newest, long_step_s=self.updates.long_step_s())
        return self._view

    def step(self, rank: int, line: bytes, now: float) -> None:
        """One line of a `step` event, not parsed."""
        number, clock = _ITERATION.search(line), _MONOTONIC.search(line)
        if number is None:
            return
        view, iteration = self._newest, int(number[1])
        if self.first_iteration is None:
            self.first_iteration = iteration
        foremost = iteration > max(view.reached.values(), default=0)
        wall = _WALL.search(line) if view.first_step_at is None else None
        self._change(
            steps=view.steps + foremost,
            first_step_at=view.first_step_at if wall is None else float(wall[1]),
            reached={**view.reached, rank: max(iteration, view.reached.get(rank, 0))},
            furthest=max(iteration, view.furthest),
            moved_at={**view.moved_at, rank: now},
        )
        if clock is not None:
            self.updates.step(rank, line, float(clock[1]), foremost=foremost)

    def take(self, rank: int, event: Mapping[str, Any], now: float) -> None:
        """Any other event."""
        view = self._newest
        match event.get("event"):
            case "start":
                starts = {**view.starts, rank: view.starts.get(rank, 0) + 1}
                self._change(starts=starts, completed=view.completed - {rank})
            case "phase":
                self._announced[rank] = plain(event.get("phase"), PHASE_LIMIT)
                self._enter(rank, self._announced[rank], now)
            case "checkpoint" if not event.get("background"):
                # Several files may belong to one phase of saving: the trainer reports when it goes on.
                announced = self._announced.get(rank, "training")
                self._enter(rank, "saving" if event.get("phase") == "begin" else announced, now)
            case "end" | "failure":
                self._enter(rank, "ended", now)
                if event.get("completed") is True:
                    self._change(completed=view.completed | {rank})
            case "emergency_checkpoint":
                phase = plain(event.get("phase"), PHASE_LIMIT)
                self._change(checkpoint_phases={**view.checkpoint_phases, rank: phase})
                if (size := count_or_none(event.get("bytes"))) is not None:
                    self._change(checkpoint_bytes={**view.checkpoint_bytes, rank: size})
            case "resumed" if view.resumed is None:
                resumed = _resumed(event)
                self._change(resumed=resumed, furthest=max(resumed.iteration, view.furthest))
                self._move(rank, now)
            case "activity":
                self._move(rank, now)
        if self._newest.phases.get(rank) in ("loading", "validating", "saving", "generating", "serving"):
            # What it fetches, validates or fuses may be large: as long as it reports anything, it makes progress.
            self._move(rank, now)

    def _enter(self, rank: int, phase: str, now: float) -> None:
        if self._newest.phases.get(rank) != phase:
            self._change(phases={**self._newest.phases, rank: phase})
            self._move(rank, now)
            if phase != "training":
                # The time between two steps is then no step time.
                self.updates.interrupt(rank)

    def _move(self, rank: int, now: float) -> None:
        self._change(moved_at={**self._newest.moved_at, rank: now})

    def _change(self, **changes: Any) -> None:
        for name, value in changes.items():
            object.__setattr__(self._newest, name, value)
        self._view = None


def _resumed(event: Mapping[str, Any]) -> Resumed:
    return Resumed(
        source=plain(event.get("source"), PHASE_LIMIT),
        iteration=count_or_none(event.get("iteration")) or 0,
        update=count_or_none(event.get("update")),
        from_rank=count_or_none(event.get("from_rank")),
    )


_MOST_TEXTS = 50
_METRICS = {"report": "train", "validation": "val", "test": "test"}
_ENVELOPE = frozenset({"event", "rank", "seq", "t", "at", "attempt"})


class EventIntake:
    """Follows the event files of one attempt. Rank 0's reports become metrics.jsonl, each once, over restarts too."""

    def __init__(
        self,
        run_dir: RunDir,
        attempt: int,
        bases: dict[int, int],
        consistency: ConsistencyWatch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bases`: rank → where the attempt begins in the head's event file. `clock`: the head's, s."""
        self._clock = clock
        self._consistency = consistency
        self.progress = AttemptProgress()
        self.any_rank_reports = False
        """Not only the attempt's rank 0, which else has the figures of all."""
        self.command: CommandWatch | None = None
        """Takes what the keepers see of a command's processes."""
        self.on_event: Callable[[Event], object] = lambda event: None
        """Takes what the journal is to have."""
        self._attempt = attempt
        self._file = LineFile(run_dir.metrics)
        lines = [parse_json_line(line) for line in LineTail(run_dir.metrics).lines() if line.strip()]
        # A damaged row was written, too.
        first = next((place for place, row in enumerate(lines) if row and row.get("attempt") == attempt), len(lines))
        rows = [row for row in lines if row is not None]
        self._written = len(lines) - first
        self.latest = functools.reduce(_updated, rows, Figures())
        self._anew = max(1, _first_of_a_training(rows))
        """The first report of a command that begins anew is of this iteration, at the most."""
        self._tails = {rank: LineTail(run_dir.events(rank), base) for rank, base in bases.items()}

    @property
    def blocked(self) -> bool:
        """The head's disk is full: nothing is read."""
        return self._file.waits

    def poll(self) -> None:
        """Read what is new. While the head's disk is full nothing is read, so nothing piles up."""
        if not self._tails or (self._file.waits and not self._file.flush()):
            return
        for rank, tail in self._tails.items():
            states, weights = deque[dict[str, Any]](maxlen=MANIFESTS_KEPT), dict[tuple[str, bool], WeightsSaved]()
            for line in tail.lines():
                # Most lines are steps, which are only parsed where they are needed.
                if STEP_FIELD in line[:NAME_END]:
                    self.progress.step(rank, line, self._clock())
                    self._consistency.step(rank, line)
                elif (event := parse_json_line(line)) is not None:
                    self._take(rank, event)
                    if "manifest" in event:
                        states.append(event)
                    elif "holds" in event and rank == 0:
                        with contextlib.suppress(ValidationError):
                            saved = _weights_saved(event)
                            weights[saved.holds, saved.val_loss is not None] = saved
            for state in states:
                with contextlib.suppress(ValidationError):
                    self.on_event(_state_saved(rank, state))
            for saved in weights.values():
                self.on_event(saved)
        self._consistency.poll()

    def own_resumption(self) -> Resumed:
        """A command's, by the steps that came. Where the run's own first report came after more steps than lie between
        two, already its first attempt went on from a state of the command's own."""
        first = self.progress.first_iteration or 0
        return Resumed("command", 0 if first <= self._anew else first - 1)

    def close(self) -> None:
        """Nothing is read any more: the next attempt writes the same files."""
        self._tails.clear()
        self._file.close()

    def _take(self, rank: int, event: dict[str, Any]) -> None:
        self.progress.take(rank, event, self._clock())
        match event.get("event"):
            case "start" if rank == 0:
                self.latest = replace(self.latest, iterations=count_or_none(event.get("iterations")))
                facts: dict[str, Any] = {name: _texts(event.get(name)) for name in ("versions", "inputs")}
                if facts["inputs"]:
                    facts["from_base"] = event.get("from_base") is True
                    self.on_event(TrainingStarted(attempt=self._attempt, **facts))
            case "processes" | "group" if self.command is not None:
                self.command.ranks[rank].take(event)
            case "checkpoint":
                self._consistency.checkpoint(event)
            case "replica_check":
                self._consistency.replica_check(event)
            case "result" if rank == 0:
                with contextlib.suppress(ValidationError):
                    self.on_event(ResultReported.model_validate({"attempt": self._attempt, "result": event}))
            case ("report" | "validation" | "test") as name if rank == 0 or self.any_rank_reports:
                self._keep(_METRICS[name], event)

    def _keep(self, kind: str, event: dict[str, Any]) -> None:
        numbers = figures(event, _ENVELOPE)
        self.latest = _updated(self.latest, numbers)
        if self._written > 0:
            # An earlier supervisor wrote it.
            self._written -= 1
            return
        at = moment_or_none(event.get("at")) or datetime.now(UTC)
        row = {"kind": kind, "attempt": self._attempt, "at": at.isoformat(), **numbers}
        self._file.append(json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace"))


def _weights_saved(event: dict[str, Any]) -> WeightsSaved:
    """From an event of rank 0. Raises ValidationError."""
    return WeightsSaved.model_validate({**event, "rank": 0, "node": "", "at": UNSTAMPED, "saved": event})


def _state_saved(rank: int, event: dict[str, Any]) -> StateSaved:
    """Raises ValidationError."""
    saved = None
    with contextlib.suppress(ValidationError):
        saved = SavedFiles.model_validate(event)
    return StateSaved(rank=rank, state=event.get("state", ""), manifest=event["manifest"], saved=saved)


def _texts(table: object) -> dict[str, str]:
    """From a node's JSON."""
    items = list(table.items())[:_MOST_TEXTS] if isinstance(table, dict) else []
    return {plain(name, PHASE_LIMIT): text for name, value in items if (text := text_or_none(value)) is not None}


def _first_of_a_training(rows: Sequence[Mapping[str, Any]]) -> int:
    """The iteration of the first report of a training from its beginning, by the reports so far; 0 where they do not
    tell how many iterations lie between two."""
    trained = [row for row in rows if row.get("kind") == "train"]
    reported = [(row.get("attempt"), count_or_none(row.get("iteration")) or 0) for row in trained]
    pairs = ((later - earlier) for (a, earlier), (b, later) in itertools.pairwise(reported) if a == b)
    interval = next((iterations for iterations in pairs if iterations > 0), 0)
    return min(reported[0][1], interval) if reported else 0


def _updated(latest: Figures, row: Mapping[str, Any]) -> Figures:
    """A command of the user's own may report anything: only numbers are taken."""
    numbers: dict[str, Any] = {figure.name: number_or_none(row.get(figure.name)) for figure in fields(Figures)}
    for name in ("iteration", "iterations"):
        numbers[name] = numbers[name] if isinstance(numbers[name], int) else None
    return replace(latest, **{name: value for name, value in numbers.items() if value is not None})
