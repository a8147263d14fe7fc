"""The Engine: one per process, composed of parts, each with the requests about one noun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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


PARTS: Final = {
    "nodes": ("nodes.NodesApi", "self"),
    "models": ("model_copies.ModelsApi", "self runs"),
    "runs": ("runs.RunsApi", "self"),
    "comparisons": ("comparisons.ComparisonsApi", "self runs"),
    "results": ("results.ResultsApi", "self runs"),
    "calibrations": ("calibrations.CalibrationsApi", "self nodes runs"),
    "checks": ("checks.ChecksApi", "self calibrations"),
    "environments": ("environments.EnvironmentsApi", "self nodes runs"),
    "launches": ("launches.LaunchesApi", "self runs calibrations"),
    "setup": ("setup.SetupApi", "self nodes checks launches models"),
    "queue": ("queue.QueueApi", "self runs"),
    "tasks": ("tasks.TasksApi", "runs launches"),
    "chats": ("chats.ChatsApi", "self runs tasks"),
}
"""Each part's module here and class, and what it is made of: the session and other parts."""


class Engine(Session):
    """Cheap to construct: a part is imported when it is first used, and nothing is read before a request."""

    nodes: NodesApi
    models: ModelsApi
    runs: RunsApi
    comparisons: ComparisonsApi
    results: ResultsApi
    calibrations: CalibrationsApi
    checks: ChecksApi
    environments: EnvironmentsApi
    launches: LaunchesApi
    setup: SetupApi
    queue: QueueApi
    tasks: TasksApi
    chats: ChatsApi

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A part, made when it is first asked for."""
            if name not in PARTS:
                raise AttributeError(name)
            (module, _, kind), needs = PARTS[name][0].partition("."), PARTS[name][1].split()
            parts = [self if need == "self" else getattr(self, need) for need in needs]
            part = getattr(import_module(f"engine.api.{module}"), kind)(*parts)
            setattr(self, name, part)
            return part

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
