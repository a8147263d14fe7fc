"""Whether the workers of a run train the same thing: staleness, spread of losses and gradient norms, Byzantine ones."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import Final

from engine.judgement.byzantine import outliers
from engine.judgement.figures import finite, not_negative, whole
from engine.security.identifiers import shown

STALENESS: Final = "STALENESS_THRESHOLD_EXCEEDED"
KL: Final = "KL_DIVERGENCE_THRESHOLD_EXCEEDED"
WASSERSTEIN: Final = "WASSERSTEIN_DISTANCE_THRESHOLD_EXCEEDED"
BYZANTINE: Final = "BYZANTINE_WORKERS_DETECTED"

_WORKER_ID: Final = re.compile(r"[A-Za-z0-9_-]+")
_LARGEST: Final = 1e150
"""Its square is still a float: above it a figure is cut, and as far away as can be all the same."""


@dataclass(frozen=True)
class WorkerState:
    """What one worker says of itself at one update. Raises ValueError for what no worker can say."""

    worker_id: str
    parameter_version: int
    """How many updates its parameters have had."""
    gradient_norm: float
    """Of its own gradient, before it was summed over the workers."""
    loss_value: float
    """Of its own examples, before it was summed over the workers."""
    timestamp: float
    """Wall clock, seconds since the epoch."""
    checkpoint_version: int | str | None = None
    """Of its newest checkpoint; None when it has none."""

    def __post_init__(self) -> None:
        if not isinstance(self.worker_id, str) or _WORKER_ID.fullmatch(self.worker_id) is None:
            raise ValueError(f"worker_id = {shown(self.worker_id)}: must be letters, digits, - and _")
        whole(self.parameter_version, f"parameter_version of {self.worker_id}")
        not_negative(self.gradient_norm, f"gradient_norm of {self.worker_id}")
        finite(self.loss_value, f"loss_value of {self.worker_id}")
        finite(self.timestamp, f"timestamp of {self.worker_id}")


@dataclass(frozen=True)
class ConsistencyMetrics:
    """The verdict on the workers' states at one update."""

    max_staleness: int
    """Updates between the newest and the oldest parameters."""
    kl_divergence: float
    """A proxy: min(ln(1 + population variance of the losses) / 10, 1)."""
    wasserstein_distance: float
    """A proxy: mean absolute deviation of the gradient norms from their mean."""
    byzantine_workers: tuple[str, ...]
    """Those that stand apart: an alarm, no proof."""
    total_workers: int
    synchronized_workers: int
    divergent_workers: tuple[str, ...]
    """Those that a finding names: stale or Byzantine; of two that differ, both."""
    consistency_issues: tuple[str, ...]
    """Names of the limits that are exceeded."""
    is_consistent: bool
    byzantine_rule: str
    """By which rule Byzantine workers were looked for, and what it could not tell."""

    @property
    def is_valid(self) -> bool:
        return self.is_consistent


def validate_worker_consistency(
    states: Sequence[WorkerState],
    staleness_threshold: float = 5,
    kl_threshold: float = 0.1,
    wasserstein_threshold: float = 1.0,
) -> ConsistencyMetrics:
    """Judge one state per worker; each limit is inclusive.

    Byzantine workers are looked for by Krum from five workers on, below that by median and MAD, over loss and gradient
    norm (engine.judgement.byzantine). Raises ValueError for no state at all, for two of one worker, and for a limit
    that is negative or no number.
    """
    if not states:
        raise ValueError("no worker states: there is nothing to judge")
    names = [state.worker_id for state in states]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two states of the worker {twice}: one per worker is judged")
    limits = (staleness_threshold, kl_threshold, wasserstein_threshold)
    for limit, what in zip(limits, ("staleness_threshold", "kl_threshold", "wasserstein_threshold"), strict=True):
        not_negative(limit, what)
    versions = [state.parameter_version for state in states]
    losses = [_cut(state.loss_value) for state in states]
    norms = [_cut(state.gradient_norm) for state in states]
    staleness = max(versions) - min(versions)
    kl = min(math.log1p(pvariance(losses)) / 10, 1.0)
    middle = fmean(norms)
    wasserstein = fmean(abs(norm - middle) for norm in norms)
    apart = outliers(list(zip(losses, norms, strict=True)))
    byzantine = tuple(names[place] for place in apart.places)
    issues = []
    if staleness > staleness_threshold:
        issues.append(STALENESS)
    if kl > kl_threshold:
        issues.append(KL)
    if wasserstein > wasserstein_threshold:
        issues.append(WASSERSTEIN)
    if byzantine:
        issues.append(BYZANTINE)
    stale = {state.worker_id for state in states if max(versions) - state.parameter_version > staleness_threshold}
    divergent = stale | set(byzantine)
    if len(states) == 2 and (KL in issues or WASSERSTEIN in issues):
        divergent = set(names)
    return ConsistencyMetrics(
        max_staleness=staleness,
        kl_divergence=kl,
        wasserstein_distance=wasserstein,
        byzantine_workers=byzantine,
        total_workers=len(states),
        synchronized_workers=len(states) - len(divergent),
        divergent_workers=tuple(name for name in names if name in divergent),
        consistency_issues=tuple(issues),
        is_consistent=not issues,
        byzantine_rule=apart.rule,
    )


def _cut(value: float) -> float:
    return max(-_LARGEST, min(_LARGEST, float(value)))
