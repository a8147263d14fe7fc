"""Whether the workers of a cluster are fit: a GPU before the start, a heartbeat while they train."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.judgement.figures import finite, not_negative, table, whole
from engine.security.identifiers import shown

HEARTBEAT_LIMIT_S: Final = 60.0
"""As long as a rank's lease: an older heartbeat is no sign of life."""
MODES: Final = ("pre-flight", "runtime")


@dataclass(frozen=True)
class HealthReport:
    """The verdict on a cluster."""

    mode: str
    healthy_workers: tuple[str, ...]
    unhealthy_workers: tuple[str, ...]
    issues: tuple[str, ...]
    """One text for each fault, naming the worker."""
    is_valid: bool


def run_health_checks(
    cluster_config: Mapping[str, Any], mode: str = "pre-flight", *, now: float | None = None
) -> HealthReport:
    """Judge every worker of `cluster_config`: {"workers": [{worker_id, gpu_count, last_heartbeat,
    heartbeat_limit_s}], "worker_count", "heartbeat_limit_s"}.

    "pre-flight": gpu_count > 0. "runtime": last_heartbeat (wall clock, seconds since the epoch; 0 is dead) is no older
    than the worker's limit, else the cluster's, else 60 s, at `now`. A figure that the mode needs and that is missing
    is an issue. Raises ValueError for another mode, no workers, a worker without a name or twice, a figure that cannot
    be one, and a `worker_count` that is below 1 or not how many there are.
    """
    if mode not in MODES:
        raise ValueError(f"mode = {shown(mode)}: must be one of {', '.join(MODES)}")
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
    found = config.get("workers")
    if "worker_count" in config:
        whole(config["worker_count"], "worker_count", 1)
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or not found:
        raise ValueError("workers: must be a list with at least one")
    workers: dict[str, Mapping[str, Any]] = {}
    for entry in found:
        worker = table(entry, "a worker")
        name = worker.get("worker_id")
        if not isinstance(name, str) or not name:
            raise ValueError(f"worker_id = {shown(name)}: must be a name")
        if name in workers:
            raise ValueError(f"worker_id {shown(name)} comes twice")
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
    beat = not_negative(last, f"last_heartbeat of {name}")
    if beat == 0:
        return f"worker {name}: dead, it has never had a heartbeat"
    return (
        f"worker {name}: its last heartbeat is {now - beat:.0f} s old, over {limit:g} s" if now - beat > limit else None
    )
