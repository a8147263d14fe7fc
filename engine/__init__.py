"""The headless engine: plans, checks, launches, watches, aborts. No textual and no rich in here;
`engine.session` is the faces' only door; `engine.worker` stands apart and runs on the nodes.

What other tools call from Python is re-exported here, each name imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from engine.calibration.node import calibrate_node as calibrate_node
    from engine.judgement.checkpoints import validate_checkpoint_consistency as validate_checkpoint_consistency
    from engine.judgement.checkpoints import validate_checkpoint_layer as validate_checkpoint_layer
    from engine.judgement.gradients import validate_gradient_layer as validate_gradient_layer
    from engine.judgement.health import run_health_checks as run_health_checks
    from engine.judgement.performance import monitor_performance as monitor_performance
    from engine.judgement.training import validate_distributed_training as validate_distributed_training
    from engine.judgement.workers import ConsistencyMetrics as ConsistencyMetrics
    from engine.judgement.workers import WorkerState as WorkerState
    from engine.judgement.workers import validate_worker_consistency as validate_worker_consistency
    from engine.measured import HardwareMetrics as HardwareMetrics
    from engine.planning.shares import calculate_workload_distribution as calculate_workload_distribution
    from engine.security.audit import audit_log as audit_log
    from engine.security.paths import validate_path as validate_path

_MODULES: Final = {
    "ConsistencyMetrics": "engine.judgement.workers",
    "HardwareMetrics": "engine.measured",
    "WorkerState": "engine.judgement.workers",
    "audit_log": "engine.security.audit",
    "calculate_workload_distribution": "engine.planning.shares",
    "calibrate_node": "engine.calibration.node",
    "monitor_performance": "engine.judgement.performance",
    "run_health_checks": "engine.judgement.health",
    "validate_checkpoint_consistency": "engine.judgement.checkpoints",
    "validate_checkpoint_layer": "engine.judgement.checkpoints",
    "validate_distributed_training": "engine.judgement.training",
    "validate_gradient_layer": "engine.judgement.gradients",
    "validate_path": "engine.security.paths",
    "validate_worker_consistency": "engine.judgement.workers",
}
"""Public name → the module that it belongs to."""

__all__ = sorted(_MODULES)  # noqa: PLE0605  (one table, not two)


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
