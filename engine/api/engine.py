"""The Engine: one per process, composed of parts, each with the requests about one noun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.api.session import Session

if TYPE_CHECKING:
    from engine.api.calibrations import CalibrationsApi
    from engine.api.chats import ChatsApi
    from engine.api.checks import ChecksApi
    from engine.api.comparisons import ComparisonsApi
    from engine.api.environments import EnvironmentsApi
    from engine.api.launches import LaunchesApi
    from engine.api.model_copies import ModelsApi
    from engine.api.nodes import NodesApi
    from engine.api.queue import QueueApi
    from engine.api.results import ResultsApi
    from engine.api.runs import RunsApi
    from engine.api.setup import SetupApi
    from engine.api.tasks import TasksApi
    from engine.config.models import Config


class Engine(Session):
    """Cheap to construct: a part is imported when it is first used, and nothing is read before a request."""

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def load_config(self, path: Path, overrides: Mapping[str, Any] = {}) -> Config:
        """Read a flightdeck.toml, with other values of some keys. Raises ConfigError with all its faults."""
        from engine.config.load import load_config

        return load_config(path, overrides)

    def load_grid(self, path: Path, texts: Sequence[str]) -> list[Config]:
        """The configuration of each run that `key=value` texts ask for. Raises ConfigError, InputError."""
        from engine.config.load import load_grid

        return load_grid(path, texts)

    def demo_config(self, *, ranks: int = 2, iters: int = 60) -> Config:
        """The demo's configuration; its model and corpus are made first when not cached (seconds; blocking)."""
        from engine.demo import demo_config

        return demo_config(self.home, ranks=ranks, iters=iters)

    @cached_property
    def nodes(self) -> NodesApi:
        from engine.api.nodes import NodesApi

        return NodesApi(self)

    @cached_property
    def models(self) -> ModelsApi:
        from engine.api.model_copies import ModelsApi

        return ModelsApi(self, self.runs)

    @cached_property
    def runs(self) -> RunsApi:
        from engine.api.runs import RunsApi

        return RunsApi(self)

    @cached_property
    def comparisons(self) -> ComparisonsApi:
        from engine.api.comparisons import ComparisonsApi

        return ComparisonsApi(self, self.runs)

    @cached_property
    def results(self) -> ResultsApi:
        from engine.api.results import ResultsApi

        return ResultsApi(self, self.runs)

    @cached_property
    def calibrations(self) -> CalibrationsApi:
        from engine.api.calibrations import CalibrationsApi

        return CalibrationsApi(self, self.nodes, self.runs)

    @cached_property
    def checks(self) -> ChecksApi:
        from engine.api.checks import ChecksApi

        return ChecksApi(self, self.calibrations)

    @cached_property
    def environments(self) -> EnvironmentsApi:
        from engine.api.environments import EnvironmentsApi

        return EnvironmentsApi(self, self.nodes, self.runs)

    @cached_property
    def launches(self) -> LaunchesApi:
        from engine.api.launches import LaunchesApi

        return LaunchesApi(self, self.runs, self.calibrations)

    @cached_property
    def setup(self) -> SetupApi:
        from engine.api.setup import SetupApi

        return SetupApi(self, self.nodes, self.checks, self.launches, self.models)

    @cached_property
    def queue(self) -> QueueApi:
        from engine.api.queue import QueueApi

        return QueueApi(self, self.runs)

    @cached_property
    def tasks(self) -> TasksApi:
        from engine.api.tasks import TasksApi

        return TasksApi(self.runs, self.launches)

    @cached_property
    def chats(self) -> ChatsApi:
        from engine.api.chats import ChatsApi

        return ChatsApi(self, self.runs, self.tasks)
