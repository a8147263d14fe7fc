"""The tables of docs/plan.md on what an exchange of gradients takes, and an averaging of weights, by the plan's own
arithmetic."""

from __future__ import annotations

from typing import Final, Literal

from engine.config.mlx_lm_keys import DEFAULTS
from engine.measurements import LinkMeasure
from engine.plan.memory.estimate import RankWorkload, estimate
from engine.plan.memory.shape import ModelShape, trained_element_bytes
from engine.plan.prediction import exchange_s, mean_updates
from engine.protocol.exchange import Averaging, Exchange, averaging, exchange
from tests.bench.known_sizes import QWEN3_4B, QWEN3_14B

RANKS: Final = 2
WIRES: Final = ("float32", "auto", "int8")
LINKS: Final = {
    **{f"{gigabits:g} Gbit/s": gigabits * 1e9 / 8 for gigabits in (0.1, 0.2, 0.5, 1, 10)},
    "Thunderbolt, 5 GB/s": 5e9,
}
"""Bytes per second in each direction."""
SLOW_LINKS: Final = {"20 Mbit/s": 20e6 / 8, "100 Mbit/s": 100e6 / 8, "1 Gbit/s": 1e9 / 8}
UPDATES: Final = mean_updates(DEFAULTS)
"""Of a job of the default length."""
_LORA: Final = RankWorkload(num_layers=16)
_FULL: Final = RankWorkload(fine_tune_type="full")
CASES: Final = (
    ("LoRA of Qwen3-4B, last 16 layers", QWEN3_4B, _LORA),
    ("full fine-tuning of Qwen3-4B", QWEN3_4B, _FULL),
    ("full fine-tuning of Qwen3-14B", QWEN3_14B, _FULL),
)


def seconds(trained: int, form: Exchange | Averaging, bytes_per_s: float) -> float:
    """An exchange of so many gradients, or changes of weights, by two ranks over a link of that speed, without its
    latency."""
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


def averaging_table() -> str:
    """The exchange of an update with data, and an averaging with local beside its part for each update."""
    lines = [["training, trained parameters", "strategy, `wire`", "sent by a rank", *SLOW_LINKS]]
    lines.append(["---"] * len(lines[0]))
    for name, config, workload in CASES:
        trained = estimate(ModelShape.from_config(config), workload).trainable_parameters
        data = exchange("auto", RANKS, trained_element_bytes(config, workload.fine_tune_type))
        local = averaging("auto", RANKS)
        forms: list[tuple[str, Exchange | Averaging, float, float]] = [
            ("data, auto", data, data.sent, 1),
            ("data, int8", int8 := exchange("int8", RANKS, 4), int8.sent, 1),
            ("local, auto: an averaging", local, local.element_bytes, 1),
            ("local, auto: for each update", local, local.element_bytes, UPDATES),
        ]
        for title, form, sent, updates in forms:
            found = [_seconds(seconds(trained, form, speed) / updates) for speed in SLOW_LINKS.values()]
            size = f"{trained * sent / updates / 1e6:,.1f} MB"
            lines.append([f"{name}, {trained / 1e6:,.0f} M", title, size, *found])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s"
