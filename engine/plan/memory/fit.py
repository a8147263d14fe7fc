"""The memory section: the memory that each rank needs, estimated from config.json or measured by calibration, and the
limit of its node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.config.models import NodeConfig
from engine.errors import InputError
from engine.plan.context import PlanContext, usable_calibration, why_unused
from engine.plan.document import OVERRIDE, Disabled, MemorySection, RankMemory, Rationale, Source
from engine.plan.memory.estimate import MemoryEstimate, RankWorkload, estimate, largest_batch, peak_from_probes
from engine.plan.memory.shape import ModelShape
from engine.plan.strategy import split_layers
from engine.protocol.partition import LayerSplit, micro_batches

WORKING_SET = 0.75
"""Share of a Mac's memory, about Metal's recommended working set; used when a node did not report its limit."""


@dataclass(frozen=True)
class MemoryFit:
    """The memory section, and what other sections derive from it."""

    section: MemorySection | Disabled
    split: LayerSplit | None = None
    largest_batch: int | None = None
    """Most sequences per rank that fit every node; 0 if none does."""

    def billions(self, least: float, below: float = math.inf) -> bool:
        """True if the model is known to have that many parameters."""
        return isinstance(self.section, MemorySection) and least <= self.section.parameters / 1e9 < below

    @property
    def trainable_share(self) -> float | None:
        return self.section.trainable_share if isinstance(self.section, MemorySection) else None

    @property
    def fits(self) -> bool:
        """True if every node is known to have enough memory."""
        return isinstance(self.section, MemorySection) and all(row.fits for row in self.section.ranks)


def memory_fit(context: PlanContext, rationale: Rationale) -> MemoryFit:
    """Estimate every rank, and refuse a job that does not fit."""
    nodes = context.inputs.config.nodes
    sizes = [size for size, _ in (_limit(context, node) for node in nodes)]
    if not context.settings:
        return MemoryFit(_unknown("the job runs a custom command", rationale))
    if context.inputs.model is None:
        rationale.warn("memory", f"the memory need is unknown: {context.inputs.model_source}")
        return MemoryFit(_unknown(f"the model's config.json was not read: {context.inputs.model_source}", rationale))
    try:
        shape = ModelShape.from_config(context.inputs.model)
        split = split_layers(context, shape.layers, sizes, rationale)
        workloads = _workloads(context, split)
        estimates = [estimate(shape, workload) for workload in workloads]
        known = [(workload, size) for workload, size in zip(workloads, sizes, strict=True) if size is not None]
        most = [largest_batch(shape, workload, size) for workload, size in known]
    except InputError as error:
        rationale.warn("memory", str(error))
        return MemoryFit(_unknown(str(error), rationale))
    rows = [
        _rank_memory(context, node, workload, found, rationale)
        for node, workload, found in zip(nodes, workloads, estimates, strict=True)
    ]
    _refuse(context, rows, rationale)
    whole = shape.total_parameters
    # The ranks of a pipeline train different layers, other ranks all the same ones.
    trained = sum(found.trainable_parameters for found in (estimates if split else estimates[:1]))
    section = MemorySection(
        parameters=whole,
        trainable_parameters=trained,
        trainable_share=trained / whole,
        layers=shape.layers,
        assumptions=tuple(dict.fromkeys(found.assumption for found in estimates)),
        ranks=tuple(rows),
    )
    largest = min(most) if len(most) == context.ranks else None
    return MemoryFit(section, split, largest)


def _unknown(reason: str, rationale: Rationale) -> Disabled:
    rationale.explain("memory", Source.UNKNOWN, reason)
    return Disabled(reason=reason)


def _limit(context: PlanContext, node: NodeConfig) -> tuple[int | None, str]:
    """The rank's part of its machine's memory, bytes, and where it comes from or why it is unknown."""
    facts = context.inputs.facts.get(node.name)
    ranks = sum(other.ssh == node.ssh for other in context.inputs.config.nodes)
    if facts is None:
        return None, "the node was never probed"
    shared = f", shared by its {ranks} ranks" if ranks > 1 else ""
    if facts.gpu_limit_bytes is not None:
        return facts.gpu_limit_bytes // ranks, f"the GPU's limit{shared}"
    if facts.memory_total_bytes is None:
        return None, "the node did not report its memory"
    if facts.system == "Darwin":
        size = int(facts.memory_total_bytes * WORKING_SET) // ranks
        return size, f"{WORKING_SET:.0%} of memory, since the GPU's limit is not known{shared}"
    return facts.memory_total_bytes // ranks, f"all memory, since there is no GPU limit{shared}"


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
        grad_checkpoint=context.recomputes or context.strategy == "sharded",
        optimizer=str(settings["optimizer"]),
        optimizer_precision="parameter" if settings.get("optimizer_precision") == "parameter" else "float32",
        strategy=context.strategy,
        world_size=context.ranks,
        accumulation=context.accumulation,
    )
    if context.strategy == "pipeline":
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


def _rank_memory(
    context: PlanContext, node: NodeConfig, workload: RankWorkload, found: MemoryEstimate, rationale: Rationale
) -> RankMemory:
    """The peak comes from the probe steps of a usable calibration of this job, else from the estimate."""
    limit_bytes, limit_from = _limit(context, node)
    measured = _measured_peak(context, node.name, workload, found)
    reason = f"from two probe steps, for a batch of {workload.batch}"
    if measured is None:
        why_not = why_unused(context.inputs)
        reason = f"from config.json: {found.assumption}" + (f" (calibration not used: {why_not})" if why_not else "")
    peak = found.peak_bytes if measured is None else measured
    needed = peak + found.reserve_bytes
    rationale.explain(
        f"memory.{node.name}",
        Source.RULE if measured is None else Source.CALIBRATION,
        f"{needed / 1e9:,.2f} GB with the reserve, {workload.batch} × {workload.sequence:,} tokens, {reason}; "
        f"limit: {limit_from}",
    )
    return RankMemory(
        **{**dict(found), "peak_bytes": peak},
        node=node.name,
        source="estimate" if measured is None else "calibration",
        limit_bytes=limit_bytes,
        limit_from=limit_from,
        fits=needed <= limit_bytes if limit_bytes is not None else None,
    )


def _measured_peak(context: PlanContext, node: str, workload: RankWorkload, found: MemoryEstimate) -> int | None:
    calibration = usable_calibration(context.inputs)
    if calibration is None or calibration.synthetic_model or context.strategy != "data":
        return None
    measured = calibration.measure_of(node)
    return peak_from_probes(measured.probes, workload.batch, found.before_bytes) if measured is not None else None


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
        if row.limit_bytes is not None
    )
    nowhere = "it fits on no node: " if len(small) == len(rows) else ""
    rationale.refuse("memory", f"{nowhere}{found}; {_way_out(context)}", OVERRIDE)


def _way_out(context: PlanContext) -> str:
    """Settings that need less memory, cheapest first."""
    ways = []
    if context.micro_batches is not None and max(context.micro_batches.values()) > 1:
        ways.append("a smaller batch_size with more grad_accumulation_steps")
    if not context.recomputes and context.strategy != "sharded":
        ways.append("grad_checkpoint = true")
    ways.append("a smaller max_seq_length")
    if context.full:
        ways.append('fine_tune_type = "lora"')
    if context.strategy == "data" and context.ranks > 1:
        ways.append("--strategy sharded or pipeline")
    return "try " + ", ".join(ways)
