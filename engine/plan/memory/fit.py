"""The memory section: the memory that each rank needs, estimated from config.json or measured by calibration, and the
limit of its node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.errors import InputError
from engine.models import NodeFacts
from engine.plan.advice import OVERRIDE
from engine.plan.context import PlanContext, usable_calibration, why_unused
from engine.plan.document import Disabled, MemorySection, RankMemory, Rationale, Source
from engine.plan.memory.estimate import MemoryEstimate, RankWorkload, estimate, largest_batch, peak_from_probes
from engine.plan.memory.shape import ModelShape
from engine.protocol.partition import LayerSplit, micro_batches

WORKING_SET = 0.75
"""Share of a Mac's memory, about Metal's recommended working set; used when a node did not report its limit."""
Divide = Callable[[int | None, Sequence[int | None]], LayerSplit | None]
"""(layers, limits of the ranks in bytes) → the split of a pipeline; None for other strategies."""


@dataclass(frozen=True)
class MemoryFit:
    """The memory section, and what other sections derive from it."""

    section: MemorySection | Disabled
    split: LayerSplit | None = None
    largest_batch: int | None = None
    """Most sequences per rank that fit every node; 0 if none does."""
    parameters: int | None = None
    trainable_share: float | None = None
    fits: bool | None = None
    """None if a limit or the need is unknown."""


@dataclass(frozen=True)
class _Limit:
    bytes: int | None
    source: str


@dataclass(frozen=True)
class _Peak:
    bytes: int
    source: str
    reason: str


def memory_fit(context: PlanContext, divide: Divide, rationale: Rationale) -> MemoryFit:
    """Estimate every rank, and refuse a job that does not fit."""
    limits = _limits(context)
    sizes = [limit.bytes for limit in limits]
    if not context.settings:
        return MemoryFit(_unknown("the job runs a custom command", rationale))
    if context.inputs.model is None:
        rationale.warn("memory", f"the memory need is unknown: {context.inputs.model_source}")
        return MemoryFit(_unknown(f"the model's config.json was not read: {context.inputs.model_source}", rationale))
    try:
        shape = ModelShape.from_config(context.inputs.model)
        split = divide(shape.layers, sizes)
        workloads = _workloads(context, split)
        estimates = [estimate(shape, workload) for workload in workloads]
        most = [
            largest_batch(shape, workload, size) or 0
            for workload, size in zip(workloads, sizes, strict=True)
            if size is not None
        ]
    except InputError as error:
        rationale.warn("memory", str(error))
        return MemoryFit(_unknown(str(error), rationale))
    needs = [_needed(context, *each) for each in zip(context.names, workloads, estimates, strict=True)]
    rows = [_row(*each) for each in zip(context.names, estimates, needs, limits, strict=True)]
    for row, workload, needed in zip(rows, workloads, needs, strict=True):
        _why(row, workload, needed, rationale)
    _refuse(context, rows, rationale)
    whole = shape.total_parameters
    trained = _trained(estimates, split)
    fits = None if any(row.fits is None for row in rows) else all(row.fits for row in rows)
    section = MemorySection(
        parameters=whole,
        trainable_parameters=trained,
        trainable_share=trained / whole,
        layers=shape.layers,
        assumptions=tuple(dict.fromkeys(found.assumption for found in estimates)),
        ranks=tuple(rows),
    )
    largest = min(most) if len(most) == context.ranks else None
    return MemoryFit(section, split, largest, whole, section.trainable_share, fits)


def _unknown(reason: str, rationale: Rationale) -> Disabled:
    rationale.explain("memory", Source.UNKNOWN, reason)
    return Disabled(reason=reason)


def _limits(context: PlanContext) -> list[_Limit]:
    """Each rank's part of its machine's memory."""
    nodes = context.inputs.config.nodes
    on_host = Counter(node.ssh for node in nodes)
    return [_limit(context.inputs.facts.get(node.name), on_host[node.ssh]) for node in nodes]


def _limit(facts: NodeFacts | None, ranks: int) -> _Limit:
    if facts is None:
        return _Limit(None, "the node was never probed")
    shared = f", shared by its {ranks} ranks" if ranks > 1 else ""
    if facts.gpu_limit_bytes is not None:
        return _Limit(facts.gpu_limit_bytes // ranks, f"the GPU's limit{shared}")
    if facts.memory_total_bytes is None:
        return _Limit(None, "the node did not report its memory")
    if facts.system == "Darwin":
        size = int(facts.memory_total_bytes * WORKING_SET) // ranks
        return _Limit(size, f"{WORKING_SET:.0%} of memory, since the GPU's limit is not known{shared}")
    return _Limit(facts.memory_total_bytes // ranks, f"all memory, since there is no GPU limit{shared}")


def _workloads(context: PlanContext, split: LayerSplit | None) -> list[RankWorkload]:
    settings = context.settings
    lora = settings.get("lora_parameters") or {}
    keys = lora.get("keys")
    even = max(1, int(settings["batch_size"]) // context.ranks)
    common = RankWorkload(
        fine_tune_type=context.job.fine_tune_type,
        num_layers=int(settings["num_layers"]),
        lora_rank=int(lora.get("rank", 8)),
        lora_keys=tuple(keys) if keys is not None else None,
        sequence=int(settings["max_seq_length"]),
        # A sharded layer is always recomputed in the backward pass.
        grad_checkpoint=bool(settings.get("grad_checkpoint")) or context.inputs.strategy == "sharded",
        optimizer=str(settings["optimizer"]),
        optimizer_precision=settings.get("optimizer_precision") or "float32",
        strategy=context.inputs.strategy,
        world_size=context.ranks,
        accumulation=context.accumulation,
    )
    if context.inputs.strategy == "pipeline":
        return _stages(common, int(settings["batch_size"]), split)
    return [
        replace(common, batch=context.micro_batches[name] if context.micro_batches is not None else even)
        for name in context.names
    ]


def _stages(common: RankWorkload, batch: int, split: LayerSplit | None) -> list[RankWorkload]:
    """The first stage has as many micro-batches in flight as there are stages, the last stage only one."""
    stages = common.world_size
    pieces = micro_batches(batch, stages)
    return [
        replace(
            common,
            batch=-(-batch // pieces) * min(pieces, stages - stage),
            layers=split[stage] if split is not None else None,
            accumulation=max(common.accumulation, min(pieces, 2)),
        )
        for stage in range(stages)
    ]


def _needed(context: PlanContext, name: str, workload: RankWorkload, found: MemoryEstimate) -> _Peak:
    """Uses the probe steps of a usable calibration of this job, else the estimate."""
    taken = usable_calibration(context.inputs)
    if taken is not None and not taken.synthetic_model and context.inputs.strategy == "data":
        measured = taken.measure_of(name)
        probes = measured.probes if measured is not None else ()
        peak = peak_from_probes(probes, workload.batch, before_bytes=found.before_bytes)
        if peak is not None:
            return _Peak(peak, "calibration", f"from two probe steps, for a batch of {workload.batch}")
    why_not = why_unused(context.inputs)
    reason = f"from config.json: {found.assumption}" + (f" (calibration not used: {why_not})" if why_not else "")
    return _Peak(found.peak_bytes, "estimate", reason)


def _row(name: str, found: MemoryEstimate, peak: _Peak, limit: _Limit) -> RankMemory:
    needed = peak.bytes + found.reserve_bytes
    return RankMemory(
        node=name,
        weights_bytes=found.weights_bytes,
        gradients_bytes=found.gradients_bytes,
        optimizer_bytes=found.optimizer_bytes,
        activations_bytes=found.activations_bytes,
        logits_bytes=found.logits_bytes,
        communication_bytes=found.communication_bytes,
        update_bytes=found.update_bytes,
        reserve_bytes=found.reserve_bytes,
        peak_bytes=peak.bytes,
        needed_bytes=needed,
        source=peak.source,
        limit_bytes=limit.bytes,
        limit_from=limit.source,
        fits=needed <= limit.bytes if limit.bytes is not None else None,
    )


def _why(row: RankMemory, workload: RankWorkload, peak: _Peak, rationale: Rationale) -> None:
    needed = f"{row.needed_bytes / 1e9:,.2f} GB with the reserve" if row.needed_bytes is not None else "not known"
    size = f"{workload.batch} × {workload.sequence:,} tokens"
    source = Source.CALIBRATION if peak.source == "calibration" else Source.RULE
    rationale.explain(f"memory.{row.node}", source, f"{needed}, {size}, {peak.reason}; limit: {row.limit_from}")


def _refuse(context: PlanContext, rows: Sequence[RankMemory], rationale: Rationale) -> None:
    unknown = [row.node for row in rows if row.limit_bytes is None]
    if unknown:
        rationale.warn("memory", f"the memory of {', '.join(unknown)} is unknown, and so is whether the job fits")
    small = [row for row in rows if row.fits is False]
    if not small:
        return
    found = "; ".join(
        f"{row.node} needs {row.needed_bytes / 1e9:,.1f} GB of {row.limit_bytes / 1e9:,.1f} GB"
        for row in small
        if row.needed_bytes is not None and row.limit_bytes is not None
    )
    nowhere = "it fits on no node: " if len(small) == len(rows) else ""
    rationale.refuse("memory", f"{nowhere}{found}; {_way_out(context)}", OVERRIDE)


def _way_out(context: PlanContext) -> str:
    """Settings that need less memory, cheapest first."""
    ways = []
    if context.micro_batches is not None and max(context.micro_batches.values()) > 1:
        ways.append("a smaller batch_size with more grad_accumulation_steps")
    if not context.settings.get("grad_checkpoint") and context.inputs.strategy != "sharded":
        ways.append("grad_checkpoint = true")
    ways.append("a smaller max_seq_length")
    if context.full:
        ways.append('fine_tune_type = "lora"')
    if context.inputs.strategy == "data" and context.ranks > 1:
        ways.append("--strategy sharded or pipeline")
    return "try " + ", ".join(ways)


def _trained(estimates: Sequence[MemoryEstimate], split: LayerSplit | None) -> int:
    """Pipeline ranks train different layers; other ranks train the same ones."""
    return sum(found.trainable_parameters for found in estimates) if split else estimates[0].trainable_parameters
