"""Divides the global batch over the nodes: equally, unless the measured throughputs clearly differ."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from engine.config.models import Config
from engine.measurements import Calibration, HardwareMetrics, NodeMeasure, Shares
from engine.plan.fingerprint import age_days, is_stale
from engine.validators.values import check_items

UNEQUAL_ABOVE = 0.10
"""Coefficient of variation of the nodes' throughputs above which unequal shares pay off."""
WARN_ABOVE = 0.20
MISSING = "hardware calibration missing, assuming equal performance"

_log = logging.getLogger(__name__)


def divide_batch(config: Config, calibration: Calibration | None, *, now: datetime | None = None) -> Shares:
    """`calibration` must match the configuration's fingerprint; with `now`, one older than [calibration] max_age_days
    is not used.

    A `share` in [[node]] has priority. Without a calibration, or with calibration switched off, the shares are equal;
    also if the measured throughputs vary by at most UNEQUAL_ABOVE, or by at most the measurement noise. Raises
    ValueError when no node has any throughput."""
    names = [node.name for node in config.nodes]
    if any(node.share is not None for node in config.nodes):
        relative = {node.name: node.share if node.share is not None else 1.0 for node in config.nodes}
        return Shares(parts=_normalised(relative), source="fixed", reason="set by share in [[node]]")
    if (unmeasured := config.job.kind.framework.unmeasured) is not None:
        return Shares(parts=_normalised(dict.fromkeys(names, 1.0)), source="equal", reason=unmeasured)
    if not config.calibration.enabled:
        return _equal(names, f"{MISSING} ([calibration] enabled = false)")
    if calibration is None:
        return _equal(names, MISSING)
    if now is not None and is_stale(config, calibration, now):
        age, limit = age_days(calibration, now), config.calibration.max_age_days
        return _equal(
            names, f"hardware calibration is {age:.0f} days old (limit {limit:g}), assuming equal performance"
        )
    return _measured(names, calibration)


def calculate_workload_distribution(metrics: Sequence[HardwareMetrics]) -> dict[str, float]:
    """Share of the work by node: its throughput over the sum of all. They sum to 1.

    A node without throughput counts as offline: it is left out, with a logged warning. Raises ValueError for no list
    of metrics or an empty one, for duplicate nodes, and when no node is left."""
    check_items(metrics, HardwareMetrics, "metrics")
    names = [measured.node_id for measured in metrics]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"duplicate metrics of a node: {', '.join(twice)}")
    online = {measured.node_id: measured.throughput for measured in metrics if measured.throughput > 0}
    if not online:
        raise ValueError(f"no node has any throughput: {', '.join(names)}")
    for name in names:
        if name not in online:
            _log.warning("node %s has no throughput: it counts as offline and is left out", name)
    return _normalised(online)


def variation(throughputs: Sequence[float]) -> float:
    """Coefficient of variation with the population standard deviation, since all nodes are measured."""
    return statistics.pstdev(throughputs) / statistics.fmean(throughputs)


def noise(measures: Iterable[NodeMeasure | None]) -> float | None:
    """Two standard errors of a node's mean throughput (its spread over the measurement windows, divided by the square
    root of their number), as a root mean square over the nodes; equal nodes rarely appear to vary more. None when no
    spread is known."""
    with_spread = [measure for measure in measures if measure is not None and measure.spread is not None]
    errors = [(measure.spread or 0.0) ** 2 / max(measure.windows, 1) for measure in with_spread]
    return 2 * math.sqrt(statistics.fmean(errors)) if errors else None


def _measured(names: Sequence[str], calibration: Calibration) -> Shares:
    measures = {name: calibration.measure_of(name) for name in names}
    speeds = {name: measure.examples_per_s if measure is not None else None for name, measure in measures.items()}
    unknown = [name for name, speed in speeds.items() if speed is None]
    offline = tuple(name for name, speed in speeds.items() if speed == 0)
    online = {name: speed for name, speed in speeds.items() if speed}
    if len(offline) == len(names):
        raise ValueError(f"no node has any throughput: {', '.join(names)}")
    warnings = [
        f"{name} completed no step during calibration: it counts as offline and is left out" for name in offline
    ]
    equal = _normalised({name: 1.0 for name in names if name not in offline})
    if unknown:
        warnings.append(f"hardware calibration missing for {', '.join(unknown)}, assuming equal performance")
        return Shares(parts=equal, source="equal", reason=warnings[-1], left_out=offline, warnings=tuple(warnings))
    spread, noise_level = variation(list(online.values())), noise(measures[name] for name in online)
    if spread > WARN_ABOVE:
        warnings.append(f"the nodes' throughputs vary by {spread:.0%}: the slower ones hold up the others")
    parts, source = equal, "equal"
    if spread <= UNEQUAL_ABOVE:
        reason = f"equal: the measured throughputs vary by {spread:.0%} (limit {UNEQUAL_ABOVE:.0%})"
    elif noise_level is not None and spread <= noise_level:
        warnings.append(
            f"the measured throughputs vary by {spread:.0%}, within their noise of {noise_level:.0%}: calibrate again "
            "while nothing else runs on the nodes"
        )
        reason = f"equal: {warnings[-1]}"
    else:
        parts, source = _normalised(online), "calibrated"
        against = f"noise {noise_level:.0%}" if noise_level is not None else "noise unknown"
        reason = f"by the measured throughputs, which vary by {spread:.0%} (limit {UNEQUAL_ABOVE:.0%}, {against})"
    figures = {"variation": spread, "noise": noise_level, "left_out": offline, "warnings": tuple(warnings)}
    return Shares.model_validate({"parts": parts, "source": source, "reason": reason, **figures})


def _equal(names: Sequence[str], warning: str) -> Shares:
    return Shares(parts=_normalised(dict.fromkeys(names, 1.0)), source="equal", reason=warning, warnings=(warning,))


def _normalised(relative: Mapping[str, float]) -> dict[str, float]:
    whole = sum(relative.values())
    return {name: part / whole for name, part in relative.items()}
