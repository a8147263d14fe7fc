"""Periodic checkpoints beside the training: taken by reference between two updates, written by a thread of their own.

All ranks decide together, by counters that ride in the update's own sum: one checkpoint begins when it is due and none
is being written any more. Where the state is the same everywhere, rank 0 writes; else each rank writes its part.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import store
from .checkpoint.background import Background, Ended
from .checkpoint.remote import Remote
from .reporting import Reporter
from .snapshot import Origin, Snapshot


@dataclass(frozen=True)
class Cadence:
    """How often, how many and how."""

    every: int
    """Updates from one to the next; 0: none."""
    keep: int = 3
    compression: str = "none"

    def kept(self, parts: int) -> int:
        """How many, of a state in so many parts: the newest of a part may be the only part of it that there is."""
        return self.keep if parts == 1 else max(2, self.keep)


@dataclass(frozen=True)
class _Written:
    checkpoint: store.Checkpoint
    refused: tuple[str, ...]
    """What was found wrong with older ones."""


class Periodic:
    """The checkpoints of one run, on one rank."""

    def __init__(
        self,
        folder: Path,
        cadence: Cadence,
        origin: Origin,
        reporter: Reporter,
        *,
        writes: bool,
        remote: Remote | None = None,
    ) -> None:
        """`writes`: whether this rank is a committer. `folder` is where; `remote`, where they are copied to."""
        self._folder = folder
        self._cadence = cadence
        self._origin = origin
        self._reporter = reporter
        self._writes = writes
        self._remote = remote
        self._background: Background[_Written] = Background()
        self._begun_at: tuple[int, int] | None = None
        """The update and the iteration of the last one that was begun."""
        self._blocking_s = 0.0
        self._idle = True
        self._settled = True
        self.committed: int | None = None
        """The newest update of which all ranks know that it is on a disk, as a whole."""

    @property
    def on(self) -> bool:
        return self._cadence.every > 0

    def counters(self) -> list[float]:
        """What this rank adds to the update's sum: whether it could begin one, and whether the last one is whole."""
        begun = time.perf_counter()
        self._look(wait=False)
        self._blocking_s += time.perf_counter() - begun
        return [float(not self._background.busy), float(self._settled)]

    def agree(self, idle: float, settled: float) -> None:
        """The counters summed over the ranks."""
        self._idle = idle == self._origin.world_size
        if settled == self._origin.world_size and self._begun_at is not None:
            self.committed = self._begun_at[0]

    def due(self, update: int) -> bool:
        """Whether one begins after `update`. The same on every rank."""
        if not self.on or update % self._cadence.every:
            return False
        if not self._idle:
            self._reporter.event("checkpoint", phase="skipped", kind="state", background=True, update=update)
            self._reporter.warn(
                "a checkpoint was due while the one before was still being written, and was left out: a larger "
                "[checkpoint] every or a faster disk is needed"
            )
        return self._idle

    def begin(self, snapshot: Snapshot) -> None:
        """Write `snapshot` beside what follows. Called on every rank, when due."""
        # A part is only worth something with all others: old ones go when the one after them is known to be whole.
        whole = self._origin.parts == 1 or (self._begun_at is not None and self._begun_at[0] == self.committed)
        self._begun_at = (snapshot.update, snapshot.iteration)
        if not self._writes:
            return
        begun = time.perf_counter()
        self._look(wait=True)
        self._settled, self._blocking_s = False, 0.0
        self._tell("begin")
        self._background.begin(lambda: self._write(snapshot, retain=whole))
        self._blocking_s += time.perf_counter() - begun

    def finish(self, snapshot: Snapshot | None) -> None:
        """The training ends: await what is being written, and write `snapshot` where there is one. Every rank calls."""
        self._look(wait=True)
        if snapshot is not None and self.on and (self._begun_at is None or self._begun_at[0] != snapshot.update):
            self.begin(snapshot)
            self._look(wait=True)

    def _look(self, *, wait: bool) -> None:
        waited = time.perf_counter()
        ended = self._background.ended(wait=wait)
        if ended is not None:
            self._blocking_s += time.perf_counter() - waited if wait else 0.0
            self._take(ended)

    def _take(self, ended: Ended[_Written]) -> None:
        assert self._begun_at is not None
        update, iteration = self._begun_at
        if ended.result is None:
            self._tell("failed", message=str(ended.error))
            self._reporter.warn(f"no checkpoint of update {update} (iteration {iteration}): {ended.error}")
            return
        self._settled = True
        for said in ended.result.refused:
            self._reporter.warn(said)
        written = ended.result.checkpoint
        self._tell(
            "committed",
            path=self._remote.address(written.path.name) if self._remote is not None else str(written.path),
            bytes=written.manifest.stored_bytes,
            seconds=ended.seconds,
            blocking_seconds=self._blocking_s,
        )

    def _tell(self, phase: str, **fields: object) -> None:
        assert self._begun_at is not None
        update, iteration = self._begun_at
        fields = {"path": str(self._folder), **fields}
        self._reporter.event(
            "checkpoint", phase=phase, kind="state", background=True, iteration=iteration, update=update, **fields
        )

    def _write(self, snapshot: Snapshot, *, retain: bool) -> _Written:
        """In the thread. What is told goes back to the training's own."""
        refused: list[str] = []

        def told(path: Path, why: str) -> None:
            refused.append(f"the checkpoint {path.name}: {why}")

        written = self._origin.write(self._folder, snapshot, self._cadence.compression)
        # Older ones go only after this one has been read back.
        store.prove(written.path)
        if self._remote is not None:
            self._remote.put(written)
        if retain:
            keep = self._cadence.kept(self._origin.parts)
            if self._remote is not None:
                self._remote.retain(keep, snapshot.update, told)
            store.retain(self._folder, keep, snapshot.update, told)
        return _Written(written, tuple(refused))
