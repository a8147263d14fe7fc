"""When a training writes its state. Periodic checkpoints are taken by reference between two updates, or on CUDA by a
copy on the GPU, and written by a background thread, one at a time. All ranks decide together, by counters in the
update's own all_sum: a checkpoint begins when it is due and no rank is still writing one. Where the state is
replicated, rank 0 writes it; else each rank writes its part.

Emergency checkpoints have the state of the last finished update, when a peer is lost. They cost nothing beforehand: the
state is held by reference, and released while an update changes it. Where the main thread hangs in a collective (of a
peer that is stopped or cut off), the control thread writes the state and ends the process."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from engine.protocol.attempt import AttemptSpec
from engine.trainer.checkpoint import store
from engine.trainer.checkpoint.store import CheckpointFolder, Snapshot
from engine.trainer.weights import for_other_threads
from engine.training.checkpoint_files import Origin
from engine.training.reporting import Reporter


def kept(spec: AttemptSpec, parts: int) -> int:
    """How many checkpoints to keep of a state in so many parts: the newest may lack a part of another rank."""
    return spec.checkpoint_keep if parts == 1 else max(2, spec.checkpoint_keep)


class PeriodicCheckpoints:
    def __init__(self, folder: CheckpointFolder | None, spec: AttemptSpec, origin: Origin, reporter: Reporter) -> None:
        """`folder` None: this rank writes none."""
        self._folder = folder
        self._spec = spec
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
        return self._spec.checkpoint_every > 0

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
        return self.on and update % self._spec.checkpoint_every == 0

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
        if self._folder is None:
            return
        self._settled = False
        self._report("begin")
        snapshot = replace(snapshot, state=for_other_threads(snapshot.state))
        self._writing = self._executor.submit(self._write, self._folder, snapshot, retain=complete)
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
        assert self._last is not None and self._folder is not None
        facts = {"iteration": self._last.iteration, "update": self._last.update, "path": str(self._folder.path)}
        self._reporter.event("checkpoint", phase=phase, kind="state", background=True, **{**facts, **fields})

    def _write(
        self, folder: CheckpointFolder, snapshot: Snapshot, *, retain: bool
    ) -> tuple[dict[str, object], list[str]]:
        """In the background thread. Returns the facts of the event, and problems with older checkpoints."""
        started = time.perf_counter()
        problems: list[str] = []
        written = store.write(folder.path, snapshot, self._origin, self._spec.checkpoint_compression)
        if not written.durable and not self._durability_said:
            self._durability_said = True
            problems.append(
                f"the volume of {folder.path} has no F_FULLFSYNC: a power cut there can take the newest checkpoints"
            )
        # Older ones go only after this one has been read back.
        store.verify(written.path)
        folder.put(written)
        if retain:
            problems += folder.retain(kept(self._spec, self._origin.parts), snapshot.update)
        facts: dict[str, object] = {
            "path": folder.location(written.path.name),
            "bytes": written.manifest.stored_bytes,
            "seconds": time.perf_counter() - started,
            **written.manifest.journal_entry(),
            **written.manifest.fetchable(written.path),
        }
        return facts, problems


def emergency_folder(home: Path) -> Path:
    """Holds <attempt>/rank<k>/, below a run's folder."""
    return home / "emergency"


class EmergencyCheckpoint:
    """One rank's last finished update."""

    def __init__(self, home: Path, attempt: int, rank: int, origin: Origin, reporter: Reporter) -> None:
        self.useful = origin.parts == 1
        """A training can go on from this rank's state, without that of the others."""
        self._root = emergency_folder(home)
        self._author = attempt, rank
        self._folder = self._root / str(attempt) / f"rank{rank}"
        self._origin = origin
        self._reporter = reporter
        self._unchanging = threading.Lock()
        """Held while an update changes the state."""
        self._snapshot: Snapshot | None = None
        self._done = False
        self._exiting = False

    def hold(self, snapshot: Snapshot) -> None:
        """`snapshot` is the newest complete state from now on."""
        self._snapshot = snapshot

    def release(self) -> None:
        """There is no state to write until the next `hold`."""
        with self._unchanging:
            self._snapshot = None

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """The state changes inside: it is neither written nor held in memory until `hold` has a complete one again."""
        with self._unchanging:
            self._snapshot = None
            yield

    def save_on_peer_loss(self) -> None:
        """Write the state, unless that was done. The caller ends the process."""
        self._exiting = True
        self._save()

    def save_on_stop(self) -> None:
        """Write the state of a run that is stopped without periodic checkpoints, where a rank has all of it."""
        if self.useful:
            self._save()

    def save_and_exit(self, code: int) -> None:
        """On request of the head, in case the main thread hangs: save, and exit with `code` unless it is about to. On
        CUDA this frees memory under its kernels, of which no update follows; a copy (for_other_threads) could hang."""
        try:
            self._save()
        except Exception:
            traceback.print_exc()
        if not self._exiting:
            os._exit(code)

    def remove_older(self) -> None:
        """Remove those of earlier attempts: something newer is on disk."""
        with contextlib.suppress(OSError):
            for folder in self._root.iterdir():
                if folder.name.isdigit() and int(folder.name) < self._author[0]:
                    shutil.rmtree(folder, ignore_errors=True)

    def remove_all(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def _save(self) -> None:
        with self._unchanging:
            if not self._done:
                self._write()

    def _write(self) -> None:
        snapshot = self._snapshot
        if not self.useful or snapshot is None or snapshot.update == 0:
            why = "no update is finished" if self.useful else "this rank has only a part of the state"
            self._reporter.print(f"no emergency checkpoint: {why}")
            self._done = True
            return
        started = time.perf_counter()
        facts: dict[str, object] = {"iteration": snapshot.iteration, "update": snapshot.update}
        size = sum(array.nbytes for group in snapshot.state.values() for array in group.values())
        self._reporter.event("emergency_checkpoint", phase="begin", bytes=size, **facts)
        try:
            written = store.write(self._folder, snapshot, self._origin)
        except (OSError, ValueError) as error:
            self._reporter.event("emergency_checkpoint", phase="failed", message=str(error), **facts)
            self._reporter.warn(f"the state of iteration {snapshot.iteration} could not be saved: {error}")
            return
        self._done = True
        seconds = time.perf_counter() - started
        facts |= written.manifest.journal_entry(self._author) | written.manifest.fetchable(written.path)
        facts["path"] = str(self._folder)
        self._reporter.event("emergency_checkpoint", phase="committed", seconds=seconds, **facts)
        self._reporter.print(f"saved the state of iteration {snapshot.iteration} in {seconds:.2f} s")
        self.remove_older()
