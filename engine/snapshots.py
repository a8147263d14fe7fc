"""Snapshots of a run for the frontends: frozen dataclasses, in memory only, made by `RunWatch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from engine.errors import size_text
from engine.measurements import Division
from engine.models import CheckResult, Reason, RunRecord, RunState
from engine.task_result import TaskResult


@dataclass(frozen=True)
class Sample:
    """An answer to one of the job's sample_prompts."""

    iteration: int
    """By the weights after it; 0: by those that the training began with."""
    prompt: str
    text: str
    tokens: int
    seconds: float
    share: float | None = None
    """Time for answers over the training time in the attempt so far; None at iteration 0."""


@dataclass(frozen=True)
class ServedRequests:
    """The requests that a server has answered in this attempt, its own health checks left out."""

    requests: int
    tokens: int
    tokens_per_second: float
    """In the newest answer, its prompt included in the time."""


@dataclass(frozen=True)
class RankReport:
    """The newest report of one rank, from its events."""

    phase: str | None = None
    """"loading", "training", "validating", "saving" or "ended"; of a command of which no step is read "running", and
    "suspended" while its processes are stopped."""
    iteration: int | None = None
    step_s: float | None = None
    """Compute time of the last step without waiting for other ranks, seconds."""
    typical_s: float | None = None
    """Median of `step_s` over the last steps."""
    exchange_s: float | None = None
    """Communication time of the last step, including waiting for other ranks, seconds."""
    grad_norm: float | None = None
    """Norm of this rank's mean gradient before the exchange, at the last update."""
    global_grad_norm: float | None = None
    """Norm of the global gradient at the last update."""
    memory_bytes: int | None = None
    """Peak MLX memory."""
    seen_at: datetime | None = None
    stepped_at: datetime | None = None
    """When it reported a step of its last attempt, by its node's clock."""
    moved_at: datetime | None = None
    """When its last step, phase or other progress of its last attempt had reached the head, by the head's clock."""
    attempt: int = 0
    iterations: int | None = None
    """The planned number, from the start event like the next three."""
    backend: str | None = None
    world_size: int | None = None
    device: str | None = None
    compared_at: int | None = None
    """Iteration of the last comparison of the replicas."""
    replicas_agree: bool | None = None
    saved_bytes: int | None = None
    """Size of the last committed checkpoint."""
    saving_s: float = 0.0
    """How long its training has waited for saves and checkpoints in this attempt."""
    training_s: float | None = None
    """Since the start event."""
    chunk: ChunkProgress | None = None
    """The last one that was finished of data that is streamed."""
    warnings: tuple[str, ...] = ()
    """The newest of this attempt."""
    samples: tuple[Sample, ...] = ()
    """The first and the two newest answers to each prompt."""
    served: ServedRequests | None = None
    """None before the first answer, and on all ranks but 0."""


@dataclass(frozen=True, kw_only=True)
class RankStatus(RankReport):
    """One rank, from its newest report and its exit record."""

    rank: int
    node: str
    phase: str
    """That of the report, "waiting", "starting" or "stopping"."""
    exit_code: int | None = None
    signal: int | None = None
    link: NodeCondition | None = None
    """Connection to its node; None for this machine."""
    printed_at: datetime | None = None
    """When output of its last attempt last reached the head."""

    @property
    def signs(self) -> dict[str, datetime]:
        """When it last made a "step", and when it last gave "output"."""
        times = {"step": self.stepped_at, "output": self.printed_at}
        return {sign: at for sign, at in times.items() if at is not None}


@dataclass(frozen=True)
class Quiet:
    """The ranks train, and since when none has shown it."""

    sign: str
    """The one that is missing: "step" or "output"."""
    since: datetime
    """By the head's clock, without the time in which no sign could be seen."""
    hang_s: float | None
    """From the last sign on, after which it counts as a hang at the earliest, seconds; None: that is not judged."""


@dataclass(frozen=True)
class NodeCondition:
    """The supervisor's connection to a node. An unreachable node does not mean a dead rank."""

    condition: str
    """"connected", "unreachable" or "lost" (for so long that the lease of its rank has expired)."""
    since: datetime
    """Last contact with an unreachable node; time of the reconnection of a connected one."""
    why: str | None = None


@dataclass(frozen=True)
class SeriesMark:
    """A point on a chart's axis: a checkpoint or a restart."""

    iteration: int
    kind: str
    """"checkpoint" or "restart"."""


@dataclass(frozen=True)
class Series:
    """Loss against iteration, as reported; x ascending."""

    train: tuple[tuple[int, float], ...] = ()
    val: tuple[tuple[int, float], ...] = ()
    tokens_per_second: tuple[tuple[int, float], ...] = ()
    marks: tuple[SeriesMark, ...] = ()
    not_finite: tuple[int, int] | None = None
    """The first and the last iteration of the newest reports, where the loss of all of them is not finite."""


@dataclass(frozen=True)
class Diagnosis:
    """The first failure, and its fix."""

    cause: str
    fix: str | None = None
    rank: int | None = None
    host: str | None = None
    source: int | None = None
    """Log with the evidence: a rank, or LAUNCHER_SOURCE."""
    offset: int | None = None
    """Byte offset of the evidence in that log."""
    signature: str | None = None
    """Id of the failure signature that matched (engine.failures.signatures), if one did."""


@dataclass(frozen=True)
class StopProgress:
    stage: str
    """"asked", "stop", "term", "kill", "verifying", "stopped" or "unconfirmed"."""
    since: datetime
    acknowledged: tuple[int, ...] = ()
    left: tuple[str, ...] = ()
    """Processes that are still alive, as "node pid command"."""
    passed: tuple[str, ...] = ()
    """Earlier stages that were needed, in order."""


@dataclass(frozen=True)
class AttemptStatus:
    """One attempt of a run: its members, how it failed, and what it continued from."""

    number: int
    members: tuple[tuple[int, str], ...]
    """(rank, node); ranks are renumbered when a node is left out."""
    began_at: datetime
    why: str | None = None
    """Reason for this attempt: "recovers from rank 1's death at iteration 37"; None for the first."""
    ended_at: datetime | None = None
    """When it had failed and all its processes were gone; None while it runs and after success."""
    reason: Reason | None = None
    rank: int | None = None
    host: str | None = None
    cause: str | None = None
    reached: int | None = None
    """Last iteration that any rank finished before the failure."""
    resumed_at: int | None = None
    """Iteration after which it continued."""
    source: str | None = None
    """Origin of the restored state: "emergency", "checkpoint", "adapter", "none", or "command": it did so by itself."""
    repeated: int | None = None
    """Steps; at least so many of a command, which may report some of its steps only. None: not known."""
    recovery_s: float | None = None
    """Seconds from the failure to the first step."""


@dataclass(frozen=True)
class Alarm:
    """A finding about the ranks during training, which does not stop them."""

    name: str
    """Name of the issue: BYZANTINE_WORKERS_DETECTED, REPLICAS_DIFFER, …"""
    message: str
    at: datetime
    iteration: int | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verification:
    """One property that a started run must have."""

    name: str
    good: bool | None
    """None if unknown, with the reason in `text`."""
    text: str


@dataclass(frozen=True)
class TrainedFile:
    """The newest adapters, trained weights or whole model that a run has saved, or those in a state."""

    path: str
    """On its node."""
    size: int
    """Bytes."""
    node: str
    command: str
    """Uses it, in a shell of that node."""
    unserved: str | None = None
    """Why it is not served; None where it can be."""
    parts: tuple[tuple[str, str, str], ...] = ()
    """Each part of a state, newer than all such files: its node, its folder there, and the SHA-256 of its manifest."""
    iteration: int | None = None
    divided: bool = False
    """The model is divided over the run's nodes where it answers, as it was while it was trained: perhaps no single one
    has room for it."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those that have some of it."""
        return tuple(dict.fromkeys((self.node, *(node for node, _, _ in self.parts))))


@dataclass(frozen=True)
class ResultFile:
    holds: str
    """"adapter", "weights" (those of the trained layers), "model" or "checkpoint" (a state to resume from)."""
    best: bool
    """Saved at the best validation so far, and not as the newest."""
    iteration: int
    node: str
    path: str
    """On the node."""
    name: str
    """Below the folder that it is fetched to."""
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ValidationLoss:
    iteration: int
    loss: float


@dataclass(frozen=True)
class Energy:
    joules: float
    seconds: float
    """How long it was measured, on all nodes together: the sums of what their sensors told."""
    nodes: tuple[str, ...]
    """Those that have a sensor."""
    joules_per_million_tokens: float | None = None


@dataclass(frozen=True)
class RunResult:
    """The files that a run has left, its losses, and what it took. None is not known."""

    files: tuple[ResultFile, ...] = ()
    """The newest of each kind; of earlier releases' runs none."""
    first: ValidationLoss | None = None
    best: ValidationLoss | None = None
    last: ValidationLoss | None = None
    base: float | None = None
    """The base model's loss on the same split: that of the validation before the first update."""
    test_loss: float | None = None
    tokens: int | None = None
    """Targets trained on."""
    learning_rate: float | None = None
    """That of the newest report."""
    seconds: float | None = None
    """In which an attempt went on, each from its launch to its end."""
    energy: Energy | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Python and the packages that rank 0 trained with."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the data files and of the base model."""

    @property
    def fetch_option(self) -> str | None:
        """The option of `flightdeck fetch` that copies some of it: "" for the newest weights, else that for the best
        ones or for the state; None without a file."""
        return min(
            ("--checkpoint" if one.holds == "checkpoint" else "--best" * one.best for one in self.files), default=None
        )

    def newest(self, holds: str, *, best: bool = False) -> tuple[ResultFile, ...]:
        return tuple(file for file in self.files if (file.holds, file.best) == (holds, best))


@dataclass(frozen=True)
class FetchProgress:
    bytes: int
    """That are here, also from an earlier time."""
    total: int
    bytes_per_s: float | None = None
    note: str = ""
    """Which node is away, and for how long it is tried again."""


@dataclass(frozen=True)
class CopyProgress:
    """How far a model, data set or environment has come onto a node."""

    node: str
    bytes: int = 0
    """That are there, also from an earlier time."""
    total: int = 0
    path: str | None = None
    """Where it is, once it is whole and verified."""
    note: str = ""
    """The event there, or what it waits for."""
    failed: bool = False
    """The note says why."""

    @property
    def text(self) -> str:
        """ "1.2 GB of 4.0 GB", its note, or both."""
        amount = f"{size_text(self.bytes)} of {size_text(self.total)}" if self.total else ""
        return ", ".join(filter(None, (amount, self.note)))


@dataclass(frozen=True)
class Fetched:
    """The end of a fetch: the files are in `folder`, verified."""

    folder: Path
    files: tuple[ResultFile, ...]


@dataclass(frozen=True)
class RunFolders:
    """The folders of a run on one machine."""

    node: str
    """Its nodes; "" for this machine as the head."""
    folders: tuple[str, ...]
    bytes: int | None = None
    """That they take, or took; None where that is not known."""
    problem: str | None = None
    """Why they are still there, or could not be looked at."""


@dataclass(frozen=True)
class Deletion:
    """The space that a run takes, and whether it is deleted."""

    run: str
    here: RunFolders
    nodes: tuple[RunFolders, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    """(node, folder) of what the run has saved in folders that are not its own, or an address."""
    deleted: bool = False
    """It is no longer listed."""

    @property
    def freed(self) -> int:
        """Bytes, of the folders of which that is known and that do not stay."""
        return sum(part.bytes or 0 for part in (self.here, *self.nodes) if part.problem is None)

    @property
    def problems(self) -> dict[str, str]:
        """By node, why its folders stay."""
        return {part.node: part.problem for part in self.nodes if part.problem is not None}


@dataclass(frozen=True)
class TrackerStatus:
    name: str
    """ "tensorboard" or "wandb"."""
    use: str | None
    """The command that shows or sends its files, or the address of the service's page; None before there is any."""
    problem: str | None = None
    """Why nothing more is written for it."""


@dataclass(frozen=True)
class Notification:
    """One event of a run, or of the queue, that people are told."""

    event: str
    """As in `on` of [notify]."""
    title: str
    text: str
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    run: str = ""
    problems: tuple[str, ...] = ()
    """Channels that did not take it, each with the reason."""


@dataclass(frozen=True)
class ChannelAnswer:
    channel: str
    sent: bool
    answer: str
    """The reply, or why it was not sent, without secrets."""


@dataclass(frozen=True)
class ChunkProgress:
    """Progress through data that is streamed in chunks."""

    done: int
    of: int
    epoch: int = 1
    """From 1."""


@dataclass(frozen=True)
class RunSnapshot:
    """Everything that the frontends show of a run."""

    record: RunRecord
    supervised: bool
    state_since: datetime
    ranks: tuple[RankStatus, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    series: Series = field(default_factory=Series)
    eta_s: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    """Norm of the global mean gradient before clipping, at the last update."""
    diagnosis: Diagnosis | None = None
    stop: StopProgress | None = None
    alarms: tuple[Alarm, ...] = ()
    """Alarms of the last attempt, oldest first; only the newest if there are many."""
    verification: tuple[Verification, ...] = ()
    """Empty for a custom command."""
    quiet: Quiet | None = None
    taken_at: datetime | None = None
    attempts: tuple[AttemptStatus, ...] = ()
    most_attempts: int = 1
    """Limit of automatic attempts."""
    recovery: str | None = None
    """The recovery step between two attempts."""
    given_up: str | None = None
    """Why no further attempt follows, if known."""
    division: Division | None = None
    """Shares of the batch, and the prediction from the creation of the run."""
    chunk: ChunkProgress | None = None
    """None before the first chunk is finished, and for data that is kept in memory."""
    damage: tuple[str, ...] = ()
    """The run's files that are missing or damaged, one line each."""
    trained: TrainedFile | None = None
    result: RunResult | None = None
    """Once it has ended."""
    task_results: tuple[TaskResult, ...] = ()
    """The results of a task on what another run has trained."""
    trackers: tuple[TrackerStatus, ...] = ()
    notifications: tuple[Notification, ...] = ()
    """Those that were told, the oldest first."""

    @property
    def ended(self) -> bool:
        return self.record.state.ended

    @property
    def fetch(self) -> str | None:
        """The command that copies what it has left; None where there is nothing."""
        option = self.result.fetch_option if self.result is not None else None
        task = self.record.task is not None
        command = f"flightdeck fetch {self.record.source if task else self.record.id} {'--fused' if task else option}"
        return command.rstrip() if option is not None else None

    @property
    def activity(self) -> str | None:
        """The activity of a command that runs and of which no step was read; None for all others."""
        unread = self.record.state is RunState.RUNNING and self.record.iteration is None
        silent = unread and any(rank.phase in ("running", "suspended") for rank in self.ranks)
        return "running, prints no step that is read here" if silent else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The ranks' warnings, each with those that gave it."""
        texts = dict.fromkeys(text for rank in self.ranks for text in rank.warnings)
        named = {text: [str(rank.rank) for rank in self.ranks if text in rank.warnings] for text in texts}
        return tuple(f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {text}" for text, numbers in named.items())

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.ranks[0].samples if self.ranks else ()

    @property
    def cause(self) -> str | None:
        """The first failure, from the logs or else from the record; None without one."""
        return self.diagnosis.cause if self.diagnosis is not None else self.record.cause

    @property
    def fix(self) -> str | None:
        """The fix of the first failure, if known."""
        return (self.diagnosis.fix if self.diagnosis is not None else None) or self.record.fix
