"""The files on the head's disk: those of a run below the state directory, and this machine's own node root."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine.security.paths import state_home as state_home  # noqa: PLC0414  (re-exported: its readers look here)

LAUNCHER_SOURCE = 0xFFFF
"""Source number of the launcher's own output in log indices; ranks are their own number."""


def node_root() -> Path:
    """Where this machine keeps its files as a *node* (bundles, runs): below FLIGHTDECK_HOME when that is set, so that a
    test or a second instance shares nothing; else ~/.flightdeck."""
    configured = os.environ.get("FLIGHTDECK_HOME")
    return Path(configured).expanduser().absolute() / "node" if configured else Path.home() / ".flightdeck"


@dataclass(frozen=True)
class RunDir:
    """The paths of one run on the head, `<home>/runs/<run id>/` (0700).

    plan.json               what was launched: resolved config and ranks (written before anything starts)
    plan.whole.json         the first plan.json, where preflight has excluded nodes since
    training_plan.json      the training plan as `flightdeck plan` makes it; written while the checks run
    journal.jsonl           the append-only record, the truth about the run's states; written by the supervisor
    metrics.jsonl           mlx-lm's report dicts, one a line, with `kind` "train" or "val", `attempt`, `at`
    preflight.json          PreflightReport as far as it has come
    rank<k>.log             mirror of rank k's log, attempts one after the other
    rank<k>.events.jsonl    mirror of rank k's events, attempts one after the other
    launcher.log            what mlx.launch itself printed, both streams, attempts one after the other
    rank<k>.idx, launcher.idx, merged.idx    line indices (engine.run.logs.line_index)
    supervisor.json         pid, start time, boot id of the supervisor
    supervisor.log          its stderr
    requests/               one JSON file per request to the supervisor
    attempts/<n>/           hostfile.json, launcher.in (FIFO)
    """

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def home(self) -> Path:
        """The state directory that the run lies in, whatever FLIGHTDECK_HOME is by now."""
        return self.path.parent.parent

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def whole_plan(self) -> Path:
        return self.path / "plan.whole.json"

    @property
    def training_plan(self) -> Path:
        return self.path / "training_plan.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def preflight(self) -> Path:
        return self.path / "preflight.json"

    @property
    def supervisor(self) -> Path:
        return self.path / "supervisor.json"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "supervisor.log"

    @property
    def requests(self) -> Path:
        return self.path / "requests"

    @property
    def merged_index(self) -> Path:
        return self.path / "merged.idx"

    def attempt(self, number: int) -> Path:
        return self.path / "attempts" / str(number)

    def log(self, source: int) -> Path:
        return self.path / ("launcher.log" if source == LAUNCHER_SOURCE else f"rank{source}.log")

    def index(self, source: int) -> Path:
        return self.log(source).with_suffix(".idx")

    def events(self, rank: int) -> Path:
        return self.path / f"rank{rank}.events.jsonl"
