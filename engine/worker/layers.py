"""Contiguous layers per rank for a pipeline: by memory, and as they are written. Standard library alone: the engine
plans with it, the trainer divides by it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

Split = tuple[tuple[int, int], ...]
"""Per rank, its layers as a half-open range."""
KINDS = ("llama", "ministral3", "mistral3", "mixtral", "qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Modules of mlx_lm.models whose model is embeddings, equal layers, a norm and a head, and which take embeddings in
place of tokens: those whose layers can be on several ranks."""
_KNOWN_AS = {"mistral": "llama", "iquestcoder": "llama", "xverse": "llama", "llava": "mistral3"}
"""model_type of a config.json → mlx-lm's module, where they differ (mlx_lm.utils.MODEL_REMAPPING)."""
_RANGE = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")


def mlx_kind(model_type: str) -> str:
    """mlx-lm's module for a config.json's `model_type`."""
    return _KNOWN_AS.get(model_type, model_type)


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


def parse_split(text: str) -> Split:
    """ "0-8,8-36" as ranges. Raises ValueError unless they begin at 0, are not empty, and follow one another without a
    gap."""
    ranges = []
    for part in text.replace(" ", "").split(","):
        matched = _RANGE.fullmatch(part)
        if matched is None:
            raise ValueError(f'{part!r} is no range of layers; accepted is one per rank, such as "0-8,8-36"')
        ranges.append((int(matched[1]), int(matched[2])))
    reached = 0
    for start, end in ranges:
        if start != reached or end <= start:
            raise ValueError(f"{start}-{end} does not go on from layer {reached} with at least one layer")
        reached = end
    return tuple(ranges)


def check_split(split: Split, layers: int, ranks: int) -> None:
    """Raises ValueError unless `split` divides `layers` over `ranks`."""
    if len(split) != ranks:
        raise ValueError(f"it has {len(split)} ranges for {ranks} ranks")
    if split[-1][1] != layers:
        raise ValueError(f"it ends at layer {split[-1][1]}, and the model has {layers}")


def _told(counts: Sequence[int], limits: Sequence[int | None]) -> str:
    return ", ".join(
        f"rank {rank} takes {count}" + (f" (at most {limit})" if limit is not None else "")
        for rank, (count, limit) in enumerate(zip(counts, limits, strict=True))
    )
