"""What the deck shows at one moment: everything the panes and the actions' conditions look at, and nothing else.

A frozen value, replaced as a whole; so a pane is a function of it, and a test can make any situation by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from tui.formatting import age
from tui.glyphs import Glyphs

if TYPE_CHECKING:
    from engine.config.models import FlightConfig
    from engine.events import RunSnapshot
    from engine.measured import CalibrationProgress
    from engine.models import CheckResult, NodeFacts, NodeTelemetry, RunRecord, Topology
    from engine.planning.document import TrainingPlan
    from engine.planning.outlook import Outlook
    from engine.planning.wiring import Wiring

VIEWS: Final = ("dashboard", "nodes", "preflight", "calibration", "run", "history")
"""The dashboard and the full views, in the order of their number keys (0 has none)."""

ENDED: Final = frozenset({"succeeded", "failed", "aborted", "lost"})

FACTS_LIMIT_S: Final = 300.0
"""A node's facts are shown stale when they are older than this."""
TELEMETRY_LIMIT_S: Final = 15.0
"""So is what a node uses, which it says every 2 s."""
RANK_LIMIT_S: Final = 15.0
"""A training rank is shown stale when it has said nothing for longer than this."""


@dataclass(frozen=True)
class DeckState:
    """One moment of the console."""

    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    glyphs: Glyphs = field(default_factory=Glyphs)
    ready: bool = False
    """The engine is loaded."""
    config: FlightConfig | None = None
    fault: str | None = None
    """Why there is no usable configuration, or what could not be done last; one line each."""
    facts: Mapping[str, NodeFacts] = field(default_factory=dict)
    """By node, as last seen: at the start what an earlier console has seen, as old as it says."""
    probing: bool = False
    asked: frozenset[str] = frozenset()
    """Nodes that the probe under way has had no answer of yet."""
    telemetry: Mapping[str, NodeTelemetry] = field(default_factory=dict)
    """By node: what it uses, as it last said."""
    listening: bool = False
    """Telemetry is on."""
    topology: Topology | None = None
    wiring: Wiring | None = None
    plan: TrainingPlan | None = None
    """Of what would be launched, as the last probe found the nodes."""
    planning: bool = False
    unwired: str | None = None
    """Why there is no wiring, one line."""
    node: str | None = None
    """The node under the cursor."""
    detail: bool = False
    """Its details have the whole pane."""
    check: str | None = None
    """The preflight check under the cursor."""
    checks: tuple[CheckResult, ...] = ()
    """Of a preflight started from here, without a launch."""
    not_checked: tuple[str, ...] = ()
    """Checks of the full product that this release does not make."""
    checks_at: datetime | None = None
    """When that preflight ended; None while it runs."""
    outlook: Outlook | None = None
    """What the newest calibration means for the next launch; without a calibration what is assumed."""
    calibrating: Mapping[str, CalibrationProgress] | None = None
    """How far a calibration under way is, by what is measured; None while there is none."""
    snapshot: RunSnapshot | None = None
    runs: tuple[RunRecord, ...] | None = None
    """Newest first; None until they have been read."""
    busy: str | None = None
    """A request to the engine that has not been answered: "launching", "checking", "calibrating"."""
    view: str = "dashboard"
    pane: str = "run"
    frozen: bool = False
    has_log: bool = False
    searching: bool = False
    """A search of the log has matches to go through."""

    @property
    def active(self) -> bool:
        """The shown run has not ended."""
        return self.snapshot is not None and self.snapshot.record.state not in ENDED

    @property
    def running(self) -> RunRecord | None:
        """A run that has not ended, the shown one first."""
        if self.snapshot is not None and self.active:
            return self.snapshot.record
        return next((run for run in self.runs or () if run.state not in ENDED and not self._shown(run)), None)

    def _shown(self, run: RunRecord) -> bool:
        return self.snapshot is not None and run.id == self.snapshot.record.id

    @property
    def shown_checks(self) -> tuple[CheckResult, ...]:
        """The newest preflight: one started from here, else the shown run's."""
        if self.checks:
            return self.checks
        return self.snapshot.checks if self.snapshot is not None else ()

    @property
    def selected_facts(self) -> NodeFacts | None:
        """Of the node under the cursor."""
        return self.facts.get(self.node) if self.node is not None else None

    @property
    def selected_check(self) -> CheckResult | None:
        """The check under the cursor of the preflight pane."""
        return next((check for check in self.shown_checks if check.name == self.check), None)

    @property
    def backend(self) -> str | None:
        """How the ranks are, or would be, joined."""
        if self.snapshot is not None:
            return self.snapshot.record.backend
        if self.wiring is not None:
            return self.wiring.backend
        if self.config is None:
            return None
        if self.config.cluster.backend != "auto":
            return self.config.cluster.backend
        return "ring" if all(node.local for node in self.config.nodes) else "backend auto"

    def failures(self) -> int:
        """Failed checks of a preflight started from here: those block a launch."""
        return sum(check.status == "fail" for check in self.checks)

    def ago(self, moment: datetime | None) -> str:
        """ "just now" or "3 min ago"."""
        return "just now" if (said := age(moment, self.now)) == "now" else f"{said} ago"

    def age_s(self, moment: datetime) -> float:
        """Seconds from `moment` to now, never below 0."""
        return max(0.0, (self.now - moment).total_seconds())
