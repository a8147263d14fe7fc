"""Worker consistency: staleness, spread of losses and gradient norms, and Byzantine workers.

Byzantine workers are found by Krum, or by median and MAD where there are too few workers for Krum. Krum: Blanchard,
El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017:
score(i) = sum of squared distances from i to its n - f - 2 nearest others, for n >= 2 f + 3. Krum itself picks the
lowest score; here a worker is reported when its score exceeds a limit, since an honest group has a highest score too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, pvariance
from typing import Final

from engine.security.identifiers import safe_repr
from engine.validators.values import check_items, finite, not_negative, whole

KRUM_MIN_WORKERS: Final = 5
"""n >= 2 f + 3 with f = 1."""
MAD_MIN_WORKERS: Final = 3
"""With two that differ either may be wrong."""
MAD_TO_SIGMA: Final = 1.4826
"""Median absolute deviation to standard deviation of a normal distribution."""
OUTLIER_LIMIT: Final = 3.5
"""Deviations; of Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993."""
MIN_SPREAD: Final = 0.1
"""Share of the median: ranks train on different examples, so their values are not expected to agree more closely."""

_FARTHEST: Final = 1e100
"""Deviations: the square of more would overflow a float."""

Point = tuple[float, ...]


def byzantine_rule(count: int) -> tuple[str, int]:
    """How outliers among `count` workers are found, and how many of them Krum tolerates; 0 where it is not used."""
    if count < MAD_MIN_WORKERS:
        alone = "one worker: nothing to compare it with"
        return alone if count < 2 else "two workers: either may be the one that is wrong", 0
    if count < KRUM_MIN_WORKERS:
        return f"median and MAD: Krum needs {KRUM_MIN_WORKERS} workers, there are {count}", 0
    tolerated = (count - 3) // 2
    return f"Krum for up to {tolerated} of {count} workers", tolerated


def _outliers(points: Sequence[Point]) -> tuple[list[int], str]:
    """Which of the workers' points are outliers, ascending, and a description of the rule, with its limits. `points`:
    one per worker, of the same finite values (loss, gradient norm)."""
    count = len(points)
    rule, tolerated = byzantine_rule(count)
    if count < MAD_MIN_WORKERS:
        return [], rule
    scaled = _scaled(points)
    if not tolerated:
        # The rule is for one value at a time: a worker is an outlier when any of its values is.
        outliers = [index for index, point in enumerate(scaled) if max(map(abs, point), default=0.0) > OUTLIER_LIMIT]
        return outliers, rule
    scores = krum_scores(scaled, tolerated)
    # Each neighbour adds a squared distance, so the limit grows with the number of values and of neighbours.
    limit = len(points[0]) * OUTLIER_LIMIT**2 * (count - tolerated - 2)
    outliers = [index for index in range(count) if scores[index] > limit]
    if len(outliers) > tolerated:
        rule += f": {len(outliers)} are outliers: too many to tell which workers are right"
    return outliers, rule


def krum_scores(points: Sequence[Point], tolerated: int) -> list[float]:
    """Krum's score of each point for `tolerated` Byzantine workers. Raises ValueError when they are too many."""
    count = len(points)
    if tolerated < 0 or count < 2 * tolerated + 3:
        need = 2 * tolerated + 3
        raise ValueError(f"for {tolerated} Byzantine workers Krum needs {need} workers in all, there are {count}")
    scores = []
    for index, point in enumerate(points):
        distances = sorted(
            math.dist(point, other) ** 2 for other_index, other in enumerate(points) if other_index != index
        )
        scores.append(math.fsum(distances[: count - tolerated - 2]))
    return scores


def _scaled(points: Sequence[Point]) -> list[Point]:
    """Each value as its distance from the median, in robust standard deviations, whatever its unit."""
    columns = []
    for column in zip(*points, strict=True):
        middle = median(column)
        deviation = median(abs(value - middle) for value in column)
        # For a median of 0 any distance counts.
        spread = MAD_TO_SIGMA * max(deviation, MIN_SPREAD * abs(middle)) or 1e-12
        columns.append([max(-_FARTHEST, min(_FARTHEST, (value - middle) / spread)) for value in column])
    return list(zip(*columns, strict=True))


STALENESS: Final = "STALENESS_THRESHOLD_EXCEEDED"
LOSS_SPREAD: Final = "KL_DIVERGENCE_THRESHOLD_EXCEEDED"
WASSERSTEIN: Final = "WASSERSTEIN_DISTANCE_THRESHOLD_EXCEEDED"
BYZANTINE: Final = "BYZANTINE_WORKERS_DETECTED"

_WORKER_ID: Final = re.compile(r"[A-Za-z0-9_-]+")
_LARGEST: Final = 1e150
"""Larger values are cut to it: their squares would overflow a float."""


@dataclass(frozen=True)
class WorkerState:
    """One worker's report at one update. Raises ValueError for impossible values."""

    worker_id: str
    parameter_version: int
    """Updates that its parameters have had."""
    gradient_norm: float
    """Its own gradient's, before the sum over the workers."""
    loss_value: float
    """On its own examples, before the mean over the workers."""
    timestamp: float
    """Wall clock, seconds since the epoch."""
    checkpoint_version: int | str | None = None
    """The version of its newest checkpoint; None when it has none."""

    def __post_init__(self) -> None:
        if not isinstance(self.worker_id, str) or _WORKER_ID.fullmatch(self.worker_id) is None:
            raise ValueError(f"worker_id = {safe_repr(self.worker_id)}: must be letters, digits, - and _")
        whole(self.parameter_version, f"parameter_version of {self.worker_id}")
        not_negative(self.gradient_norm, f"gradient_norm of {self.worker_id}")
        finite(self.loss_value, f"loss_value of {self.worker_id}")
        finite(self.timestamp, f"timestamp of {self.worker_id}")


@dataclass(frozen=True)
class ConsistencyMetrics:
    """The agreement of the workers' states at one update."""

    max_staleness: int
    """Updates between the newest and the oldest parameters."""
    kl_divergence: float
    """The spread of the losses, min(ln(1 + population variance) / 10, 1): no divergence of two distributions."""
    wasserstein_distance: float
    """The spread of the gradient norms: their mean absolute deviation from their mean."""
    byzantine_workers: tuple[str, ...]
    """Outliers: an alarm, not a proof."""
    total_workers: int
    synchronized_workers: int
    divergent_workers: tuple[str, ...]
    """Stale or Byzantine workers; both of two that differ."""
    consistency_issues: tuple[str, ...]
    """Names of the limits that are exceeded."""
    is_consistent: bool
    byzantine_rule: str
    """The rule by which Byzantine workers were detected, with its limits."""

    @property
    def is_valid(self) -> bool:
        return self.is_consistent


def validate_worker_consistency(
    states: Sequence[WorkerState],
    staleness_threshold: float = 5,
    kl_threshold: float = 0.1,
    wasserstein_threshold: float = 1.0,
) -> ConsistencyMetrics:
    """Compare one state per worker; each limit is inclusive. Byzantine workers are detected from loss and gradient
    norm, by Krum from five workers on, below that by median and MAD. Raises ValueError for no states, for two of one
    worker, and for a limit that is negative or not a number."""
    check_items(states, WorkerState, "worker states")
    names = [state.worker_id for state in states]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two states of the worker {twice}: there must be one per worker")
    limits = (staleness_threshold, kl_threshold, wasserstein_threshold)
    for limit, what in zip(limits, ("staleness_threshold", "kl_threshold", "wasserstein_threshold"), strict=True):
        not_negative(limit, what)
    versions = [state.parameter_version for state in states]
    losses = [_cut(state.loss_value) for state in states]
    norms = [_cut(state.gradient_norm) for state in states]
    staleness = max(versions) - min(versions)
    loss_spread = min(math.log1p(pvariance(losses)) / 10, 1.0)
    middle = fmean(norms)
    wasserstein = fmean(abs(norm - middle) for norm in norms)
    indices, rule = _outliers(list(zip(losses, norms, strict=True)))
    byzantine = tuple(names[index] for index in indices)
    exceeded = {
        STALENESS: staleness > staleness_threshold,
        LOSS_SPREAD: loss_spread > kl_threshold,
        WASSERSTEIN: wasserstein > wasserstein_threshold,
        BYZANTINE: bool(byzantine),
    }
    issues = tuple(name for name, over in exceeded.items() if over)
    stale = {state.worker_id for state in states if max(versions) - state.parameter_version > staleness_threshold}
    divergent = stale | set(byzantine)
    if len(states) == 2 and (exceeded[LOSS_SPREAD] or exceeded[WASSERSTEIN]):
        divergent = set(names)
    return ConsistencyMetrics(
        max_staleness=staleness,
        kl_divergence=loss_spread,
        wasserstein_distance=wasserstein,
        byzantine_workers=byzantine,
        total_workers=len(states),
        synchronized_workers=len(states) - len(divergent),
        divergent_workers=tuple(name for name in names if name in divergent),
        consistency_issues=issues,
        is_consistent=not issues,
        byzantine_rule=rule,
    )


def _cut(value: float) -> float:
    return max(-_LARGEST, min(_LARGEST, float(value)))
