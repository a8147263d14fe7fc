"""The events of a run's journal, one class per kind (the field `event` of its line), and the models that they carry.

`at` is set by the step that records the event, or else by the journal when it is appended. A change that an older
reader would misread needs a higher JOURNAL_VERSION."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, StrictBool

from engine.cluster.staging import HostLayout
from engine.measurements import Count
from engine.models import FrozenModel, Reason, RunRecord, RunState
from engine.plan.decisions import LaunchDecisions
from engine.protocol.attempt import Identity, NodeFiles
from engine.security.paths import path_fault
from engine.task_result import TaskResult

JOURNAL_VERSION = 1


class StopStage(StrEnum):
    """The stages in which an attempt is ended, in order."""

    ASKED = "asked"
    STOP = "stop"
    EMERGENCY_CHECKPOINT = "emergency_checkpoint"
    TERM = "term"
    KILL = "kill"
    VERIFYING = "verifying"
    STOPPED = "stopped"
    UNCONFIRMED = "unconfirmed"


class Trigger(StrEnum):
    """Why an attempt is ended."""

    ABORT = "abort"
    ENDED = "ended"
    """Every rank that is waited for has ended by itself."""
    RANK = "rank"
    """A rank has failed without which the others do not go on."""
    LAUNCHER_GONE = "launcher_gone"
    NOT_STARTED = "not_started"
    """A rank has not appeared in time."""
    HUNG = "hung"
    """No rank, or not the one that the others need, has made a step for too long."""
    APART = "apart"
    """The ranks train apart from one another, in groups that the command has started."""


class Attempt(FrozenModel):
    """One attempt as it is planned: enough to go on with it after the supervisor's death."""

    number: int
    nonce: str
    """`<nonce of the run>.<number>`, so that the processes of each attempt can be recognised."""
    starting_port: int
    log_bases: dict[int, int]
    """Source → size of the head's log when the attempt began, bytes."""
    event_bases: dict[int, int]
    """Rank → size of the head's event file when the attempt began, bytes."""
    layouts: tuple[HostLayout, ...]
    """Where the nodes' files are: whoever adopts the run may have another environment."""
    memory_kills: int | None = None
    """Processes that this machine had killed for lack of memory when the attempt began."""
    nodes: tuple[str, ...] = ()
    """In the order of their ranks: a run that goes on without a node renumbers these."""
    needs_state: str = ""
    accept_changed_data: bool = False
    manifests: list[tuple[str, str]] = Field(default=[], exclude=True)
    """AttemptSpec.manifests; the journal has an event of each."""

    def layout(self, rank: int) -> HostLayout:
        return next(layout for layout in self.layouts if rank in layout.ranks)

    def files(self, run_id: str, rank: int) -> NodeFiles:
        """The attempt's files on the node of `rank`."""
        return self.files_at(self.layout(rank), run_id)

    def files_at(self, layout: HostLayout, run_id: str) -> NodeFiles:
        return NodeFiles.for_attempt(Path(layout.root), run_id, self.number)


@dataclass(frozen=True)
class Verdict:
    state: RunState
    reason: Reason
    cause: str | None = None
    rank: int | None = None
    host: str | None = None
    """Name of the rank's node."""
    exit_code: int | None = None
    signal: int | None = None
    fix: str | None = None
    signature: str | None = None
    """Id of the failure signature that explains the cause."""


@dataclass(frozen=True)
class Figures:
    iteration: int | None = None
    iterations: int | None = None
    """In the whole run, as its trainers reported: only they know those of epochs."""
    train_loss: float | None = None
    val_loss: float | None = None
    test_loss: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class Resumed:
    """The state that an attempt went on from, as its trainers reported."""

    source: str
    """ "emergency", "checkpoint", "adapter" or "none"; "command": by itself, and iteration is that before its first
    step."""
    iteration: int = 0
    update: int | None = None
    from_rank: int | None = None


@dataclass(frozen=True)
class Hang:
    """No progress for too long, and which rank stalled first where that is known."""

    silent_s: float
    limit_s: float
    doing: str
    """ "training", or the slow phase that it is in."""
    iteration: int
    """The last one that any rank finished."""
    rank: int | None = None


UNSTAMPED = datetime.min.replace(tzinfo=UTC)


class Event(FrozenModel):
    kind: ClassVar[str]
    at: datetime = UNSTAMPED

    def __init_subclass__(cls, kind: str = "", **config: Any) -> None:
        super().__init_subclass__(**config)
        if kind:
            cls.kind = kind
            EVENTS[kind] = cls


EVENTS: dict[str, type[Event]] = {}
"""By their kind."""


class SyncedEvent(Event):
    """On the disk before the supervisor acts on it."""


class RunPlanned(SyncedEvent, kind="planned"):
    """The first event of every journal, before anything starts."""

    version: int = JOURNAL_VERSION
    run: RunRecord
    nonce: str


class SupervisorStarted(Event, kind="supervisor"):
    """This process supervises the run from here on."""

    pid: int
    start: str
    boot_id: str
    adopted: bool = False


class StateChanged(SyncedEvent, kind="state"):
    state: RunState
    verdict: Verdict | None = None
    """At the end of the run."""
    figures: Figures = Figures()
    """At the end of the run."""
    unconfirmed: tuple[str, ...] = ()
    """Nodes on which it is not proved that nothing of the run is left."""


class RunReopened(SyncedEvent, kind="reopened"):
    """The run had ended and goes on from the state that it saved; preflight comes next."""

    accept_changed_data: bool = False
    """Although the data or the base model are others than those of the saved state."""
    without_state: bool = False
    """Where no state is left it begins anew, however far it had come."""
    without_budget: bool = False
    """To its last iteration, however long that takes."""


class NodesExcluded(SyncedEvent, kind="nodes_excluded"):
    """Preflight left these nodes out: the run goes on without them."""

    nodes: tuple[str, ...]
    why: str
    world_size: int


class LaunchDecided(SyncedEvent, kind="decided"):
    """For the attempts that follow on these nodes. The settings are the first ones for the whole run, so that every
    attempt trains alike."""

    decisions: LaunchDecisions


class AttemptPlanned(SyncedEvent, kind="attempt"):
    """The next attempt, before anything of it starts."""

    attempt: Attempt


class LauncherStarted(SyncedEvent, kind="launcher"):
    """mlx.launch's process, leader of its group."""

    pid: int
    start: str


class RankLaunched(Event, kind="rank_started"):
    rank: int
    node: str
    identity: Identity


NODE_LOST = "its node is lost"
"""The end of a rank whose exit record has not been read yet."""


class RankExited(Event, kind="rank_ended"):
    rank: int
    node: str
    code: int | None = None
    signal: int | None = None
    stopped_by: str | None = None
    error: str | None = None


class NodeConditionChanged(Event, kind="node"):
    """A node other than this machine answers again, or no longer does."""

    node: str
    condition: Literal["connected", "unreachable", "lost"]
    since: datetime | None = None
    """When it answered last, for a node that does not."""
    why: str | None = None
    silent_s: float | None = None
    """How long it was away, for a node that is back."""
    boot_id: str | None = None
    memory_kills: int | None = None
    """Processes that it had killed for lack of memory when it first answered."""


class AlarmRaised(Event, kind="alarm"):
    """An inconsistency between the ranks, found while they train."""

    alarm: str
    ranks: tuple[int, ...] = ()
    workers: tuple[str, ...] = ()
    iteration: int | None = None
    message: str


class TrackerFailed(Event, kind="tracker_failed"):
    """Nothing more is written for this tracker; the run goes on."""

    tracker: str
    why: str


class HangDetected(Event, kind="hung"):
    hang: Hang
    node: str | None = None


class RequestReceived(SyncedEvent, kind="request"):
    request: Literal["abort", "budget"]
    """"budget": nobody's, its time was up."""
    now: StrictBool = False
    """Skip the cooperative stop."""
    by: str = Field(default="", max_length=100)


class StopStageReached(SyncedEvent, kind="stop"):
    stage: StopStage
    purpose: Literal["abort", "fence", "end"] = "abort"
    trigger: Trigger | None = None
    acknowledged: tuple[int, ...] = ()
    """Ranks whose keeper has written an exit record."""
    left: tuple[str, ...] = ()
    """Processes still alive, as "node pid command"."""


LONG_OUTPUT_S = 30


class AttemptFailed(SyncedEvent, kind="attempt_failed"):
    attempt: int
    verdict: Verdict
    reached: int = 0
    """The last iteration that any rank finished, or that the attempt went on from; 0 for none."""
    failed_at: datetime
    """When the failure was noticed, on the head."""
    ran_long: bool = False
    """A command that reports no steps ran for longer than `stall_s`, or printed something in LONG_OUTPUT_S different
    seconds, or a server had answered: that counts as progress."""
    outputs: int = 0
    """Seconds in which one of the ranks of a command that reports no steps printed something."""
    unconfirmed: tuple[str, ...] = ()

    @property
    def under_way(self) -> bool:
        """It did not fail at its start. A traceback alone is printed in a second or two."""
        return self.reached > 0 or self.ran_long or self.outputs > 2


class RestartDelayed(Event, kind="restart_delayed"):
    """The run waits, for a node for example, before it can restart."""

    after: int
    why: str


class RestartPlanned(SyncedEvent, kind="restart"):
    attempt: int
    after: int
    members: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    delay_s: float
    why: str


class AttemptResumed(Event, kind="resumed"):
    """The attempt has made its first step."""

    attempt: int
    resumed: Resumed
    repeated: int | None = None
    """Steps made again."""
    seconds: float | None = None
    """From the failure to the first step."""


def _path(path: str) -> str:
    if path_fault(path) or not {".", ".."}.isdisjoint(path.split("/")):
        raise ValueError(f"not a path: {path!r:.80}")
    return path


PathOnNode = Annotated[str, AfterValidator(_path)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class SavedFiles(FrozenModel):
    """Files of a node, as it names them."""

    folder: Annotated[PathOnNode, Field(pattern="^/")]
    iteration: Count
    files: tuple[tuple[Annotated[PathOnNode, Field(pattern="^[^/]")], Count, Digest], ...] = Field(max_length=2_000)
    """The name of each below `folder`, its bytes and SHA-256."""
    parts: Annotated[int, Field(ge=1)] = 1
    """More than 1 of a state that is divided: each is saved by another rank."""


class StateSaved(Event, kind="state_saved"):
    """A rank has committed a state (Manifest.journal_entry). Whoever changes its files later cannot change this."""

    rank: int
    state: str = Field(pattern=r"^[0-9]{1,19}\.[0-9]{1,4}(@[0-9]{1,9}\.[0-9]{1,9})?$")
    manifest: Digest
    node: str = ""
    saved: SavedFiles | None = None
    """None in the journals of earlier releases."""


class WeightsSaved(Event, kind="weights_saved"):
    """A rank has saved trained weights that can be used by themselves."""

    rank: int
    node: str = ""
    attempt: int
    holds: Literal["adapter", "weights", "model"]
    val_loss: float | None = None
    """That of the best validation so far, at which they were saved; None at any other."""
    saved: SavedFiles


class TrainingStarted(Event, kind="training_started"):
    """The trainer of rank 0 has loaded its model and its data."""

    attempt: int
    versions: dict[str, str] = Field(default_factory=dict)
    """By package."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Checksum of each file of data, and of the base model (Origin.inputs)."""
    from_base: bool = False
    """Before the first update its model is the base, and no adapter that was trained before."""


class ResultReported(SyncedEvent, kind="result"):
    """A result of a task on what another run has trained, by rank 0."""

    attempt: int = 1
    result: TaskResult


class EnergyMeasured(Event, kind="energy"):
    """The energy that a node's host has used in an attempt, while a supervisor was connected to it."""

    node: str
    joules: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    seconds: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class RestartRefused(Event, kind="restart_refused"):
    after: int
    why: str


class CleanupConfirmed(SyncedEvent, kind="cleanup_confirmed"):
    """Nothing of the run is left on this node; at the run's end that was not proved yet."""

    node: str


class LogsMissing(Event, kind="logs_missing"):
    """Logs and events of an attempt that is over which the head lacks, as its disk was full or a node away; none once
    they have come."""

    attempt: int
    files: dict[str, int | None]
    """Name on the head → bytes; None where that is not known."""
    reached: int = 0
    """The furthest iteration by what has come."""


class Note(Event, kind="note"):
    """Anything else worth knowing, a full disk for example."""

    message: str
