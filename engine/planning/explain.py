"""The plan in prose: a summary, and the reason of each choice with where its figure came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.planning.document import ChunkingPart, MemoryPart, TrainingPlan
from engine.planning.notes import Source

_FROM = {
    Source.FACT: "seen on the nodes",
    Source.CALIBRATION: "measured by calibrate",
    Source.RULE: "by rule",
    Source.USER: "the configuration",
    Source.DEFAULT: "a default",
    Source.UNKNOWN: "not known",
}
Row = tuple[str, str]


def summary(plan: TrainingPlan) -> list[Row]:
    """What would be launched, on what, and what it needs: (label, text), in the order in which one reads."""
    rows = [("job", f"{plan.job} on {plan.cluster}"), ("strategy", _strategy(plan)), ("batch", _batch(plan))]
    if (rate := _rate(plan)) is not None:
        rows.append(("learning rate", rate))
    rows += [
        ("shares", _shares(plan)),
        ("backend", f"{plan.rdma_config.backend or 'not known'}: {plan.rdma_config.reason}"),
    ]
    rows.append(("memory", _memory(plan)))
    rows.append(("throughput", _throughput(plan)))
    rows.append(("saves", _saves(plan)))
    rows.append(("data", _data(plan)))
    return rows


def explained(plan: TrainingPlan) -> Iterator[tuple[str, list[Row]]]:
    """Each section, with its choices as (key and value, reason and source); "" is the section as a whole."""
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
            [(advice.name, _advised(advice.text, advice.source, disputed=advice.disputed)) for advice in plan.advice],
        )


def _strategy(plan: TrainingPlan) -> str:
    part = plan.strategy
    words = f"{part.parallelism}, {_count(part.world_size, 'rank')} on {_count(part.nodes, 'machine')}"
    if part.layer_split is not None:
        words += f", layers {part.layer_split}"
    if part.bubble is not None:
        words += f", {part.bubble:.0%} of a step waiting"
    return words if part.launchable else f"{words}; {part.not_launchable}"


def _batch(plan: TrainingPlan) -> str:
    part = plan.batch_configuration
    if part.total_batch_size is None:
        return "the command's own"
    micro = " + ".join(f"{node} {count}" for node, count in (part.micro_batch or {}).items())
    words = f"{part.total_batch_size} an update"
    if micro:
        words += f": {micro}"
    if part.gradient_accumulation_steps != 1:
        words += f", {part.gradient_accumulation_steps} times"
    if part.largest_per_gpu_batch_size is not None:
        words += f"; up to {part.largest_per_gpu_batch_size:,} a rank would fit"
    return words


def _rate(plan: TrainingPlan) -> str | None:
    part = plan.batch_configuration
    if part.learning_rate is None:
        return None
    words = f"{part.learning_rate:g}"
    if part.rule_learning_rate is not None:
        words += f" ({part.learning_rate_rule} rule: {part.rule_learning_rate:.2g})"
    return words + (f", {_count(part.warmup_steps, 'update')} of warm-up" if part.warmup_steps else "")


def _shares(plan: TrainingPlan) -> str:
    shares = plan.hardware_calibration.workload_distribution
    return ", ".join(f"{node} {share:.1%}" for node, share in shares.items())


def _memory(plan: TrainingPlan) -> str:
    part = plan.memory
    if not isinstance(part, MemoryPart):
        return f"not known: {part.reason}"
    words = []
    for rank in part.ranks:
        need = f"{rank.needed_bytes / 1e9:,.1f}" if rank.needed_bytes is not None else "?"
        limit = f"{rank.limit_bytes / 1e9:,.1f} GB" if rank.limit_bytes is not None else "an unknown limit"
        words.append(f"{rank.node} {need} of {limit}" + (", too much" if rank.fits is False else ""))
    return "; ".join(dict.fromkeys(words))


def _throughput(plan: TrainingPlan) -> str:
    part = plan.performance_targets
    if part.throughput is None:
        why = next((r.reason for r in plan.reasons if r.key == "performance_targets.throughput"), "")
        return f"not known: {why}"
    words = f"{part.throughput:.2f} samples/s"
    return words + (f", {part.speed_up:.2f} times the fastest node alone" if part.speed_up is not None else "")


def _saves(plan: TrainingPlan) -> str:
    part = plan.checkpoint_strategy
    if part.frequency is None:
        return "the command's own"
    beside = (
        "and the whole state beside the training, to " if part.async_ else "the state not: [checkpoint] is off; to "
    )
    return f"adapters every {part.frequency:,} iterations (rule: {part.suggested_frequency:,}), {beside}{part.storage}"


def _data(plan: TrainingPlan) -> str:
    size = f"{plan.data.examples:,} examples, " if plan.data.examples is not None else "not known: "
    chunks = plan.coordinator_chunking
    tail = f"; {chunks.num_chunks} chunks of {chunks.chunk_size:,}" if isinstance(chunks, ChunkingPart) else ""
    return f"{size}{plan.data.source}{tail}"


def _advised(text: str, source: str, *, disputed: bool) -> str:
    return f"{text} ({source}{'; disputed' if disputed else ''})"


def _count(number: int | None, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}" if number is not None else f"? {noun}s"


def _value(values: Mapping[str, Any], key: str) -> str | None:
    """A figure of the document, where the key names one that is short."""
    found: Any = values
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    if isinstance(found, bool):
        return str(found).lower()
    if isinstance(found, float):
        return f"{found:g}"
    if isinstance(found, Mapping):
        short = all(isinstance(item, int | float) for item in found.values()) and 0 < len(found) <= 16
        return (
            ", ".join(
                f"{name} {item:.3g}" if isinstance(item, float) else f"{name} {item}" for name, item in found.items()
            )
            if short
            else None
        )
    return str(found) if isinstance(found, int | str) and len(str(found)) <= 60 else None
