"""Contiguous layers per rank for a pipeline, by memory; and what its start and end cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Split = tuple[tuple[int, int], ...]
"""Per rank, its layers as a half-open range."""


def layer_split(layers: int, memory: Sequence[float], most: Sequence[int | None] | None = None) -> Split:
    """Each rank's layers in proportion to its memory (any unit), ranges half-open, in rank order.

    From the weakest rank on each gets its proportion of what is left, rounded up, no more than an even part of it, and
    no more than `most` of it (None: no limit); the strongest gets the rest. So 36 layers over 128:512 are 7.2:28.8, and
    0-8, 8-36; a weaker rank never gets more than a stronger one.

    Raises ValueError for fewer layers than ranks, a memory that is not above 0, and limits that leave layers over.
    """
    ranks = len(memory)
    limits = [None] * ranks if most is None else list(most)
    if not ranks or len(limits) != ranks:
        raise ValueError("memory and most are per rank")
    if layers < ranks:
        raise ValueError(f"{layers} layers are too few for {ranks} stages")
    if not all(0 < size < math.inf for size in memory):
        raise ValueError(f"memory must be above 0: {list(memory)}")
    counts = [0] * ranks
    order = sorted(range(ranks), key=lambda rank: (memory[rank], math.inf if limits[rank] is None else limits[rank]))
    left, room, last = layers, float(sum(memory)), 1
    for place, rank in enumerate(order):
        after = ranks - place
        even = left // after
        wanted = left if after == 1 else max(last, min(math.ceil(left * memory[rank] / room - 1e-9), even))
        limit = limits[rank]
        counts[rank] = last = wanted if limit is None else min(wanted, limit)
        left, room = left - counts[rank], room - memory[rank]
    if left:
        raise ValueError(f"{left} of {layers} layers are left over: {_told(counts, limits)}")
    pairs = itertools.pairwise(order)
    if any(memory[weak] < memory[strong] and counts[weak] > counts[strong] for weak, strong in pairs):
        raise ValueError(f"a stronger rank may take fewer layers than a weaker one: {_told(counts, limits)}")
    ends = [sum(counts[: rank + 1]) for rank in range(ranks)]
    return tuple((end - count, end) for end, count in zip(ends, counts, strict=True))


def written(split: Split) -> str:
    """ "0-8,8-36"."""
    return ",".join(f"{start}-{end}" for start, end in split)


def bubble(stages: int, micro_batches: int) -> float:
    """The part of a step in which a stage of a 1F1B pipeline waits: (p-1)/(m+p-1), 0 to below 1. Source: Narayanan et
    al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters. Raises ValueError for counts below 1."""
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"stages and micro-batches must be at least 1: {stages}, {micro_batches}")
    return (stages - 1) / (micro_batches + stages - 1)


def _told(counts: Sequence[int], limits: Sequence[int | None]) -> str:
    return ", ".join(
        f"rank {rank} takes {count}" + (f" (at most {limit})" if limit is not None else "")
        for rank, (count, limit) in enumerate(zip(counts, limits, strict=True))
    )
