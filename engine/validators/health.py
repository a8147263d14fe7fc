"""GPUs before the start, heartbeats during training, and performance figures within their thresholds."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from engine.security.identifiers import safe_repr
from engine.validators.values import finite, not_negative, number, table, whole

LIMITS: Final = MappingProxyType(
    {"throughput": 0.0, "latency_ms": 500.0, "gpu_utilization": 0.8, "memory_utilization": 0.9}
)
"""Exclusive: examples per second, milliseconds, 0 to 1, 0 to 1."""
_MINIMUMS: Final = ("throughput", "gpu_utilization")


@dataclass(frozen=True)
class PerformanceReport:
    within_thresholds: Mapping[str, bool | None]
    """By the metric's name; None where it was not measured."""
    issues: tuple[str, ...]
    """One message for each metric that exceeds its threshold or was not measured."""
    is_valid: bool
    """Every metric was measured and is within its threshold."""


def monitor_performance(metrics: Mapping[str, Any], thresholds: Mapping[str, float] | None = None) -> PerformanceReport:
    """Check throughput > 0, latency_ms < 500, gpu_utilization > 0.8, memory_utilization < 0.9; `thresholds` replaces
    limits by name. A metric that is None was not measured, and the report is not valid then. Raises ValueError for a
    metric that is missing or not a number, and for an unknown threshold."""
    measured = table(metrics, "performance metrics")
    limits = {**LIMITS, **(table(thresholds, "thresholds") if thresholds is not None else {})}
    if unknown := sorted(map(str, limits.keys() - LIMITS.keys())):
        raise ValueError(f"threshold {safe_repr(unknown[0])}: must be one of {', '.join(LIMITS)}")
    within: dict[str, bool | None] = {}
    issues = []
    for name in LIMITS:
        above, limit = name in _MINIMUMS, finite(limits[name], f"threshold {name}")
        if name not in measured:
            raise ValueError(f"performance metrics: {name} is missing (None where it was not measured)")
        if measured[name] is None:
            within[name] = None
            issues.append(f"{name} was not measured")
            continue
        value = number(measured[name], name)
        within[name] = math.isfinite(value) and (value > limit if above else 0 <= value < limit)
        if not within[name]:
            issues.append(f"{name} is {value:g}, must be {'above' if above else 'from 0 to below'} {limit:g}")
    return PerformanceReport(MappingProxyType(within), tuple(issues), not issues)


HEARTBEAT_LIMIT_S: Final = 60.0
"""As long as a rank's lease."""
MODES: Final = ("pre-flight", "runtime")


@dataclass(frozen=True)
class HealthReport:
    mode: str
    healthy_workers: tuple[str, ...]
    unhealthy_workers: tuple[str, ...]
    issues: tuple[str, ...]
    """One message for each fault, naming the worker."""
    is_valid: bool


def run_health_checks(
    cluster_config: Mapping[str, Any], mode: str = "pre-flight", *, now: float | None = None
) -> HealthReport:
    """Check every worker of `cluster_config`: {"workers": [{worker_id, gpu_count, last_heartbeat,
    heartbeat_limit_s}], "worker_count", "heartbeat_limit_s"}.

    "pre-flight": gpu_count > 0. "runtime": last_heartbeat (wall clock, seconds since the epoch; 0 is dead) is no older
    than the worker's limit, else the cluster's, else 60 s, at `now`. A missing value that the mode needs is
    an issue. Raises ValueError for another mode, no workers, a worker without a name or twice, an invalid value, and a
    `worker_count` that is below 1 or wrong."""
    if mode not in MODES:
        raise ValueError(f"mode = {safe_repr(mode)}: must be one of {', '.join(MODES)}")
    config = table(cluster_config, "cluster_config")
    workers = _workers(config)
    limit = not_negative(config.get("heartbeat_limit_s", HEARTBEAT_LIMIT_S), "heartbeat_limit_s")
    at = time.time() if now is None else finite(now, "now")
    faults: dict[str, str] = {}
    for name, worker in workers.items():
        fault = _without_gpu(name, worker) if mode == "pre-flight" else _without_heartbeat(name, worker, limit, at)
        if fault is not None:
            faults[name] = fault
    return HealthReport(
        mode=mode,
        healthy_workers=tuple(name for name in workers if name not in faults),
        unhealthy_workers=tuple(faults),
        issues=tuple(faults.values()),
        is_valid=not faults,
    )


def _workers(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    entries = config.get("workers")
    if "worker_count" in config:
        whole(config["worker_count"], "worker_count", 1)
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes) or not entries:
        raise ValueError("workers: must be a list with at least one")
    workers: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        worker = table(entry, "a worker")
        name = worker.get("worker_id")
        if not isinstance(name, str) or not name:
            raise ValueError(f"worker_id = {safe_repr(name)}: must be a name")
        if name in workers:
            raise ValueError(f"worker_id {safe_repr(name)} occurs twice")
        workers[name] = worker
    if config.get("worker_count", len(workers)) != len(workers):
        raise ValueError(f"worker_count = {config['worker_count']}, but there are {len(workers)} workers")
    return workers


def _without_gpu(name: str, worker: Mapping[str, Any]) -> str | None:
    count = worker.get("gpu_count")
    if count is None:
        return f"worker {name}: gpu_count is not known"
    return None if whole(count, f"gpu_count of {name}") > 0 else f"worker {name}: no GPU"


def _without_heartbeat(name: str, worker: Mapping[str, Any], limit: float, now: float) -> str | None:
    last = worker.get("last_heartbeat")
    if last is None:
        return f"worker {name}: its heartbeat is not known"
    limit = not_negative(worker.get("heartbeat_limit_s", limit), f"heartbeat_limit_s of {name}")
    heartbeat = not_negative(last, f"last_heartbeat of {name}")
    if heartbeat == 0:
        return f"worker {name}: dead, it never sent a heartbeat"
    if now - heartbeat <= limit:
        return None
    return f"worker {name}: its last heartbeat is {now - heartbeat:.0f} s old, over {limit:g} s"
