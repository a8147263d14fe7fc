"""Logs as a run leaves them on the head, made through the real mirror."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engine.cluster.host_connection import LocalFile
from engine.run.logs.mirror import Mirror
from engine.store.layout import LAUNCHER_SOURCE, RunDir


class RunLogs:
    """A run directory whose sources are written to by a test."""

    def __init__(self, root: Path, sources: Iterable[int] = (0, 1)) -> None:
        self.run_dir = RunDir(root / "run")
        self.run_dir.path.mkdir(parents=True)
        self.now = 1_000_000.0
        self._root = root
        self._mirror = Mirror(self.run_dir, print, lambda: self.now)
        for source in sources:
            self._mirror.follow(source, None if source == LAUNCHER_SOURCE else LocalFile(self.node_log(source)), 0)

    @staticmethod
    def mirrored(run_dir: RunDir, source: int, data: str) -> None:
        """As after a run whose rank has printed `data`."""
        run_dir.log(source).write_text(data)
        Mirror(run_dir, print).close()

    def node_log(self, source: int) -> Path:
        """Where the source's program writes."""
        return self.run_dir.log(source) if source == LAUNCHER_SOURCE else self._root / f"node-rank{source}.log"

    def write(self, source: int, data: bytes | str) -> None:
        """Print `data` and mirror it, a second after what was printed before."""
        self.now += 1
        with self.node_log(source).open("ab") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        self._mirror.settle()
