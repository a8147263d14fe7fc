"""The headless engine: plans, checks, launches, watches, aborts.

The frontends call `engine.api` alone. Functions for other tools (docs/library.md) are here, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from engine.calibration.custom_benchmark import calibrate_node
    from engine.measurements import HardwareMetrics
    from engine.plan.shares import calculate_workload_distribution
    from engine.security.audit import audit_log
    from engine.security.paths import validate_path
    from engine.validators.checkpoints import validate_checkpoint_consistency, validate_checkpoint_layer
    from engine.validators.gradients import validate_gradient_layer
    from engine.validators.health import monitor_performance, run_health_checks
    from engine.validators.training import validate_distributed_training
    from engine.validators.workers import ConsistencyMetrics, WorkerState, validate_worker_consistency

_NAMES: Final = {
    "engine.calibration.custom_benchmark": "calibrate_node",
    "engine.measurements": "HardwareMetrics",
    "engine.plan.shares": "calculate_workload_distribution",
    "engine.security.audit": "audit_log",
    "engine.security.paths": "validate_path",
    "engine.validators.checkpoints": "validate_checkpoint_consistency validate_checkpoint_layer",
    "engine.validators.gradients": "validate_gradient_layer",
    "engine.validators.health": "monitor_performance run_health_checks",
    "engine.validators.training": "validate_distributed_training",
    "engine.validators.workers": "ConsistencyMetrics WorkerState validate_worker_consistency",
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)  # noqa: PLE0605  (one table, not two)


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
