"""The table of docs/plan.md on what an exchange of gradients takes, by the plan's own arithmetic."""

from __future__ import annotations

from typing import Final, Literal

from engine.measurements import LinkMeasure
from engine.plan.memory.estimate import RankWorkload, estimate
from engine.plan.memory.shape import ModelShape, trained_element_bytes
from engine.plan.prediction import exchange_s
from engine.protocol.exchange import Exchange, exchange
from tests.bench.known_sizes import QWEN3_4B, QWEN3_14B

RANKS: Final = 2
WIRES: Final = ("float32", "auto", "int8")
LINKS: Final = {
    **{f"{gigabits:g} Gbit/s": gigabits * 1e9 / 8 for gigabits in (0.1, 0.2, 0.5, 1, 10)},
    "Thunderbolt, 5 GB/s": 5e9,
}
"""Bytes per second in each direction."""
_LORA: Final = RankWorkload(num_layers=16)
_FULL: Final = RankWorkload(fine_tune_type="full")
CASES: Final = (
    ("LoRA of Qwen3-4B, last 16 layers", QWEN3_4B, _LORA),
    ("full fine-tuning of Qwen3-4B", QWEN3_4B, _FULL),
    ("full fine-tuning of Qwen3-14B", QWEN3_14B, _FULL),
)


def seconds(trained: int, form: Exchange, bytes_per_s: float) -> float:
    """An exchange of so many gradients by two ranks over a link of that speed, without its latency."""
    # What a rank sends for an all_sum of two ranks is as large as its result.
    link = LinkMeasure(nodes=("a", "b"), latency_s=0.0, bandwidth_bytes_per_s=bytes_per_s)
    found = exchange_s(link, 4 * trained, form)
    assert found is not None
    return found


def table() -> str:
    """One line for each form that an exchange has; forms of equal size share one."""
    lines = [["training, trained parameters", "`wire`", "sent by each rank", *LINKS]]
    lines.append(["---"] * len(lines[0]))
    for name, config, workload in CASES:
        trained = estimate(ModelShape.from_config(config), workload).trainable_parameters
        kind: Literal["lora", "dora", "full"] = workload.fine_tune_type
        own = trained_element_bytes(config, kind)
        forms: dict[Exchange, list[str]] = {}
        for wire in WIRES:
            forms.setdefault(exchange(wire, RANKS, own), []).append(wire)
        for form, wires in forms.items():
            found = [_seconds(seconds(trained, form, speed)) for speed in LINKS.values()]
            sent = f"{trained * form.sent / 1e6:,.0f} MB"
            lines.append([f"{name}, {trained / 1e6:,.0f} M", ", ".join(wires), sent, *found])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s"
