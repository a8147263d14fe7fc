"""The inputs of a plan, collected beforehand, and the context that its sections share. Planning itself contacts no node
and reads neither files nor the clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from engine.config.mlx_lm_keys import DEFAULTS
from engine.config.models import Config, JobConfig
from engine.errors import plural
from engine.measurements import Calibration, Division, Shares, ThroughputPrediction
from engine.models import NodeFacts, Topology
from engine.plan.data_report import DataReport
from engine.plan.document import Launching, PlanIssue, PlannedCheck, Rationale, Source
from engine.plan.fingerprint import age_days, is_stale
from engine.plan.network import NetworkPlan
from engine.plan.padding import BatchShapes, laid_out, shapes
from engine.plan.prediction import predict_throughput
from engine.plan.shares import divide_batch
from engine.protocol.job import AUTO, Strategy
from engine.protocol.partition import epoch_iterations, input_width

_M4_MAX_BYTES = 128 * 2**30
"""hw.memsize of the largest M4 Max."""


@dataclass(frozen=True)
class Tools:
    """Paths of programs on this machine that the plan mentions."""

    python: str
    flightdeck: str


@dataclass(frozen=True)
class PlanInputs:
    config: Config
    """Contains only the nodes that would take part."""
    now: datetime
    topology: Topology
    tools: Tools
    facts: Mapping[str, NodeFacts] = field(default_factory=dict)
    """Last known facts by node, however old; nodes that were never probed are missing."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why a node does not respond now."""
    network: NetworkPlan | None = None
    network_problem: str | None = None
    """Why `network` is None."""
    model: Mapping[str, Any] | None = None
    """The model's config.json."""
    model_source: str = ""
    """Where `model` was read, or why it was not."""
    examples: int | None = None
    """Number of training examples."""
    examples_source: str = ""
    converted: str | None = None
    """The name of the folder that each node makes of its data; None for mlx-lm's own."""
    lengths: Mapping[int, int] = field(default_factory=dict)
    """Rows by their tokens, of some rows of the training data that a node has tokenised; empty if unknown."""
    report: DataReport | None = None
    report_problem: str | None = None
    """Why the job's data report could not be read."""
    calibration: Calibration | None = None
    division: Division | None = None
    """How the batch was divided when the run was created; None before that, when the calibration decides."""
    recoveries_s: tuple[float, ...] = ()
    """From a failure to the first step after it, in earlier runs of this job on this cluster, newest first."""
    left_out: tuple[str, ...] = ()
    """Nodes of the configuration that would not take part."""
    launching: Launching = field(default_factory=Launching)
    rank_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that `flightdeck launch` sets for every rank, without secrets."""
    obstacles: tuple[PlanIssue, ...] = ()
    """Reported by nodes, and refused."""
    checks: tuple[PlannedCheck, ...] = ()
    seeks_ways_out: bool = True
    """Find which changes would let a job fit that does not."""


def usable_calibration(inputs: PlanInputs) -> Calibration | None:
    return inputs.calibration if why_unused(inputs) is None else None


def why_unused(inputs: PlanInputs) -> str | None:
    """None when a calibration is used, and when there is none."""
    taken = inputs.calibration
    if taken is None:
        return None
    if not inputs.config.calibration.enabled:
        return "[calibration] enabled = false"
    if is_stale(inputs.config, taken, inputs.now):
        return f"the calibration is {plural(round(age_days(taken, inputs.now)), 'day')} old"
    return None


def job_iterations(settings: Mapping[str, Any], batches: int | None) -> int | None:
    """The iterations of a job with these mlx-lm keys; None where they depend on an epoch's unknown `batches`."""
    epochs = settings.get("epochs")
    if epochs is None:
        return int(settings["iters"])
    return epoch_iterations(float(epochs), batches) if batches is not None else None


@dataclass(frozen=True, kw_only=True)
class PlanContext(Rationale, PlanInputs):
    """The inputs, with what several sections derive from them, and the rationale that all sections collect."""

    strategy: Strategy
    """The job's or, where that is "auto", the plan's; "auto" is a script's own."""
    rows: Sequence[int]
    """Tokens of the training data's rows, as laid out from those measured; empty if unknown."""
    shares: Shares
    micro_batches: Mapping[str, int] | None
    """Sequences of the global batch by node; None for a custom command, for a batch that is too small, and for a
    pipeline, in which every stage processes the whole batch."""
    throughput: ThroughputPrediction

    @property
    def job(self) -> JobConfig:
        return self.config.job

    @property
    def settings(self) -> Mapping[str, Any]:
        """mlx-lm's keys; {} for a custom command."""
        return self.job.mlx_lm if self.job.kind.own_model is None else {}

    @property
    def budget(self) -> int | None:
        """batch_tokens; batch_size then is the mean number of sequences of a batch, as far as it is known."""
        return self.settings.get("batch_tokens")

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Sequences, and tokens of each, of the global batches of which one needs the most memory: with a budget, those
        of the longest examples and those that have all of it."""
        longest = int(self.settings["max_seq_length"])
        if self.budget is None:
            return [(int(self.settings["batch_size"]), longest)]
        if self.rows and sum(self.lengths.values()) >= (self.examples or math.inf):
            longest = min(longest, 1 + input_width(self.rows[0], longest))
        most = max(1, self.budget // longest)
        shorter = (most + 1, max(2, self.budget // (most + 1)))
        return [(most, longest), *[shorter] * (self.budget - most * longest > longest // 16)]

    @property
    def backend(self) -> str | None:
        """None if the ranks cannot be connected."""
        return self.network.backend if self.network is not None else None

    @property
    def shares_source(self) -> Source:
        return {"fixed": Source.USER, "calibrated": Source.CALIBRATION, "equal": Source.RULE}[self.shares.source]

    @property
    def names(self) -> list[str]:
        """Node names in rank order."""
        return [node.name for node in self.config.nodes]

    @property
    def ranks(self) -> int:
        return len(self.config.nodes)

    @property
    def platform(self) -> str:
        """ "apple", "cuda", "cpu" or "unknown"."""
        facts, of_mlx = list(self.facts.values()), self.job.framework == "mlx"
        if any(fact.system == "Darwin" for fact in facts):
            return "apple"
        # To MLX an NVIDIA GPU is of use with its CUDA build alone.
        cuda = [
            fact.mlx_device == "CUDA" or (fact.gpus and not (of_mlx and fact.mlx_device == "CPU")) for fact in facts
        ]
        return "cuda" if any(cuda) else "cpu" if facts else "unknown"

    @property
    def m4_max(self) -> list[str]:
        """The nodes that are an M4 Max, of at most 128 GB."""
        probed = ((name, fact) for name in self.names if (fact := self.facts.get(name)) is not None)
        m4_max = ((name, fact) for name, fact in probed if "M4 Max" in (fact.chip or ""))
        return [name for name, fact in m4_max if (fact.memory_total_bytes or 0) <= _M4_MAX_BYTES]

    @property
    def validates(self) -> bool:
        """The job computes a loss on examples that it does not train on."""
        return bool(self.settings) and bool(self.settings.get("val_batches") or self.settings.get("test"))

    @property
    def full(self) -> bool:
        return bool(self.settings) and self.job.fine_tune_type == "full"

    @property
    def accumulation(self) -> int:
        return int(self.settings.get("grad_accumulation_steps") or 1)

    @property
    def total_batch(self) -> int | None:
        """Sequences per update; None for a custom command."""
        return int(self.settings["batch_size"]) * self.accumulation if self.settings else None

    @property
    def iterations(self) -> int | None:
        """None for a custom command, and for epochs over an unknown number of examples."""
        return job_iterations(self.settings, self._batches) if self.settings else None

    @cached_property
    def shapes(self) -> BatchShapes | None:
        """Those of the job's batches; None if the rows are unknown."""
        sequences, longest = int(self.settings["batch_size"]), int(self.settings["max_seq_length"])
        return shapes(self.rows, longest, sequences=sequences, budget=self.budget) if self.rows else None

    @property
    def sequences(self) -> float:
        """Those of a global batch; with batch_tokens the mean, less than one per rank perhaps."""
        if self.budget is None or self.shapes is None:
            return int(self.settings["batch_size"])
        return self.shapes.rows

    @property
    def _batches(self) -> int | None:
        """Those of an epoch, which leaves out no example with batch_tokens."""
        if self.examples is None:
            return None
        batches = self.examples / self.sequences
        return round(batches) if self.budget is not None else int(batches)

    @property
    def updates(self) -> int | None:
        """Optimizer updates in the whole run; an incomplete last accumulation is applied too."""
        return -(-self.iterations // self.accumulation) if self.iterations is not None else None

    @property
    def updates_per_epoch(self) -> float | None:
        if not self.settings or self.examples is None:
            return None
        return self.examples / (self.sequences * self.accumulation)

    def given(self, *keys: str) -> bool:
        """True if the configuration sets any of these keys of [job], or one differs from its default."""
        return any(key in self.job.given or self.settings.get(key) != DEFAULTS.get(key) for key in keys)

    def explain_setting(self, key: str, value: Any, chosen: str) -> None:
        """`chosen`: why the plan has taken it, where the job's `value` of the key is "auto"."""
        source, reason = (Source.USER, "the job sets it") if value or self.given(key) else (Source.DEFAULT, "not set")
        if value == AUTO:
            source, reason = Source.RULE, chosen
        self.explain(f"settings.{key}", source, reason)


def make_context(inputs: PlanInputs) -> PlanContext:
    """Divide the batch and predict the throughput. A batch that cannot be divided is refused."""
    rows = _rows(inputs)
    inputs = _with_batch_size(inputs, rows)
    config, rationale = inputs.config, Rationale()
    shares = _shares(inputs, rationale)
    # A division brings its own warnings about them.
    for name in inputs.left_out if inputs.division is None else ():
        rationale.warn("hardware_calibration", f"{name} completed no step during calibration and is left out")
    for name in inputs.division.excluded if inputs.division is not None else ():
        rationale.warn("nodes", f"{name} is left out: a preflight check excluded it")
    for warning in shares.warnings:
        rationale.warn("hardware_calibration", warning)
    micro = None
    if (batch := config.job.mlx_lm.get("batch_size")) is not None and config.job.kind.strategy.divides_batch:
        try:
            micro = shares.micro_batches(int(batch))
        except ValueError as error:
            rationale.refuse("batch_size", str(error))
    throughput = ThroughputPrediction(why_not=(inputs.division and inputs.division.why_not) or why_unused(inputs))
    if throughput.why_not is None:
        throughput = predict_throughput(config, inputs.calibration, shares)
    return PlanContext(
        **vars(inputs),
        **vars(rationale),
        strategy=config.job.strategy,
        rows=rows,
        shares=shares,
        micro_batches=micro,
        throughput=throughput,
    )


def _rows(inputs: PlanInputs) -> list[int]:
    job = inputs.config.job
    trains = job.kind.own_model is None
    return laid_out(inputs.lengths, inputs.examples, int(job.mlx_lm["max_seq_length"])) if trains else []


def _with_batch_size(inputs: PlanInputs, rows: Sequence[int]) -> PlanInputs:
    """With batch_tokens: the mean sequences of a batch as batch_size, or those of full length where it is unknown."""
    job = inputs.config.job
    budget, ranks = job.mlx_lm.get("batch_tokens"), len(inputs.config.nodes)
    if budget is None or job.kind.own_model is not None:
        return inputs
    longest = int(job.mlx_lm["max_seq_length"])
    mean = round(shapes(rows, longest, budget=budget).rows) if rows else budget // longest
    job = job.model_copy(update={"mlx_lm": {**job.mlx_lm, "batch_size": max(mean, ranks, 1)}})
    return replace(inputs, config=inputs.config.model_copy(update={"job": job}))


def _shares(inputs: PlanInputs, rationale: Rationale) -> Shares:
    if inputs.division is not None:
        return inputs.division
    try:
        return divide_batch(inputs.config, inputs.calibration, now=inputs.now)
    except ValueError as error:
        rationale.refuse("hardware_calibration", str(error))
        return divide_batch(inputs.config, None)
