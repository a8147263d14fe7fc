"""The memory section: each rank's need, estimated from config.json or measured by calibration, and its limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Literal

from engine.config.models import NodeConfig
from engine.errors import InputError, memory_text
from engine.job.traits import STRATEGY_TRAITS
from engine.models import NodeFacts
from engine.plan.context import PlanContext, usable_calibration, why_unused
from engine.plan.document import (
    OVERRIDE,
    Disabled,
    MemoryBreakdown,
    MemorySection,
    RankMemory,
    Rationale,
    Settings,
    Source,
    WayOut,
)
from engine.plan.memory.attention import attention_text
from engine.plan.memory.choice import Choice, choose, settings_of, unresolved, with_settings
from engine.plan.memory.estimate import (
    MemoryEstimate,
    RankWorkload,
    Workload,
    estimate,
    estimates,
    is_tiled,
    largest_batch,
    peak_from_probes,
)
from engine.plan.memory.shape import ModelShape
from engine.plan.memory.ways_out import NEWER_MLX, RankPlace, describe_ways, ways_out
from engine.plan.network import gpus_of_ranks
from engine.plan.strategy import split_layers
from engine.protocol.job import AUTO
from engine.protocol.partition import (
    SPLITTABLE_MODULES,
    Fusing,
    LayerSplit,
    cuda_width,
    fusing_device,
    micro_batches,
    mlx_module,
    token_edges,
    version_numbers,
)

_WORTH_NAMING = 0.1
"""Part of the need that an older MLX costs."""
_Source = Literal["estimate", "calibration"]
WORKING_SET = 0.75
"""Share of a Mac's memory, about Metal's recommended working set; used when a node did not report its limit."""
_SMALL_MAC_BYTES, _SMALL_WORKING_SET = 32 * 2**30, 2 / 3
"""Up to this memory it is less: mx.device_info() of a Mac with 8 GB."""


@dataclass(frozen=True)
class MemoryFit:
    """The memory section, and what other sections derive from it."""

    section: MemorySection | Disabled
    settings: Settings | Disabled
    """The job's, with the values chosen for "auto"."""
    split: LayerSplit | None = None
    largest_batch: int | None = None
    """Most sequences per rank that fit every node with these settings; 0 if none does."""
    shape: ModelShape | None = None
    workloads: tuple[RankWorkload, ...] = ()

    def billions(self, least: float) -> bool:
        """True if the model is known to have that many parameters."""
        return isinstance(self.section, MemorySection) and least <= self.section.parameters / 1e9

    @property
    def trained(self) -> int | None:
        """Trained parameters."""
        return self.section.trainable_parameters if isinstance(self.section, MemorySection) else None

    @property
    def trainable_share(self) -> float | None:
        return self.section.trainable_share if isinstance(self.section, MemorySection) else None


def memory_fit(context: PlanContext) -> MemoryFit:
    """Choose what is "auto", estimate every rank, and refuse a job that does not fit."""
    places = [_place(context, node) for node in context.config.nodes]
    limits = [place.limit_bytes for place in places]
    try:
        shape = model_shape(context)
        split = split_layers(context, shape.layers, limits)
        asked = _workloads(context, shape, split, places)
        choice = choose(shape, asked, limits, context.settings)
        workloads = tuple(with_settings(workload, choice.settings) for workload in asked)
        needs = [estimate(shape, workload) for workload in workloads]
        most = [
            _largest_batch(context, rank, shape, workload, place.limit_bytes)
            for rank, (place, workload) in enumerate(zip(places, workloads, strict=True))
            if place.limit_bytes is not None
        ]
    except InputError as error:
        settings = unresolved(context.settings) if context.settings else Disabled(reason=str(error))
        return MemoryFit(unknown_memory(context, error), settings)
    _explain_choice(context, choice)
    _warn_of_tiling(context, choice.settings.sequence_tiling, shape, workloads)
    ranks = list(zip(places, workloads, needs, strict=True))
    _warn_of_older_mlx(context, shape, ranks)
    rows = [_rank_memory(context, place, workload, need) for place, workload, need in ranks]
    ways: tuple[WayOut, ...] = ()
    if context.seeks_ways_out and context.job.kind.trains and any(row.fits is False for row in rows):
        places = [
            replace(place, measured=max(1.0, row.needed_bytes / need.needed_bytes))
            for (place, _, need), row in zip(ranks, rows, strict=True)
        ]
        splittable = mlx_module(str((context.model or {}).get("model_type", ""))) in SPLITTABLE_MODULES
        ways = ways_out(shape, workloads, places, context.settings, splittable=splittable)
    refuse_memory(rows, ways, context)
    # The ranks of a pipeline train different layers, other ranks all the same ones.
    trained = sum(need.trainable_parameters for need in (needs if split else needs[:1]))
    section = memory_section(shape, trained, (need.assumption for need in needs), rows, ways)
    section = section.model_copy(update={"attention": _attention(context, shape, ranks)})
    largest = min(most) if len(most) == context.ranks else None
    return MemoryFit(section, choice.settings, split, largest, shape, workloads)


def model_shape(context: PlanContext) -> ModelShape:
    """Raises InputError with why the memory cannot be estimated."""
    if not context.settings:
        raise InputError("the job runs a custom command")
    if context.model is None:
        raise InputError(f"the model's config.json was not read: {context.model_source}")
    return ModelShape.from_config(context.model)


def _warn_of_older_mlx(
    context: PlanContext, shape: ModelShape, ranks: Iterable[tuple[RankPlace, RankWorkload, MemoryEstimate]]
) -> None:
    for place, workload, need in ranks:
        if place.fuses != "" or workload.sequence_tiling:
            continue
        newer = estimate(shape, replace(workload, fused_attention="metal")).needed_bytes
        if newer < (1 - _WORTH_NAMING) * need.needed_bytes:
            keeps = f"mlx {context.facts[place.node].mlx} on {place.node} keeps attention's scores"
            needs = f"it would need {memory_text(newer)} instead of {memory_text(need.needed_bytes)}"
            grow = f"which grow with the square of {workload.sequence:,} tokens"
            context.warn("memory", f"{keeps}, {grow}: with mlx {NEWER_MLX} {needs}")


def memory_section(
    shape: ModelShape, trained: int, assumptions: Iterable[str], ranks: Iterable[RankMemory], ways: tuple[WayOut, ...]
) -> MemorySection:
    return MemorySection(
        parameters=shape.total_parameters,
        trainable_parameters=trained,
        trainable_share=trained / shape.total_parameters,
        layers=shape.layers,
        assumptions=tuple(dict.fromkeys(assumptions)),
        ranks=tuple(ranks),
        ways_out=ways,
    )


def unknown_memory(context: PlanContext, error: InputError) -> Disabled:
    reason = str(error)
    if context.settings:
        unread = f"the memory need is unknown: {context.model_source}"
        context.warn("memory", reason if context.model is not None else unread)
    context.explain("memory", Source.UNKNOWN, reason)
    return Disabled(reason=reason)


def _place(context: PlanContext, node: NodeConfig) -> RankPlace:
    facts, name = context.facts.get(node.name), node.name
    ranks = on_machine = sum(other.ssh == node.ssh for other in context.config.nodes)
    if facts is None:
        return RankPlace(name, None, ranks, None, limit_from="the node was never probed")
    if facts.mlx_device == "CUDA":
        # Each rank has a GPU of its own while there are enough.
        ranks = -(-ranks // max(1, len(gpus_of_ranks(context.config, facts))))
    shared = f", shared by its {ranks} ranks" if ranks > 1 else ""
    mac, total = facts.system == "Darwin", facts.memory_total_bytes
    limit, limit_from = total, "all memory, since there is no GPU limit"
    if facts.gpu_limit_bytes is not None:
        limit, limit_from = facts.gpu_limit_bytes, "the GPU's limit"
    elif total is None:
        limit_from, shared = "the node did not report its memory", ""
    elif mac:
        share = _SMALL_WORKING_SET if total <= _SMALL_MAC_BYTES else WORKING_SET
        limit, limit_from = int(total * share), f"{share:.0%} of memory, since the GPU's limit is not known"
    size = limit // ranks if limit is not None else None
    fuses = _fusing_device(facts, context.job.env)
    return RankPlace(name, size, on_machine, total if mac else None, limit_from=f"{limit_from}{shared}", fuses=fuses)


def workload_of(context: PlanContext) -> Workload:
    """The settings that all ranks have in common."""
    settings = context.settings
    lora = settings.get("lora_parameters") or {}
    keys = lora.get("keys")
    return Workload(
        fine_tune_type=context.job.fine_tune_type,
        num_layers=int(settings["num_layers"]),
        lora_rank=int(lora.get("rank", 8)),
        lora_keys=tuple(keys) if keys is not None else None,
        sequence=int(settings["max_seq_length"]),
        accumulation=context.accumulation,
        world_size=context.ranks,
    )


def _workloads(
    context: PlanContext, shape: ModelShape, split: LayerSplit | None, places: Sequence[RankPlace]
) -> list[RankWorkload]:
    """Those of the batches that need the most memory."""
    steps = [_step_workloads(context, split, places, step) for step in context.steps]
    return [max(rank, key=lambda load: estimate(shape, load).needed_bytes) for rank in zip(*steps, strict=True)]


def rows_of_ranks(context: PlanContext, sequences: int) -> list[int]:
    """The most sequences of each rank of a global batch of so many of one length, whichever rank comes first; at least
    one."""
    if context.budget is None:
        even = max(1, sequences // context.ranks)
        return [(context.micro_batches or {}).get(name, even) for name in context.names]
    shares, most = [context.shares.parts[name] for name in context.names], [1] * context.ranks
    for first in range(context.ranks):
        edges = token_edges([1] * sequences, [*shares[first:], *shares[:first]])
        for number, (start, end) in enumerate(pairwise(edges), first):
            most[number % context.ranks] = max(most[number % context.ranks], end - start)
    return most


def _step_workloads(
    context: PlanContext, split: LayerSplit | None, places: Sequence[RankPlace], step: tuple[int, int]
) -> list[RankWorkload]:
    settings, (sequences, length) = context.settings, step
    common = RankWorkload(
        **{**asdict(workload_of(context)), "sequence": length},
        optimizer=str(settings["optimizer"]),
        clipping=settings.get("max_grad_norm") is not None,
        wire=str(settings.get("wire", AUTO)),
        outer_momentum=bool(settings["outer_momentum"]),
        strategy=context.strategy,
    )
    if not context.job.kind.trains:
        common = replace(common, num_layers=0, forward="measure")
    if context.job.kind.generates:
        common = replace(common, forward="generate", strategy="data", batch=1)
        sizes = [place.limit_bytes or 0 for place in places]
        ranks = [replace(common, weight_share=size / sum(sizes) if all(sizes) else 1 / len(sizes)) for size in sizes]
    elif context.strategy == "pipeline":
        ranks = _stages(common, sequences, split)
    else:
        ranks = [replace(common, batch=rows) for rows in rows_of_ranks(context, sequences)]
    for number, place in enumerate(places):
        facts, tokens = context.facts.get(place.node), common.sequence
        if facts is not None and facts.mlx_device == "CUDA":
            tokens = max(tokens, cuda_width(tokens - 1))
        ranks[number] = replace(ranks[number], sequence=tokens, fused_attention=place.fuses or "")
    return ranks


def _fusing_device(facts: NodeFacts, env: Mapping[str, str]) -> Fusing | None:
    """See RankPlace.fuses."""
    if facts.mlx is None or facts.gpu != "gpu":
        return None
    capability = min((version_numbers(gpu.compute_capability) for gpu in facts.gpus), default=())
    fuses = fusing_device(facts.mlx_device or "", facts.mlx, env, capability)
    return None if facts.mlx_device == "CUDA" and not fuses else fuses


def _stages(common: RankWorkload, batch: int, split: LayerSplit | None) -> list[RankWorkload]:
    """The first stage has as many micro-batches in flight as there are stages, the last stage only one."""
    return [
        _with_batch(replace(common, layers=split[stage] if split is not None else None), batch, stage)
        for stage in range(common.world_size)
    ]


def _with_batch(workload: RankWorkload, batch: int, stage: int) -> RankWorkload:
    """The stage's, with what it has in flight of a global batch of so many sequences."""
    stages = workload.world_size
    pieces = micro_batches(batch, stages)
    in_flight = -(-batch // pieces) * min(pieces, stages - stage)
    return replace(workload, batch=in_flight, accumulation=max(workload.accumulation, min(pieces, 2)))


def _rank_memory(
    context: PlanContext, place: RankPlace, workload: RankWorkload, estimated: MemoryEstimate
) -> RankMemory:
    need, source = _need(context, place.node, workload, estimated)
    reason = f"from two probe steps, for a batch of {workload.batch}"
    if source == "estimate":
        unused = f" (calibration not used: {why_not})" if (why_not := why_unused(context)) else ""
        reason = f"from config.json: {estimated.assumption}{unused}"
    tokens = f"{workload.batch} × {workload.sequence:,} tokens"
    why = f"{memory_text(need.needed_bytes)} with the reserve, {tokens}, {reason}; limit: {place.limit_from}"
    context.explain(f"memory.{place.node}", Source.RULE if source == "estimate" else Source.CALIBRATION, why)
    return rank_memory(need, place.node, (place.limit_bytes, place.limit_from), source)


def rank_memory(need: MemoryBreakdown, node: str, limit: tuple[int | None, str], source: _Source) -> RankMemory:
    """`limit`: bytes, and where they come from or why they are unknown."""
    limit_bytes, limit_from = limit
    return RankMemory(
        **{name: getattr(need, name) for name in MemoryBreakdown.model_fields},
        node=node,
        source=source,
        limit_bytes=limit_bytes,
        limit_from=limit_from,
        fits=need.needed_bytes <= limit_bytes if limit_bytes is not None else None,
    )


def _largest_batch(context: PlanContext, rank: int, shape: ModelShape, workload: RankWorkload, size: int) -> int:
    """Most sequences that fit `size` bytes of the rank; of a pipeline, of the global batch for each rank."""

    def load(sequences: int) -> RankWorkload:
        if not STRATEGY_TRAITS[workload.strategy].divides_batch:
            return _with_batch(workload, sequences * context.ranks, rank)
        return replace(workload, batch=sequences)

    estimate_of, node = estimates(shape, load(1)), context.names[rank]

    def needed(sequences: int) -> MemoryEstimate:
        of_rank = load(sequences)
        return _need(context, node, of_rank, estimate_of(of_rank.batch))[0]

    return largest_batch(needed, size)


def _need(
    context: PlanContext, node: str, workload: RankWorkload, estimated: MemoryEstimate
) -> tuple[MemoryEstimate, _Source]:
    """The peak comes from the probe steps of a usable calibration of this job, else from the estimate."""
    calibration = usable_calibration(context)
    # A probe's step is of one rank alone: with local it would lack the averaging, which may be the peak, and the
    # averaged weights with their momentum. All sequences of a probe have max_seq_length tokens.
    shorter = workload.sequence < int(context.settings["max_seq_length"])
    unlike = context.strategy != "data" or workload.forward or shorter
    if calibration is None or calibration.synthetic_model or unlike:
        return estimated, "estimate"
    measured, peak = calibration.measure_of(node), None
    # With other settings the probe steps tell nothing.
    if measured is not None and calibration.settings in ({}, dict(settings_of(workload))):
        peak = peak_from_probes(measured.probes, workload.batch, estimated.before_bytes)
    return (
        (estimated, "estimate") if peak is None else (estimated.model_copy(update={"peak_bytes": peak}), "calibration")
    )


def _explain_choice(context: PlanContext, choice: Choice) -> None:
    precise, recomputed, tiled = "the most precise that fits", "all activations fit", "whole sequences fit"
    if choice.rejected_bytes is not None:
        precise += f": the next more precise would need {memory_text(choice.rejected_bytes)}"
    if choice.settings.grad_checkpoint:
        recomputed = "as few layers are recomputed as must be"
    if choice.whole_bytes is not None:
        tiled = f"the largest that fit: without tiles {memory_text(choice.whole_bytes)} are needed"
    if not choice.fits:
        precise = recomputed = tiled = "it needs the least, and does not fit"
    if context.strategy == "sharded":
        recomputed = "sharded layers are always recomputed"
    chosen = {
        "optimizer_precision": precise, "moments": precise, "grad_checkpoint": recomputed, "sequence_tiling": tiled,
    }  # fmt: skip
    for key, reason in chosen.items():
        context.explain_setting(key, context.settings.get(key), reason)


def _warn_of_tiling(context: PlanContext, tokens: int, shape: ModelShape, workloads: Sequence[RankWorkload]) -> None:
    parts = {part for layer in shape.architecture.layers for part in layer.sublayers}
    if tokens and not any(is_tiled(part, load, shape.dtype_bytes) for part in parts for load in workloads):
        why = "no scores of attention and no MLP are computed in tiles"
        context.warn("memory", f"sequence_tiling = {tokens} saves no memory here: {why}")


def _attention(
    context: PlanContext, shape: ModelShape, ranks: Iterable[tuple[RankPlace, RankWorkload, MemoryEstimate]]
) -> dict[str, str]:
    """By node; the reasons of the plan have each text once."""
    texts = {
        place.node: attention_text(shape, workload, context.facts.get(place.node), context.job.env)
        for place, workload, _ in ranks
    }
    for text in filter(None, dict.fromkeys(texts.values())):
        nodes = [node for node in texts if texts[node] == text]
        where = f"{', '.join(nodes)}: " if len(nodes) < len(texts) else ""
        context.explain("memory.attention", Source.RULE, where + text)
    return texts


def refuse_memory(rows: Sequence[RankMemory], ways: Sequence[WayOut], rationale: Rationale) -> None:
    unknown = [row.node for row in rows if row.limit_bytes is None]
    if unknown:
        rationale.warn("memory", f"the memory of {', '.join(unknown)} is unknown, and so is whether the job fits")
    small = [row for row in rows if row.fits is False]
    if not small:
        return
    needs = "; ".join(
        f"{row.node} needs {memory_text(row.needed_bytes)} of {memory_text(row.limit_bytes)}"
        for row in small
        if row.limit_bytes is not None
    )
    nowhere = "it fits on no node: " if len(small) == len(rows) else ""
    rationale.refuse("memory", f"{nowhere}{needs}", OVERRIDE, describe_ways(ways))
