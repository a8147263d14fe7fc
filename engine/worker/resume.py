"""Where a training goes on: the newest whole state that any rank has, given to all of them.

Every rank lists what lies on its disk (rescues of earlier attempts, checkpoints), all ranks see all lists, and take
the same decision from them. A state is used only when every byte of it has been compared with its hash; each that is
refused is told, and the next older one is tried.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .candidates import Candidate, Facts, Holder, Row, Whole, wholes
from .checkpoint import store
from .checkpoint.errors import Refused
from .collective import Collective
from .job import JobError
from .passing import gather_facts, pass_arrays, pass_facts
from .replicas import Corrupted
from .reporting import Reporter
from .rescued import Author, digest, judged
from .strategies.strategy import State, Strategy

_MOST = 32
"""States of one rank that are looked at."""


@dataclass(frozen=True)
class Place:
    """A folder in which states may lie."""

    source: str
    """ "rescue" or "checkpoint"."""
    folder: Path
    author: Author | None = None
    """Of a rescue."""


@dataclass(frozen=True)
class Start:
    """What the training goes on from; all zero at its beginning."""

    iteration: int = 0
    update: int = 0
    window: dict[str, Any] | None = None
    """What had been counted since the last report."""
    source: str = "none"
    """ "rescue", "checkpoint", "adapter" or "none"."""
    rank: int | None = None
    """Whose state it is; None where each rank has its own part."""


class Resume:
    """The search of one rank. Every call is made by every rank."""

    def __init__(
        self,
        collective: Collective,
        strategy: Strategy,
        config_hash: str,
        reporter: Reporter,
        *,
        stops: bool = True,
    ) -> None:
        """`stops`: whether rescues that differ, and of which none is known to be right, are not gone on from."""
        self._stops = stops
        self._collective = collective
        self._strategy = strategy
        self._config_hash = config_hash
        self._reporter = reporter
        self._refused = 0
        self._own: list[Candidate] = []
        self._rows: list[list[Row]] = []

    def run(self, places: Sequence[Place], *, adapter: bool = False, reached: int = 0) -> Start:
        """Restore the newest whole state and say so. `adapter`: the model has the weights of an adapter file, where
        there is no state. Raises PeerLost, JobError: on all ranks, when there is none although the run had `reached`
        an iteration; Corrupted, likewise."""
        begun = time.perf_counter()
        self._own = self._candidates(places)
        told = gather_facts(self._collective, [candidate.row for candidate in self._own])
        self._rows = [[Row.told(values) for values in theirs] for theirs in told]
        none = Start(source="adapter" if adapter else "none")
        found = next((start for whole in wholes(self._rows) if (start := self._try(whole)) is not None), none)
        refused = sum(gather_facts(self._collective, self._refused))
        if reached > 0 and found is none:
            raise JobError(
                f"no state to go on from ({_why_none(refused)}), and the run had reached iteration {reached}: to begin "
                "again at 1 would overwrite the adapters that it has saved. Bring the node that has the state back and "
                "`flightdeck resume`, or start a new run with `flightdeck launch`"
            )
        self._tell(found, time.perf_counter() - begun, refused)
        return found

    def _candidates(self, places: Sequence[Place]) -> list[Candidate]:
        found = []
        for place in places:
            try:
                paths = store.listed(place.folder)
            except OSError as error:
                self._reporter.warn(f"{place.folder} cannot be read: {error.strerror or error}")
                continue
            for path in reversed(paths[-_MOST:]):
                try:
                    manifest = store.prove(path, thorough=False).manifest
                    if manifest.config_hash != self._config_hash:
                        raise Refused("it is of another job")
                    facts, hashed = Facts.of(manifest.state), digest(manifest)
                    found.append(Candidate(place.source, path, manifest.update, facts, place.author, hashed))
                except (Refused, OSError) as error:
                    self._refuse(path, error)
        return sorted(found, key=lambda each: -each.update)[:_MOST]

    def _refuse(self, path: Path, why: Exception) -> None:
        self._refused += 1
        self._reporter.warn(f"the state in {path} is not used: {why}")

    def _try(self, whole: Whole) -> Start | None:
        """Restore it, on all ranks or on none; None when a part of it cannot be read by anybody who has it."""
        differing = self._differing(whole)
        chosen = [
            self._holder([holder for holder in holders if self._row(holder).author not in differing])
            for holders in whole.holders
        ]
        if None in chosen:
            return None
        holders = [holder for holder in chosen if holder is not None]
        size = self._collective.size
        if len(holders) == size > 1 and [rank for rank, _ in holders] == list(range(size)):
            own = holders[self._collective.rank]
            state = self._loaded(own)
            known = gather_facts(self._collective, None if state is None else self._strategy.fits(state))
            if None in known:
                return None
            if all(known):
                return self._started(whole, holders, apart=True, worked=self._put(state, 0, 1, own))
            # As many ranks, divided otherwise: each picks its own out of all parts.
            del state
        return self._started(whole, holders, apart=False, worked=self._put_all(holders))

    def _put_all(self, holders: Sequence[Holder]) -> bool:
        """Every part, on every rank; whether they could be restored. Nothing is when one of them cannot be read."""
        worked = True
        for part, holder in enumerate(holders):
            state = self._passed(holder)
            if state is None:
                return False
            worked = self._put(state, part, len(holders), holder) and worked
        return worked

    def _differing(self, whole: Whole) -> set[Author | None]:
        """Who has rescued another state than most of its attempt: told. Raises Corrupted where there is no majority."""
        if len(whole.holders) > 1:
            return set()
        (holders,) = whole.holders
        rows = [self._row(holder) for holder in holders]
        outvoted: set[Author | None] = set()
        for verdict in judged((row.author, row.digest) for row in rows if row.author is not None):
            ranks = ", ".join(map(str, verdict.ranks))
            said = (
                f"the states of update {whole.update} that the ranks of attempt {verdict.attempt} have rescued differ: "
            )
            if verdict.certain:
                self._reporter.warn(f"{said}rank {ranks} has another one than most, which is not used")
                outvoted |= {Author(verdict.attempt, rank) for rank in verdict.ranks}
                continue
            said += f"those of ranks {ranks}, and which is right cannot be told"
            if self._stops:
                raise Corrupted(f"{said}; remove the wrong one, and resume again", verdict.ranks, certain=False)
            self._reporter.warn(said)
        return outvoted

    def _row(self, holder: Holder) -> Row:
        rank, place = holder
        return self._rows[rank][place]

    def _holder(self, holders: Sequence[Holder]) -> Holder | None:
        """The first whose copy proves itself."""
        for rank, place in holders:
            proved = rank == self._collective.rank and self._proves(self._own[place])
            if pass_facts(self._collective, proved, rank):
                return rank, place
        return None

    def _proves(self, candidate: Candidate) -> bool:
        try:
            store.prove(candidate.path)
        except (Refused, OSError) as error:
            self._refuse(candidate.path, error)
            return False
        return True

    def _loaded(self, holder: Holder) -> State | None:
        """This rank's own; None when it cannot be read after all."""
        candidate = self._own[holder[1]]
        try:
            return store.load(store.prove(candidate.path, thorough=False))
        except (Refused, OSError) as error:
            self._refuse(candidate.path, error)
            return None

    def _passed(self, holder: Holder) -> State | None:
        """The holder's, on every rank."""
        mine = holder[0] == self._collective.rank
        state = self._loaded(holder) if mine else None
        if not pass_facts(self._collective, state is not None, holder[0]):
            return None
        if self._collective.size == 1:
            return state
        return pass_arrays(self._collective, state, holder[0])

    def _put(self, state: State | None, part: int, parts: int, holder: Holder) -> bool:
        """Whether it could be restored."""
        if state is None:
            return False
        try:
            self._strategy.restore(state, part, parts)
        except ValueError as error:
            if holder[0] == self._collective.rank:
                self._refuse(self._own[holder[1]].path, error)
            return False
        return True

    def _started(self, whole: Whole, holders: list[Holder], *, apart: bool, worked: bool) -> Start | None:
        """`worked`: whether this rank's could be restored."""
        good = gather_facts(self._collective, worked)
        if not any(good):
            return None
        if not all(good):
            raise JobError(
                f"the state of update {whole.update} could be restored on some ranks or in part only: remove it, and "
                "resume again"
            )
        row, rank = self._row(holders[0]), holders[0][0]
        return Start(row.iteration, whole.update, row.window, row.source, None if apart else rank)

    def _tell(self, found: Start, seconds: float, refused: int) -> None:
        self._reporter.event(
            "resumed",
            source=found.source,
            iteration=found.iteration,
            update=found.update,
            from_rank=found.rank,
            seconds=seconds,
            refused=refused,
        )
        if not found.update:
            weights = ", with the weights of resume_adapter_file" if found.source == "adapter" else ""
            why = _why_none(refused)
            self._reporter.warn(f"no state to go on from ({why}): the training begins again at iteration 1{weights}")
            return
        whose = "every rank's own part of it" if found.rank is None else f"rank {found.rank}'s"
        self._reporter.say(
            f"goes on after iteration {found.iteration} (update {found.update}) from a {found.source}, {whose}, "
            f"in {seconds:.2f} s"
        )


def _why_none(refused: int) -> str:
    return f"{refused} were refused" if refused else "no rank has any"
