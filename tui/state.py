"""The state of the console at one moment: everything that the panes and the actions' conditions read.

A frozen value, replaced as a whole, so a pane is a function of it and a test can construct any situation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from engine import api
from engine.errors import FlightDeckError
from tui.formatting import ago
from tui.glyphs import Glyphs

if TYPE_CHECKING:
    from engine.api import (
        CalibrationProgress,
        Config,
        NetworkPlan,
        Prediction,
        QueueItem,
        QueueSnapshot,
        Scaling,
        TrainingPlan,
    )
    from engine.models import CheckResult, NodeFacts, NodeTelemetry, RunRecord, Topology
    from engine.snapshots import Diagnosis, RunSnapshot

NUMBERED: Final = ("nodes", "preflight", "calibration", "run", "history", "queue")
"""The full views, in the order of their number keys."""
VIEWS: Final = ("dashboard", *NUMBERED, "compare")

ENGINE_ERRORS: Final = (FlightDeckError, OSError)
"""How the engine refuses a request."""

FACTS_LIMIT_S: Final = 300.0
"""A node's facts are shown stale when they are older than this."""
TELEMETRY_LIMIT_S: Final = 15.0
"""So is its telemetry, which arrives every 2 s."""
RANK_LIMIT_S: Final = 15.0
"""A training rank is shown stale when it has reported nothing for longer than this."""


class ListedRuns:
    """Answers to a redraw about the runs, newest first: there may be ten thousand, so they are gone through once."""

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        self.by_id = {run.id: run for run in runs}
        self.active = [run for run in runs if not run.state.ended]
        self.tasks: dict[str, list[RunRecord]] = {}
        """By the run whose result they use."""
        for run in runs:
            if run.source is not None:
                self.tasks.setdefault(run.source, []).append(run)


@dataclass(frozen=True)
class DeckState:
    """One moment of the console."""

    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    glyphs: Glyphs = field(default_factory=Glyphs)
    ready: bool = False
    """The engine is loaded."""
    read_only: bool = False
    """Whoever looks at this console may change nothing with it."""
    config: Config | None = None
    fault: str | None = None
    """Why there is no usable configuration, or why the last launch failed; may have several lines."""
    asking: bool = False
    """A person is asked whether the configuration may run what it names."""
    edits: tuple[str, ...] = ()
    """Its keys that were changed since the console read it first, or since the last launch."""
    differs: bool = False
    """It is another than the shown run's."""
    facts: Mapping[str, NodeFacts] = field(default_factory=dict)
    """By node; at the start those that the store has, with their age."""
    probing: bool = False
    unanswered: frozenset[str] = frozenset()
    """Nodes that have not answered the probe under way."""
    telemetry: Mapping[str, NodeTelemetry] = field(default_factory=dict)
    """The newest of each node."""
    listening: bool = False
    """Telemetry is on."""
    topology: Topology | None = None
    network_plan: NetworkPlan | None = None
    plan: TrainingPlan | None = None
    """The next launch, by the facts of the last probe."""
    planning: bool = False
    network_problem: str | None = None
    """Why there is no network plan, one line."""
    node: str | None = None
    """The node under the cursor."""
    detail: bool = False
    """Its details have the whole pane."""
    check: str | None = None
    """The preflight check under the cursor."""
    run: str | None = None
    """The run under the cursor of the history."""
    queue: QueueSnapshot | None = None
    """None where nothing was ever queued."""
    item: str | None = None
    """The queue's item under the cursor."""
    marked: tuple[str, ...] = ()
    """Runs of the history that are to be compared or deleted together, in the order of their marks."""
    checks: tuple[CheckResult, ...] = ()
    """The preflight started from the console, without a launch."""
    skips: Mapping[str, str] = field(default_factory=dict)
    """Checks that the next launch skips, and why, as a person says."""
    checks_at: datetime | None = None
    """When that preflight ended; None while it runs."""
    prediction: Prediction | None = None
    """The next launch by the newest calibration; without one by what is assumed."""
    scaling: Scaling | None = None
    """The newest scaling of the job, however old; while one is measured, what there is of it."""
    calibrating: Mapping[str, CalibrationProgress] | None = None
    """Progress of the calibration or scaling under way, by what is measured; None while there is none."""
    snapshot: RunSnapshot | None = None
    metrics: tuple[str, ...] = ()
    """Those of the shown run that a chart can be drawn of."""
    runs: tuple[RunRecord, ...] | None = None
    """Newest first; None until they have been read."""
    busy: str | None = None
    """The request to the engine under way: "launching", "checking", "calibrating", "measuring the
    scaling"."""
    back_to: str | None = None
    """The view from which the shown run was opened, where esc leads back to."""
    view: str = "dashboard"
    pane: str = "run"
    frozen: bool = False
    has_log: bool = False
    searching: bool = False
    """A search of the log has matches to go through."""

    def key(self, text: str) -> str:
        """`text`, which names a key that changes something; "" where this console only reads."""
        return "" if self.read_only else text

    def stop_key(self, run: str) -> str:
        """How a run that has not ended is stopped: the key stops the shown one."""
        shown = self.snapshot is not None and self.snapshot.record.id == run
        return "ctrl+x stops it" if shown else "5 lists it, enter twice opens it, ctrl+x stops it"

    @property
    def taken(self) -> str | None:
        """By which run the nodes are used."""
        return None if (run := self.running) is None else f"{run.id} uses the nodes: {self.stop_key(run.id)}"

    @property
    def unconfigured(self) -> str:
        """Why there is no configuration, one line."""
        if not self.ready:
            return "loading"
        return self.fault.splitlines()[0] if self.fault else "no configuration: `flightdeck init` writes one"

    @property
    def active(self) -> bool:
        """The shown run has not ended."""
        return self.snapshot is not None and not self.snapshot.record.state.ended

    @property
    def ranks_work(self) -> bool:
        """The shown run has an attempt under way: what its ranks reported is not an earlier one's."""
        return self.snapshot is not None and self.snapshot.record.state in ("running", "finishing")

    @cached_property
    def listed(self) -> ListedRuns:
        """`runs`, gone through."""
        return ListedRuns(self.runs or ())

    @property
    def running(self) -> RunRecord | None:
        """A run that has not ended, the shown one first."""
        if self.snapshot is not None and self.active:
            return self.snapshot.record
        return next((run for run in self.listed.active if not self._shown(run)), None)

    @property
    def queued(self) -> QueueItem | None:
        """The selected item of the queue."""
        items = self.queue.items if self.queue is not None else ()
        return next((item for item in items if str(item.id) == self.item), None)

    @property
    def used_run(self) -> str | None:
        """The training whose result is to be used: the selected run of the history, else the shown one, and of a task
        the one that it uses."""
        record = self.snapshot.record if self.snapshot is not None else None
        if self.pane == "history":
            record = self.listed.by_id.get(self.run or "")
        return (record.source or record.id) if record is not None else None

    @property
    def proof(self) -> Diagnosis | None:
        """The diagnosis of the shown run, where a line of the log proves it."""
        diagnosis = self.snapshot.diagnosis if self.snapshot is not None else None
        return diagnosis if diagnosis is not None and diagnosis.offset is not None else None

    def _shown(self, run: RunRecord) -> bool:
        return self.snapshot is not None and run.id == self.snapshot.record.id

    @cached_property
    def shown_checks(self) -> tuple[CheckResult, ...]:
        """The newest preflight: the console's own, else the shown run's. Those that have not begun have their places
        from the first moment on, and before any preflight, too."""
        if self.checks:
            return self.checks
        recorded = self.snapshot.checks if self.snapshot is not None else ()
        begins = self.snapshot is None or self.snapshot.record.state in ("planned", "preflight")
        configured = self.ready and (self.config is not None or self.snapshot is not None)
        return api.with_pending(recorded) if configured and begins else recorded

    @property
    def checks_of_run(self) -> bool:
        """The shown checks are those of the shown run, not of the configuration as it is now."""
        return not self.checks and self.snapshot is not None and bool(self.snapshot.checks)

    @property
    def known_facts(self) -> list[NodeFacts]:
        """The facts of the configuration's nodes, in its order."""
        nodes = self.config.nodes if self.config is not None else ()
        return [facts for node in nodes if (facts := self.facts.get(node.name)) is not None]

    @property
    def selected_facts(self) -> NodeFacts | None:
        """The facts of the node under the cursor."""
        return self.facts.get(self.node) if self.node is not None else None

    @property
    def selected_check(self) -> CheckResult | None:
        """The check under the cursor of the preflight pane."""
        return next((check for check in self.shown_checks if check.name == self.check), None)

    @property
    def backend(self) -> str | None:
        """The backend of the shown run, else of the next launch."""
        if self.snapshot is not None:
            return self.snapshot.record.backend
        if self.network_plan is not None:
            return self.network_plan.backend
        if self.config is None:
            return None
        if self.config.cluster.backend != "auto":
            return self.config.cluster.backend
        return "ring" if all(node.local for node in self.config.nodes) else "backend auto"

    def failures(self) -> int:
        """Failed checks of the console's own preflight: those block a launch."""
        return sum(check.status == "fail" and check.name not in self.skips for check in self.checks)

    def ago(self, moment: datetime | None) -> str:
        """ "just now" or "3 min ago"."""
        return ago(moment, self.now)

    def age_s(self, moment: datetime) -> float:
        """Seconds from `moment` to now, never below 0."""
        return max(0.0, (self.now - moment).total_seconds())


class StateStore:
    """Holds the console's one state. Every part of the console reads it and changes it here, on the app's loop."""

    def __init__(self, state: DeckState, changed: Callable[[], object]) -> None:
        self.state = state
        self._changed = changed

    def change(self, **changes: Any) -> None:
        """Replace fields of the state; `changed` is called when one is another object than before."""
        if any(getattr(self.state, name) is not value for name, value in changes.items()):
            self.keep(**changes)
            self._changed()

    def keep(self, **changes: Any) -> None:
        """Replace fields of the state; drawn with the next change."""
        before, self.state = self.state, replace(self.state, **changes)
        if before.runs is self.state.runs:
            vars(self.state)["listed"] = before.listed
