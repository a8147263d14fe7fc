"""The strategy that the job names, made for this rank."""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

import os
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from ..collective import Collective
from ..data import Split
from ..job import Job, JobError
from ..layers import Split as Layers
from ..layers import layer_split, parse_split, written
from ..reporting import Reporter
from .data import DataParallel
from .pipeline import Pipeline
from .sharded import Sharded
from .strategy import Strategy

_MIB = 2**20


def chosen(
    job: Job,
    model: nn.Module,
    train: Split,
    *,
    collective: Collective,
    shares: list[float],
    reporter: Reporter,
) -> Strategy:
    """Called by all ranks. `model` is as model.load_model gives it. Raises JobError, PeerLost."""
    if job.strategy == "pipeline":
        layers = _layers(job, len(model.layers), collective)
        reporter.say(f"pipeline: layers {written(layers)} on ranks 0 to {collective.size - 1}")
        return Pipeline(job, model, train, collective=collective, layers=layers, reporter=reporter)
    kind = Sharded if job.strategy == "sharded" else DataParallel
    return kind(job, model, train, collective=collective, shares=shares, reporter=reporter)


def _layers(job: Job, layers: int, collective: Collective) -> Layers:
    """As the job says, else in proportion to the ranks' memory."""
    try:
        if job.layer_split is not None:
            return parse_split(job.layer_split)
        rows = collective.gather([_memory_mib()])
        return layer_split(layers, [float(memory) for (memory,) in rows])
    except ValueError as error:
        raise JobError(f"[job] layer_split: {error}") from error


def _memory_mib() -> int:
    """What this node's accelerator can work with, or its main memory."""
    if mx.metal.is_available():
        facts = cast("dict[str, Any]", mx.device_info())
        return int(facts["max_recommended_working_set_size"]) // _MIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MIB
