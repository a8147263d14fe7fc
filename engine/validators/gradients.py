"""Gradient health: values are finite, norms are similar, and no worker is an outlier."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pvariance
from typing import Any, Final

from engine.security.identifiers import safe_repr
from engine.validators.values import is_number, not_negative, number, table

NO_VARIANCE: Final = 1e-10
"""Below it the norms count as equal."""
FEW_WORKERS: Final = 3
"""Up to so many workers deviations mean little, so a factor from the median is used."""
FACTOR: Final = 10.0
DEVIATIONS: Final = 3.5
_ROUNDING: Final = 1e-12
"""Share of the median: a smaller deviation is rounding."""
_LARGEST: Final = 1e150


@dataclass(frozen=True)
class GradientReport:
    gradient_variance: float
    """Population variance of the finite norms; 0 below 1e-10."""
    outlier_workers: tuple[str, ...]
    unstable_workers: tuple[str, ...]
    """With a NaN or an infinite value."""
    numerical_stability: bool
    """No worker is unstable."""
    is_valid: bool
    """Stable, the variance below the tolerance, no outlier."""


def validate_gradient_layer(updates: Sequence[Mapping[str, Any]], tolerance: float = 0.1) -> GradientReport:
    """`updates` is one round; each is {worker_id, gradients, gradient_norm}, gradients numbers in any nesting of lists,
    arrays and tables. With up to three workers an outlier's norm is more than ten times or less than a tenth of the
    median; with more, its deviation from the median is over 3.5 times the mean deviation. Raises ValueError for no
    updates, missing gradients or norms, a worker that occurs twice, a negative norm, and a tolerance that is negative
    or not a number."""
    if not isinstance(updates, Sequence) or isinstance(updates, str | bytes) or not updates:
        raise ValueError("gradient updates: must be a list with at least one")
    not_negative(tolerance, "tolerance")
    norms: dict[str, float] = {}
    unstable = []
    for worker, norm, stable in map(_read, updates):
        if worker in norms:
            raise ValueError(f"two gradient updates of the worker {safe_repr(worker)}: there must be one per worker")
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
    """(worker, gradient norm, all values are finite)."""
    fields = table(update, "gradient update")
    worker = fields.get("worker_id")
    if not isinstance(worker, str) or not worker:
        raise ValueError(f"worker_id of a gradient update = {safe_repr(worker)}: must be a name")
    if "gradient_norm" not in fields:
        raise ValueError(f"gradient update of {safe_repr(worker)}: gradient_norm is missing")
    norm = number(fields["gradient_norm"], f"gradient_norm of {safe_repr(worker)}")
    if norm < 0:
        raise ValueError(f"gradient_norm of {safe_repr(worker)} = {norm}: must be at least 0")
    values, stable = 0, math.isfinite(norm)
    for values, value in enumerate(_numbers(fields.get("gradients"), worker), 1):  # noqa: B007
        stable = stable and math.isfinite(value)
    if not values:
        raise ValueError(f"gradient update of {safe_repr(worker)}: gradients are missing or empty")
    return worker, norm, stable


def _numbers(gradients: object, worker: str) -> Iterator[float]:
    """All numbers in it, without recursion: the nesting may be of any depth."""
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
            raise ValueError(f"gradients of {safe_repr(worker)} hold {safe_repr(value)}: must be numbers")


def _outliers(norms: Mapping[str, float]) -> tuple[str, ...]:
    if len(norms) < 2:
        return ()
    middle = median(norms.values())
    if len(norms) <= FEW_WORKERS:
        return tuple(w for w, norm in norms.items() if norm > FACTOR * middle or norm < middle / FACTOR)
    deviations = {worker: abs(norm - middle) for worker, norm in norms.items()}
    limit = max(DEVIATIONS * fmean(deviations.values()), _ROUNDING * middle)
    return tuple(worker for worker, deviation in deviations.items() if deviation > limit)
