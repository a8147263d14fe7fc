"""Validation of a distributed training, layer by layer, from values that another program has collected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from engine.models import CheckStatus
from engine.security.identifiers import is_identifier, safe_repr
from engine.validators.checkpoints import validate_checkpoint_layer
from engine.validators.gradients import validate_gradient_layer
from engine.validators.health import monitor_performance, run_health_checks

PARTS: Final = ("checkpoints", "gradient_updates", "performance_metrics", "health_config")


@dataclass(frozen=True)
class TrainingReport:
    """A layer that was skipped is not valid, and then the training as a whole is not either."""

    hardware_valid: bool
    """Every worker has a GPU."""
    worker_valid: bool
    """Every worker has a valid name, and all that sent gradients are in the cluster."""
    checkpoint_valid: bool
    gradient_valid: bool
    performance_valid: bool
    health_valid: bool
    """Every worker has a heartbeat ("mode": "runtime") or a GPU (before the start)."""
    statuses: Mapping[str, CheckStatus]
    """By layer: pass, fail, or skip where its part was empty."""
    validation_issues: tuple[str, ...]
    """Each begins with its layer's name."""
    overall_valid: bool

    @property
    def is_valid(self) -> bool:
        return self.overall_valid


def validate_distributed_training(config: dict[str, Any]) -> TrainingReport:
    """Validate `config`: checkpoints (paths), gradient_updates (as `validate_gradient_layer` takes them),
    performance_metrics (`monitor_performance`), health_config (`run_health_checks`, with its "mode"). An empty part is
    skipped; a malformed one fails its layer, and is an issue. Raises TypeError when `config` is not a dict, ValueError
    when a part is missing."""
    if not isinstance(config, dict):
        raise TypeError(f"config must be a dict, not {type(config).__name__}")
    for part in PARTS:
        if part not in config:
            raise ValueError(f"config: {part} is missing")
    checkpoints, updates, performance, health = (config[part] for part in PARTS)
    mode = str(health.get("mode", "pre-flight")) if isinstance(health, Mapping) else "pre-flight"
    checks: dict[str, tuple[object, Callable[[], list[str]]]] = {
        "hardware": (health, lambda: list(run_health_checks(health).issues)),
        "worker": (health, lambda: _workers(health, updates)),
        "checkpoint": (checkpoints, lambda: _checkpoints(checkpoints)),
        "gradient": (updates, lambda: _gradients(updates)),
        "performance": (performance, lambda: list(monitor_performance(performance).issues)),
        "health": (health, lambda: list(run_health_checks(health, mode).issues)),
    }
    results = {layer: _check_part(values, check) for layer, (values, check) in checks.items()}
    statuses = {layer: status for layer, (status, _) in results.items()}
    valid = {layer: status is CheckStatus.PASS for layer, status in statuses.items()}
    return TrainingReport(
        **{f"{layer}_valid": good for layer, good in valid.items()},
        statuses=MappingProxyType(statuses),
        validation_issues=tuple(f"{layer}: {issue}" for layer, (_, issues) in results.items() for issue in issues),
        overall_valid=all(valid.values()),
    )


def _check_part(part: object, check: Callable[[], list[str]]) -> tuple[CheckStatus, list[str]]:
    if part is None or (hasattr(part, "__len__") and len(part) == 0):
        return CheckStatus.SKIP, ["skipped: its part of the config is empty"]
    try:
        issues = check()
    except ValueError as fault:
        issues = [str(fault)]
    return (CheckStatus.FAIL if issues else CheckStatus.PASS), issues


def _workers(health: Any, updates: Any) -> list[str]:
    # Raises for a malformed list of workers.
    report = run_health_checks(health)
    names = {*report.healthy_workers, *report.unhealthy_workers}
    issues = [f"{safe_repr(name)} is not a valid name" for name in sorted(names) if not is_identifier(name)]
    sent = [update.get("worker_id") for update in updates or () if isinstance(update, Mapping)]
    unknown = dict.fromkeys(str(name) for name in sent if name not in names)
    return issues + [f"{safe_repr(name)} sent gradients and is not in health_config" for name in unknown]


def _checkpoints(paths: Any) -> list[str]:
    report = validate_checkpoint_layer(paths)
    issues = [f"{path}: {problem}" for path, problem in report.problems.items()]
    if not report.version_consistency and len(report.problems) < len(report.integrity_checks):
        issues.append("the checkpoints are of different versions")
    return issues


def _gradients(updates: Any) -> list[str]:
    report = validate_gradient_layer(updates)
    issues = [f"{safe_repr(worker)} has NaN or infinite values" for worker in report.unstable_workers]
    issues += [f"{safe_repr(worker)} is far from the others" for worker in report.outlier_workers]
    if not report.is_valid and not issues:
        issues.append(f"the norms' variance {report.gradient_variance:g} is not below the tolerance")
    return issues
