"""What calibration has measured of a job on its nodes, as it is stored and used. None is "not measured", never a guess.

`*_s` are seconds, `*_bytes` bytes, `*_per_s` per second; a spread is a coefficient of variation (standard deviation
over mean).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field


class MemoryProbe(BaseModel):
    """The peak of one training step at one batch."""

    model_config = ConfigDict(frozen=True)

    batch: int = Field(ge=1)
    """Sequences of this rank, each of the job's full length."""
    peak_bytes: int = Field(ge=0)


class NodeMeasure(BaseModel):
    """One node alone, at the real training step of the job."""

    model_config = ConfigDict(frozen=True)

    node: str
    host: str
    examples_per_s: float | None = Field(default=None, ge=0)
    """0: the node did its best and finished nothing: it counts as offline. None: not measured, `problem` says why."""
    spread: float | None = None
    """Of the throughput over the windows of the measurement."""
    windows: int = 0
    """Parts of the measurement that the spread is over."""
    tokens_per_s: float | None = None
    step_s: float | None = None
    """Median of one step."""
    batch: int | None = None
    """Sequences of each step."""
    overhead_s: float | None = Field(default=None, ge=0)
    """Of a step, whatever its batch: with it `step_s` is affine in the batch. Measured at a second, smaller batch."""
    steps: int = 0
    measured_s: float = 0.0
    state_bytes: int | None = None
    """Weights, gradients and moments: MLX's own figure."""
    probes: tuple[MemoryProbe, ...] = ()
    """Of batch 1 and 2: the peak is affine in the batch."""
    qos: str | None = None
    """What was done about the trainer's priority, in words."""
    problem: str | None = None


class LinkMeasure(BaseModel):
    """all_sum between two nodes, or over all of them."""

    model_config = ConfigDict(frozen=True)

    nodes: tuple[str, ...]
    """Two, or all in rank order."""
    latency_s: float | None = None
    """Of a small all_sum."""
    bandwidth_bytes_per_s: float | None = None
    """Of a large one: its bytes over its time."""
    problem: str | None = None


@dataclass(frozen=True)
class CalibrationProgress:
    """How far a calibration has come, in memory only."""

    what: str
    """A node, "a - b" for the link between two, or "all ranks"."""
    phase: str
    """ "loading", "probing", "warming up", "measuring", "measured", "not measured"."""
    elapsed_s: float = 0.0
    """Of measuring."""
    seconds: float | None = None
    """How long it is measured; None where that is not known."""
    examples_per_s: float | None = None
    """So far."""
    note: str = ""
    """One line."""


class Calibration(BaseModel):
    """One calibration of one job on one cluster."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    cluster: str
    job: str
    """The job's name."""
    fingerprint: str
    """SHA-256 of what the figures depend on: the job's model and settings, the nodes' hosts, chips and versions.
    Another one is another calibration."""
    taken_at: datetime
    quick: bool = False
    stand_in: bool = False
    """The job has a command of its own: a model of the demo's kind was trained in its place."""
    backend: str | None = None
    nodes: tuple[NodeMeasure, ...] = ()
    """In rank order."""
    links: tuple[LinkMeasure, ...] = ()
    """One per pair of neighbours."""
    everyone: LinkMeasure | None = None
    """All ranks at once."""
    gradient_bytes: int | None = None
    """What one step's all_sum carries."""
    machines: dict[str, str] = Field(default_factory=dict)
    """Node → SHA-256 of its own part of the fingerprint: which of them has changed since."""
    notes: tuple[str, ...] = ()

    @property
    def sums(self) -> tuple[LinkMeasure, ...]:
        """The links, and everyone where that is another measurement."""
        if self.everyone is None or self.everyone in self.links:
            return self.links
        return (*self.links, self.everyone)

    def of(self, node: str) -> NodeMeasure | None:
        return next((measure for measure in self.nodes if measure.node == node), None)


class Division(BaseModel):
    """How the global batch is divided over the nodes, and what was predicted of that when the run was made. None is
    "not known", and `why_not` says why."""

    model_config = ConfigDict(frozen=True)

    source: str
    """ "fixed" (by [[node]] share), "calibrated" or "equal"."""
    reason: str
    parts: dict[str, float]
    """Node → its part; they sum to 1."""
    left_out: tuple[str, ...] = ()
    """Nodes of the configuration that have finished nothing while they were measured."""
    excluded: tuple[str, ...] = ()
    """Nodes that a check has left out of the launch since."""
    warnings: tuple[str, ...] = ()
    examples_per_s: float | None = None
    tokens_per_s: float | None = None
    compute_s: dict[str, float] = Field(default_factory=dict)
    """Node → its own part of an iteration."""
    speed_up: float | None = None
    efficiency: float | None = None
    why_not: str | None = None

    def without(self, nodes: Collection[str]) -> Division:
        """The same for the other nodes; of those together nothing was predicted."""
        kept = {name: part for name, part in self.parts.items() if name not in nodes}
        whole = sum(kept.values())
        excluded = tuple(dict.fromkeys((*self.excluded, *nodes)))
        return Division(
            source=self.source,
            reason=self.reason,
            parts={name: part / whole for name, part in kept.items()} if whole else {},
            left_out=self.left_out,
            excluded=excluded,
            warnings=self.warnings,
            why_not=f"left out: {', '.join(excluded)}",
        )


@dataclass(frozen=True)
class HardwareMetrics:
    """What a benchmark has measured of one node. Raises ValueError for a name that is empty, and for a figure that is
    below 0 or none."""

    node_id: str
    model_name: str
    throughput: float
    """Examples per second; 0 is an offline node."""
    memory_gb: float
    latency_ms: float
    timestamp: datetime

    def __post_init__(self) -> None:
        for name in ("node_id", "model_name"):
            if not (isinstance(text := getattr(self, name), str) and text):
                raise ValueError(f"{name} must be a text that is not empty: {text!r}")
        for name in ("throughput", "memory_gb", "latency_ms"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be a number, 0 or more: {value!r}")
