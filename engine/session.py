"""The faces' only door into the engine: requests in, records and snapshots out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from engine.config.models import FlightConfig
from engine.events import RunSnapshot, StopProgress
from engine.models import CheckResult, NodeFacts, RunRecord
from engine.runs.layout import RunDir, state_home


class Engine:
    """One per process. Cheap to construct: reads nothing until it is asked."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or state_home()

    def load_config(self, path: Path) -> FlightConfig:
        """Read a flightdeck.toml. Raises ConfigError with all its faults."""
        raise NotImplementedError

    def demo_config(self, *, ranks: int = 2, iters: int = 60) -> FlightConfig:
        """The demo's configuration, its model and corpus made first when they are not cached (seconds; blocking)."""
        raise NotImplementedError

    def runs(self) -> list[RunRecord]:
        """Every run, newest first; running ones with their live figures."""
        raise NotImplementedError

    def find(self, run: str) -> RunDir:
        """A run by id, unique id prefix, name (its newest) or "last". Raises RunNotFound."""
        raise NotImplementedError

    def record(self, run: str) -> RunRecord:
        raise NotImplementedError

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """mlx-lm's report dicts in order."""
        raise NotImplementedError

    def watch(self, run: str) -> RunWatch:
        raise NotImplementedError

    def adopt_orphans(self) -> list[str]:
        """Find runs whose supervisor is gone and start one that adopts or fences each; the ids."""
        raise NotImplementedError

    async def facts(self, config: FlightConfig) -> list[NodeFacts]:
        """Probe every node once, concurrently."""
        raise NotImplementedError

    def preflight(self, config: FlightConfig, *, skip: Iterable[str] = ()) -> AsyncIterator[CheckResult]:
        """Run the checks; each is yielded as RUNNING and again when it ends."""
        raise NotImplementedError

    async def launch(self, config: FlightConfig, *, skip: Iterable[str] = ()) -> RunRecord:
        """Make the run, start its supervisor, and return once that has taken over (state planned or later).
        Preflight is the supervisor's first step. Raises LaunchError."""
        raise NotImplementedError

    def abort(self, run: str, *, now: bool = False) -> AsyncIterator[StopProgress]:
        """Ask the run's supervisor to stop it and follow until that is proved; `now` leaves out the cooperative
        stop. Ends at once, with no progress, when the run has ended. Idempotent."""
        raise NotImplementedError


class RunWatch:
    """Follows one run's directory; `poll` reads only what is new. Not thread safe; made for one reader."""

    def poll(self) -> RunSnapshot:
        raise NotImplementedError
