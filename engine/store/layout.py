"""The files on the head's disk: those of a run below the state directory, and this machine's own node root."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LAUNCHER_SOURCE = 0xFFFF
"""Source number of the launcher's own output in log indices; ranks are their own number."""


def run_names(home: Path) -> list[str]:
    """The names of the run directories below the state directory `home`, ascending: the oldest first."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(entry.name for entry in os.scandir(home / "runs"))
    return []


class RunDir:
    """The paths of one run on the head, `<home>/runs/<run id>/` (0700)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.home = path.parent.parent
        """The state directory that the run lies in, whatever FLIGHTDECK_HOME is by now."""
        self.plan = path / "plan.json"
        """The run as launched: resolved config, shares, nonce; written before anything starts, and its copy beside it.
        """
        self.training_plan = path / "training_plan.json"
        """The training plan as `flightdeck plan` makes it; written while the checks run."""
        self.journal = path / "journal.jsonl"
        """The append-only record, the truth about the run's states; written by the supervisor."""
        self.metrics = path / "metrics.jsonl"
        """mlx-lm's report dicts, one a line, with `kind` "train" or "val", `attempt`, `at`."""
        self.wandb_url = path / "wandb.url"
        """Where W&B shows the run."""
        self.preflight = path / "preflight.json"
        """PreflightReport as far as it has come."""
        self.supervisor = path / "supervisor.json"
        """The pid, start time and boot id of the supervisor."""
        self.lock = path / "supervisor.lock"
        """Its supervisor holds a lock on it for life."""
        self.secrets = path / "secrets.json"
        """Secrets of the launch's environment, for an adopter; gone with the run's end."""
        self.supervisor_log = path / "supervisor.log"
        """Its stderr."""
        self.requests = path / "requests"
        """One JSON file per request to the supervisor."""
        self.merged_index = path / "merged.idx"
        """The line index of all logs (engine.run.logs.line_index)."""

    @property
    def telemetry(self) -> Path:
        """Samples of its nodes' telemetry, one a line."""
        return self.path / "telemetry.jsonl"

    @property
    def series(self) -> Path:
        """The folder of its series' pyramids (engine.run.series), which can be made anew."""
        return self.path / "series"

    @property
    def chat(self) -> Path:
        """Conversations with what the run has trained, one question with its answer a line."""
        return self.path / "chat.jsonl"

    @property
    def notifications(self) -> Path:
        """The notifications of the run, and what became of them (engine.run.notifications)."""
        return self.path / "notifications.jsonl"

    @property
    def end_untold(self) -> Path:
        """There until the run's end was told, where it is to be."""
        return self.path / "end.untold"

    def tracker(self, name: str) -> Path:
        """A tracker's folder: TensorBoard's event files, or W&B's own, with what it has not sent in `offline-run-*`."""
        return self.path / name

    def tracker_log(self, name: str) -> Path:
        """The output of a tracker's process."""
        return self.path / f"{name}.log"

    def attempt(self, number: int) -> Path:
        """The folder of an attempt: hostfile.json, launcher.in (FIFO)."""
        return self.path / "attempts" / str(number)

    def newest_attempt(self) -> int:
        """The number of the newest attempt with a folder, which is made before a rank of it starts; 0 for none."""
        names = (path.name for path in (self.path / "attempts").glob("*"))
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def log(self, source: int) -> Path:
        """The mirror of a rank's log, or what mlx.launch itself printed; attempts one after the other."""
        return self.path / ("launcher.log" if source == LAUNCHER_SOURCE else f"rank{source}.log")

    def index(self, source: int) -> Path:
        return self.log(source).with_suffix(".idx")

    def events(self, rank: int) -> Path:
        """The mirror of a rank's events, attempts one after the other."""
        return self.path / f"rank{rank}.events.jsonl"

    def sources(self) -> list[int]:
        """The sources that have a log here, ranks first."""
        names = (path.stem.removeprefix("rank") for path in self.path.glob("rank*.log"))
        ranks = sorted(int(name) for name in names if name.isdecimal())
        return [*ranks, LAUNCHER_SOURCE] if self.log(LAUNCHER_SOURCE).exists() else ranks
