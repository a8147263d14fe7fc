"""The state of a run as its supervisor goes on with it. The history, which is the fold of the journal, is its durable
part. All else is volatile: it may be lost at any moment, and a supervisor that adopts the run begins without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, auto
from typing import Any, Final, TypeVar

from engine.cluster.agent_client import THIS_MACHINE
from engine.models import RunState
from engine.run import events
from engine.run.decide import Restart
from engine.run.effects import Effect, Record, Standing
from engine.run.history import AttemptHistory, RunHistory, fold
from engine.run.journal import FOLLOWERS
from engine.run.node_health import HostHealth
from engine.run.observation import Observation, RankView, Result
from engine.run.run_plan import RunPlan
from engine.run.shutdown import AttemptView, CleanupProof, Shutdown

R = TypeVar("R", bound=Result)
HEAD: Final = THIS_MACHINE.name
"""The name of this machine's host where none of its nodes is in the attempt."""


class Phase(Enum):
    """The phases of a run's life, in order; engine.run.step.PHASES has what each does."""

    BEGINNING = auto()
    PREFLIGHT = auto()
    TAKING_UP = auto()
    """It has ended before: first its last attempt is proved to be gone."""
    FINDING = auto()
    """It is adopted: what there is of its last attempt is looked for."""
    ENDING_UNKNOWN = auto()
    """It is adopted, and the journal has nothing of its last attempt."""
    PLANNING = auto()
    STARTING = auto()
    RUNNING = auto()
    STOPPING = auto()
    SETTLING = auto()
    """Nothing of the attempt runs: the rest of its files comes, and the evidence of its end."""
    DECIDING = auto()
    """It has failed, and waits until a restart is possible, or is not."""
    BACKING_OFF = auto()
    ABANDONING = auto()
    """An abort was requested between two attempts."""
    AFTERMATH = auto()
    """Its end is recorded; nodes that are away are waited for."""
    OVER = auto()


@dataclass(frozen=True)
class WatchState:
    """The volatile part of the attempt that is watched. Times are as in Observation."""

    number: int
    began: float
    launched: bool = False
    """A launcher is known, or was."""
    standings: tuple[Standing, ...] = ()
    """By rank."""
    health: Mapping[str, HostHealth] = field(default_factory=dict)
    """By host."""
    ended: frozenset[int] = frozenset()
    """The ranks that had ended when they were last seen."""
    taken_in: tuple[object, ...] = ()
    """Its ranks and hosts as they were last taken in: the same again changes nothing."""
    starts: Mapping[int, int] | None = None
    """ProgressView.starts as last seen; None before the first look: those were noted by an earlier supervisor."""
    losses: tuple[tuple[float, str], ...] = ()
    """When the loss of a dispensable rank was noticed, and its note."""
    slept_s: float = 0.0
    """Observation.slept_s as last seen."""
    launcher_gone_at: float | None = None
    launcher_noted: bool = False
    failing_since: float | None = None
    """When the first failed rank was noticed."""
    failed_at: datetime | None = None
    """The same by the wall clock; of a hang, when that was found."""
    completed_at: float | None = None
    quiet_since: float = 0.0
    """Since when no step came, without the time in which none could come."""
    looked_at: float = 0.0
    """When that was last looked at."""


@dataclass(frozen=True)
class Ending:
    """The volatile part of an attempt's end."""

    trigger: events.Trigger = events.Trigger.ENDED
    """As found by this supervisor, or recorded by an earlier one."""
    verdict_pending: bool = False
    """A verdict is awaited."""
    ends_judged: int = 0
    """How many ranks' ends were known at the last verdict."""
    aborted: bool = False
    """An abort was requested while it was being ended for a restart."""
    stop: Shutdown | None = None
    settling: frozenset[str] = frozenset()
    """Hosts on which nothing is left, and whose files are awaited."""


@dataclass(frozen=True)
class State:
    launched_plan: RunPlan
    """As the run was launched."""
    plan: RunPlan
    """That of the nodes that preflight has not excluded, with all that was decided."""
    history: RunHistory
    newest_attempt: int = 0
    """The number of the newest attempt of which there are files: a damaged journal may not have it."""
    phase: Phase = Phase.BEGINNING
    since: float = 0.0
    """When the phase began."""
    adopting: bool = False
    watch: WatchState | None = None
    ending: Ending = Ending()
    proofs: Mapping[str, CleanupProof] = field(default_factory=dict)
    """By host, also of attempts before the one that is watched. While this is being ended, its own are in `ending`."""
    sought: frozenset[str] = frozenset()
    """The nodes of the attempt that is watched, or HEAD, for which a proof is needed, where nothing is known of it
    yet."""
    restart: Restart | None = None
    planned: events.Attempt | None = None
    """The last attempt that this supervisor planned."""
    delay: str | None = None
    """Why no restart is possible yet, as last recorded."""
    aftermath_s: float = 0.0

    @property
    def attempt(self) -> AttemptHistory:
        """The one that is watched."""
        assert self.watch is not None
        return self.history.attempt(self.watch.number)

    @property
    def unknown_attempt(self) -> str | None:
        return self.history.unknown_attempt(self.newest_attempt)

    @property
    def next_attempt(self) -> int:
        return self.history.next_attempt(self.newest_attempt)


class Transition:
    """One step as it is being made: the state so far, and the effects."""

    def __init__(self, state: State, seen: Observation) -> None:
        self.state = state
        self.seen = seen
        self.effects: list[Effect] = []

    @property
    def history(self) -> RunHistory:
        return self.state.history

    @property
    def watch(self) -> WatchState:
        assert self.state.watch is not None
        return self.state.watch

    @property
    def ending(self) -> Ending:
        return self.state.ending

    @property
    def run_state(self) -> RunState:
        return self.history.record.state

    def do(self, *effects: Effect) -> None:
        self.effects += effects

    def set(self, **changes: Any) -> None:
        """Fields of the state."""
        self.state = replace(self.state, **changes)

    def set_watch(self, **changes: Any) -> None:
        self.set(watch=replace(self.watch, **changes))

    def set_ending(self, **changes: Any) -> None:
        self.set(ending=replace(self.ending, **changes))

    def enter(self, phase: Phase, **changes: Any) -> None:
        self.set(phase=phase, since=self.seen.now, **changes)

    def record(self, event: events.Event) -> None:
        event = event.model_copy(update={"at": self.seen.at})
        self.set(history=fold([event], self.history))
        self.do(Record(event))
        if isinstance(event, events.NodesExcluded | events.LaunchDecided):
            self.set(plan=self.history.plan(self.state.launched_plan))

    def note(self, message: str) -> None:
        self.record(events.Note(message=message))

    def change(self, state: RunState) -> None:
        """Go over to `state`, if the run is not there."""
        if state is not self.run_state:
            assert state in FOLLOWERS[self.run_state], f"a run that is {self.run_state} does not become {state}"
            self.record(events.StateChanged(state=state))

    def result(self, kind: type[R]) -> R | None:
        """The result of this kind that has come since the last step."""
        return next((result for result in self.seen.finished if isinstance(result, kind)), None)

    @property
    def waited_s(self) -> float:
        """In this phase."""
        return self.seen.now - self.state.since


def has_ended(rank: RankView, standing: Standing) -> bool:
    """Nothing more will come of it: it has a record, or no keeper is left to write one."""
    return rank.end_known or standing.lost or rank.refused


def attempt_view(t: Transition) -> AttemptView:
    return AttemptView(t.seen, t.watch.ended, t.watch.launched, t.state.launched_plan.config.recovery)
