"""The state of a run as a pure fold over the events of its journal: one reading for the console, `show`, recovery and
adoption alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from engine.errors import StateError
from engine.models import RunRecord, RunState
from engine.plan.decisions import LaunchDecisions
from engine.run import events
from engine.run.run_plan import RunPlan
from engine.security.sanitise import moment_or_none
from engine.snapshots import Alarm, AttemptStatus, NodeCondition, StopProgress
from engine.task_result import TaskResult

ALARMS_SHOWN = 20
MANIFESTS_KEPT = 32
"""Per rank: a trainer considers no more of its states."""
MOST_RESULTS = 1_000
"""A task reports no more of them in one attempt."""


@dataclass(frozen=True)
class AttemptHistory:
    plan: events.Attempt
    status: AttemptStatus
    decisions: LaunchDecisions | None
    """None where the journal has lost them."""
    boot_id: str | None = None
    """The head's, when it was planned."""
    launcher: events.LauncherStarted | None = None
    started: Mapping[int, events.RankLaunched] = field(default_factory=dict)
    ended: Mapping[int, events.RankExited] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    """The ranks that were lost with their nodes: they stay so when those are back."""
    nodes: tuple[events.NodeConditionChanged, ...] = ()
    alarms: tuple[events.AlarmRaised, ...] = ()
    hang: events.Hang | None = None
    trigger: events.Trigger | None = None
    """Why it is being ended, or was."""
    outlived: frozenset[int] = frozenset()
    """The ranks of which no end was recorded when that began."""
    missing: Mapping[str, int | None] = field(default_factory=dict)
    """The head's files that lack bytes of the attempt, and how many where that is known."""
    failed_at: datetime | None = None

    @property
    def number(self) -> int:
        return self.plan.number

    @property
    def ranks_with_missing_files(self) -> frozenset[int]:
        return frozenset(int(name.removeprefix("rank").split(".")[0]) for name in self.missing)

    @property
    def hosts(self) -> dict[int, str]:
        """Rank → node, of the ranks that were seen."""
        started = {rank: event.node for rank, event in self.started.items()}
        return started | {rank: event.node for rank, event in self.ended.items()}

    def condition(self, node: str) -> NodeCondition | None:
        """How `node` can be reached; None for this machine and before it was reached."""
        event = next((event for event in reversed(self.nodes) if event.node == node), None)
        return NodeCondition(event.condition, event.since or event.at, event.why) if event is not None else None

    def ran_s(self, until: datetime) -> float:
        """From its plan to its failure, else to the last end of a rank that is known, else `until`; seconds."""
        ended = self.failed_at or max((event.at for event in self.ended.values()), default=until)
        return (ended - self.status.began_at).total_seconds()

    def memory_kills(self, node: str) -> int | None:
        """Processes that `node`, another machine, had killed for lack of memory when the attempt began."""
        return next((event.memory_kills for event in self.nodes if event.node == node), None)

    def shown_alarms(self) -> tuple[Alarm, ...]:
        """The newest alarms, oldest first."""
        newest = self.alarms[-ALARMS_SHOWN:]
        return tuple(Alarm(event.alarm, event.message, event.at, event.iteration, event.ranks) for event in newest)


@dataclass(frozen=True)
class RunHistory:
    """One run as far as its journal goes. A run that is reopened begins a new life: what is marked so is of the current
    life alone."""

    record: RunRecord
    nonce: str
    state_since: datetime
    attempts: tuple[AttemptHistory, ...] = ()
    launched_at: datetime | None = None
    """When the first attempt of this life was planned; None before that."""
    reopened: events.RunReopened = field(default_factory=events.RunReopened)
    """The wishes for this life."""
    failures: tuple[events.AttemptFailed, ...] = ()
    """In this life."""
    reached: int = 0
    """The furthest iteration that the run is known to have reached; 0 for none."""
    boot_id: str | None = None
    """The head's, when the newest supervisor started."""
    decisions: tuple[LaunchDecisions, ...] = ()
    """One for each group of nodes, or more where its addresses changed; the newest last."""
    abort: events.RequestReceived | None = None
    """In this life; a request that skips the cooperative stop wins."""
    stop: StopProgress | None = None
    """The user's abort of the current attempt."""
    restart_pending: str | None = None
    """The work between two attempts."""
    restart_refused: str | None = None
    """Why no other attempt follows the last."""
    next_why: str | None = None
    """Why the next attempt follows."""
    trackers_failed: Mapping[str, str] = field(default_factory=dict)
    """Tracker → why nothing more is written for it by the newest supervisor."""
    states: Mapping[int, tuple[events.StateSaved, ...]] = field(default_factory=dict)
    """Rank → the newest states that it has saved."""
    weights: Mapping[tuple[str, bool], events.WeightsSaved] = field(default_factory=dict)
    """The newest of each kind, and the best (True)."""
    task_results: tuple[TaskResult, ...] = ()
    """Those of the newest attempt that had any, `results_of`."""
    results_of: int = 0
    energy: tuple[events.EnergyMeasured, ...] = ()
    training: events.TrainingStarted | None = None
    """The newest."""

    @property
    def launched(self) -> bool:
        """An attempt was planned in this life."""
        return self.launched_at is not None

    @property
    def manifests(self) -> dict[int, tuple[tuple[str, str], ...]]:
        """Rank → its newest states, each with the SHA-256 of its manifest."""
        return {rank: tuple((event.state, event.manifest) for event in saved) for rank, saved in self.states.items()}

    @property
    def last_attempt(self) -> AttemptHistory | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def end_unseen(self) -> bool:
        """The run may have ended otherwise than recorded, or may have failed otherwise: how a rank of its last attempt
        ended was not known, because a node or the supervisor was away."""
        last = self.failures[-1].verdict if self.failures else self.record
        unseen = self.record.state is RunState.COMPLETED or (last.reason is not None and last.reason.traits.end_unseen)
        return unseen and self.record.state not in (RunState.SUCCEEDED, RunState.ABORTED)

    @property
    def newest_reached(self) -> int:
        """The iteration that the run goes on from at best; 0 for none."""
        return (self.failures[-1].reached if self.failures else 0) or self.reached

    def unknown_attempt(self, newest: int) -> str | None:
        """Why an attempt that was launched is not known, in one line; None when all are. `newest`: the number of the
        newest one of which there are files."""
        return f"attempt {newest} is not in journal.jsonl" if newest > self.record.attempts else None

    def next_attempt(self, newest: int) -> int:
        """The number of the attempt that follows. `newest`: of those of which there are files, so that also a damaged
        journal has none that was launched numbered anew."""
        return max(self.record.attempts, newest) + 1

    def decisions_for(self, nodes: Sequence[str]) -> LaunchDecisions | None:
        """The newest for exactly these nodes, in the order of their ranks."""
        return next((made for made in reversed(self.decisions) if made.nodes == tuple(nodes)), None)

    def plan(self, launched: RunPlan) -> RunPlan:
        """The plan of the run without the nodes that preflight has excluded, and with what was decided. `launched`: as
        it was launched."""
        return self._decided(launched.without(self.record.excluded))

    def plan_on(self, launched: RunPlan, nodes: Sequence[str]) -> RunPlan:
        """The same of these nodes alone, which preflight may have excluded since; of all when none is named."""
        return self._decided(launched.among(nodes))

    def _decided(self, plan: RunPlan) -> RunPlan:
        return plan.decided(self.decisions_for(plan.nodes) or next(iter(self.decisions), None))

    def attempt(self, number: int) -> AttemptHistory:
        """The attempt of this number. Raises LookupError when it was not planned."""
        for attempt in reversed(self.attempts):
            if attempt.number == number:
                return attempt
        raise LookupError(f"attempt {number} was not planned")


def run_history(recorded: Sequence[events.Event], plan: RunPlan) -> RunHistory:
    """The state of a run by its whole journal; `plan` stands in for the journal's first line where that is missing."""
    began = recorded and isinstance(recorded[0], events.RunPlanned)
    return fold(recorded, None if began else RunHistory(plan.record(), plan.nonce, plan.created_at))


def fold(recorded: Iterable[events.Event], history: RunHistory | None = None) -> RunHistory:
    """The state of a run after the `recorded` events, which follow those that led to `history`. Raises StateError when
    the first event of a journal is not its plan."""
    for event in recorded:
        if history is not None:
            history = _advance(history, event)
        elif isinstance(event, events.RunPlanned):
            history = RunHistory(event.run, event.nonce, state_since=event.at)
        else:
            break
    if history is None:
        raise StateError("the journal does not begin with a plan")
    return history


def _advance(history: RunHistory, event: events.Event) -> RunHistory:
    if isinstance(event, events.AttemptPlanned):
        return _plan_attempt(history, event)
    if isinstance(event, events.RunReopened):
        return _reopen(history, event)
    record = _record(history.record, event)
    attempts = history.attempts
    if attempts:
        attempts = (*attempts[:-1], _attempt(attempts[-1], event))
    return replace(history, record=record, attempts=attempts, **_changes(history, event))


def _plan_attempt(history: RunHistory, event: events.AttemptPlanned) -> RunHistory:
    attempt, decisions = event.attempt, history.decisions_for(event.attempt.nodes)
    changes = {
        "attempts": attempt.number,
        # Also where the line before is damaged.
        "state": RunState.LAUNCHING,
        "backend": decisions.network.backend if decisions is not None else history.record.backend,
        "world_size": len(attempt.nodes) or history.record.world_size,
        "logs_missing": [],
        "outcome": None,
    }
    status = AttemptStatus(attempt.number, tuple(enumerate(attempt.nodes)), event.at, history.next_why)
    return replace(
        history,
        record=history.record.model_copy(update=changes),
        attempts=(*history.attempts, AttemptHistory(attempt, status, decisions, history.boot_id)),
        launched_at=history.launched_at or event.at,
        stop=None,
        restart_pending=None,
        restart_refused=None,
        next_why=None,
    )


_CLEARED = ("reason", "rank", "host", "cause", "fix", "exit_code", "signal", "ended_at")


def _reopen(history: RunHistory, event: events.RunReopened) -> RunHistory:
    # It is the same run: it has the same iterations.
    figures = replace(events.Figures(), iterations=history.record.iterations)
    cleared: dict[str, Any] = {**dict.fromkeys(_CLEARED), **asdict(figures)}
    return replace(
        history,
        record=history.record.model_copy(update={"state": RunState.PLANNED, **cleared}),
        launched_at=None,
        reopened=event,
        failures=(),
        abort=None,
        stop=None,
        restart_refused=None,
        next_why="resumed as requested",
    )


def _record(record: RunRecord, event: events.Event) -> RunRecord:
    """The same object when `event` does not change it."""
    changes: dict[str, Any] = {}
    match event:
        case events.StateChanged():
            changes = _end(event, record)
        case events.NodesExcluded():
            changes = {"excluded": [*record.excluded, *event.nodes], "world_size": event.world_size}
        case events.CleanupConfirmed():
            changes = {"unconfirmed": [node for node in record.unconfirmed if node != event.node]}
        case events.RankLaunched():
            started = moment_or_none(event.identity.started_at)
            times = [at for at in (started, record.started_at) if at is not None]
            changes = {"started_at": min(times, default=None)}
        case events.AttemptResumed(seconds=float()):
            changes = {"recovery_s": event.seconds}
        case events.LogsMissing(attempt=record.attempts):
            changes = {"logs_missing": sorted(event.files)}
        case events.ResultReported():
            parts = record.outcome.split(", ") if record.outcome is not None else []
            changes = {"outcome": ", ".join(dict.fromkeys([*parts, event.result.summary]))}
    return record.model_copy(update=changes) if changes else record


def _end(event: events.StateChanged, record: RunRecord) -> dict[str, Any]:
    # An end that is known only later was then all the same.
    ended_at = record.ended_at or event.at if event.state.ended else None
    changes: dict[str, Any] = {"state": event.state, "ended_at": ended_at}
    if event.state.ended and record.task == "serve":
        changes["outcome"] = None  # an address at which nothing answers
    if event.verdict is not None:
        changes |= {name: getattr(event.verdict, name) for name in _CLEARED if name != "ended_at"}
        changes["unconfirmed"] = list(event.unconfirmed)
    return changes | {name: value for name, value in vars(event.figures).items() if value is not None}


def _attempt(attempt: AttemptHistory, event: events.Event) -> AttemptHistory:
    changes: dict[str, Any] = {}
    match event:
        case events.LauncherStarted():
            changes = {"launcher": event}
        case events.RankLaunched():
            changes = {"started": {**attempt.started, event.rank: event}}
        case events.RankExited():
            lost = {event.rank} if event.error == events.NODE_LOST else ()
            changes = {"ended": {**attempt.ended, event.rank: event}, "lost": attempt.lost.union(lost)}
        case events.NodeConditionChanged():
            changes = {"nodes": (*attempt.nodes, event)}
        case events.AlarmRaised():
            changes = {"alarms": (*attempt.alarms, event)}
        case events.HangDetected():
            changes = {"hang": attempt.hang or event.hang}
        case events.StopStageReached(trigger=events.Trigger()) if attempt.trigger is None:
            outlived = frozenset(range(len(attempt.plan.nodes))).difference(attempt.ended)
            changes = {"trigger": event.trigger, "outlived": outlived}
        case events.LogsMissing(attempt=attempt.number):
            changes = {"missing": event.files}
        case events.AttemptFailed(attempt=attempt.number) if attempt.status.reason is None:
            how: dict[str, Any] = {name: getattr(event.verdict, name) for name in ("reason", "rank", "host", "cause")}
            status = replace(attempt.status, ended_at=event.at, reached=event.reached, **how)
            changes = {"status": status, "failed_at": event.failed_at}
        case events.AttemptResumed(attempt=attempt.number):
            status = replace(attempt.status, resumed_at=event.resumed.iteration, source=event.resumed.source)
            changes = {"status": replace(status, repeated=event.repeated, recovery_s=event.seconds)}
    return replace(attempt, **changes) if changes else attempt


def _saves(history: RunHistory, event: events.Event) -> dict[str, Any]:
    match event:
        case events.StateSaved():
            saved = (*history.states.get(event.rank, ()), event)
            return {"states": {**history.states, event.rank: saved[-MANIFESTS_KEPT:]}}
        case events.WeightsSaved():
            return {"weights": {**history.weights, (event.holds, event.val_loss is not None): event}}
        case events.TrainingStarted():
            return {"training": event}
        case events.EnergyMeasured():
            return {"energy": (*history.energy, event)}
    return {}


def _changes(history: RunHistory, event: events.Event) -> dict[str, Any]:
    changes = _saves(history, event)
    match event:
        case events.StateChanged():
            changes = {"state_since": event.at, "reached": max(history.reached, event.figures.iteration or 0)}
            if event.state is RunState.SUCCEEDED:
                changes["restart_refused"] = None
        case events.AttemptFailed():
            changes = {"failures": (*history.failures, event), "reached": max(history.reached, event.reached)}
        case events.LogsMissing() if history.failures and history.failures[-1].attempt == event.attempt:
            reached = max(history.failures[-1].reached, event.reached)
            last = history.failures[-1].model_copy(update={"reached": reached})
            changes = {"failures": (*history.failures[:-1], last), "reached": max(history.reached, reached)}
        case events.ResultReported():
            earlier = history.task_results if event.attempt == history.results_of else ()
            changes = {"task_results": (*earlier, event.result), "results_of": event.attempt}
        case events.LaunchDecided():
            changes = {"decisions": (*history.decisions, event.decisions)}
        case events.SupervisorStarted():
            changes = {"boot_id": event.boot_id, "trackers_failed": {}}
        case events.TrackerFailed():
            changes = {"trackers_failed": {**history.trackers_failed, event.tracker: event.why}}
        case events.RequestReceived() if history.abort is None or event.now:
            changes = {"abort": event}
        case events.StopStageReached(purpose="abort"):
            changes = {"stop": _stop_progress(event, history.stop)}
        case events.RestartPlanned() | events.RestartDelayed() | events.RestartRefused():
            changes = _restart_changes(event)
    return changes


def _restart_changes(event: events.RestartPlanned | events.RestartDelayed | events.RestartRefused) -> dict[str, Any]:
    match event:
        case events.RestartPlanned():
            wait = f", after a wait of {event.delay_s:.0f} s" if event.delay_s >= 1.0 else ""
            return {"next_why": event.why, "restart_pending": event.why + wait}
        case events.RestartDelayed():
            return {"restart_pending": event.why}
    return {"restart_refused": event.why, "restart_pending": None}


def _stop_progress(event: events.StopStageReached, before: StopProgress | None) -> StopProgress:
    """A stage holds since the event that first named it."""
    progress = StopProgress(event.stage.value, event.at, event.acknowledged, event.left)
    if before is None:
        return progress
    if before.stage == progress.stage:
        return replace(progress, since=before.since, passed=before.passed)
    return replace(progress, passed=(*before.passed, before.stage))
