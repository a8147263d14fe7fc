"""How much of a job's batches is padding, and how large they become, from the lengths of some of its rows: by the
trainer's own arithmetic."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.protocol.partition import budget_edges, input_width

_ROWS = 20_000
"""Most rows that are laid out into batches."""
_STEP = 16


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


def suggested_budget(rows: Sequence[int], sequences: int, max_length: int) -> int:
    """Inputs of a batch in place of one of so many `sequences`: the fewest with which an epoch has no more batches, and
    so as many updates, each of as many sequences in the mean. `rows`: as laid out, at least one."""
    batches, most = math.ceil(len(rows) / sequences), sequences * input_width(rows[0], max_length)

    def enough(budget: int) -> bool:
        return len(budget_edges(rows, budget, max_length)) - 1 <= batches

    # The more inputs, the fewer batches.
    budgets = range(_STEP, most + _STEP, _STEP)
    return budgets[bisect_left(budgets, True, key=enough)]
