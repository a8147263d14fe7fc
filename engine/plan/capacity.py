"""The longest sequence and the largest batch that fit each node: the most that the plan does not refuse."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import FineTuneType
from engine.plan.context import PlanInputs, make_context
from engine.plan.document import Disabled, RankMemory, Settings
from engine.plan.memory.architecture import ConfigReader
from engine.plan.memory.estimate import MOST_SEQUENCES
from engine.plan.memory.shape import ModelShape, quantized_as
from engine.plan.planner import FITS
from engine.protocol.job import Framework

_STEP, _MOST_TOKENS = 32, 2**20
"""Tokens: lengths are multiples; the longest of a model that does not say what it is made for."""
_FOUR_BITS: Final[Mapping[Framework, Sequence[Mapping[str, object]]]] = {
    "mlx": [{"quantization": {"bits": 4, "group_size": 64}}],
    "torch": [],
}
"""By framework, as `mlx_lm.convert -q` makes them by default."""
_OF_MEMORY: Final = ("system", "memory_total_bytes", "gpu_limit_bytes", "gpu", "gpus", "mlx", "mlx_device")
"""The facts that decide what fits."""


@dataclass(frozen=True)
class Capacity:
    nodes: tuple[str, ...]
    """Nodes that are alike. The amount is that of a job whose other ranks run on such nodes, too."""
    method: str
    """ "lora", "dora", "full"; "qlora" and "qdora" of quantized weights."""
    weights: str
    """ "bfloat16", "4 bits"."""
    amount: int | None = None
    """Tokens, or sequences per rank; 0 where not even the least fits; None where that is not known."""
    why_not: str = ""
    """Why it is not known."""
    memory: RankMemory | None = None
    """With this amount, or the least."""
    settings: Settings | Disabled | None = None
    """Those chosen for it."""


@dataclass(frozen=True)
class CapacityReport:
    model: str
    """Where its config.json was read."""
    made_for: int | None
    """Tokens of the longest sequence that the model is made for; None if it does not say."""
    sequence: int
    """The job's `max_seq_length`, for the batches."""
    longest: list[Capacity] | None
    largest_batch: list[Capacity] | None


def capacities(inputs: PlanInputs, *, longest: bool, largest_batch: bool) -> CapacityReport:
    """The longest sequences, one per rank, at most what the model is made for, and the largest batches of a rank.
    Raises InputError for a model of an unknown kind."""
    model, job = inputs.model or {}, inputs.config.job
    tables = (ConfigReader(model), ConfigReader(ConfigReader(model).get_table("text_config")))
    made_for = next(filter(None, (table.get_int("max_position_embeddings", default=0) for table in tables)), None)
    step = min(_STEP, made_for or _STEP)
    lengths, batches = range(step, (made_for or _MOST_TOKENS) + 1, step), range(1, MOST_SEQUENCES + 1)
    return CapacityReport(
        inputs.model_source,
        made_for,
        int(job.mlx_lm["max_seq_length"]),
        [*_capacities(inputs, lengths, lambda tokens: {"max_seq_length": tokens})] if longest else None,
        [*_capacities(inputs, batches, lambda batch: {"batch_size": batch})] if largest_batch else None,
    )


def _capacities(inputs: PlanInputs, amounts: range, keys: Callable[[int], dict[str, int]]) -> Iterator[Capacity]:
    model, nodes = inputs.model or {}, inputs.config.nodes
    dtype, bits = ModelShape.from_config(model).dtype, quantized_as(model)
    methods = [
        ("q" * (bits is not None and kind != "full") + kind, bits or dtype, model) for kind in get_args(FineTuneType)
    ]
    if bits is None:
        methods += [("qlora", "4 bits", {**model, **packed}) for packed in _FOUR_BITS[inputs.config.job.framework]]
    alike: dict[object, list[str]] = {}
    for node in nodes:
        facts = inputs.facts.get(node.name)
        seen = facts and tuple(getattr(facts, name) for name in _OF_MEMORY)
        alike.setdefault((seen, sum(other.ssh == node.ssh for other in nodes)), []).append(node.name)
    for names in alike.values():
        everywhere = {node.name: inputs.facts[names[0]] for node in nodes} if names[0] in inputs.facts else {}
        for method, weights, changed in methods:
            asked = replace(inputs, model=changed, facts=everywhere)
            yield _searched(Capacity(tuple(names), method, weights), asked, amounts, keys)


def _searched(
    capacity: Capacity, inputs: PlanInputs, amounts: Sequence[int], keys: Callable[[int], dict[str, int]]
) -> Capacity:
    def fit(amount: int) -> tuple[Capacity, bool]:
        """The plan's verdict, and whether it refuses the memory."""
        context = make_context(_with_keys(inputs, capacity.method.removeprefix("q"), keys(amount)))
        memory = FITS[context.job.framework](context)
        if isinstance(memory.section, Disabled):
            return replace(capacity, why_not=memory.section.reason), False
        ranks = [rank for rank in memory.section.ranks if rank.node in capacity.nodes]
        largest = max(ranks, key=lambda rank: rank.needed_bytes)
        if largest.limit_bytes is None:
            return replace(capacity, why_not=largest.limit_from), False
        refused = any(refusal.name == "memory" for refusal in context.refusals)
        return replace(capacity, amount=0 if refused else amount, memory=largest, settings=memory.settings), refused

    least, refused = fit(amounts[0])
    if least.why_not or refused:
        return least
    return fit(amounts[bisect_left(amounts, True, key=lambda amount: fit(amount)[1]) - 1])[0]


def _with_keys(inputs: PlanInputs, kind: str, keys: Mapping[str, int]) -> PlanInputs:
    """One sequence per rank, or `batch_size` of them, and equal shares; no calibration: that is of other sizes."""
    job, ranks = inputs.config.job, len(inputs.config.nodes)
    layers = {} if "num_layers" in job.given else {"num_layers": with_defaults({"fine_tune_type": kind})["num_layers"]}
    settings = {**job.mlx_lm, **layers, **keys, "fine_tune_type": kind, "batch_tokens": None}
    settings["batch_size"] = keys.get("batch_size", 1) * ranks
    nodes = tuple(node.model_copy(update={"share": None}) for node in inputs.config.nodes)
    job = job.model_copy(update={"fine_tune_type": kind, "mlx_lm": settings})
    config = inputs.config.model_copy(update={"job": job, "nodes": nodes})
    return replace(inputs, config=config, calibration=None, division=None, seeks_ways_out=False)
