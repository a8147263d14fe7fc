"""Results of a calibration: a job measured on its nodes. None means "not measured".

`*_s` are seconds, `*_bytes` bytes, `*_per_s` per second; a spread is a coefficient of variation (standard deviation
over mean)."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from engine.models import FrozenModel
from engine.protocol.job import Framework
from engine.protocol.partition import share_counts
from engine.security.identifiers import IDENTIFIER_FORM, is_identifier, safe_repr
from engine.validators.values import not_negative

Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Batch = Annotated[int, Field(ge=1)]


class MemoryProbe(FrozenModel):
    """Peak memory of one training step at one batch size."""

    batch: Batch
    """Sequences of this rank, each of full length."""
    peak_bytes: Count


class NodeMeasure(FrozenModel):
    """One node alone, running the job's training step."""

    node: str
    host: str
    examples_per_s: Figure | None = None
    """0: the node completed no step and counts as offline. None: not measured, see `problem`."""
    spread: Figure | None = None
    """Spread of the throughput over the measurement windows."""
    windows: Count = 0
    tokens_per_s: Figure | None = None
    step_s: Figure | None = None
    """Median duration of a step."""
    batch: Batch | None = None
    """Sequences per step."""
    overhead_s: Figure | None = None
    """Part of a step that does not depend on the batch, measured with a second, smaller batch."""
    steps: Count = 0
    measured_s: Figure = 0.0
    state_bytes: Count | None = None
    """Weights, gradients and moments, as reported by MLX."""
    probes: tuple[MemoryProbe, ...] = Field(default=(), max_length=10)
    """At batch 1 and 2, since the peak is affine in the batch."""
    qos: str | None = None
    """Description of the trainer's priority."""
    problem: str | None = None


class LinkMeasure(FrozenModel):
    """all_sum between two nodes, or over all of them."""

    nodes: tuple[str, ...]
    """Two, or all in rank order."""
    latency_s: float | None = None
    """Duration of a small all_sum."""
    bandwidth_bytes_per_s: float | None = None
    """Bytes of a large all_sum over its duration."""
    problem: str | None = None


class GroupMeasure(FrozenModel):
    """Real iterations of all ranks together, with a strategy of which no node can make a step alone."""

    strategy: Literal["sharded", "pipeline"]
    batch: Batch
    """Sequences of an iteration over all ranks."""
    steps: Count = 0
    step_s: Figure | None = None
    """Mean duration of an iteration."""
    tokens_per_s: Figure | None = None
    compute_s: dict[str, Figure] = Field(default_factory=dict)
    """By node, its own part of an iteration: a pipeline's stage."""
    peak_bytes: dict[str, Count] = Field(default_factory=dict)
    """By node."""
    problem: str | None = None

    @property
    def waiting(self) -> float | None:
        """The share of an iteration that the ranks spend waiting and exchanging, in the mean."""
        if not self.step_s or not self.compute_s:
            return None
        return max(0.0, 1 - sum(self.compute_s.values()) / len(self.compute_s) / self.step_s)


PAYS = 0.5
"""A rank more pays while it brings at least this part of what a rank does by itself: below, it waits for longer than it
works, and each example that it adds costs more than twice its own machine time."""


class ScalingPoint(FrozenModel):
    """Real iterations over so many ranks. Times are of one iteration, in the mean over the ranks."""

    ranks: Batch
    """The first of the configuration."""
    batch: Count = 0
    """Sequences of an iteration over all of them."""
    steps: Count = 0
    """Iterations that were timed."""
    step_s: Figure | None = None
    examples_per_s: Figure | None = None
    tokens_per_s: Figure | None = None
    data_s: Figure | None = None
    compute_s: Figure | None = None
    """Forward and backward passes; of a single rank often the update, too, which MLX computes with them."""
    communicate_s: Figure | None = None
    """Waiting for other ranks, and what of the exchange is not beside the computation."""
    update_s: Figure | None = None
    peak_bytes: Count | None = None
    """The largest rank's."""
    problem: str | None = None
    """Why it was not measured."""


class Scaling(FrozenModel):
    """The throughput of one job over 1, 2, … of its nodes' ranks."""

    cluster: str
    job: str
    fingerprint: str
    """See engine.plan.fingerprint.scaling_fingerprint."""
    taken_at: datetime
    strategy: str
    framework: Framework = "mlx"
    backend: str | None = None
    quick: bool = False
    per_rank_batch: bool = False
    """Weak scaling: each rank's part of the batch is kept, so that the batch grows with the ranks. Else strong scaling:
    the job's own batch is divided over ever more ranks."""
    nodes: tuple[str, ...] = ()
    """In rank order."""
    points: tuple[ScalingPoint, ...] = ()
    """Ascending; when interrupted, those so far."""
    complete: bool = False
    """Each number of ranks was tried."""
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> tuple[ScalingPoint, ...]:
        return tuple(point for point in self.points if point.examples_per_s)

    @property
    def own_rate(self) -> float | None:
        """Examples/s that one rank does by itself; where a single rank was not measured, a rank among the fewest."""
        return (self.measured[0].examples_per_s or 0.0) / self.measured[0].ranks if self.measured else None

    def speed_up(self, point: ScalingPoint) -> float | None:
        """How many ranks by themselves would do as much."""
        alone = self.own_rate
        return point.examples_per_s / alone if point.examples_per_s and alone else None

    def efficiency(self, point: ScalingPoint) -> float | None:
        """Speed-up over ranks; above 1 where the nodes differ, or a rank's part of the batch fits better."""
        speed_up = self.speed_up(point)
        return speed_up / point.ranks if speed_up is not None else None

    def gain(self, point: ScalingPoint, before: ScalingPoint) -> float | None:
        """The part of a rank's own rate that each added one brings since the measured point `before`."""
        now, then = self.speed_up(point), self.speed_up(before)
        return (now - then) / (point.ranks - before.ranks) if now is not None and then is not None else None

    @property
    def stops_paying(self) -> int | None:
        """The first number of ranks from which none that was measured brings PAYS of a rank for each one added: a dip
        at a number that divides the batch badly is none. None where the last one still pays."""
        points = self.measured
        for place in range(1, len(points)):
            if all((self.gain(point, points[place - 1]) or 0.0) < PAYS for point in points[place:]):
                return points[place].ranks
        return None


@dataclass(frozen=True)
class CalibrationProgress:
    """How far a calibration has come, in memory only."""

    what: str
    """A node, "a - b" for the link between two, "all ranks", or "2 ranks" for their scaling."""
    phase: str
    """ "loading", "probing", "warming up", "measuring", "measured", "not measured"."""
    elapsed_s: float = 0.0
    """Measuring time so far."""
    seconds: float | None = None
    """How long it is measured; None where that is not known."""
    examples_per_s: float | None = None
    note: str = ""


class Calibration(FrozenModel):
    """One calibration of one job on one cluster."""

    cluster: str
    job: str
    fingerprint: str
    """SHA-256 of what the results depend on: the job's model and settings, the nodes' hosts, chips and versions."""
    taken_at: datetime
    quick: bool = False
    synthetic_model: bool = False
    """A synthetic model was trained, since the job runs a custom command."""
    backend: str | None = None
    connected_as: tuple[Literal["data", "local"], ...] = ("data",)
    """The strategies whose ranks are connected as they were when the links were measured: "data" stands for all but
    "local"."""
    nodes: tuple[NodeMeasure, ...] = ()
    """In rank order."""
    links: tuple[LinkMeasure, ...] = ()
    """One for each pair of neighbours."""
    all_ranks: LinkMeasure | None = None
    group: GroupMeasure | None = None
    """With strategy "sharded" and "pipeline"."""
    gradient_bytes: int | None = None
    """Size of an all_sum of one step in float32."""
    element_bytes: int = 4
    """Size of one gradient in the model's own type, in which it may travel."""
    settings: dict[str, str | bool | int] = Field(default_factory=dict)
    """The job's settings that the plan had chosen; empty where the job sets all of them."""
    machines: dict[str, str] = Field(default_factory=dict)
    """SHA-256 by node of its part of the fingerprint, to find the nodes that have changed."""
    notes: tuple[str, ...] = ()

    @property
    def sums(self) -> tuple[LinkMeasure, ...]:
        """The links, and `all_ranks` unless it is one of them."""
        if self.all_ranks is None or self.all_ranks in self.links:
            return self.links
        return (*self.links, self.all_ranks)

    def measure_of(self, node: str) -> NodeMeasure | None:
        return next((measure for measure in self.nodes if measure.node == node), None)


class Shares(FrozenModel):
    """The share of the global batch that each node gets."""

    parts: dict[str, float]
    """Share by node; they sum to 1. In the configuration's order, without the nodes that are left out."""
    source: Literal["fixed", "calibrated", "equal"]
    """ "fixed": by [[node]] share."""
    reason: str
    """One line."""
    variation: float | None = None
    """Coefficient of variation of the measured throughputs; None unless all are known."""
    noise: float | None = None
    """Variation between equal nodes that measurement noise alone explains; None if unknown."""
    left_out: tuple[str, ...] = ()
    """Nodes that completed no step during calibration."""
    warnings: tuple[str, ...] = ()

    def micro_batches(self, batch: int) -> dict[str, int]:
        """Sequences of the global batch by node, as in training. Raises ValueError for a batch that is too small."""
        return dict(zip(self.parts, share_counts(batch, list(self.parts.values())), strict=True))


class ThroughputPrediction(FrozenModel):
    """Throughput of all ranks together. None means unknown, and `why_not` gives the reason."""

    examples_per_s: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    """One iteration over the global batch, communication included."""
    compute_s: dict[str, float] = Field(default_factory=dict)
    """Compute part of an iteration by node."""
    communicate_s: float | None = None
    """The part of the exchange that an iteration waits for: its backward pass covers the rest, and in strategy "local"
    the other iterations up to an averaging have their part of it."""
    exchange_s: float | None = None
    """The whole exchange of one update; an averaging in strategy "local"."""
    speed_up: float | None = None
    """Throughput over that of the fastest node with the whole batch."""
    efficiency: float | None = None
    """Throughput over the sum of all nodes running alone, 0 to 1."""
    why_not: str | None = None


class Division(Shares, ThroughputPrediction):
    """How a run divides the global batch over the nodes, with the prediction from its creation."""

    excluded: tuple[str, ...] = ()
    """Nodes that a preflight check excluded."""

    def without(self, nodes: Collection[str]) -> Division:
        """The division over the other nodes, without a prediction."""
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


_MODEL_NAME = re.compile(r"[\w~/][\w~/.:@+ ()-]{0,255}")
"""A name of the Hugging Face Hub, or a path: no command, no option, one line."""


def valid_node_id(value: object) -> str:
    """An identifier (CWE-20). Raises ValueError."""
    if not isinstance(value, str) or not is_identifier(value):
        raise ValueError(f"node_id = {safe_repr(value)}: must be {IDENTIFIER_FORM}")
    return value


def valid_model_name(value: object) -> str:
    """Raises ValueError."""
    if not isinstance(value, str) or _MODEL_NAME.fullmatch(value) is None:
        raise ValueError(f"model_name = {safe_repr(value)}: must be a name or a path, 256 characters at most")
    return value


@dataclass(frozen=True)
class HardwareMetrics:
    """A benchmark result of one node. Raises ValueError for a name of another form, a number that is negative or not
    finite, and a timestamp that is no datetime."""

    node_id: str
    model_name: str
    throughput: float
    """Examples per second; 0 is an offline node."""
    memory_gb: float
    latency_ms: float
    timestamp: datetime

    def __post_init__(self) -> None:
        node = valid_node_id(self.node_id)
        valid_model_name(self.model_name)
        for name in ("throughput", "memory_gb", "latency_ms"):
            not_negative(getattr(self, name), f"{name} of {node}")
        if not isinstance(self.timestamp, datetime):
            raise ValueError(f"timestamp of {node} = {safe_repr(self.timestamp)}: must be a datetime")
