"""The frontends' only way into the engine: `Engine` with its parts, and the types and functions that go with them.

A name is imported when it is first used (PEP 562): a console paints before it loads pydantic, and `flightdeck runs`
needs neither the checks nor asyncssh."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from engine.api.chats import ChatAnswer, ChatExchange, ChatServer
    from engine.api.engine import Engine
    from engine.api.queue import starting_time
    from engine.api.read_only import ReadOnlyEngine
    from engine.api.setup import NodeCandidate, SetupChoices
    from engine.api.tasks import TaskRequest, serve_request
    from engine.checks.dataset import DataInspection
    from engine.checks.fixes import MAKE_ENVIRONMENT, as_shell_line, asks_for_password
    from engine.checks.runner import CHECKS, check_label, with_pending
    from engine.cluster.discovery import FoundHost, FoundPython, draft_nodes, hosts_from_hostfile, hosts_from_names
    from engine.cluster.environments import EnvironmentPlan, NodePythons
    from engine.cluster.probe_results import NodeCopies, NodeCopy
    from engine.cluster.transport.base import Completed
    from engine.config.draft import (
        SCHEMA,
        USUAL_ITERS,
        DraftJob,
        DraftNode,
        answer_form,
        check_target,
        draft,
        find_job,
        is_beside,
        usual_batch,
        write_draft,
    )
    from engine.config.edit import changed_keys, edited_settings, with_settings
    from engine.config.models import Config
    from engine.config.overrides import parse_settings, parse_value
    from engine.config.sources import ConfigValue, PlacedFault, configurations, effective, placed
    from engine.measurements import (
        Calibration,
        CalibrationProgress,
        GroupMeasure,
        LinkMeasure,
        NodeMeasure,
        Scaling,
        ScalingPoint,
    )
    from engine.plan.capacity import Capacity, CapacityReport
    from engine.plan.document import TorchSection, TrainingPlan
    from engine.plan.explain import explained, summary
    from engine.plan.network import NetworkPlan
    from engine.plan.prediction import Prediction
    from engine.plan.strategy import with_strategy
    from engine.protocol.attempt import replacing
    from engine.protocol.exit_codes import ExitCode
    from engine.protocol.job import Strategy
    from engine.protocol.task import ANSWER_TOKENS, KEEP, SERVE_PORT, TaskKind
    from engine.publish.model_card import PublicationRequest
    from engine.queue.items import QueueItem, QueueSnapshot
    from engine.run.compare import Comparison, Difference, SpeedReasons
    from engine.run.logs.alike import AlikeLines
    from engine.run.logs.pattern import ERRORS, LogPattern
    from engine.run.logs.reader import LogFilter, LogLine, LogReader
    from engine.run.metrics import MetricsTrial
    from engine.run.run_filter import run_filter, sorted_runs
    from engine.run.series.reader import AXES, UNITS, RunSeries, SeriesChart, SeriesCurve
    from engine.run.verification import GPU, NOT_MEASURED, gpu_line
    from engine.run.watch import RunWatch
    from engine.security.identifiers import safe_repr, validate_identifier
    from engine.security.paths import path_fault, state_home
    from engine.security.redact import redact
    from engine.security.sanitise import sanitise, sanitise_text
    from engine.snapshots import FetchProgress
    from engine.store.layout import LAUNCHER_SOURCE, RunDir

_NAMES: Final = {
    "engine.api.chats": "ChatAnswer ChatServer ChatExchange",
    "engine.api.engine": "Engine",
    "engine.api.queue": "starting_time",
    "engine.api.read_only": "ReadOnlyEngine",
    "engine.api.setup": "NodeCandidate SetupChoices",
    "engine.api.tasks": "TaskRequest serve_request",
    "engine.checks.fixes": "MAKE_ENVIRONMENT as_shell_line asks_for_password",
    "engine.checks.dataset": "DataInspection",
    "engine.checks.runner": "CHECKS check_label with_pending",
    "engine.cluster.discovery": "FoundHost FoundPython draft_nodes hosts_from_hostfile hosts_from_names",
    "engine.cluster.probe_results": "NodeCopies NodeCopy",
    "engine.cluster.environments": "EnvironmentPlan NodePythons",
    "engine.cluster.transport.base": "Completed",
    "engine.config.draft": (
        "SCHEMA USUAL_ITERS DraftJob DraftNode answer_form check_target draft find_job is_beside usual_batch "
        "write_draft"
    ),
    "engine.config.edit": "changed_keys edited_settings with_settings",
    "engine.config.models": "Config",
    "engine.config.overrides": "parse_settings parse_value",
    "engine.config.sources": "ConfigValue PlacedFault configurations effective placed",
    "engine.measurements": "Calibration CalibrationProgress GroupMeasure LinkMeasure NodeMeasure Scaling ScalingPoint",
    "engine.plan.capacity": "Capacity CapacityReport",
    "engine.plan.document": "TorchSection TrainingPlan",
    "engine.plan.explain": "explained summary",
    "engine.plan.network": "NetworkPlan",
    "engine.plan.prediction": "Prediction",
    "engine.plan.strategy": "with_strategy",
    "engine.protocol.attempt": "replacing",
    "engine.protocol.exit_codes": "ExitCode",
    "engine.protocol.job": "Strategy",
    "engine.protocol.task": "ANSWER_TOKENS KEEP SERVE_PORT TaskKind",
    "engine.publish.model_card": "PublicationRequest",
    "engine.queue.items": "QueueItem QueueSnapshot",
    "engine.run.compare": "Comparison Difference SpeedReasons",
    "engine.run.logs.pattern": "ERRORS LogPattern",
    "engine.run.logs.alike": "AlikeLines",
    "engine.run.logs.reader": "LogFilter LogLine LogReader",
    "engine.run.metrics": "MetricsTrial",
    "engine.run.run_filter": "run_filter sorted_runs",
    "engine.run.series.reader": "AXES UNITS RunSeries SeriesChart SeriesCurve",
    "engine.run.verification": "GPU NOT_MEASURED gpu_line",
    "engine.run.watch": "RunWatch",
    "engine.security.identifiers": "safe_repr validate_identifier",
    "engine.security.paths": "path_fault state_home",
    "engine.security.redact": "redact",
    "engine.security.sanitise": "sanitise sanitise_text",
    "engine.snapshots": "FetchProgress",
    "engine.store.layout": "LAUNCHER_SOURCE RunDir",
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
