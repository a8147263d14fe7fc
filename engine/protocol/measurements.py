"""Measurements that a node reports: preflight's all_sum, and the calibration of one node's throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ALL_SUM_LARGE_BYTES = 4 * 2**20
"""The largest array that `engine.trainer.allreduce_check` sums; its bandwidth is that array's."""


GROUP_LIMIT_S = 900.0
"""For the ranks of `engine.training.group_bench` to load a large model from a slow disk."""


@dataclass
class AllSumResult:
    """One rank's result of `engine.trainer.allreduce_check`, or that of `engine.torch_trainer`."""

    rank: int
    size: int = 0
    """Ranks in the framework's group; 0 without a group."""
    exact: bool = False
    """Sums of small and of large arrays are right bit for bit."""
    latency_s: float | None = None
    """Median of one number's all_sum."""
    bandwidth_bytes_per_s: float | None = None
    """Median, payload bytes over time, of the largest array."""
    chosen: str | None = None
    """Accelerate's distributed type and number of processes, for a job that uses it."""
    error: str | None = None
    """One line."""

    @property
    def succeeded(self) -> bool:
        return self.exact and self.error is None


STEP_PARTS = ("data_s", "compute_s", "communicate_s", "update_s")
"""In seconds, the parts of a step's time."""


@dataclass
class GroupStepReport:
    """One rank's result of `engine.training.group_bench`; seconds are means over the iterations that count, see
    `summarise`."""

    rank: int
    steps: int = 0
    """Iterations that were timed."""
    step_s: float | None = None
    data_s: float | None = None
    compute_s: float | None = None
    """Forward and backward passes."""
    communicate_s: float | None = None
    """Waiting for other ranks and exchanging."""
    update_s: float | None = None
    tokens: float | None = None
    """Targets of an iteration, over all ranks."""
    peak_bytes: int | None = None
    error: str | None = None
    """One line."""

    @property
    def succeeded(self) -> bool:
        return self.steps > 0 and self.error is None

    def summarise(self, rounds: Sequence[Mapping[str, float]], iterations: int) -> None:
        """Take the means over the middle half of the `rounds`, by their duration, of so many `iterations` each: as
        steady as a median, and the parts still add up to the whole. A round: the updates from one exchange to the next,
        timed together, with the figures of an iteration by their names here."""
        cut = len(rounds) // 4
        middle = sorted(rounds, key=lambda figures: figures["step_s"])[cut : len(rounds) - cut]
        self.steps = len(rounds) * iterations
        for name in ("step_s", *STEP_PARTS, "tokens"):
            setattr(self, name, sum(figures[name] for figures in middle) / (len(middle) * iterations))


@dataclass(frozen=True)
class MeasureSpec:
    """The input of `engine.trainer.calibrate`. Paths are absolute on the node."""

    workdir: str
    job: dict[str, Any] | None
    """See AttemptSpec; None for a job with its own command: a synthetic model is measured then."""
    model: str | None
    data: str | None
    batch: int
    """Sequences of each step."""
    seconds: float
    """Duration of measuring, without loading and warming up."""
    env: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    """The ranks of the job: several keep their gradients otherwise than one does."""


@dataclass
class MeasureReport:
    """A report of `engine.trainer.calibrate`, so far; for the fields see engine.measurements.NodeMeasure."""

    examples_per_s: float | None = None
    spread: float | None = None
    windows: int = 0
    tokens_per_s: float | None = None
    step_s: float | None = None
    batch: int | None = None
    overhead_s: float | None = None
    steps: int = 0
    measured_s: float = 0.0
    state_bytes: int | None = None
    gradient_bytes: int | None = None
    probes: list[dict[str, int]] = field(default_factory=list)
    qos: str | None = None
    problem: str | None = None
    phase: str = "loading"
    """ "probing", "warming up", "measuring"; "measured" in the last report, also where that failed."""
