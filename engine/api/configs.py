"""Configurations: read, drafted, or the demo's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.api.session import Session
from engine.config.draft import DraftJob, DraftNode, draft
from engine.config.load import load_config
from engine.config.models import Config
from engine.demo import demo_config


class ConfigsApi:
    """Which job runs on which nodes."""

    def __init__(self, session: Session) -> None:
        self._home = session.home

    def load(self, path: Path) -> Config:
        """Read a flightdeck.toml. Raises ConfigError with all its faults."""
        return load_config(path)

    def demo(self, *, ranks: int = 2, iters: int = 60) -> Config:
        """The demo's configuration; its model and corpus are made first when not cached (seconds; blocking)."""
        return demo_config(self._home, ranks=ranks, iters=iters)

    def draft(self, nodes: Sequence[DraftNode], *, cluster: str, backend: str, job: DraftJob) -> str:
        """The text of a first flightdeck.toml. Raises InputError."""
        return draft(nodes, cluster=cluster, backend=backend, job=job)
