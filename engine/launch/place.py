"""Where an attempt lives on one host, once that host is prepared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Place:
    """One host (a distinct `ssh` of the configuration) with the worker staged. All paths are absolute on it."""

    target: str
    """NodeConfig.ssh."""
    ranks: tuple[int, ...]
    home: str
    root: str
    """The node root: `~/.flightdeck` there."""
    bundle: str
    """The folder that holds `worker/`; programs of the bundle run with it as their directory."""
    python: str
    """Interpreter of the first of its ranks: runs what belongs to the host and not to a rank."""

    def expanded(self, path: str) -> str:
        """A path of this host's configuration, absolute."""
        if path == "~":
            return self.home
        return str(PurePosixPath(self.home) / path.removeprefix("~/")) if path.startswith("~/") else path
