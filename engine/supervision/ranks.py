"""The ranks of one attempt as their hosts show them: who has started, who has ended, who has vanished or is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.runs.plan_file import PlannedRank
from engine.supervision.links.links import Links
from engine.worker.wire import ExitRecord, Identity


@dataclass
class Rank:
    """One rank, as far as it has come."""

    planned: PlannedRank
    identity: Identity | None = None
    record: ExitRecord | None = None
    vanished: bool = False
    """Its keeper is gone without an exit record."""
    restarted: bool = False
    """Because its node has been restarted."""
    lost: bool = False
    """Its node has been away for longer than its lease: it has been ended there, as far as one can know."""
    launcher_code: int | None = None
    """The exit code of its start, where no keeper has told another."""

    @property
    def number(self) -> int:
        return self.planned.rank

    @property
    def started(self) -> bool:
        return self.identity is not None

    @property
    def ended(self) -> bool:
        """Nothing more will come of it: it has a record, or nobody is left to write one."""
        refused = self.launcher_code is not None and not self.started
        return self.record is not None or self.vanished or self.lost or refused


class Ranks:
    """All ranks of one attempt, and the way to their keepers."""

    def __init__(self, links: Links, planned: Sequence[PlannedRank]) -> None:
        self._links = links
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

    def tell(self, word: bytes, *, only: int | None = None, but: int | None = None) -> None:
        """Say a word to every keeper that may still hear it, or to the one of rank `only`, or to all but one."""
        for rank in self.all:
            if only not in (None, rank.number) or (but is not None and rank.number == but):
                continue
            if rank.record is None and not rank.vanished:
                self._links.to(rank.number).tell(rank.number, word)

    def refused(self, codes: Sequence[tuple[int, int]]) -> list[Rank]:
        """What is told of starts that failed (rank, exit code), of ranks that no keeper speaks for; those that have
        ended by it."""
        changed = []
        for number, code in codes:
            rank = self.all[number] if 0 <= number < len(self.all) else None
            if rank is not None and rank.record is None and not rank.started:
                rank.launcher_code = code
                changed.append(rank)
        return changed

    def lose(self, numbers: Sequence[int]) -> list[Rank]:
        """Take ranks for ended whose node has been away for too long; those that were not ended before."""
        lost = [rank for rank in self.all if rank.number in numbers and not rank.ended]
        for rank in lost:
            rank.lost = True
        return lost

    def _look_at(self, rank: Rank, *, thorough: bool) -> None:
        if rank.record is not None:
            return
        seen = self._links.to(rank.number).sight(rank.number, thorough=thorough)
        rank.identity = rank.identity or seen.identity
        rank.record = seen.record
        rank.vanished = rank.record is None and (rank.vanished or seen.vanished)
        rank.restarted = rank.restarted or seen.restarted
