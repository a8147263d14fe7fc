"""Builds what a face sees of one run from its directory: each poll reads only what is new."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from engine.config.models import FlightConfig
from engine.errors import StateError
from engine.events import (
    Alarm,
    ChunkProgress,
    Diagnosis,
    NodeCondition,
    RankStatus,
    RunSnapshot,
    StopProgress,
    Verification,
)
from engine.models import CheckResult, PreflightReport, RunRecord, RunState
from engine.runs.attempt_log import AttemptLog
from engine.runs.journal import replay
from engine.runs.json_lines import JsonLinesTail
from engine.runs.layout import RunDir
from engine.runs.plan_file import Plan, read_plan
from engine.runs.rank_events import RankEvents, RankNews
from engine.runs.series import SeriesBuilder
from engine.runs.verification import verify
from engine.worker.processes import alive, boot_id

_IDENTITY_AGE_S = 1.0
"""How long a supervisor that was seen alive is believed to be; asking costs a process on macOS."""
ALARMS_SHOWN = 20
_ACTIVE = frozenset({RunState.LAUNCHING, RunState.RUNNING, RunState.RECOVERING, RunState.FINISHING})

Diagnose = Callable[[RunDir], Diagnosis | None]


class RunWatch:
    """Follows one run's directory; `poll` reads only what is new. Not thread safe; made for one reader."""

    def __init__(
        self,
        rundir: RunDir,
        *,
        diagnose: Diagnose | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`diagnose` is asked once, when the run has ended otherwise than succeeded. Raises StateError when the plan
        cannot be read, as `poll` does when it was made again."""
        self._rundir = rundir
        self._plan: Plan = read_plan(rundir.plan)
        self._whole_plan = self._plan
        self._clock = clock
        self._diagnose = diagnose
        self._diagnosis: Diagnosis | None = None
        self._diagnosed = False
        self._journal = JournalView(rundir, self._plan)
        self._plans = 0
        self._members: tuple[str, ...] = ()
        self._metrics = JsonLinesTail(rundir.metrics)
        self._series = SeriesBuilder()
        self._ranks = {rank.rank: RankEvents(rundir.events(rank.rank)) for rank in self._plan.ranks}
        self._checks: tuple[CheckResult, ...] = ()
        self._checks_seen: tuple[int, int] | None = None
        self._supervised = False
        self._supervised_until = 0.0

    def poll(self) -> RunSnapshot:
        """The run as its files say now."""
        # Liveness first: a supervisor that leaves after this has written everything that is read below.
        supervised = self._supervisor_alive()
        self._journal.poll()
        self._follow_plan()
        for row in self._metrics.objects():
            self._series.add(row)
        news = {rank: events.poll() for rank, events in self._ranks.items()}
        self._read_checks()
        record = self._record(news)
        if not record.state.ended:
            # A run that had ended may have been taken up again.
            self._diagnosed, self._diagnosis = False, None
        ended_badly = record.state.ended and record.state is not RunState.SUCCEEDED
        if ended_badly and not self._diagnosed and self._diagnose is not None:
            self._diagnosed = True
            self._diagnosis = self._diagnose(self._rundir)
        running = record.state is RunState.RUNNING
        return RunSnapshot(
            record=record,
            supervised=supervised,
            state_since=self._journal.state_since,
            ranks=tuple(self._rank(number, news[number]) for number in sorted(news)),
            checks=self._checks,
            series=self._series.build(self._ranks[0].checkpoints if 0 in self._ranks else []),
            eta_s=self._series.seconds_left(record.iteration, record.iterations) if running else None,
            learning_rate=self._series.learning_rate,
            grad_norm=next((found.grad_norm for found in news.values() if found.grad_norm is not None), None),
            diagnosis=self._diagnosis,
            stop=self._journal.stop,
            alarms=tuple(self._journal.alarms),
            verification=self._verification(news, record),
            taken_at=self._clock(),
            attempts=self._journal.attempts.attempts,
            most_attempts=1 + self._plan.config.recovery.max_restarts,
            recovery=self._journal.attempts.pending if not record.state.ended else None,
            given_up=self._journal.attempts.given_up,
            division=self._plan.division,
            chunk=_chunk(news, record),
        )

    def _follow_plan(self) -> None:
        """A plan that was made again has fewer ranks, and they are counted anew; so are those of an attempt that leaves
        a node out."""
        members = self._journal.attempts.members
        if (self._plans, self._members) == (self._journal.replanned, members):
            return
        if self._plans != self._journal.replanned:
            self._whole_plan = read_plan(self._rundir.plan)
        self._plans, self._members = self._journal.replanned, members
        before, self._plan = self._plan, self._whole_plan.among(members)
        if self._plan.ranks == before.ranks:
            return
        self._ranks = {rank.rank: RankEvents(self._rundir.events(rank.rank)) for rank in self._plan.ranks}

    def _verification(self, news: dict[int, RankNews], record: RunRecord) -> tuple[Verification, ...]:
        if self._plan.config.job.command is not None or not record.attempts:
            return ()
        current = [found if found.attempt == record.attempts else RankNews() for _, found in sorted(news.items())]
        return verify(
            current,
            backend=record.backend,
            compared_every=_compared_every(self._plan.config),
            losses=self._series.train.points,
            tokens_per_second=self._series.tokens_per_second.last,
            checkpoint=max(self._ranks[0].checkpoints[-1:], default=None) if 0 in self._ranks else None,
            predicted_tokens_per_second=self._plan.division.tokens_per_s if self._plan.division is not None else None,
        )

    def _record(self, news: dict[int, RankNews]) -> RunRecord:
        """The journal's record with the figures that have come since: it only has them at the end."""
        record = self._journal.record
        steps = [found.iteration for found in news.values() if found.iteration is not None]
        live: dict[str, Any] = {
            "iteration": max((*steps, self._series.iteration or 0), default=0) or None,
            "train_loss": self._series.train.last,
            "val_loss": self._series.val.last,
            "tokens_per_second": self._series.tokens_per_second.last,
        }
        if record.state.ended:
            live = {name: value for name, value in live.items() if getattr(record, name) is None}
        if record.iterations is None:
            live["iterations"] = next((found.iterations for found in news.values() if found.iterations), None)
        return record.model_copy(update=live)

    def _rank(self, number: int, news: RankNews) -> RankStatus:
        planned = self._plan.ranks[number]
        life = self._journal.rank(number)
        record = self._journal.record
        begun = life.started or news.phase is not None
        if life.ended or (record.state.ended and begun):
            phase = "ended"
        elif record.state.ended:
            phase = "waiting"
        elif self._journal.stop is not None and self._journal.stop.stage != "asked" and record.state in _ACTIVE:
            phase = "saving" if news.phase == "saving" else "stopping"
        elif news.phase is not None and news.attempt == record.attempts:
            phase = news.phase
        else:
            phase = "starting" if life.started else "waiting"
        return RankStatus(
            rank=number,
            node=planned.node,
            phase=phase,
            iteration=news.iteration,
            step_s=news.step_s,
            typical_s=news.typical_s,
            exchange_s=news.exchange_s,
            grad_norm=news.own_grad_norm,
            memory_bytes=news.memory_bytes,
            seen_at=news.seen_at,
            exit_code=life.exit_code,
            signal=life.signal,
            link=self._journal.conditions.get(planned.node),
        )

    def _read_checks(self) -> None:
        try:
            stat = self._rundir.preflight.stat()
            seen = (stat.st_mtime_ns, stat.st_size)
            if seen == self._checks_seen:
                return
            report = PreflightReport.model_validate_json(self._rundir.preflight.read_bytes())
        except (FileNotFoundError, ValueError):
            return
        self._checks, self._checks_seen = tuple(report.checks), seen

    def _supervisor_alive(self) -> bool:
        now = time.monotonic()
        if not (self._supervised and now < self._supervised_until):
            self._supervised = supervisor_alive(self._rundir)
            self._supervised_until = now + _IDENTITY_AGE_S
        return self._supervised


def _chunk(news: dict[int, RankNews], record: RunRecord) -> ChunkProgress | None:
    """All ranks go through the same chunks: that of the rank that is furthest."""
    done = [found.chunk for found in news.values() if found.chunk is not None and found.attempt == record.attempts]
    return max(done, key=lambda chunk: (chunk.epoch, chunk.done), default=None)


def supervisor_alive(rundir: RunDir) -> bool:
    """Whether the process that wrote supervisor.json is still that process."""
    try:
        who = json.loads(rundir.supervisor.read_bytes())
        return str(who["boot_id"]) == boot_id() and alive(int(who["pid"]), str(who["start"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


class RankLife:
    """What the journal says of one rank in the current attempt."""

    def __init__(self) -> None:
        self.started = False
        self.ended = False
        self.exit_code: int | None = None
        self.signal: int | None = None


class JournalView:
    """The journal as far as it has come: the record, since when its state holds, the stop, and who has ended."""

    def __init__(self, rundir: RunDir, plan: Plan) -> None:
        self._tail = JsonLinesTail(rundir.journal)
        self._entries: list[dict[str, Any]] = []
        self._ranks: dict[int, RankLife] = {}
        self.record = plan.record()
        self.state_since = plan.created_at
        self.stop: StopProgress | None = None
        self.attempts = AttemptLog()
        self.replanned = 0
        """How often the plan was made again."""
        self.alarms: deque[Alarm] = deque(maxlen=ALARMS_SHOWN)
        self.conditions: dict[str, NodeCondition] = {}
        """By the node's name; of nodes that are not this machine."""

    def poll(self) -> None:
        fresh = [entry for entry in self._tail.objects() if isinstance(entry.get("event"), str)]
        if not fresh:
            return
        # What does not change the record is not kept: notes may be many.
        self._entries += [entry for entry in fresh if entry["event"] in _RECORD_EVENTS]
        try:
            self.record = replay(self._entries)
        except StateError:
            return
        for entry in fresh:
            self._take(entry)

    def rank(self, number: int) -> RankLife:
        return self._ranks.setdefault(number, RankLife())

    def _take(self, entry: dict[str, Any]) -> None:
        self.attempts.take(entry)
        match entry["event"]:
            case "reopened":
                self.stop = None
                self._ranks.clear()
            case "state":
                self.state_since = datetime.fromisoformat(entry["at"])
            case "replanned":
                self.replanned += 1
            case "attempt":
                self._ranks.clear()
                self.conditions.clear()
                self.alarms.clear()
                self.stop = None
            case "node":
                since = datetime.fromisoformat(entry.get("since") or entry["at"])
                self.conditions[entry["node"]] = NodeCondition(entry["condition"], since, entry.get("why"))
            case "alarm":
                self.alarms.append(_alarm(entry))
            case "rank_started":
                self.rank(entry["rank"]).started = True
            case "rank_ended":
                life = self.rank(entry["rank"])
                life.ended, life.exit_code, life.signal = True, entry.get("code"), entry.get("signal")
            case "stop" if entry.get("purpose", "abort") == "abort":
                self.stop = stop_progress(entry, self.stop)


def _alarm(entry: dict[str, Any]) -> Alarm:
    at, ranks = datetime.fromisoformat(entry["at"]), tuple(entry.get("ranks") or ())
    return Alarm(str(entry["alarm"]), str(entry.get("message")), at, entry.get("iteration"), ranks)


_RECORD_EVENTS = frozenset({"planned", "replanned", "reopened", "state", "attempt", "rank_started", "confirmed"})


def stop_progress(entry: dict[str, Any], before: StopProgress | None) -> StopProgress:
    """A journal's stop entry; its stage holds since the entry that first named it."""
    stage, at = str(entry["stage"]), datetime.fromisoformat(entry["at"])
    progress = StopProgress(stage, at, tuple(entry.get("acknowledged") or ()), tuple(entry.get("left") or ()))
    if before is None:
        return progress
    if before.stage == stage:
        return replace(progress, since=before.since, passed=before.passed)
    return replace(progress, passed=(*before.passed, before.stage))


def _compared_every(config: FlightConfig) -> int | None:
    """Updates between two comparisons of the replicas; None where there are none."""
    if config.job.strategy != "data":
        return None
    return config.consistency.every if config.consistency.enabled else 0
