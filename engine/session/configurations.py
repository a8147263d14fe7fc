"""Configurations: read, drafted, or the demo's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.models import FlightConfig
from engine.session.room import Room

if TYPE_CHECKING:
    from engine.config.draft import DraftJob, DraftNode


class Configurations(Room):
    """What is to be run, and on what."""

    def load_config(self, path: Path) -> FlightConfig:
        """Read a flightdeck.toml. Raises ConfigError with all its faults."""
        from engine.config.load import load_config

        return load_config(path)

    def demo_config(self, *, ranks: int = 2, iters: int = 60) -> FlightConfig:
        """The demo's configuration, its model and corpus made first when they are not cached (seconds; blocking)."""
        from engine.demo import demo_config

        return demo_config(self.home, ranks=ranks, iters=iters)

    def draft(
        self, nodes: Sequence[DraftNode], *, cluster: str, backend: str = "auto", job: DraftJob | None = None
    ) -> str:
        """The text of a first flightdeck.toml. Raises InputError."""
        from engine.config.draft import draft

        return draft(nodes, cluster=cluster, backend=backend, job=job)
