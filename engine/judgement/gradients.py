"""Whether the workers' gradients are sound: finite, alike in size, and none of them far from the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pvariance
from typing import Any, Final

from engine.judgement.figures import is_number, not_negative, number, table
from engine.security.identifiers import shown

NO_VARIANCE: Final = 1e-10
"""Below it the norms are as good as equal."""
FEW: Final = 3
"""Workers: with so few a deviation says little, so a factor from the median counts."""
FACTOR: Final = 10.0
DEVIATIONS: Final = 3.5
_ROUNDING: Final = 1e-12
"""Of the median: a smaller deviation is the last digits of a float."""
_LARGEST: Final = 1e150


@dataclass(frozen=True)
class GradientReport:
    """The verdict on one round of gradients."""

    gradient_variance: float
    """Population variance of the finite norms; 0 below 1e-10."""
    outlier_workers: tuple[str, ...]
    unstable_workers: tuple[str, ...]
    """Those with a NaN or an infinite value."""
    numerical_stability: bool
    """No worker is unstable."""
    is_valid: bool
    """Stable, the variance below the tolerance, no outlier."""


def validate_gradient_layer(updates: Sequence[Mapping[str, Any]], tolerance: float = 0.1) -> GradientReport:
    """Judge one round: each update is {worker_id, gradients, gradient_norm}.

    Gradients are numbers in any nesting of lists, arrays and tables. Up to three workers one is an outlier whose norm
    is more than ten times or less than a tenth of the median; with more, one whose deviation from the median is over
    3.5 times the mean deviation. Raises ValueError for no updates, one without gradients or without a norm, a worker
    that comes twice, a negative norm, and a tolerance that is negative or no number.
    """
    if not isinstance(updates, Sequence) or isinstance(updates, str | bytes) or not updates:
        raise ValueError("gradient updates: must be a list with at least one")
    not_negative(tolerance, "tolerance")
    norms: dict[str, float] = {}
    unstable = []
    for update in updates:
        worker, norm, stable = _read(update)
        if worker in norms:
            raise ValueError(f"two gradient updates of the worker {shown(worker)}: one per worker is judged")
        norms[worker] = norm
        if not stable:
            unstable.append(worker)
    sound = {worker: min(norm, _LARGEST) for worker, norm in norms.items() if math.isfinite(norm)}
    variance = pvariance(sound.values()) if sound else 0.0
    variance = variance if variance >= NO_VARIANCE else 0.0
    outliers = _outliers(sound)
    return GradientReport(
        gradient_variance=variance,
        outlier_workers=outliers,
        unstable_workers=tuple(unstable),
        numerical_stability=not unstable,
        is_valid=not unstable and variance < tolerance and not outliers,
    )


def _read(update: object) -> tuple[str, float, bool]:
    """A worker's name, its gradient's norm, and whether all of it is finite."""
    found = table(update, "gradient update")
    worker = found.get("worker_id")
    if not isinstance(worker, str) or not worker:
        raise ValueError(f"worker_id of a gradient update = {shown(worker)}: must be a name")
    if "gradient_norm" not in found:
        raise ValueError(f"gradient update of {shown(worker)}: gradient_norm is missing")
    norm = number(found["gradient_norm"], f"gradient_norm of {shown(worker)}")
    if norm < 0:
        raise ValueError(f"gradient_norm of {shown(worker)} = {norm}: must be at least 0")
    any_, stable = False, math.isfinite(norm)
    for value in _numbers(found.get("gradients"), worker):
        any_ = True
        stable = stable and math.isfinite(value)
    if not any_:
        raise ValueError(f"gradient update of {shown(worker)}: gradients are missing or empty")
    return worker, norm, stable


def _numbers(gradients: object, worker: str) -> Iterator[float]:
    """All numbers in it. Walked without recursion: how deep it is nested is not ours to say."""
    waiting = [gradients]
    while waiting:
        value = waiting.pop()
        if is_number(value):
            yield number(value, "a gradient")
        elif value is None:
            continue
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif hasattr(value, "tolist"):
            waiting.append(value.tolist())
        elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
            waiting.extend(value)
        else:
            raise ValueError(f"gradients of {shown(worker)} hold {shown(value)}: must be numbers")


def _outliers(norms: Mapping[str, float]) -> tuple[str, ...]:
    if len(norms) < 2:
        return ()
    middle = median(norms.values())
    if len(norms) <= FEW:
        return tuple(w for w, norm in norms.items() if norm > FACTOR * middle or norm < middle / FACTOR)
    deviations = {worker: abs(norm - middle) for worker, norm in norms.items()}
    limit = max(DEVIATIONS * fmean(deviations.values()), _ROUNDING * middle)
    return tuple(worker for worker, deviation in deviations.items() if deviation > limit)
