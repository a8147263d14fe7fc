"""How much of a job's batches is padding, and how large they become, from the lengths of some of its rows: by the
trainer's own arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.protocol.partition import budget_edges, input_width

_ROWS = 20_000
"""Most rows that are laid out into batches."""
_STEP = 256


@dataclass(frozen=True)
class BatchShapes:
    """The batches of an epoch."""

    rows: float
    """Examples of a batch, the mean."""
    largest: tuple[int, int]
    """Rows and padded inputs of each, of the largest batch."""
    real: float
    """The inputs of the examples over those computed, 0 to 1."""


def laid_out(lengths: Mapping[int, int], examples: int | None, max_length: int) -> list[int]:
    """Tokens, the longest first, of as many rows as there are `examples`, in the proportions of `lengths` (tokens →
    rows, of some); [] if these are unknown."""
    measured = [min(tokens, max_length) for tokens in sorted(lengths, reverse=True) for _ in range(lengths[tokens])]
    count = min(_ROWS, len(measured) if examples is None else examples)
    return [measured[number * len(measured) // count] for number in range(count)] if measured else []


def shapes(rows: Sequence[int], max_length: int, *, sequences: int = 1, budget: int | None = None) -> BatchShapes:
    """Those of batches of so many `sequences`, or by `budget`. `rows`: as laid out, at least one."""
    edges = [*range(0, len(rows), sequences), len(rows)]
    if budget is not None:
        edges = budget_edges(rows, budget, max_length)
    sizes = [(end - start, input_width(rows[start], max_length)) for start, end in pairwise(edges)]
    real = sum(max(tokens - 1, 0) for tokens in rows) / sum(map(math.prod, sizes))
    return BatchShapes(len(rows) / len(sizes), max(sizes, key=math.prod), real)


def suggested_budget(rows: Sequence[int], sequences: int, most: int | None) -> int:
    """Inputs of a batch in place of one of so many `sequences`: as many as that has in the mean, or a quarter of the
    largest, so that a tail of long rows neither makes steps tiny nor takes half of its memory; at most as many as there
    is room for (`most`)."""
    wanted = max(sequences * sum(rows) / len(rows), min(sequences, len(rows)) * rows[0] / 4)
    wanted = _STEP * math.ceil(wanted / _STEP)
    return wanted if most is None else max(1, min(wanted, most))
