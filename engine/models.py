"""What the engine tells its faces: runs, checks, nodes, and their words.

Pydantic models are what is written to disk or printed as JSON; frozen dataclasses live in memory only.
Times on disk are UTC, ISO 8601 with a zone; `*_s` are seconds, `*_bytes` bytes.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class RunState(StrEnum):
    """Where a run is in its life, in order; the last four are ends (reliability.md)."""

    PLANNED = "planned"
    PREFLIGHT = "preflight"
    LAUNCHING = "launching"
    RUNNING = "running"
    RECOVERING = "recovering"
    FINISHING = "finishing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABORTED = "aborted"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        return self in ENDED


ENDED = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.ABORTED, RunState.LOST})


class Reason(StrEnum):
    """Why a run ended, apart from how (its state)."""

    COMPLETED = "completed"
    RANK_FAILED = "rank_failed"
    RANK_KILLED = "rank_killed"
    NODE_LOST = "node_lost"
    HUNG = "hung"
    LAUNCH_FAILED = "launch_failed"
    PREFLIGHT_FAILED = "preflight_failed"
    USER_ABORT = "user_abort"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    DIVERGED = "diverged"
    SUPERVISOR_LOST = "supervisor_lost"


class RunRecord(BaseModel):
    """One run as `flightdeck runs --json` prints it and the store keeps it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    name: str
    state: RunState
    reason: Reason | None = None
    rank: int | None = None
    """The rank that ended the run, where one did."""
    host: str | None = None
    """The name of that rank's node."""
    cause: str | None = None
    """One line, in words: what happened first."""
    fix: str | None = None
    """What to do about it, where that is known."""
    exit_code: int | None = None
    signal: int | None = None
    created_at: datetime
    started_at: datetime | None = None
    """When the first rank's keeper started, null until then."""
    ended_at: datetime | None = None
    attempts: int = 0
    world_size: int
    backend: str
    iteration: int | None = None
    iterations: int | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    unconfirmed: list[str] = Field(default_factory=list)
    """Nodes on which a stop could not be proved."""


class CheckStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class CheckResult(BaseModel):
    """One preflight check's answer (preflight.md)."""

    model_config = ConfigDict(frozen=True)

    name: str
    status: CheckStatus
    summary: str = ""
    evidence: dict[str, str] = Field(default_factory=dict)
    """Per node name: what was seen there."""
    fix_command: str | None = None
    fixes: dict[str, str] = Field(default_factory=dict)
    """Per node name: a command that mends it there."""
    duration_s: float | None = None
    blames: tuple[int, str] | None = None
    """(rank, node) of the first failing rank, where one can be named."""


class PreflightReport(BaseModel):
    """All checks of one preflight. `overall_status` is fail when any check fails that was not skipped by name."""

    model_config = ConfigDict(frozen=True)

    checks: list[CheckResult]
    overall_status: CheckStatus
    overridden: list[str] = Field(default_factory=list)
    """Names given with --skip."""
    finished_at: datetime


class NodeFacts(BaseModel):
    """What was last seen of a node. None is "not measured", never a guess."""

    model_config = ConfigDict(frozen=True)

    node: str
    host: str
    probed_at: datetime
    os: str | None = None
    chip: str | None = None
    cores: int | None = None
    gpu: str | None = None
    """The MLX default device, for example "gpu" or "cpu"."""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    disk_free_bytes: int | None = None
    python: str | None = None
    mlx: str | None = None
    mlx_lm: str | None = None
    backends: tuple[str, ...] = ()
    round_trip_s: float | None = None
    problem: str | None = None
    """Why the probe failed, in one line; the facts are then None."""
