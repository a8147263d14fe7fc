"""Everything that a plan is made of, gathered beforehand: making the plan touches no node, no disk and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from engine.config.models import FlightConfig
from engine.measured import Calibration, Division
from engine.models import NodeFacts, Topology
from engine.planning.data_report import DataReport
from engine.planning.document import CheckPart
from engine.planning.wiring import Wiring

Parallelism = Literal["data", "sharded", "pipeline"]


@dataclass(frozen=True)
class Launching:
    """How the ranks would be started by hand."""

    command: str | None = None
    notes: tuple[str, ...] = ()
    hostfile: Mapping[str, Any] | None = None
    hostfile_path: str | None = None


@dataclass(frozen=True)
class Tools:
    """Programs on this machine that the plan names."""

    python: str
    flightdeck: str


@dataclass(frozen=True)
class PlanInputs:
    """One moment of a cluster, and a job."""

    config: FlightConfig
    """With the nodes that would take part."""
    strategy: Parallelism
    """The job's, or the one that was asked about."""
    now: datetime
    topology: Topology
    tools: Tools
    facts: Mapping[str, NodeFacts] = field(default_factory=dict)
    """Node → what was last seen of it, however long ago; without those that nobody has ever seen."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Node → why it does not answer now."""
    wiring: Wiring | None = None
    unwired: str | None = None
    """Why there is no wiring."""
    model: Mapping[str, Any] | None = None
    """The model's config.json."""
    model_from: str = ""
    """Where it was read, or why it was not."""
    examples: int | None = None
    """Of the training data."""
    examples_from: str = ""
    report: DataReport | None = None
    report_problem: str | None = None
    """Why a report that the job names is not there."""
    calibration: Calibration | None = None
    division: Division | None = None
    """How the batch is divided, where a run has been made; else the calibration says."""
    left_out: tuple[str, ...] = ()
    """Nodes of the configuration that would take no part."""
    launching: Launching = Launching()
    rank_environment: Mapping[str, str] = field(default_factory=dict)
    """What `flightdeck launch` sets for every rank, without secrets."""
    checks: tuple[CheckPart, ...] = ()
    checks_not_yet: Mapping[str, str] = field(default_factory=dict)
