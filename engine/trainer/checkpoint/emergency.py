"""Emergency checkpoints: the state of the last finished update is written when a peer is lost. They cost nothing
beforehand: the state is held by reference, and released while an update changes it. Where the main thread hangs in a
collective (of a peer that is stopped or cut off), the control thread writes the state and ends the process."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from engine.trainer.checkpoint import store
from engine.trainer.checkpoint.store import Snapshot
from engine.training.checkpoint_files import Origin
from engine.training.reporting import Reporter


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
            manifest = store.write(self._folder, snapshot, self._origin).manifest
        except (OSError, ValueError) as error:
            self._reporter.event("emergency_checkpoint", phase="failed", message=str(error), **facts)
            self._reporter.warn(f"the state of iteration {snapshot.iteration} could not be saved: {error}")
            return
        self._done = True
        seconds = time.perf_counter() - started
        facts |= {"path": str(self._folder), **manifest.journal_entry(self._author)}
        self._reporter.event("emergency_checkpoint", phase="committed", seconds=seconds, **facts)
        self._reporter.print(f"saved the state of iteration {snapshot.iteration} in {seconds:.2f} s")
        self.remove_older()
