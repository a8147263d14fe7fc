"""strategy: what runs where, and how the model is divided."""

from __future__ import annotations

from collections.abc import Sequence

from engine.planning.advice import is_m4_max
from engine.planning.document import StrategyPart
from engine.planning.notes import Notes, Source
from engine.planning.situation import Situation
from engine.worker.layers import KINDS, Split, check_split, layer_split, mlx_kind, parse_split, written
from engine.worker.strategies.stages import bubble, micro_batches

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
    if name != now.job.strategy:
        not_launchable = f'the job trains strategy {now.job.strategy}: [job] strategy = "{name}" launches this one'
        notes.why("strategy.launchable", Source.USER, not_launchable)
    kind = mlx_kind(str((now.inputs.model or {}).get("model_type", "")))
    if name != "data" and now.inputs.model is not None and kind not in KINDS:
        notes.refuse("strategy", f"{name} does not divide models of kind {kind}: it does {', '.join(KINDS)}")
    if name == "pipeline" and now.ranks < 2:
        notes.refuse("strategy", "a pipeline has a stage on each of two nodes or more")
    pieces = wait = None
    if name == "pipeline" and now.settings:
        pieces = micro_batches(int(now.settings["batch_size"]), now.ranks)
        wait = bubble(now.ranks, pieces)
        notes.why(
            "strategy.bubble",
            Source.RULE,
            f"(p-1)/(m+p-1) with {now.ranks} stages and {pieces} micro-batches of a batch: {wait:.0%} of it is waiting",
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
        pipeline_micro_batches=pieces,
        launchable=not_launchable is None,
        not_launchable=not_launchable,
    )


def split_layers(now: Situation, layers: int | None, limits: Sequence[int | None], notes: Notes) -> Split | None:
    """The layers of each rank of a pipeline as the job says, else by its memory limit, bytes; None for another
    strategy, and where layers or memory are not known. A split that cannot be is refused."""
    if now.inputs.strategy != "pipeline":
        return None
    key = "strategy.layer_split"
    if layers is None:
        notes.why(key, Source.UNKNOWN, f"the model's layers are not known: {now.inputs.model_from}")
        return None
    asked = now.job.layer_split
    if asked is not None:
        try:
            chosen = parse_split(asked)
            check_split(chosen, layers, now.ranks)
        except ValueError as error:
            notes.refuse("layer_split", f"{asked}: {error}")
            return None
        notes.why(key, Source.USER, f"layer_split = {asked}: the job says so")
        return chosen
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
