"""The state of one finished update, and who it is of: what a checkpoint and a rescue are written from."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .checkpoint import store
from .job import config_hash
from .strategies.strategy import State


@dataclass(frozen=True)
class Snapshot:
    """References to arrays that never change, so that nothing is copied and no memory is taken while they are the
    training's own."""

    iteration: int
    """The last one that the state has seen; the position of the data is this number too."""
    update: int
    window: Mapping[str, Any]
    """What has been counted since the last report."""
    state: State


@dataclass(frozen=True)
class Origin:
    """Whose state it is."""

    job: str
    """Its state_hash."""
    world_size: int
    part: int
    """Of the state, from 0 …"""
    parts: int
    """… of so many: 1 where every rank has all of it."""

    def write(self, folder: Path, snapshot: Snapshot, compression: str = "none") -> store.Checkpoint:
        """Commit `snapshot` in `folder`, on any thread. Raises OSError, ValueError."""
        return store.write(
            folder,
            snapshot.state,
            update=snapshot.update,
            config_hash=self.job,
            world_size=self.world_size,
            state={
                "iteration": snapshot.iteration,
                "window": dict(snapshot.window),
                "part": self.part,
                "parts": self.parts,
            },
            versions=versions(),
            compression=compression,
        )


def state_hash(raw: Mapping[str, Any]) -> str:
    """Of the job as far as a state depends on it: which rank has which layers changes with the number of ranks."""
    return config_hash({key: value for key, value in raw.items() if key != "layer_split"})


def versions() -> dict[str, str]:
    """Package → version, of what the training is computed with."""
    return {
        "python": platform.python_version(),
        **{name.replace("-", "_"): version(name) for name in ("mlx", "mlx-lm")},
    }
