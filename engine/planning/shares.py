"""Each node's share of the global batch, and the micro-batches that follow: equal unless evidence says otherwise."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, cast

from engine.config.models import FlightConfig
from engine.measured import Calibration, Division, HardwareMetrics, NodeMeasure
from engine.planning.fingerprint import age_days, stale
from engine.worker.shares import share_counts

UNEQUAL_ABOVE = 0.10
"""Coefficient of variation of the nodes' throughputs above which unequal shares are worth it."""
WARN_ABOVE = 0.20
MISSING = "hardware calibration missing, assuming equal performance"

Source = Literal["fixed", "calibrated", "equal"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shares:
    """What part of the global batch each node gets."""

    parts: Mapping[str, float]
    """Node → its part; they sum to 1. In the configuration's order, without the nodes that are left out."""
    source: Source
    reason: str
    """One line."""
    variation: float | None = None
    """Coefficient of variation of the measured throughputs; None where they are not all known."""
    noise: float | None = None
    """How much equal nodes may seem to vary by the unsteadiness of their measurements; None where that is not known."""
    left_out: tuple[str, ...] = ()
    """Nodes that have finished nothing while they were measured."""
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, division: Division) -> Shares:
        """Those that a run was made with."""
        source = cast(Source, division.source)
        return cls(division.parts, source, division.reason, left_out=division.left_out, warnings=division.warnings)

    def micro_batches(self, batch: int) -> dict[str, int]:
        """Node → sequences of a global batch, as in training. Raises ValueError for one that is too small."""
        counts = share_counts(batch, list(self.parts.values()))
        return dict(zip(self.parts, counts, strict=True))


def shares(config: FlightConfig, calibration: Calibration | None, *, now: datetime | None = None) -> Shares:
    """The shares of a job's nodes. `calibration` is one with the configuration's fingerprint; with `now` one that is
    older than [calibration] max_age_days is not used.

    A `share` in [[node]] wins. Without a calibration, or with it switched off, all are equal; so they are when the
    measured throughputs vary by no more than UNEQUAL_ABOVE, or by no more than the noise of the measurement. Raises
    ValueError when no node has any throughput.
    """
    names = [node.name for node in config.nodes]
    fixed = {node.name: node.share for node in config.nodes if node.share is not None}
    if fixed:
        relative = {node.name: node.share if node.share is not None else 1.0 for node in config.nodes}
        return Shares(_normalised(relative), "fixed", "fixed by share in [[node]]")
    if not config.calibration.enabled:
        return _equal(names, f"{MISSING}: it is switched off by [calibration] enabled")
    if calibration is None:
        return _equal(names, MISSING)
    if now is not None and stale(config, calibration, now):
        age, limit = age_days(calibration, now), config.calibration.max_age_days
        return _equal(
            names, f"hardware calibration is {age:.0f} days old (limit {limit:g}), assuming equal performance"
        )
    return _measured(names, calibration)


def calculate_workload_distribution(metrics: Sequence[HardwareMetrics]) -> dict[str, float]:
    """Node → its share of the work: its throughput over the sum of all. They sum to 1.

    A node without throughput is offline: it is left out, and that is logged as a warning. Raises ValueError for an
    empty list, a node that is there twice, and when none is left.
    """
    if not metrics:
        raise ValueError("there are no metrics to distribute the work by")
    names = [measured.node_id for measured in metrics]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"metrics of a node are there twice: {', '.join(twice)}")
    online = {measured.node_id: measured.throughput for measured in metrics if measured.throughput > 0}
    if not online:
        raise ValueError(f"no node has any throughput: {', '.join(names)}")
    for name in names:
        if name not in online:
            _log.warning("node %s has no throughput: it counts as offline and is left out", name)
    return _normalised(online)


def variation(throughputs: Sequence[float]) -> float:
    """Coefficient of variation: population standard deviation over mean; these nodes are all there are."""
    return statistics.pstdev(throughputs) / statistics.fmean(throughputs)


def noise(measures: Iterable[NodeMeasure | None]) -> float | None:
    """Two standard errors of a node's mean throughput (its spread over the windows of the measurement, divided by the
    square root of their number), as a root mean square over the nodes: nodes that are equal rarely seem to vary by
    more. None when no spread is known."""
    known = [measure for measure in measures if measure is not None and measure.spread is not None]
    errors = [(measure.spread or 0.0) ** 2 / max(measure.windows, 1) for measure in known]
    return 2 * math.sqrt(statistics.fmean(errors)) if errors else None


def _measured(names: Sequence[str], calibration: Calibration) -> Shares:
    measures = {name: calibration.of(name) for name in names}
    speeds = {name: measure.examples_per_s if measure is not None else None for name, measure in measures.items()}
    unknown = [name for name, speed in speeds.items() if speed is None]
    offline = tuple(name for name, speed in speeds.items() if speed == 0)
    warnings = [
        f"{name} finished nothing while it was measured: it counts as offline and is left out" for name in offline
    ]
    online = {name: speed for name, speed in speeds.items() if speed}
    left = [name for name in names if name not in offline]
    if not left:
        raise ValueError(f"no node has any throughput: {', '.join(names)}")
    if unknown:
        warnings.append(f"hardware calibration missing of {', '.join(unknown)}, assuming equal performance")
        parts = _normalised(dict.fromkeys(left, 1.0))
        return Shares(parts, "equal", warnings[-1], left_out=offline, warnings=tuple(warnings))
    found, own = variation(list(online.values())), noise(measures[name] for name in online)
    if found > WARN_ABOVE:
        warnings.append(f"the nodes' throughputs vary by {found:.0%}: the slower ones hold the others up")
    parts = _normalised(dict.fromkeys(left, 1.0))
    source: Source = "equal"
    if found <= UNEQUAL_ABOVE:
        reason = f"equal: the measured throughputs vary by {found:.0%}, not above {UNEQUAL_ABOVE:.0%}"
    elif own is not None and found <= own:
        reason = (
            f"equal: the measured throughputs vary by {found:.0%} between the nodes, but each was so unsteady that "
            f"{own:.0%} would be no evidence: calibrate again when nothing else works there"
        )
        warnings.append(reason.removeprefix("equal: "))
    else:
        parts, source = _normalised(online), "calibrated"
        beside = f", and beyond their own noise of {own:.0%}" if own is not None else ", their own noise is not known"
        reason = f"by the measured throughputs, which vary by {found:.0%} (above {UNEQUAL_ABOVE:.0%}{beside})"
    return Shares(parts, source, reason, found, own, offline, tuple(warnings))


def _equal(names: Sequence[str], warning: str) -> Shares:
    return Shares(_normalised(dict.fromkeys(names, 1.0)), "equal", warning, warnings=(warning,))


def _normalised(relative: Mapping[str, float]) -> dict[str, float]:
    whole = sum(relative.values())
    return {name: part / whole for name, part in relative.items()}
