"""memory: what a rank needs, by the model's config.json or by what calibration measured, against what its node has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.errors import InputError
from engine.models import NodeFacts
from engine.planning.advice import OVERRIDE
from engine.planning.document import Disabled, MemoryPart, RankMemory
from engine.planning.memory.estimate import MemoryAsk, MemoryEstimate, estimate, largest_batch
from engine.planning.memory.probes import peak_from_probes
from engine.planning.memory.shape import ModelShape
from engine.planning.notes import Notes, Source
from engine.planning.situation import Situation
from engine.planning.usable import unused, usable
from engine.worker.layers import Split
from engine.worker.strategies.stages import micro_batches

WORKING_SET = 0.75
"""Of a Mac's memory: about Metal's recommended working set, where a node did not say its own limit."""
Divide = Callable[[int | None, Sequence[int | None]], Split | None]
"""Layers and the ranks' limits, bytes → a pipeline's split; None for other strategies."""


@dataclass(frozen=True)
class Need:
    """What follows from the memory."""

    part: MemoryPart | Disabled
    split: Split | None = None
    largest_batch: int | None = None
    """Sequences of a rank that fit every node; 0: not one does."""
    parameters: int | None = None
    trainable_share: float | None = None
    fits: bool | None = None
    """None where a limit or the need is not known."""


@dataclass(frozen=True)
class _Limit:
    bytes: int | None
    source: str


@dataclass(frozen=True)
class _Peak:
    bytes: int
    source: str
    told: str


def need(now: Situation, divide: Divide, notes: Notes) -> Need:
    """Estimate every rank, and refuse what does not fit."""
    limits = _limits(now)
    sizes = [limit.bytes for limit in limits]
    if not now.settings:
        return Need(_unknown("the job runs a command of its own", notes))
    if now.inputs.model is None:
        notes.warn("memory", f"what it needs is not known: {now.inputs.model_from}")
        return Need(_unknown(f"the model's config.json was not read: {now.inputs.model_from}", notes))
    try:
        shape = ModelShape.of(now.inputs.model)
        split = divide(shape.layers, sizes)
        asks = _asks(now, split)
        estimates = [estimate(shape, ask) for ask in asks]
        most = [largest_batch(shape, ask, size) or 0 for ask, size in zip(asks, sizes, strict=True) if size is not None]
    except InputError as error:
        notes.warn("memory", str(error))
        return Need(_unknown(str(error), notes))
    needs = [_needed(now, *each) for each in zip(now.names, asks, estimates, strict=True)]
    rows = [_row(*each) for each in zip(now.names, estimates, needs, limits, strict=True)]
    for row, ask, needed in zip(rows, asks, needs, strict=True):
        _why(row, ask, needed, notes)
    _refuse(now, rows, notes)
    whole = shape.total_parameters
    trained = _trained(estimates, split)
    fits = None if any(row.fits is None for row in rows) else all(row.fits for row in rows)
    part = MemoryPart(
        parameters=whole,
        trainable_parameters=trained,
        trainable_share=trained / whole,
        layers=shape.layers,
        assumptions=tuple(dict.fromkeys(found.assumption for found in estimates)),
        ranks=tuple(rows),
    )
    largest = min(most) if len(most) == now.ranks else None
    return Need(part, split, largest, whole, part.trainable_share, fits)


def _unknown(reason: str, notes: Notes) -> Disabled:
    notes.why("memory", Source.UNKNOWN, reason)
    return Disabled(reason=reason)


def _limits(now: Situation) -> list[_Limit]:
    """Each rank's part of what its machine can give."""
    nodes = now.inputs.config.nodes
    on_host = Counter(node.ssh for node in nodes)
    return [_limit(now.inputs.facts.get(node.name), on_host[node.ssh]) for node in nodes]


def _limit(facts: NodeFacts | None, ranks: int) -> _Limit:
    if facts is None:
        return _Limit(None, "the node was never seen")
    shared = f", divided by its {ranks} ranks" if ranks > 1 else ""
    if facts.gpu_limit_bytes is not None:
        return _Limit(facts.gpu_limit_bytes // ranks, f"the GPU's limit{shared}")
    if facts.memory_total_bytes is None:
        return _Limit(None, "the node did not say its memory")
    if facts.system == "Darwin":
        size = int(facts.memory_total_bytes * WORKING_SET) // ranks
        return _Limit(size, f"{WORKING_SET:.0%} of memory, since the GPU's limit is not known{shared}")
    return _Limit(facts.memory_total_bytes // ranks, f"all memory: there is no GPU limit{shared}")


def _asks(now: Situation, split: Split | None) -> list[MemoryAsk]:
    settings = now.settings
    lora = settings.get("lora_parameters") or {}
    keys = lora.get("keys")
    even = max(1, int(settings["batch_size"]) // now.ranks)
    common = MemoryAsk(
        fine_tune_type=now.job.fine_tune_type,
        num_layers=int(settings["num_layers"]),
        lora_rank=int(lora.get("rank", 8)),
        lora_keys=tuple(keys) if keys is not None else None,
        sequence=int(settings["max_seq_length"]),
        # A sharded layer is always run again in the backward pass.
        grad_checkpoint=bool(settings.get("grad_checkpoint")) or now.inputs.strategy == "sharded",
        optimizer=str(settings["optimizer"]),
        optimizer_precision=settings.get("optimizer_precision") or "float32",
        strategy=now.inputs.strategy,
        world_size=now.ranks,
        accumulation=now.accumulation,
    )
    if now.inputs.strategy == "pipeline":
        return _stages(common, int(settings["batch_size"]), split)
    return [replace(common, batch=now.micro[name] if now.micro is not None else even) for name in now.names]


def _stages(common: MemoryAsk, batch: int, split: Split | None) -> list[MemoryAsk]:
    """The first stage has as many micro-batches under way as there are stages, the last one a single one."""
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


def _needed(now: Situation, name: str, ask: MemoryAsk, found: MemoryEstimate) -> _Peak:
    """By the two probe steps of a usable calibration of this very job, else by the estimate."""
    taken = usable(now.inputs)
    if taken is not None and not taken.stand_in and now.inputs.strategy == "data":
        measured = taken.of(name)
        probes = measured.probes if measured is not None else ()
        peak = peak_from_probes(probes, ask.batch, before_bytes=found.before_bytes)
        if peak is not None:
            return _Peak(peak, "calibration", f"two probe steps say so for a batch of {ask.batch}")
    why_not = unused(now.inputs)
    told = f"from config.json: {found.assumption}" + (f" ({why_not}: not used)" if why_not else "")
    return _Peak(found.peak_bytes, "estimate", told)


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


def _why(row: RankMemory, ask: MemoryAsk, peak: _Peak, notes: Notes) -> None:
    needed = f"{row.needed_bytes / 1e9:,.2f} GB with the reserve" if row.needed_bytes is not None else "not known"
    size = f"{ask.batch} × {ask.sequence:,} tokens"
    source = Source.CALIBRATION if peak.source == "calibration" else Source.RULE
    notes.why(f"memory.{row.node}", source, f"{needed}, {size}, {peak.told}; limit: {row.limit_from}")


def _refuse(now: Situation, rows: Sequence[RankMemory], notes: Notes) -> None:
    unknown = [row.node for row in rows if row.limit_bytes is None]
    if unknown:
        notes.warn("memory", f"the memory of {', '.join(unknown)} is not known: whether it fits there is not, either")
    small = [row for row in rows if row.fits is False]
    if not small:
        return
    told = "; ".join(
        f"{row.node} needs {row.needed_bytes / 1e9:,.1f} GB of {row.limit_bytes / 1e9:,.1f} GB"
        for row in small
        if row.needed_bytes is not None and row.limit_bytes is not None
    )
    nowhere = "it fits on no node: " if len(small) == len(rows) else ""
    notes.refuse("memory", f"{nowhere}{told}; {_way_out(now)}", OVERRIDE)


def _way_out(now: Situation) -> str:
    """What makes it smaller, in the order of what it costs."""
    ways = []
    if now.micro is not None and max(now.micro.values()) > 1:
        ways.append("a smaller batch_size with more grad_accumulation_steps")
    if not now.settings.get("grad_checkpoint") and now.inputs.strategy != "sharded":
        ways.append("grad_checkpoint = true")
    ways.append("a smaller max_seq_length")
    if now.full:
        ways.append('fine_tune_type = "lora"')
    if now.inputs.strategy == "data" and now.ranks > 1:
        ways.append("--strategy sharded or pipeline to see whether the nodes together hold it")
    return "what helps: " + ", ".join(ways)


def _trained(estimates: Sequence[MemoryEstimate], split: Split | None) -> int:
    """A pipeline's ranks train their own layers, all others the same ones."""
    return sum(found.trainable_parameters for found in estimates) if split else estimates[0].trainable_parameters
