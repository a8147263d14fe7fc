"""What the watch over an attempt begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.supervision.launcher_watch import LauncherWatch


@dataclass(frozen=True)
class Outset:
    """How the attempt came to be watched, and what is known of its start by then."""

    launcher: LauncherWatch | None = None
    """None: it has never run, or is not ours to be watched any more."""
    refusals: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    """Ranks that did not start, where mlx.launch does not tell of them → (exit code, words)."""
    adopted: bool = False
    """An earlier supervisor has begun it."""
    rebooted: bool = False
    """This machine has been restarted since."""
