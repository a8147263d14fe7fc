"""How a job is divided over the ranks: what follows for its nodes, and what the command line asks for in place of what
the configuration says."""

from __future__ import annotations

from engine.config.models import FlightConfig, Strategy
from engine.errors import InputError
from engine.worker.layers import parse_split


def parted(config: FlightConfig) -> bool:
    """Whether each node keeps a part of the state that lies nowhere else, so that nothing goes on without it."""
    keeps = config.checkpoint.enabled and config.checkpoint.destination is None
    return config.job.command is None and config.job.strategy != "data" and keeps and len(config.nodes) > 1


def divided(config: FlightConfig, strategy: Strategy | None, layer_split: str | None) -> FlightConfig:
    """`config` with another strategy, and a pipeline's layers; None leaves what it says. Raises InputError."""
    if strategy is None and layer_split is None:
        return config
    chosen = strategy or ("pipeline" if layer_split is not None else config.job.strategy)
    if config.job.command is not None:
        raise InputError("--strategy", why="the job runs a command of its own, which divides nothing")
    if chosen == "pipeline" and len(config.nodes) < 2:
        raise InputError("--strategy pipeline", why="a pipeline has a stage on each of two nodes or more")
    if layer_split is not None:
        _check(layer_split, chosen, len(config.nodes))
    kept = layer_split or (config.job.layer_split if chosen == "pipeline" else None)
    job = config.job.model_copy(update={"strategy": chosen, "layer_split": kept})
    return config.model_copy(update={"job": job})


def _check(layer_split: str, strategy: Strategy, nodes: int) -> None:
    what = f"--layer-split {layer_split}"
    if strategy != "pipeline":
        raise InputError(what, why=f"strategy {strategy} does not divide layers", todo="use --strategy pipeline")
    try:
        ranges = parse_split(layer_split)
    except ValueError as error:
        raise InputError(what, why=str(error)) from error
    if len(ranges) != nodes:
        raise InputError(what, why=f"it has {len(ranges)} ranges for {nodes} nodes")
