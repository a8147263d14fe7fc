"""Whether a run is as fast and as well placed as it should be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from engine.judgement.figures import finite, number, table
from engine.security.identifiers import shown

AT_LEAST: Final = MappingProxyType({"throughput": 0.0, "gpu_utilization": 0.8})
"""To be above it: examples per second; 0 to 1."""
BELOW: Final = MappingProxyType({"latency_ms": 500.0, "memory_utilization": 0.9})
"""To be below it: milliseconds; 0 to 1."""


@dataclass(frozen=True)
class PerformanceReport:
    """The verdict on four figures."""

    within_thresholds: Mapping[str, bool | None]
    """By the figure's name; None where it was not measured."""
    issues: tuple[str, ...]
    """One text for each figure that is not within, or not known."""
    is_valid: bool
    """Every figure is known and within."""


def monitor_performance(metrics: Mapping[str, Any], thresholds: Mapping[str, float] | None = None) -> PerformanceReport:
    """Judge throughput > 0, latency_ms < 500, gpu_utilization > 0.8, memory_utilization < 0.9.

    `thresholds` replaces limits under the same names. A figure that is None was not measured: it is neither within nor
    without, and the whole is then not valid. Raises ValueError for a figure that is missing or no number, and for a
    threshold of another name.
    """
    found = table(metrics, "performance metrics")
    replaced = dict(table(thresholds, "thresholds")) if thresholds is not None else {}
    if unknown := sorted(map(str, set(replaced) - set(AT_LEAST) - set(BELOW))):
        raise ValueError(f"threshold {shown(unknown[0])}: must be one of {', '.join([*AT_LEAST, *BELOW])}")
    within: dict[str, bool | None] = {}
    issues = []
    for name in ("throughput", "latency_ms", "gpu_utilization", "memory_utilization"):
        above = name in AT_LEAST
        limit = finite(replaced.get(name, (AT_LEAST if above else BELOW)[name]), f"threshold {name}")
        if name not in found:
            raise ValueError(f"performance metrics: {name} is missing (None where it was not measured)")
        if found[name] is None:
            within[name] = None
            issues.append(f"{name} was not measured")
            continue
        value = number(found[name], name)
        within[name] = math.isfinite(value) and (value > limit if above else 0 <= value < limit)
        if not within[name]:
            issues.append(f"{name} is {value:g}, must be {'above' if above else 'from 0 to below'} {limit:g}")
    return PerformanceReport(MappingProxyType(within), tuple(issues), not issues)
