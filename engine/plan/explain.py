"""The plan as text for people: a summary, and the reason and source of each choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import memory_text, plural, size_text
from engine.plan.document import (
    BatchSection,
    CheckpointSection,
    ChosenSettings,
    ChunkingSection,
    Disabled,
    MemorySection,
    PaddingSection,
    Settings,
    Source,
    StrategySection,
    TrainingPlan,
)

_FROM = {
    Source.FACT: "reported by the nodes", Source.CALIBRATION: "measured by calibrate", Source.RULE: "rule",
    Source.USER: "configuration", Source.DEFAULT: "default", Source.UNKNOWN: "unknown",
}  # fmt: skip
Row = tuple[str, str]
_WORTH_NAMING = 0.05
"""A gain in real tokens over computed ones."""
_MANY = 4
"""More nodes than this are not listed if all are alike."""


def summary(plan: TrainingPlan) -> list[Row]:
    """The planned launch, its nodes and its needs, as (label, text)."""
    shares = plan.hardware_calibration.workload_distribution
    rows = [
        ("job", f"{plan.job} on {plan.cluster}"),
        ("strategy", _strategy(plan.strategy)),
        ("batch", _batch(plan.batch_configuration)),
        ("learning rate", _rate(plan.batch_configuration)),
        ("shares", ", ".join(_by_node({node: f"{share:.1%}" for node, share in shares.items()}))),
        ("backend", f"{plan.rdma_config.backend or 'not known'}: {plan.rdma_config.reason}"),
        ("memory", _memory(plan.memory, plan.settings)),
        ("throughput", _throughput(plan)),
        ("saves", _saves(plan.checkpoint_strategy)),
        ("data", _data(plan)),
    ]
    return [(label, text) for label, text in rows if text]


def explained(plan: TrainingPlan) -> Iterator[tuple[str, list[Row]]]:
    """(section, rows) where a row is (key and value, reason and source); the key "" means the whole section."""
    values = plan.model_dump(mode="json", by_alias=True)
    sections: dict[str, list[Row]] = {}
    for reason in plan.reasons:
        section, _, key = reason.key.partition(".")
        value = _value(values, reason.key)
        label = f"{key} = {value}" if key and value is not None else key
        sections.setdefault(section, []).append((label, f"{reason.reason} ({_FROM[reason.source]})"))
    yield from sections.items()
    if plan.advice:
        yield (
            "advice",
            [(item.name, f"{item.text} ({item.source}{'; disputed' * item.disputed})") for item in plan.advice],
        )


def _by_node(texts: Mapping[str, str]) -> list[str]:
    """One text for each node, or a single one where many are alike."""
    if len(texts) > _MANY and len(set(texts.values())) == 1:
        return [f"{next(iter(texts.values()))} on each of {len(texts)} nodes"]
    return [f"{node} {text}" for node, text in texts.items()]


def _strategy(section: StrategySection) -> str:
    text = f"{section.parallelism}, {plural(section.world_size, 'rank')} on {plural(section.nodes, 'machine')}"
    if section.layer_split is not None:
        text += f", layers {section.layer_split}"
    if section.bubble is not None:
        text += f", waiting {section.bubble:.0%} of each step"
    if section.local_steps is not None:
        text += f", the weights averaged at least every {plural(section.local_steps, 'update')}"
    if section.averaging_bytes is not None:
        text += f" ({size_text(section.averaging_bytes)} each way)"
    return text


def _batch(section: BatchSection) -> str:
    if section.total_batch_size is None:
        return "chosen by the command"
    micro = " + ".join(_by_node({node: str(count) for node, count in (section.micro_batch or {}).items()}))
    padding = section.padding
    budget = padding is not None and padding.batch_tokens is not None
    text = f"{'about ' * budget}{section.total_batch_size} per update"
    if micro:
        text += f": {micro}"
    if section.gradient_accumulation_steps != 1:
        text += f", accumulated {section.gradient_accumulation_steps} times"
    if section.largest_per_gpu_batch_size is not None:
        text += f"; up to {section.largest_per_gpu_batch_size:,} per rank would fit"
    return text if padding is None else f"{text}; {_padding(padding)}"


def _padding(section: PaddingSection) -> str:
    rows, width = section.largest_step
    text = f"{section.real_share:.0%} of the tokens computed are real, the largest step has {rows:,} × {width:,}"
    better = f"batch_tokens = {section.suggested_batch_tokens}"
    if section.batch_tokens is None and section.suggested_real_share > section.real_share + _WORTH_NAMING:
        text += f"; with {better} {section.suggested_real_share:.0%}"
    elif section.batch_tokens is not None and section.suggested_batch_tokens < section.batch_tokens:
        text += f"; {better} would fit"
    return text


def _rate(section: BatchSection) -> str:
    """Empty for a custom command."""
    if section.learning_rate is None:
        return ""
    text = f"{section.learning_rate:g} ({section.learning_rate_rule} rule: {section.rule_learning_rate:.2g})"
    return text + (f", {plural(section.warmup_steps, 'update')} of warm-up" if section.warmup_steps else "")


def _memory(section: MemorySection | Disabled, settings: Settings | Disabled) -> str:
    if isinstance(section, Disabled):
        return f"not known: {section.reason}"
    by_node = {}
    for rank in section.ranks:
        limit = memory_text(rank.limit_bytes) if rank.limit_bytes is not None else "an unknown limit"
        too_much = ", too much" if rank.fits is False else ""
        by_node[rank.node] = f"{memory_text(rank.needed_bytes)} of {limit}{too_much}"
    text = _by_node(by_node)
    if not isinstance(settings, Disabled) and settings != ChosenSettings():
        text.append(f"with {settings.text}")
    return "; ".join(dict.fromkeys(text))


def _throughput(plan: TrainingPlan) -> str:
    section = plan.performance_targets
    if section.throughput is None:
        why = next((r.reason for r in plan.reasons if r.key == "performance_targets.throughput"), "")
        return f"not known: {why}"
    text = f"{section.throughput:.2f} samples/s"
    return text + (f", {section.speed_up:.2f} times the fastest node alone" if section.speed_up is not None else "")


def _saves(section: CheckpointSection) -> str:
    if section.frequency is None:
        return "by the command itself"
    state = "with the training state in the background" if section.async_ else "without the training state"
    rule = f" (rule: {section.suggested_frequency:,})" if section.suggested_frequency is not None else ""
    return f"adapters every {section.frequency:,} iterations{rule}, {state}, to {section.storage}"


def _data(plan: TrainingPlan) -> str:
    size = f"{plural(plan.data.examples, 'example')}, " if plan.data.examples is not None else "not known: "
    chunks = plan.coordinator_chunking
    tail = f"; {chunks.num_chunks} chunks of {chunks.chunk_size:,}" if isinstance(chunks, ChunkingSection) else ""
    return f"{size}{plan.data.source}{tail}"


def _value(values: Mapping[str, Any], key: str) -> str | None:
    """The value at `key` of the document, if it is short enough to print."""
    value: Any = values
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping) and 0 < len(value) <= 16 and all(isinstance(n, int | float) for n in value.values()):
        return ", ".join(f"{name} {n:.3g}" if isinstance(n, float) else f"{name} {n}" for name, n in value.items())
    return str(value) if isinstance(value, int | str) and len(str(value)) <= 60 else None
