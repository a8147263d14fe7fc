"""Metrics thinned out for a plot (the file itself is read by engine.runs.json_lines)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

X = TypeVar("X", int, float)


def decimate(points: Sequence[tuple[X, float]], width: int) -> list[tuple[X, float]]:
    """At most two points for each of `width` columns of equal x: its lowest and its highest, in the order of x.

    `points` are in ascending x. Points whose y is not finite are left out; few enough points are all kept.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if width < 1 or len(finite) <= 2 * width:
        return finite if width > 0 else []
    first, span = finite[0][0], finite[-1][0] - finite[0][0]
    if span <= 0:
        return _extremes(finite)
    kept: list[tuple[X, float]] = []
    column: list[tuple[X, float]] = []
    number = 0
    for point in finite:
        own = min(width - 1, int((point[0] - first) / span * width))
        if own != number:
            kept += _extremes(column)
            column, number = [], own
        column.append(point)
    return kept + _extremes(column)


def _extremes(column: list[tuple[X, float]]) -> list[tuple[X, float]]:
    if not column:
        return []
    low = min(range(len(column)), key=lambda place: column[place][1])
    high = max(range(len(column)), key=lambda place: column[place][1])
    return [column[place] for place in sorted({low, high})]
