"""The strategy section: which ranks run where, how a pipeline splits its layers; and the choice of another strategy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine.config.edit import with_settings
from engine.config.models import Config
from engine.errors import memory_text, plural, size_text
from engine.plan.context import PlanContext
from engine.plan.document import Source, StrategySection
from engine.plan.memory.shape import trained_element_bytes
from engine.plan.prediction import mean_updates
from engine.protocol.exchange import averaging, exchange
from engine.protocol.job import AUTO, Strategy
from engine.protocol.partition import (
    SPLITTABLE_MODULES,
    LayerSplit,
    bubble_fraction,
    check_split,
    format_split,
    layer_split,
    micro_batches,
    mlx_module,
    parse_split,
)
from engine.security.sanitise import plain

M4_MAX_LAYERS = 8
"""Most pipeline layers on an M4 Max in full fine-tuning: users hit Metal's GPU watchdog with more."""
_APPROACH = {
    "data": "data parallelism: every rank holds the whole model and computes its share of each batch",
    "sharded": "sharded data parallelism: parameters, gradients and optimizer state are partitioned over the ranks",
    "pipeline": "pipeline parallelism (1F1B): every rank holds contiguous layers",
    "local": "local training with periodic averaging (as DiLoCo): every rank trains the whole model by itself on its "
    "share of each batch; another algorithm than data, with other losses",
    "auto": "as the command divides the training",
    "ddp": "distributed data parallelism (DDP): every rank holds the whole training state",
    "fsdp": "fully sharded data parallelism (FSDP2): the training state is partitioned over the ranks",
    "deepspeed": "DeepSpeed ZeRO: the training state is partitioned over the ranks",
}


def strategy_section(context: PlanContext, split: LayerSplit | None, trained: int | None) -> StrategySection:
    """`split` is None unless the strategy is a pipeline whose layers could be split. `trained` parameters, None if
    unknown."""
    name = context.strategy
    hosts = [node.ssh for node in context.config.nodes]
    per_host = {hosts.count(host) for host in hosts}
    shown, source, origin = str(name), Source.USER, "set by the job, or its default"
    if name == AUTO:
        shown, origin = "the script's own", "see settings"
    elif context.job.strategy == AUTO:
        source, origin = Source.RULE, 'strategy = "auto", by the memory of the ranks: see settings.strategy'
    context.explain("strategy.parallelism", source, f"{shown}: {origin}")
    ranks = f"one process for each rank: {context.ranks} on {plural(len(set(hosts)), 'machine')}"
    of_mac = "; one process drives the GPU of a Mac" if context.platform == "apple" else ""
    context.explain("strategy.world_size", Source.USER, f"{ranks}{of_mac}")
    _refuse_impossible(context)
    return StrategySection(
        approach=_APPROACH[name],
        total_gpus=context.ranks,
        nodes=len(set(hosts)),
        gpus_per_node=per_host.pop() if len(per_host) == 1 else None,
        parallelism=shown,
        layer_split=format_split(split) if split is not None else None,
        world_size=context.ranks,
        **(_pipelining(context) if name == "pipeline" and context.settings else {}),
        **(_averaging(context, trained) if name == "local" and context.settings else {}),
    )


def _refuse_impossible(context: PlanContext) -> None:
    name, kind = context.strategy, mlx_module(str((context.model or {}).get("model_type", "")))
    if name in ("sharded", "pipeline") and context.model is not None and kind not in SPLITTABLE_MODULES:
        only = ", ".join(SPLITTABLE_MODULES)
        why = f"{name} does not support model_type {plain(kind, 60)}, only {only}"
        context.refuse("strategy", why, todo='set strategy = "data" or "local"')
    needs = {
        "pipeline": "a pipeline needs at least two nodes",
        "local": "local averages the weights of at least two nodes",
    }
    if context.ranks < 2 and name in needs:
        context.refuse("strategy", needs[name])


def _pipelining(context: PlanContext) -> dict[str, Any]:
    """The fields of strategy "pipeline"."""
    pieces = micro_batches(int(context.settings["batch_size"]), context.ranks)
    wait = bubble_fraction(context.ranks, pieces)
    reason = f"(p-1)/(m+p-1) with {context.ranks} stages and {pieces} micro-batches: {wait:.0%} of a step is waiting"
    context.explain("strategy.bubble", Source.RULE, reason)
    return {"bubble": wait, "pipeline_micro_batches": pieces}


def _averaging(context: PlanContext, trained: int | None) -> dict[str, Any]:
    """The fields of strategy "local": how often the weights are averaged, and what that costs."""
    settings = context.settings
    steps, wire = int(settings["local_steps"]), str(settings["wire"])
    updates = mean_updates(settings)
    form = averaging(wire, context.ranks)
    context.explain(
        "strategy.local_steps",
        Source.USER if context.given("local_steps") else Source.DEFAULT,
        "updates of each rank by itself from one averaging to the next; there is also one before each validation and "
        f"save, and at the end: one for {updates:.3g} updates in the mean. The averaged change is applied with "
        f"outer_learning_rate = {settings['outer_learning_rate']:g} and outer_momentum = "
        f"{settings['outer_momentum']:g}: 1 and 0 is plain averaging",
    )
    size, source, reason = None, Source.UNKNOWN, "the number of trained parameters is not known"
    if trained is not None:
        element_bytes = trained_element_bytes(context.model, context.job.fine_tune_type)
        by_data = trained * exchange(wire, context.ranks, element_bytes, context.accumulation).sent
        size, source = math.ceil(trained * form.element_bytes), Source.RULE
        reason = (
            f"{8 * form.element_bytes:.3g} bits for each of {trained:,} trained parameters, to rank 0 and back; rank 0 "
            f"receives and sends {context.ranks - 1} times that. That is {size_text(size / updates)} for each "
            f"update, where a rank sends {size_text(by_data)} with data"
        )
    context.explain("strategy.averaging_bytes", source, reason)
    seconds = context.throughput.exchange_s
    source, reason = Source.CALIBRATION, "over rank 0's link, all that the others send and then all that they get"
    if seconds is None:
        source, reason = Source.UNKNOWN, context.throughput.why_not or "not predicted"
    context.explain("strategy.averaging_s", source, reason)
    return {"local_steps": steps, "averaging_bytes": size, "averaging_s": seconds}


def split_layers(context: PlanContext, layers: int, limits: Sequence[int | None]) -> LayerSplit | None:
    """Layers of each pipeline rank, as the job sets them or else by the memory `limits` in bytes; None for other
    strategies, and when the memory is unknown. An impossible split is refused."""
    if context.strategy != "pipeline":
        return None
    key, given, sizes = "strategy.layer_split", context.job.layer_split, [size for size in limits if size]
    if given is None and len(sizes) < context.ranks:
        unknown = ", ".join(name for name, size in zip(context.names, limits, strict=True) if not size)
        context.explain(key, Source.UNKNOWN, f"the memory of {unknown} is not known")
        return None
    most = [M4_MAX_LAYERS if context.full and name in context.m4_max else None for name in context.names]
    try:
        split = parse_split(given) if given is not None else layer_split(layers, sizes, most)
        check_split(split, layers, context.ranks)
    except ValueError as error:
        context.refuse("layer_split", str(error) if given is None else f"{given}: {error}")
        return None
    if given is not None:
        context.explain(key, Source.USER, f"the job sets layer_split = {given}")
        return split
    shown = " : ".join(map(memory_text, sizes))
    cap = f"; at most {M4_MAX_LAYERS} on an M4 Max in full fine-tuning" if any(most) else ""
    context.explain(key, Source.FACT, f"{layers} layers over {shown}, nodes with less memory never get more{cap}")
    return split


def with_strategy(config: Config, strategy: Strategy | None, layer_split: str | None) -> Config:
    """`config` with another strategy or other pipeline layers; None keeps its own. Raises ConfigError."""
    if strategy is None and layer_split is None:
        return config
    changes: dict[str, str | None] = {"strategy": strategy or "pipeline"}
    split = layer_split or (config.job.layer_split if changes["strategy"] == "pipeline" else None)
    if split != config.job.layer_split:
        changes["layer_split"] = split
    return with_settings(config, changes, "--strategy" if strategy is not None else "--layer-split")
