"""The Engine: one per process, composed of parts, each with the requests about one noun."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from engine.api.session import Session

if TYPE_CHECKING:
    from engine.api.calibrations import CalibrationsApi
    from engine.api.checks import ChecksApi
    from engine.api.launches import LaunchesApi, PlansApi
    from engine.api.nodes import NodesApi
    from engine.api.runs import RunsApi
    from engine.config.models import Config


class Engine:
    """Cheap to construct: a part is imported when it is first used, and nothing is read before a request."""

    def __init__(self, home: Path | None = None) -> None:
        self.session = Session(home)

    @property
    def home(self) -> Path:
        return self.session.home

    @property
    def notices(self) -> list[str]:
        """Damage found in the state and how it was handled, one line each, for people."""
        return self.session.notices

    async def close(self) -> None:
        """Close all connections to nodes; runs go on."""
        await self.session.close()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def load_config(self, path: Path) -> Config:
        """Read a flightdeck.toml. Raises ConfigError with all its faults."""
        from engine.config.load import load_config

        return load_config(path)

    def demo_config(self, *, ranks: int = 2, iters: int = 60) -> Config:
        """The demo's configuration; its model and corpus are made first when not cached (seconds; blocking)."""
        from engine.demo import demo_config

        return demo_config(self.home, ranks=ranks, iters=iters)

    @cached_property
    def nodes(self) -> NodesApi:
        from engine.api.nodes import NodesApi

        return NodesApi(self.session)

    @cached_property
    def runs(self) -> RunsApi:
        from engine.api.runs import RunsApi

        return RunsApi(self.session)

    @cached_property
    def calibrations(self) -> CalibrationsApi:
        from engine.api.calibrations import CalibrationsApi

        return CalibrationsApi(self.session, self.nodes, self.runs)

    @cached_property
    def plans(self) -> PlansApi:
        from engine.api.launches import PlansApi

        return PlansApi(self.session)

    @cached_property
    def checks(self) -> ChecksApi:
        from engine.api.checks import ChecksApi

        return ChecksApi(self.session, self.calibrations)

    @cached_property
    def launches(self) -> LaunchesApi:
        from engine.api.launches import LaunchesApi

        return LaunchesApi(self.session, self.runs, self.calibrations)
