"""The headless engine: plans, checks, launches, watches, aborts. No textual and no rich in here;
`engine.session` is the faces' only door; `engine.worker` stands apart and runs on the nodes.

What other tools call from Python is re-exported here, each name imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from engine.calibration.node import calibrate_node as calibrate_node
    from engine.measured import HardwareMetrics as HardwareMetrics
    from engine.planning.shares import calculate_workload_distribution as calculate_workload_distribution

_MODULES: Final = {
    "HardwareMetrics": "engine.measured",
    "calculate_workload_distribution": "engine.planning.shares",
    "calibrate_node": "engine.calibration.node",
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
