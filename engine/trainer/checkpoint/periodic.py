"""Periodic checkpoints during training: taken by reference between two updates, or on CUDA by a copy on the GPU, and
written by a background thread, one at a time.

All ranks decide together, by counters in the update's own all_sum: a checkpoint begins when it is due and no rank is
still writing one. Where the state is replicated, rank 0 writes it; else each rank writes its part."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from engine.trainer.checkpoint import store
from engine.trainer.checkpoint.locations import Destination
from engine.trainer.checkpoint.store import Snapshot
from engine.trainer.weights import for_other_threads
from engine.training.checkpoint_files import Origin
from engine.training.reporting import Reporter


@dataclass(frozen=True)
class CheckpointPolicy:
    every: int
    """Updates from one to the next; 0: none."""
    keep: int = 3
    compression: str = "none"

    def kept(self, parts: int) -> int:
        """How many to keep of a state in so many parts: the newest may lack a part of another rank."""
        return self.keep if parts == 1 else max(2, self.keep)


class PeriodicCheckpoints:
    def __init__(
        self, destination: Destination | None, policy: CheckpointPolicy, origin: Origin, reporter: Reporter
    ) -> None:
        """`destination` None: this rank writes none."""
        self._destination = destination
        self._policy = policy
        self._origin = origin
        self._reporter = reporter
        # The interpreter's end waits for its thread, and so for what is half written.
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[tuple[dict[str, object], list[str]]] | None = None
        self._last: Snapshot | None = None
        """Without its state."""
        self._blocking_s = 0.0
        self._idle = True
        self._settled = True
        self._durability_said = False
        self.committed: int | None = None
        """The newest update of which every part is on a disk, as all ranks know."""

    @property
    def on(self) -> bool:
        return self._policy.every > 0

    def counters(self) -> list[float]:
        """Added to the update's sum: this rank could begin one (0 or 1), and its last one is complete (0 or 1)."""
        self._poll(wait=False)
        return [float(self._writing is None or self._writing.done()), float(self._settled)]

    def sync(self, idle: float, settled: float, ranks: int) -> bool:
        """The counters, summed over so many ranks; True when there is a complete checkpoint for the first time."""
        first = self.committed is None
        self._idle = idle == ranks
        if settled == ranks and self._last is not None:
            self.committed = self._last.update
        return first and self.committed is not None

    def planned(self, update: int) -> bool:
        """A checkpoint begins after `update`, unless one is still being written. The same on every rank."""
        return self.on and update % self._policy.every == 0

    def due(self, update: int) -> bool:
        """A checkpoint begins after `update`. The same on every rank."""
        if not self.planned(update):
            return False
        if not self._idle:
            self._reporter.event("checkpoint", phase="skipped", kind="state", background=True, update=update)
            self._reporter.warn(
                "a checkpoint was skipped because the one before was still being written: use a larger "
                "[checkpoint] every or a faster disk"
            )
        return self._idle

    def begin(self, snapshot: Snapshot) -> None:
        """Write `snapshot` in the background. Called on every rank, when due."""
        # A part is of use only with all others: old ones go when the next is known to be complete.
        complete = self._origin.parts == 1 or (self._last is not None and self._last.update == self.committed)
        started = time.perf_counter()
        self._poll(wait=True)
        self._last = replace(snapshot, state={})
        if self._destination is None:
            return
        self._settled = False
        self._report("begin")
        snapshot = replace(snapshot, state=for_other_threads(snapshot.state))
        self._writing = self._executor.submit(self._write, self._destination, snapshot, retain=complete)
        self._blocking_s = time.perf_counter() - started

    def finish(self, snapshot: Snapshot | None) -> None:
        """The training ends: await the write in flight, and write `snapshot`, if any. Called on every rank."""
        self._poll(wait=True)
        if snapshot is not None and self.on and (self._last is None or self._last.update != snapshot.update):
            self.begin(snapshot)
            self._poll(wait=True)

    def _poll(self, *, wait: bool) -> None:
        """Report the write in flight if it has ended, or after waiting for it."""
        writing = self._writing
        if writing is None or not (wait or writing.done()):
            return
        waited = time.perf_counter()
        error = writing.exception()
        self._blocking_s += time.perf_counter() - waited if wait else 0.0
        self._writing = None
        if error is not None and (last := self._last) is not None:
            self._report("failed", message=str(error))
            self._reporter.warn(f"no checkpoint of update {last.update} (iteration {last.iteration}): {error}")
            return
        self._settled = True
        facts, problems = writing.result()
        for problem in problems:
            self._reporter.warn(problem)
        self._report("committed", blocking_seconds=self._blocking_s, **facts)

    def _report(self, phase: str, **fields: object) -> None:
        assert self._last is not None and self._destination is not None
        facts = {"iteration": self._last.iteration, "update": self._last.update, "path": str(self._destination.folder)}
        self._reporter.event("checkpoint", phase=phase, kind="state", background=True, **{**facts, **fields})

    def _write(
        self, destination: Destination, snapshot: Snapshot, *, retain: bool
    ) -> tuple[dict[str, object], list[str]]:
        """In the background thread. Returns the facts of the event, and problems with older checkpoints."""
        started = time.perf_counter()
        problems: list[str] = []
        written = store.write(destination.folder, snapshot, self._origin, self._policy.compression)
        if not written.durable and not self._durability_said:
            self._durability_said = True
            problems.append(
                f"the volume of {destination.folder} has no F_FULLFSYNC: a power cut there can take the newest "
                "checkpoints"
            )
        # Older ones go only after this one has been read back.
        store.verify(written.path)
        keep = self._policy.kept(self._origin.parts)
        if destination.remote is not None:
            destination.remote.put(written)
            if retain:
                problems += destination.remote.retain(keep, snapshot.update)
        if retain:
            problems += store.retain(destination.folder, keep, snapshot.update)
        facts: dict[str, object] = {
            "path": destination.location(written.path.name),
            "bytes": written.manifest.stored_bytes,
            "seconds": time.perf_counter() - started,
            **written.manifest.journal_entry(),
        }
        return facts, problems
