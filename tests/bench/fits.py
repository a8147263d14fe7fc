"""Full fine-tunings of public models that fit 64, 128 and 512 GB, and two such machines, by the plan's own estimate
(engine.plan.memory.estimate): a table that tests.bench.memory prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from engine.plan.memory.estimate import RankWorkload, estimate
from engine.plan.memory.fit import WORKING_SET
from engine.plan.memory.shape import ModelShape
from tests.bench.figures import Figure
from tests.bench.known_sizes import QWEN3, QWEN3_4B, QWEN3_14B, QWEN3_32B, TOKENS

MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen3-4B": QWEN3_4B,
    "Qwen3-8B": {
        **QWEN3,
        "hidden_size": 4_096,
        "num_hidden_layers": 36,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "Qwen3-14B": QWEN3_14B,
    "Qwen3-32B": QWEN3_32B,
    "Llama-3.3-70B": {
        "model_type": "llama",
        "hidden_size": 8_192,
        "num_hidden_layers": 80,
        "intermediate_size": 28_672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}
FORMS: Final[Mapping[str, dict[str, Any]]] = {
    "float32": {"optimizer_precision": "float32", "moments": "float32"},
    "kahan, 8-bit": {"optimizer_precision": "kahan", "moments": "8bit"},
    "parameter": {"optimizer_precision": "parameter"},
}
"""The most precise first."""
MACHINES: Final = {f"{count} × {size} GB": (count, size) for count in (1, 2) for size in (64, 128, 512)}
"""How many, and GB of each one's memory."""
PROMISED: Final = {
    "Qwen3-4B": (1, 64 * WORKING_SET),
    "Qwen3-14B": (1, 200),
    "Qwen3-32B": (1, 384),
    "Llama-3.3-70B": (2, 512 * WORKING_SET),
}
"""Machines, and the GB of each that must be enough."""


@dataclass(frozen=True)
class Need:
    """What each machine needs for one form of the optimizer."""

    form: str
    gigabytes: float
    """10⁹ bytes, the reserve included."""


def needs(model: str, machines: int) -> list[Need]:
    """In the order of FORMS: one sequence on each machine, every layer recomputed, sharded over several."""
    shape = ModelShape.from_config(MODELS[model])
    base = RankWorkload(
        fine_tune_type="full",
        sequence=TOKENS,
        grad_checkpoint=True,
        optimizer="adamw",
        strategy="sharded" if machines > 1 else "data",
        world_size=machines,
    )
    found = [(form, estimate(shape, replace(base, **keys))) for form, keys in FORMS.items()]
    return [Need(form, (need.peak_bytes + need.reserve_bytes) / 1e9) for form, need in found]


def fits(model: str, machines: int, size: float) -> Need | None:
    """The most precise form that fits, in what Metal lets a process use of `size` GB; None where none does."""
    return next((need for need in needs(model, machines) if need.gigabytes <= size * WORKING_SET), None)


def fit_table() -> list[list[str]]:
    """A line per model, of Markdown's table."""
    lines = [["model", *MACHINES], ["---"] * (1 + len(MACHINES))]
    for model in MODELS:
        cells = [fits(model, machines, size) for machines, size in MACHINES.values()]
        lines.append([model, *(f"{need.form}: {need.gigabytes:.0f} GB" if need else "no" for need in cells)])
    return lines


def fit_figures() -> Iterator[Figure]:
    """What has to fit."""
    for model, (machines, limit) in PROMISED.items():
        least = min(needs(model, machines), key=lambda need: need.gigabytes)
        where = "one machine" if machines == 1 else f"each of {machines}, sharded"
        value = f"{least.gigabytes:.0f} GB ({least.form})"
        yield Figure(f"{model}, {TOKENS:,} tokens: {where}", value, f"<= {limit:.0f} GB", least.gigabytes <= limit)
