"""The frontends' only way into the engine: `Engine` with its parts, and the types and functions that go with them.

A name is imported when it is first used (PEP 562): a console paints before it loads pydantic, and `flightdeck runs`
needs neither the checks nor asyncssh.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from engine.api.engine import Engine as Engine
    from engine.cluster.discovery import FoundHost as FoundHost
    from engine.cluster.discovery import FoundPython as FoundPython
    from engine.cluster.discovery import hosts_from_hostfile as hosts_from_hostfile
    from engine.cluster.discovery import hosts_from_names as hosts_from_names
    from engine.cluster.discovery import is_address as is_address
    from engine.cluster.transport.base import Completed as Completed
    from engine.config.draft import DraftJob as DraftJob
    from engine.config.draft import DraftNode as DraftNode
    from engine.config.draft import already_there as already_there
    from engine.config.draft import find_job as find_job
    from engine.config.draft import unique_names as unique_names
    from engine.config.draft import write_draft as write_draft
    from engine.config.models import Config as Config
    from engine.config.models import with_strategy as with_strategy
    from engine.measurements import Calibration as Calibration
    from engine.measurements import CalibrationProgress as CalibrationProgress
    from engine.measurements import LinkMeasure as LinkMeasure
    from engine.measurements import NodeMeasure as NodeMeasure
    from engine.plan.document import TrainingPlan as TrainingPlan
    from engine.plan.explain import explained as explained
    from engine.plan.explain import summary as summary
    from engine.plan.network import NetworkPlan as NetworkPlan
    from engine.plan.prediction import Prediction as Prediction
    from engine.protocol.exit_codes import ExitCode as ExitCode
    from engine.run.logs.pattern import ERRORS as ERRORS
    from engine.run.logs.pattern import LogPattern as LogPattern
    from engine.run.logs.reader import LogFilter as LogFilter
    from engine.run.logs.reader import LogLine as LogLine
    from engine.run.logs.reader import LogReader as LogReader
    from engine.run.metrics import decimate as decimate
    from engine.run.verification import GPU as GPU
    from engine.run.verification import NOT_MEASURED as NOT_MEASURED
    from engine.run.verification import gpu_line as gpu_line
    from engine.run.watch import RunWatch as RunWatch
    from engine.security.identifiers import safe_repr as safe_repr
    from engine.security.paths import path_fault as path_fault
    from engine.security.sanitise import sanitise as sanitise
    from engine.store.layout import LAUNCHER_SOURCE as LAUNCHER_SOURCE
    from engine.store.layout import RunDir as RunDir

_NAMES: Final = {
    "engine.api.engine": ("Engine",),
    "engine.cluster.discovery": ("FoundHost", "FoundPython", "hosts_from_hostfile", "hosts_from_names", "is_address"),
    "engine.cluster.transport.base": ("Completed",),
    "engine.config.draft": ("DraftJob", "DraftNode", "already_there", "find_job", "unique_names", "write_draft"),
    "engine.config.models": ("Config", "with_strategy"),
    "engine.measurements": ("Calibration", "CalibrationProgress", "LinkMeasure", "NodeMeasure"),
    "engine.plan.document": ("TrainingPlan",),
    "engine.plan.explain": ("explained", "summary"),
    "engine.plan.network": ("NetworkPlan",),
    "engine.plan.prediction": ("Prediction",),
    "engine.protocol.exit_codes": ("ExitCode",),
    "engine.run.logs.pattern": ("ERRORS", "LogPattern"),
    "engine.run.logs.reader": ("LogFilter", "LogLine", "LogReader"),
    "engine.run.metrics": ("decimate",),
    "engine.run.verification": ("GPU", "NOT_MEASURED", "gpu_line"),
    "engine.run.watch": ("RunWatch",),
    "engine.security.identifiers": ("safe_repr",),
    "engine.security.paths": ("path_fault",),
    "engine.security.sanitise": ("sanitise",),
    "engine.store.layout": ("LAUNCHER_SOURCE", "RunDir"),
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
