"""What a face sees of a run at one moment: frozen snapshots, made by `engine.session.RunWatch`."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from engine.measured import Division
from engine.models import CheckResult, Reason, RunRecord


@dataclass(frozen=True)
class RankStatus:
    """One rank, as its own events and exit record say."""

    rank: int
    node: str
    phase: str
    """waiting, starting, loading, training, validating, saving, ended, stopping."""
    iteration: int | None = None
    step_s: float | None = None
    """Compute time of the last step, waiting for peers left out, seconds."""
    typical_s: float | None = None
    """The median of that over the last steps: who is slow, and not who was once."""
    exchange_s: float | None = None
    """Of the last step: exchanging with the other ranks, waiting for them included, seconds."""
    grad_norm: float | None = None
    """Of this rank's own mean gradient before the exchange, at the last update."""
    memory_bytes: int | None = None
    """Peak MLX memory."""
    seen_at: datetime | None = None
    exit_code: int | None = None
    signal: int | None = None
    link: NodeCondition | None = None
    """How its node can be reached, for a node that is not this machine."""


@dataclass(frozen=True)
class NodeCondition:
    """Whether the run's supervisor can reach a node. A node that it cannot reach is not a dead rank."""

    condition: str
    """connected, unreachable, lost (for so long that its rank's lease has ended it)."""
    since: datetime
    """When it was last heard, of a node that is away; when it was heard again, of one that is connected."""
    why: str | None = None
    """Why it is away, one line."""


@dataclass(frozen=True)
class Mark:
    """A point on the loss plot's axis: a checkpoint or a restart."""

    iteration: int
    kind: str
    """"checkpoint" or "restart"."""


@dataclass(frozen=True)
class Series:
    """Loss against iteration, as reported; x ascending."""

    train: tuple[tuple[int, float], ...] = ()
    val: tuple[tuple[int, float], ...] = ()
    tokens_per_second: tuple[tuple[int, float], ...] = ()
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """What went wrong first, and what to do about it."""

    cause: str
    fix: str | None = None
    rank: int | None = None
    host: str | None = None
    source: int | None = None
    """Log source that proves it (a rank, or LAUNCHER_SOURCE)."""
    offset: int | None = None
    """Byte offset in that log's file."""
    signature: str | None = None
    """Id of the known failure text that says it (engine.runs.signatures); None of what was judged otherwise."""


@dataclass(frozen=True)
class StopProgress:
    """How far an abort is."""

    stage: str
    """asked, stop, term, kill, verifying, stopped, unconfirmed."""
    since: datetime
    acknowledged: tuple[int, ...] = ()
    """Ranks whose keeper has written an exit record."""
    left: tuple[str, ...] = ()
    """Processes still alive, as "node pid command"."""
    passed: tuple[str, ...] = ()
    """The stages before this one that were really needed, in order."""


@dataclass(frozen=True)
class AttemptStatus:
    """One attempt of a run: who was in it, how it ended when it failed, and what it went on from."""

    number: int
    members: tuple[tuple[int, str], ...]
    """(rank, node): the ranks are counted anew when a node is left out."""
    began_at: datetime
    why: str | None = None
    """Why there is another one: "recovers from rank 1's death at iteration 37"; None for the first."""
    ended_at: datetime | None = None
    """When it had failed, and nothing of it was left; None of one that goes on, or has succeeded."""
    reason: Reason | None = None
    rank: int | None = None
    host: str | None = None
    cause: str | None = None
    reached: int | None = None
    """The last iteration that any rank finished, of one that has failed."""
    resumed_at: int | None = None
    """The iteration after which it went on."""
    source: str | None = None
    """ "rescue", "checkpoint", "adapter" or "none": where the state for that came from."""
    repeated: int | None = None
    """Steps that were made again."""
    recovery_s: float | None = None
    """From the failure to the first step."""


@dataclass(frozen=True)
class Alarm:
    """Something that was found of the ranks while they trained: it says, it does not act."""

    name: str
    """An issue's name: BYZANTINE_WORKERS_DETECTED, REPLICAS_DIFFER, …"""
    message: str
    at: datetime
    iteration: int | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verification:
    """One line of what must be true of a run that has begun."""

    name: str
    good: bool | None
    """None: not known yet, or not known here; the text says which."""
    text: str


@dataclass(frozen=True)
class ChunkProgress:
    """How far data that is streamed in chunks has been trained on."""

    done: int
    """Chunks of this epoch that are finished."""
    of: int
    epoch: int = 1
    """From 1."""


@dataclass(frozen=True)
class RunSnapshot:
    """Everything that a pane shows of a run."""

    record: RunRecord
    supervised: bool
    """A supervisor of this run is alive."""
    state_since: datetime
    ranks: tuple[RankStatus, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    series: Series = field(default_factory=Series)
    eta_s: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    """Of the global mean gradient before clipping, at the last update."""
    diagnosis: Diagnosis | None = None
    stop: StopProgress | None = None
    alarms: tuple[Alarm, ...] = ()
    """Of the last attempt, oldest first; of very many the newest."""
    verification: tuple[Verification, ...] = ()
    """Empty for a program of the user's own, which does not tell."""
    taken_at: datetime | None = None
    attempts: tuple[AttemptStatus, ...] = ()
    most_attempts: int = 1
    """How many there may be by themselves."""
    recovery: str | None = None
    """What is going on between two attempts."""
    given_up: str | None = None
    """Why no other attempt follows the last, where that is known."""
    division: Division | None = None
    """The nodes' shares of the batch, and what was predicted of them when the run was made."""
    chunk: ChunkProgress | None = None
    """None until the first chunk is finished, and of data that is held in memory."""

    @property
    def cause(self) -> str | None:
        """What went wrong first, as the logs prove it, else as the record has it; None while nothing has."""
        return self.diagnosis.cause if self.diagnosis is not None else self.record.cause

    @property
    def fix(self) -> str | None:
        """What mends that, where it is known."""
        return (self.diagnosis.fix if self.diagnosis is not None else None) or self.record.fix
