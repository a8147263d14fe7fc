"""Which clusters there are on this machine, whose they are, and the clearing away of those whose owner is gone."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.worker import processes
from tests.cluster import disk, network

RUNTIME = Path("/run/flightdeck-cluster")
"""One folder per cluster, named by its number. Root's alone."""
NUMBERS = range(256)
RECORD = "cluster.json"


@dataclass(frozen=True)
class Record:
    """A cluster as it is written down: its number, the process that owns it, and its number of nodes."""

    number: int
    owner: int
    owner_start: str
    size: int

    @property
    def folder(self) -> Path:
        return RUNTIME / str(self.number)

    @property
    def owned(self) -> bool:
        """Whether the process that made it still runs."""
        return processes.alive(self.owner, self.owner_start)


def claim(size: int) -> Record:
    """Take the lowest free number for a cluster of this process, clearing away first what dead owners left."""
    with _locked():
        taken = set()
        for record in _records():
            if record.owned:
                taken.add(record.number)
            else:
                clear_away(record)
        number = next(number for number in NUMBERS if number not in taken)
        start = processes.start_time(os.getpid())
        assert start is not None
        record = Record(number, os.getpid(), start, size)
        if record.folder.exists():
            clear_away(record)
        record.folder.mkdir(mode=0o700)
        (record.folder / RECORD).write_text(json.dumps(asdict(record)))
        return record


def release(record: Record) -> None:
    """Remove all that a cluster has on this machine but its processes."""
    with _locked():
        clear_away(record)


def clusters() -> list[Record]:
    """Every cluster that is up, by number."""
    return [record for record in _records() if record.owned]


def clear_stale() -> list[int]:
    """Clear away the clusters whose owner is gone; their numbers."""
    if not RUNTIME.exists():
        return []
    with _locked():
        stale = [record for record in _records() if not record.owned]
        for record in stale:
            clear_away(record)
    return [record.number for record in stale]


def clear_away(record: Record) -> None:
    """Links, mounts and folder of one cluster. Its processes ended with their pid 1, which watches the owner."""
    network.clear_away(record.number)
    disk.unmount_below(record.folder)
    shutil.rmtree(record.folder, ignore_errors=True)


def _records() -> Iterator[Record]:
    for file in sorted(RUNTIME.glob(f"*/{RECORD}"), key=lambda file: int(file.parent.name)):
        try:
            yield Record(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            # Half made by an owner that was killed: a record that nobody can own.
            yield Record(int(file.parent.name), 0, "", 0)


@contextmanager
def _locked() -> Iterator[None]:
    RUNTIME.mkdir(mode=0o700, exist_ok=True)
    with (RUNTIME / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
