"""FlashRecovery on a rank: the state of the last finished update is at hand, and written when a peer is lost.

Nothing is paid before: the state is held by reference, and let go while an update changes it. Where the main thread
hangs in a collective (the peer is stopped or cut off, so that no error ever comes), the control thread writes the same
state and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from .reporting import Reporter
from .rescued import Author
from .snapshot import Origin, Snapshot


def rescue_root(home: Path) -> Path:
    """Where the rescues of a run's attempts lie: below it <attempt>/rank<k>/."""
    return home / "rescue"


def author_of(folder: Path) -> Author | None:
    """Whose rescues lie in a folder; None for a name that is none of ours."""
    attempt, rank = folder.parent.name, folder.name.removeprefix("rank")
    return Author(int(attempt), int(rank)) if attempt.isdecimal() and rank.isdecimal() else None


class Rescue:
    """One rank's last finished update."""

    def __init__(self, home: Path, attempt: int, rank: int, origin: Origin, reporter: Reporter) -> None:
        self._root = rescue_root(home)
        self._attempt = attempt
        self._folder = self._root / str(attempt) / f"rank{rank}"
        self._origin = origin
        self._reporter = reporter
        self._whole = threading.Lock()
        """Held while an update changes the state."""
        self._snapshot: Snapshot | None = None
        self._written: bool | None = None
        self._leaving = False

    def hold(self, snapshot: Snapshot) -> None:
        """`snapshot` is the newest whole state from now on."""
        self._snapshot = snapshot

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """The state changes inside: nobody writes it then, and nothing keeps the old one's memory. Inside, `hold` says
        when it is whole again."""
        with self._whole:
            self._snapshot = None
            yield

    def leave(self) -> bool:
        """A peer is lost: write the state, once; whether it is on the disk. The caller ends the process."""
        self._leaving = True
        return self._write()

    def keep(self) -> None:
        """The training is stopped, and nothing else keeps its state: write that of the last finished update, where a
        rank has all of it."""
        if self._origin.parts == 1:
            self._write()

    def left_by_control(self, code: int) -> None:
        """The head asks for it while the main thread may hang: write the state and end the process with `code`, unless
        the main thread is about to."""
        self._write()
        if not self._leaving:
            os._exit(code)

    def forget(self) -> None:
        """Remove what earlier attempts have rescued: something newer is on a disk."""
        with contextlib.suppress(OSError):
            for folder in self._root.iterdir():
                if folder.name.isdigit() and int(folder.name) < self._attempt:
                    shutil.rmtree(folder, ignore_errors=True)

    def forget_all(self) -> None:
        """The training is over."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _write(self) -> bool:
        with self._whole:
            if self._written is None:
                self._written = self._write_once()
            return self._written

    def _write_once(self) -> bool:
        snapshot = self._snapshot
        if self._origin.parts > 1:
            self._reporter.say("nothing to rescue: this rank has a part of the state only; the last checkpoint serves")
            return False
        if snapshot is None or snapshot.update == 0:
            self._reporter.say("nothing to rescue: no update is finished")
            return False
        begun = time.perf_counter()
        facts = {"iteration": snapshot.iteration, "update": snapshot.update}
        size = sum(array.nbytes for group in snapshot.state.values() for array in group.values())
        self._reporter.event("rescue", phase="begin", bytes=size, **facts)
        try:
            self._origin.write(self._folder, snapshot)
        except (OSError, ValueError) as error:
            self._reporter.event("rescue", phase="failed", message=str(error), **facts)
            self._reporter.warn(f"the state of iteration {snapshot.iteration} could not be rescued: {error}")
            return False
        seconds = time.perf_counter() - begun
        self._reporter.event("rescue", phase="committed", seconds=seconds, path=str(self._folder), **facts)
        self._reporter.say(f"rescued the state of iteration {snapshot.iteration} in {seconds:.2f} s")
        self.forget()
        return True
