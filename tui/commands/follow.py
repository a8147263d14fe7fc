"""Follows a run and prints what is new: states, checks, reports, validations, checkpoints, and how it ended."""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

from engine.api import Engine
from engine.errors import LaunchError, plural, reason_text
from engine.models import OVERRIDDEN, CheckResult, CheckStatus, RunRecord, RunState
from engine.snapshots import RunSnapshot, SeriesMark, ServedRequests
from tui.commands.terminal import Lines
from tui.formatting import duration, loss, rate, recovery_summary, span, train_loss
from tui.task_results import result_lines, served_text

POLL_S = 0.1
ORPHAN_PATIENCE_S = 2.0
"""Without a supervisor for longer, a run is given another one."""
MAX_SUPERVISOR_RESTARTS = 3
SERVED_EVERY_S = 1.0
"""Between two lines of what a server has answered."""


def until_ended(snapshot: RunSnapshot) -> bool:
    return snapshot.record.state.ended


def until_past_preflight(snapshot: RunSnapshot) -> bool:
    return snapshot.record.state not in (RunState.PLANNED, RunState.PREFLIGHT)


class Follower:
    """One reader of one run; every line is printed once, over several calls of `follow` too."""

    def __init__(self, engine: Engine, run: str, lines: Lines, *, quiet: bool = False) -> None:
        """`quiet`: checks that pass are not printed."""
        self._quiet = quiet
        self._engine = engine
        self._watch = engine.runs.watch(run)
        self._lines = lines
        self._state: RunState | None = None
        self._checks: dict[str, CheckResult] = {}
        self._recovered = ""
        self._trained_to = -1
        self._printed = set[str]()
        """Texts that are printed once, whatever comes after them."""
        self._validated: set[int] = set()
        self._marked = Counter[SeriesMark]()
        self._served: ServedRequests | None = None
        self._served_at = 0.0
        """When that was printed (monotonic)."""
        self._restart = SupervisorRestart(engine, run, lines)

    def skip(self) -> None:
        """Pass over what there is by now, without printing it."""
        lines, self._lines = self._lines, Lines(io.StringIO())
        self._print(self._watch.poll())
        self._lines, self._state = lines, None

    def follow(self, done: Callable[[RunSnapshot], bool]) -> RunSnapshot:
        """Print what happens until `done` says so, and give the last snapshot."""
        while True:
            snapshot = self._watch.poll()
            self._print(snapshot)
            if done(snapshot):
                return snapshot
            self._restart.check(snapshot)
            time.sleep(POLL_S)

    def _print_once(self, text: str, colour: str | None = None, *, key: str = "") -> None:
        """`key`: what it is the same by, in place of its text."""
        if (key or text) not in self._printed:
            self._printed.add(key or text)
            self._lines.say(self._lines.ink(text, colour))

    def _print(self, snapshot: RunSnapshot) -> None:
        if snapshot.record.state is RunState.PREFLIGHT:
            self._print_state(snapshot.record.state)
        for check in snapshot.checks:
            self._print_check(check)
        if excluded := ", ".join(snapshot.record.excluded):
            self._print_once(f"left out: {excluded}; planned again, and checked, for the others", "yellow")
        self._print_attempts(snapshot)
        self._print_state(snapshot.record.state)
        for tracker in snapshot.trackers:
            if tracker.problem is not None:
                self._print_once(f"{tracker.name} is no longer written: {tracker.problem}; the run goes on", "yellow")
        for rank in snapshot.ranks:
            for text in rank.warnings:
                self._print_once(f"rank {rank.rank}: {self._lines.ink('warning', 'yellow')}: {text}", key=text)
        self._print_progress(snapshot)
        self._print_served(snapshot)
        if snapshot.record.test_loss is not None:
            self._print_once(f"test loss {loss(snapshot.record.test_loss)}")

    def _print_attempts(self, snapshot: RunSnapshot) -> None:
        for attempt in snapshot.attempts:
            if attempt.reason is not None:
                text, key = attempt.cause or reason_text(attempt.reason), f"attempt {attempt.number}"
                self._print_once(f"{key}: {text}", "yellow", key=key)
        text = recovery_summary(snapshot) or ""
        if text != self._recovered:
            self._recovered = text
            self._lines.say(f"attempt {snapshot.record.attempts} of {snapshot.most_attempts}: {text}")

    def _print_state(self, state: RunState) -> None:
        if state is not self._state:
            self._state = state
            if not state.ended:
                self._lines.say(self._lines.word(state.value))

    def _print_served(self, snapshot: RunSnapshot) -> None:
        served = snapshot.ranks[0].served if snapshot.ranks else None
        if served not in (None, self._served) and time.monotonic() - self._served_at > SERVED_EVERY_S:
            self._served, self._served_at = served, time.monotonic()
            self._lines.say(served_text(served))

    def _print_check(self, check: CheckResult) -> None:
        if check.status in (CheckStatus.PENDING, CheckStatus.RUNNING) or self._checks.get(check.name) == check:
            return
        self._checks[check.name] = check
        if self._quiet and check.status in (CheckStatus.PASS, CheckStatus.SKIP):
            return
        print_check(self._lines, check)

    def _print_progress(self, snapshot: RunSnapshot) -> None:
        series, record = snapshot.series, snapshot.record
        speeds = dict(series.tokens_per_second)
        new_marks = Counter(series.marks) - self._marked
        self._marked += new_marks
        events = [(mark.iteration, 2, mark.kind) for mark in new_marks]
        for mark in new_marks:
            if mark.kind == "restart":
                # From here on iterations are repeated.
                self._trained_to = min(self._trained_to, mark.iteration - 1)
                self._validated = {iteration for iteration in self._validated if iteration < mark.iteration}
        for iteration, value in series.train:
            if iteration > self._trained_to:
                parts = [f"loss {loss(value)}", rate(speeds.get(iteration))]
                if snapshot.eta_s is not None and iteration == series.train[-1][0] != record.iterations:
                    parts.append(f"ETA {span(snapshot.eta_s)}")
                events.append((iteration, 1, "   ".join(parts)))
        if (lost := series.not_finite) is not None and lost[1] > self._trained_to:
            self._trained_to = lost[1]
            events.append((lost[1], 1, f"loss {train_loss(snapshot)}   {rate(speeds.get(lost[1]))}"))
        for iteration, value in series.val:
            if iteration not in self._validated:
                self._validated.add(iteration)
                events.append((iteration, 0, f"val loss {loss(value)}"))
        if series.train:
            self._trained_to = max(self._trained_to, series.train[-1][0])
        width = len(str(record.iterations or ""))
        total = f"/{record.iterations}" if record.iterations else ""
        for iteration, _, text in sorted(events):
            self._lines.say(f"iteration {iteration:>{width}}{total}   {text}")


class SupervisorRestart:
    """Gives a run whose supervisor was killed another one, a few times at most."""

    def __init__(self, engine: Engine, run: str, lines: Lines) -> None:
        self._engine = engine
        self._run = run
        self._lines = lines
        self._unsupervised_since: float | None = None
        self._tries = 0

    def check(self, snapshot: RunSnapshot) -> None:
        """Raises LaunchError when no supervisor stays."""
        if snapshot.supervised or snapshot.record.state.ended:
            self._unsupervised_since = None
            return
        now = time.monotonic()
        if self._unsupervised_since is None:
            self._unsupervised_since = now
        elif now - self._unsupervised_since > ORPHAN_PATIENCE_S:
            self._unsupervised_since = None
            self._tries += 1
            if self._tries > MAX_SUPERVISOR_RESTARTS:
                log = self._engine.runs.find(self._run).supervisor_log
                raise LaunchError("no supervisor stays with the run", where=self._run, todo=f"see {log}")
            self._lines.say("the run's supervisor is gone: starting another one that takes it over")
            self._engine.runs.adopt_orphans()


def print_check(lines: Lines, check: CheckResult) -> None:
    """One line, and below a failure or warning its evidence and its fix."""
    took = f" ({check.duration_s:.1f} s)" if check.duration_s is not None else ""
    overridden = check.status is CheckStatus.SKIP and check.summary == OVERRIDDEN
    summary = lines.ink(check.summary, "red") if overridden else check.summary
    lines.say(f"  {lines.word(check.status.value, 4)}  {check.name:<18} {summary}{took}")
    if check.status not in (CheckStatus.FAIL, CheckStatus.WARN):
        return
    for node, seen in check.evidence.items():
        if seen not in check.summary:
            lines.say(f"        {node}: {seen}")
    if check.fix_command:
        lines.say(f"        fix: {check.fix_command}")
    if check.fix_effect:
        lines.say(f"        effect: {check.fix_effect}")


def print_end(lines: Lines, snapshot: RunSnapshot) -> None:
    record = snapshot.record
    lines.say(f"{lines.word(record.state.value)}: {ending(record)}")
    for tracker in snapshot.trackers:
        if tracker.use is not None:
            lines.say(f"  {tracker.name}: {tracker.use}")
    if record.state is RunState.SUCCEEDED:
        if record.cause:
            lines.say(f"  {record.cause}")
        return
    for label, text in (("cause", snapshot.cause), ("fix", snapshot.fix)):
        if text:
            lines.say(f"  {label + ':':<6} {text}")
    if record.unconfirmed:
        lines.say(f"  stop unconfirmed on {', '.join(record.unconfirmed)}")


def print_learned(lines: Lines, snapshot: RunSnapshot, evaluation: RunSnapshot) -> None:
    """The base model beside what was trained: by an evaluation of both, and by one of their answers."""
    for text in result_lines(evaluation.task_results):
        lines.say(text)
    if len(answers := [sample for sample in snapshot.samples if sample.prompt == snapshot.samples[0].prompt]) > 1:
        first, last = answers[0], answers[-1]
        lines.say(f'"{first.prompt}" goes on as "{first.text}" before, as "{last.text}" after')
    chat, fuse = (f"flightdeck {command} {snapshot.record.name}" for command in ("chat", "fuse"))
    lines.say(f"ask it: {chat}   make one model of it: {fuse}")


def ending(record: RunRecord) -> str:
    """The reason, the rank and its exit, and the time it took, in one line."""
    parts = [reason_text(record.reason) or "ended"]
    if record.rank is not None:
        how = f"exit {record.exit_code}" if record.exit_code is not None else ""
        how = f"signal {record.signal}" if record.signal is not None else how
        place = f" on {record.host}" if record.host else ""
        parts.append(f"rank {record.rank}{place}" + (f" ({how})" if how else ""))
    if record.iteration is not None:
        parts.append(f"iteration {record.iteration}" + (f"/{record.iterations}" if record.iterations else ""))
    parts.append(duration(lasted(record)))
    return ", ".join(parts)


def lasted(record: RunRecord, now: datetime | None = None) -> float:
    """Seconds from creation to end, or to `now`."""
    return ((record.ended_at or now or datetime.now(UTC)) - record.created_at).total_seconds()


def introduce(lines: Lines, record: RunRecord) -> None:
    iterations = f" · {plural(record.iterations, 'iteration')}" if record.iterations else ""
    lines.say(f"run {record.id} · {plural(record.world_size, 'rank')} · {record.backend}{iterations}")
