"""strategy: what runs where, and how the model is divided."""

from __future__ import annotations

from collections.abc import Sequence

from engine.planning.advice import is_m4_max
from engine.planning.document import StrategyPart
from engine.planning.notes import Notes, Source
from engine.planning.situation import Situation
from engine.worker.layers import Split, layer_split, written
from engine.worker.strategies.stages import bubble

LAUNCHED = ("data",)
"""Strategies that this release's trainer has."""
M4_MAX_LAYERS = 8
"""Of a pipeline in full fine-tuning, at most: with more its GPU has been seen to run into Metal's watchdog."""
_APPROACH = {
    "data": "data parallelism: every rank holds the whole model and computes its share of each batch",
    "sharded": "sharded data parallelism: parameters, gradients and optimizer state are split over the ranks",
    "pipeline": "pipeline parallelism (1F1B): every rank holds contiguous layers",
}


def strategy(now: Situation, split: Split | None, notes: Notes) -> StrategyPart:
    """`split` is of a pipeline, None where it could not be made."""
    name, config = now.inputs.strategy, now.inputs.config
    hosts = [node.ssh for node in config.nodes]
    per_host = {hosts.count(host) for host in hosts}
    asked = "--strategy asks for it" if name != now.job.strategy else "the job says so, or leaves the default"
    notes.why("strategy.parallelism", Source.USER, f"{name}: {asked}")
    notes.why(
        "strategy.world_size",
        Source.USER,
        f"one rank per [[node]]: {now.ranks} on {len(set(hosts))} machine{'s' * (len(set(hosts)) != 1)}"
        + ("; one process drives the one GPU of a Mac" if now.platform == "apple" else ""),
    )
    not_launchable = None
    if name not in LAUNCHED:
        not_launchable = f"this release trains strategy data; {name} is planned here and comes with a later release"
        notes.warn("strategy", not_launchable)
        notes.why("strategy.launchable", Source.RULE, not_launchable)
    micro_batches = wait = None
    if name == "pipeline" and now.micro is not None:
        # In a pipeline every sequence passes all ranks: each micro-batch is one rank's part of the batch.
        micro_batches = max(1, now.accumulation * now.ranks)
        wait = bubble(now.ranks, micro_batches)
        notes.why(
            "strategy.bubble",
            Source.RULE,
            f"(p-1)/(m+p-1) with {now.ranks} stages and {micro_batches} micro-batches: {wait:.0%} of a step is waiting",
        )
    return StrategyPart(
        approach=_APPROACH[name],
        total_gpus=now.ranks,
        nodes=len(set(hosts)),
        gpus_per_node=per_host.pop() if len(per_host) == 1 else None,
        parallelism=name,
        layer_split=written(split) if split is not None else None,
        world_size=now.ranks,
        bubble=wait,
        pipeline_micro_batches=micro_batches,
        launchable=not_launchable is None,
        not_launchable=not_launchable,
    )


def split_layers(now: Situation, layers: int | None, limits: Sequence[int | None], notes: Notes) -> Split | None:
    """The layers of each rank of a pipeline by its memory limit, bytes; None for another strategy, and where layers or
    memory are not known. A split that cannot be is refused."""
    if now.inputs.strategy != "pipeline":
        return None
    key = "strategy.layer_split"
    if layers is None:
        notes.why(key, Source.UNKNOWN, f"the model's layers are not known: {now.inputs.model_from}")
        return None
    sizes = [size for size in limits if size]
    if len(sizes) < now.ranks:
        unknown = ", ".join(name for name, size in zip(now.names, limits, strict=True) if not size)
        notes.why(key, Source.UNKNOWN, f"the memory of {unknown} is not known")
        return None
    most = [M4_MAX_LAYERS if now.full and is_m4_max(now.inputs.facts.get(name)) else None for name in now.names]
    try:
        split = layer_split(layers, sizes, most)
    except ValueError as error:
        notes.refuse("layer_split", str(error))
        return None
    shown = " : ".join(f"{size / 1e9:.0f} GB" for size in sizes)
    held = f"; at most {M4_MAX_LAYERS} on an M4 Max in full fine-tuning" if any(most) else ""
    notes.why(key, Source.FACT, f"{layers} layers over {shown}, the weaker never more than the stronger{held}")
    return split
