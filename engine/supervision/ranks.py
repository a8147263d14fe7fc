"""The ranks of one attempt as their own files say: who has started, who has ended, who has vanished."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from engine.runs.plan_file import PlannedRank
from engine.worker import processes
from engine.worker.wire import ExitRecord, Identity, NodeFiles, read_exit, read_identity


@dataclass
class Rank:
    """One rank, as far as it has come."""

    planned: PlannedRank
    identity: Identity | None = None
    record: ExitRecord | None = None
    vanished: bool = False
    """Its keeper is gone without an exit record."""
    launcher_code: int | None = None
    """The exit code that the launcher told, where no keeper has."""

    @property
    def number(self) -> int:
        return self.planned.rank

    @property
    def started(self) -> bool:
        return self.identity is not None

    @property
    def ended(self) -> bool:
        """Nothing more will come of it: it has a record, or nobody is left to write one."""
        return self.record is not None or self.vanished or (self.launcher_code is not None and not self.started)


class Ranks:
    """All ranks of one attempt, and the way to their keepers."""

    def __init__(self, files: NodeFiles, planned: Sequence[PlannedRank]) -> None:
        self._files = files
        self._fifos: dict[int, int] = {}
        self._boot_id = processes.boot_id()
        self.all = [Rank(rank) for rank in planned]

    def look(self, *, thorough: bool) -> list[Rank]:
        """Take in what is new; the ranks that have changed. `thorough` also asks whether the keepers are alive, which
        costs a process per rank on macOS."""
        changed = []
        for rank in self.all:
            before = rank.started, rank.ended
            self._look_at(rank, thorough=thorough)
            if (rank.started, rank.ended) != before:
                changed.append(rank)
        return changed

    def tell(self, word: bytes) -> None:
        """Say a word to every keeper that may still hear it."""
        for rank in self.all:
            if not rank.ended:
                self._tell(rank, word)

    def lost_keepers(self, codes: Sequence[tuple[int, int]]) -> list[Rank]:
        """What the launcher says of ranks that no keeper speaks for; those that have ended by it."""
        changed = []
        for number, code in codes:
            rank = self.all[number] if 0 <= number < len(self.all) else None
            if rank is not None and rank.record is None and not rank.started:
                rank.launcher_code = code
                changed.append(rank)
        return changed

    def close(self) -> None:
        for fifo in self._fifos.values():
            os.close(fifo)
        self._fifos.clear()

    def _look_at(self, rank: Rank, *, thorough: bool) -> None:
        if rank.record is not None:
            return
        if rank.identity is None:
            rank.identity = read_identity(self._files.identity(rank.number))
        # Liveness before the record: a keeper that leaves in between has written it by then.
        gone = thorough and rank.identity is not None and not self._keeper_alive(rank.identity)
        rank.record = read_exit(self._files.exit(rank.number))
        rank.vanished = rank.record is None and (rank.vanished or gone)

    def _keeper_alive(self, identity: Identity) -> bool:
        return identity.boot_id == self._boot_id and processes.alive(identity.keeper_pid, identity.keeper_start)

    def _tell(self, rank: Rank, word: bytes) -> None:
        try:
            if rank.number not in self._fifos:
                # Reading too, so that opening never waits and a keeper that is late finds what was said.
                flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
                self._fifos[rank.number] = os.open(self._files.control(rank.number), flags)
            os.write(self._fifos[rank.number], word)
        except (FileNotFoundError, BlockingIOError):
            # Full: a keeper that does not listen has beats enough, and is ended by signals.
            return
