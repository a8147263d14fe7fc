"""Workers that stand apart from the others: Krum where it can tell, median and MAD where there are too few for it.

Krum: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent", NeurIPS 2017: score(i) = sum of squared distances from i to its n - f - 2 nearest others, for n >= 2 f + 3.
Krum itself picks the lowest score; whom it would never pick is judged here by a limit on the score, since an honest
group has a highest score too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

KRUM_FROM: Final = 5
"""Workers: n >= 2 f + 3 with f = 1."""
MAD_FROM: Final = 3
"""Of two workers nobody can say which one is wrong."""
NORMAL: Final = 1.4826
"""Median absolute deviation to standard deviation of a normal distribution."""
LIMIT: Final = 3.5
"""Deviations; of Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993."""
LEAST_SPREAD: Final = 0.1
"""Of the median: ranks train on different examples, so their figures are never expected to agree more closely."""

_FARTHEST: Final = 1e100
"""Deviations: the square of any more would be no float."""

Point = tuple[float, ...]


@dataclass(frozen=True)
class Outliers:
    """Which workers stand apart, and by which rule."""

    places: tuple[int, ...]
    """In the order given."""
    rule: str
    """In words, with what the rule could not tell."""


def outliers(points: Sequence[Point]) -> Outliers:
    """`points`: one per worker, all of the same finite figures (loss, gradient norm)."""
    count = len(points)
    if count < MAD_FROM:
        few = (
            "one worker: nothing to compare it with" if count < 2 else "two workers: only that they differ can be told"
        )
        return Outliers((), few)
    scaled = _scaled(points)
    if count < KRUM_FROM:
        # The rule is about one figure at a time: a worker is an outlier when any of its figures is.
        far = [place for place, point in enumerate(scaled) if max(map(abs, point), default=0.0) > LIMIT]
        return Outliers(tuple(far), f"median and MAD: Krum needs {KRUM_FROM} workers, there are {count}")
    tolerated = (count - 3) // 2
    scores = krum_scores(scaled, tolerated)
    # A neighbour adds a squared distance; the limit is the one of a single figure, for each figure and neighbour.
    limit = len(points[0]) * LIMIT**2 * (count - tolerated - 2)
    far = [place for place in range(count) if scores[place] > limit]
    rule = f"Krum for up to {tolerated} of {count} workers"
    if len(far) > tolerated:
        rule += f": {len(far)} stand apart, so which ones are right cannot be told"
    return Outliers(tuple(far), rule)


def krum_scores(points: Sequence[Point], tolerated: int) -> list[float]:
    """Krum's score of each point for `tolerated` Byzantine workers. Raises ValueError when they are too many."""
    count = len(points)
    if tolerated < 0 or count < 2 * tolerated + 3:
        need = 2 * tolerated + 3
        raise ValueError(f"for {tolerated} Byzantine workers Krum needs {need} workers in all, there are {count}")
    scores = []
    for place, point in enumerate(points):
        distances = sorted(math.dist(point, other) ** 2 for at, other in enumerate(points) if at != place)
        scores.append(math.fsum(distances[: count - tolerated - 2]))
    return scores


def _scaled(points: Sequence[Point]) -> list[Point]:
    """Each figure as its distance from the median, in robust standard deviations: figures of any unit then compare."""
    columns = []
    for column in zip(*points, strict=True):
        middle = median(column)
        deviation = median(abs(value - middle) for value in column)
        # All zero but one: any distance is one.
        spread = NORMAL * max(deviation, LEAST_SPREAD * abs(middle)) or 1e-12
        columns.append([max(-_FARTHEST, min(_FARTHEST, (value - middle) / spread)) for value in column])
    return list(zip(*columns, strict=True))
