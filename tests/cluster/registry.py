"""Which clusters there are on this machine, whose they are, and the clearing away of those whose owner is gone."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine.node.processes import alive, start_time
from tests.cluster.command import CommandFailed

NUMBERS = range(256)
RECORD = "cluster.json"


@dataclass(frozen=True)
class Record:
    """A cluster as it is written down: its number, the process that owns it, its number of nodes, its folder."""

    number: int
    owner: int
    owner_start: str
    size: int
    folder: Path

    @property
    def owned(self) -> bool:
        """True while the process that made it runs."""
        return alive(self.owner, self.owner_start)


@dataclass(frozen=True)
class Registry:
    """The clusters of one kind: one folder per cluster below `runtime`, named by its number. `clear` ends and removes
    all that a cluster has on this machine outside of its folder."""

    runtime: Path
    clear: Callable[[Record], None]
    occupied: Callable[[int], bool] = field(default=lambda _: False)
    """True of a number without a record that is in use all the same: whose record was removed, or is in another /run
    beside the same network."""

    def claim(self, size: int) -> Record:
        """Take the lowest free number for a cluster of this process, clearing away first what dead owners left. What
        cannot be cleared away keeps its number."""
        with self._locked():
            taken = {record.number for record in self._records() if record.owned or not self._cleared_away(record)}
            number = next(number for number in NUMBERS if number not in taken and not self.occupied(number))
            start = start_time(os.getpid())
            assert start is not None
            record = Record(number, os.getpid(), start, size, self.runtime / str(number))
            record.folder.mkdir(mode=0o700)
            fields = {"number": number, "owner": record.owner, "owner_start": start, "size": size}
            (record.folder / RECORD).write_text(json.dumps(fields))
            return record

    def release(self, record: Record) -> None:
        """Remove all that a cluster has on this machine."""
        with self._locked():
            self._clear_away(record)

    def clusters(self) -> list[Record]:
        """Every cluster that is up, by number."""
        return [record for record in self._records() if record.owned]

    def clear_stale(self) -> list[int]:
        """Clear away the clusters whose owner is gone; their numbers."""
        if not os.access(self.runtime, os.W_OK):
            return []  # none yet, or another user's
        with self._locked():
            stale = [record for record in self._records() if not record.owned]
            for record in stale:
                self._clear_away(record)
        return [record.number for record in stale]

    def _clear_away(self, record: Record) -> None:
        self.clear(record)
        shutil.rmtree(record.folder)

    def _cleared_away(self, record: Record) -> bool:
        try:
            self._clear_away(record)
        except (CommandFailed, OSError):
            return False
        return True

    def _records(self) -> Iterator[Record]:
        for folder in sorted(self.runtime.glob("[0-9]*"), key=lambda folder: int(folder.name)):
            try:
                yield Record(**json.loads((folder / RECORD).read_text()), folder=folder)
            except (OSError, ValueError, TypeError):
                # Half made by an owner that was killed, or half removed: nobody's.
                yield Record(int(folder.name), 0, "", 0, folder)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.runtime.mkdir(mode=0o700, exist_ok=True)
        with (self.runtime / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
