"""Where a training resumes: the newest complete state that any rank has, restored on all of them.

Every rank lists the states on its disk (emergency checkpoints of earlier attempts, periodic checkpoints), all ranks
see all lists, and take the same decision from them. A state is used only when every byte has been compared with its
hash; each one that is refused is reported, and the next older one is tried.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engine.protocol.job import JobError
from engine.protocol.safetensors import CheckpointError
from engine.trainer.checkpoint import store
from engine.trainer.checkpoint.emergency import Author, manifest_digest, vote_on_digests
from engine.trainer.checkpoint.files import Manifest
from engine.trainer.collective import Collective, all_gather_object, broadcast_arrays, broadcast_object
from engine.trainer.replica_check import Corrupted
from engine.trainer.reporting import Reporter
from engine.trainer.strategies.base import State, Strategy

MAX_PARTS = 1000
_MAX_STATES = 32
"""Per rank."""


class CandidateRow(NamedTuple):
    """A state or a part of one, complete by names and sizes, as the ranks exchange it: a list of JSON values."""

    update: int
    parts: int
    part: int
    source: str
    iteration: int
    window: dict[str, Any]
    author: Author | None
    digest: int

    @classmethod
    def from_manifest(cls, manifest: Manifest, source: str, author: Author | None) -> CandidateRow:
        """Raises CheckpointError for facts that no training of ours has written."""
        iteration, part, parts, window = (manifest.state.get(key) for key in ("iteration", "part", "parts", "window"))
        if not (type(iteration) is type(part) is type(parts) is int and isinstance(window, dict)):
            raise CheckpointError("its manifest has no iteration")
        if not (iteration >= 0 and 0 <= part < parts <= MAX_PARTS):
            raise CheckpointError(f"its manifest has iteration {iteration}, part {part} of {parts}")
        if not all(isinstance(value, int | float) for value in window.values()):
            raise CheckpointError("its manifest has a counter that is not a number")
        return cls(manifest.update, parts, part, source, iteration, window, author, manifest_digest(manifest))

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> CandidateRow:
        row = cls(*values)
        return row if row.author is None else row._replace(author=Author(*row.author))


@dataclass(frozen=True)
class Candidate:
    """A row of this rank."""

    path: Path
    row: CandidateRow


class Holder(NamedTuple):
    """A rank, and which of its rows."""

    rank: int
    row: int


@dataclass(frozen=True)
class CompleteState:
    """A state of which every part is on some node."""

    update: int
    holders: tuple[tuple[Holder, ...], ...]
    """Per part: all who have it, the rank of the part's number first."""


def complete_states(rows: Sequence[Sequence[CandidateRow]]) -> list[CompleteState]:
    """All complete states in `rows` (every rank's candidates), newest first; of one update, that in the fewest parts
    first."""
    found: dict[tuple[int, int], dict[int, list[Holder]]] = {}
    for rank, candidates in enumerate(rows):
        for index, row in enumerate(candidates):
            found.setdefault((row.update, row.parts), {}).setdefault(row.part, []).append(Holder(rank, index))
    return [
        CompleteState(
            update,
            tuple(tuple(sorted(held[part], key=lambda holder: (holder.rank != part, holder))) for part in range(parts)),
        )
        for (update, parts), held in sorted(found.items(), key=lambda entry: (-entry[0][0], entry[0][1]))
        if len(held) == parts
    ]


@dataclass(frozen=True)
class StateFolder:
    """A folder that may hold states."""

    source: str
    """"emergency" or "checkpoint"."""
    folder: Path
    author: Author | None = None
    """The author of an emergency checkpoint."""


@dataclass(frozen=True)
class ResumePoint:
    """Where the training continues; all zero at its start."""

    iteration: int = 0
    update: int = 0
    window: Mapping[str, Any] = field(default_factory=dict)
    """The sums since the last report."""
    source: str = "none"
    """"emergency", "checkpoint", "adapter" or "none"."""
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
        stop_on_corruption: bool = True,
    ) -> None:
        """`stop_on_corruption`: raise Corrupted when emergency checkpoints differ and no majority tells which is
        right."""
        self._stop_on_corruption = stop_on_corruption
        self._collective = collective
        self._strategy = strategy
        self._config_hash = config_hash
        self._reporter = reporter
        self._refused = 0
        self._own: list[Candidate] = []
        self._rows: list[list[CandidateRow]] = []

    def run(self, folders: Sequence[StateFolder], *, adapter: bool = False, reached: int = 0) -> ResumePoint:
        """Restore the newest complete state and report it. `adapter`: the model has the weights of an adapter file,
        where there is no state. Raises PeerLost; JobError, on all ranks, when there is none although the run had
        `reached` an iteration; Corrupted, on all ranks."""
        started = time.perf_counter()
        self._own = self._candidates(folders)
        table = all_gather_object(self._collective, [candidate.row for candidate in self._own])
        self._rows = [[CandidateRow.from_json(values) for values in rows] for rows in table]
        points = (self._restore(state) for state in complete_states(self._rows))
        found = next((point for point in points if point is not None), None)
        refused = sum(all_gather_object(self._collective, self._refused))
        if reached > 0 and found is None:
            raise JobError(
                f"no state to resume from ({_why_no_state(refused)}), and the run had reached iteration {reached}: "
                "starting again at 1 would overwrite the adapters that it has saved. Bring the node that has the state "
                "back and `flightdeck resume`, or start a new run with `flightdeck launch`"
            )
        point = found or ResumePoint(source="adapter" if adapter else "none")
        self._report(point, time.perf_counter() - started, refused)
        return point

    def _candidates(self, folders: Sequence[StateFolder]) -> list[Candidate]:
        found = []
        for place in folders:
            try:
                paths = store.list_checkpoints(place.folder)
            except OSError as error:
                self._reporter.warn(f"{place.folder} cannot be read: {error.strerror or error}")
                continue
            for path in reversed(paths[-_MAX_STATES:]):
                try:
                    manifest = store.verify(path, check_hashes=False).manifest
                    if manifest.config_hash != self._config_hash:
                        raise CheckpointError("it is of another job")
                    found.append(Candidate(path, CandidateRow.from_manifest(manifest, place.source, place.author)))
                except (CheckpointError, OSError) as error:
                    self._refuse(path, error)
        return sorted(found, key=lambda candidate: -candidate.row.update)[:_MAX_STATES]

    def _refuse(self, path: Path, why: Exception) -> None:
        self._refused += 1
        self._reporter.warn(f"the state in {path} is not used: {why}")

    def _restore(self, complete: CompleteState) -> ResumePoint | None:
        """Restore it on all ranks or on none; None when nobody who has a part can read it."""
        outvoted = self._outvoted(complete)
        chosen = [
            self._verified_holder([holder for holder in holders if self._row(holder).author not in outvoted])
            for holders in complete.holders
        ]
        holders = [holder for holder in chosen if holder is not None]
        if len(holders) < len(chosen):
            return None
        size = self._collective.size
        if len(holders) == size > 1 and [holder.rank for holder in holders] == list(range(size)):
            own = holders[self._collective.rank]
            state = self._load(own)
            fits = all_gather_object(self._collective, None if state is None else self._strategy.fits(state))
            if None in fits:
                return None
            if all(fits):
                return self._agree_on_start(complete, holders, own_parts=True, restored=self._put(state, 0, 1, own))
            # The same number of ranks, partitioned differently: each picks its own out of all parts.
            del state
        return self._agree_on_start(complete, holders, own_parts=False, restored=self._restore_parts(holders))

    def _restore_parts(self, holders: Sequence[Holder]) -> bool:
        """Every part, on every rank; False when one cannot be read (nothing is restored then) or does not fit."""
        restored = True
        for part, holder in enumerate(holders):
            state = self._broadcast(holder)
            if state is None:
                return False
            restored = self._put(state, part, len(holders), holder) and restored
        return restored

    def _outvoted(self, complete: CompleteState) -> set[Author | None]:
        """Authors whose emergency checkpoint differs from most of their attempt's. Raises Corrupted without a
        majority."""
        if len(complete.holders) > 1:
            return set()
        (holders,) = complete.holders
        rows = [self._row(holder) for holder in holders]
        outvoted: set[Author | None] = set()
        for vote in vote_on_digests((row.author, row.digest) for row in rows if row.author is not None):
            ranks = ", ".join(map(str, vote.ranks))
            message = f"the states of update {complete.update} that the ranks of attempt {vote.attempt} saved differ: "
            if vote.certain:
                self._reporter.warn(f"{message}rank {ranks} is outvoted by the others, and its state is not used")
                outvoted |= {Author(vote.attempt, rank) for rank in vote.ranks}
                continue
            message += f"ranks {ranks} disagree, and there is no majority that tells which is right"
            if self._stop_on_corruption:
                raise Corrupted(f"{message}; remove the wrong one, and resume again", vote.ranks, certain=False)
            self._reporter.warn(message)
        return outvoted

    def _row(self, holder: Holder) -> CandidateRow:
        return self._rows[holder.rank][holder.row]

    def _verified_holder(self, holders: Sequence[Holder]) -> Holder | None:
        """The first whose copy has the right hashes."""
        for holder in holders:
            verified = holder.rank == self._collective.rank and self._verify(self._own[holder.row])
            if broadcast_object(self._collective, verified, holder.rank):
                return holder
        return None

    def _verify(self, candidate: Candidate) -> bool:
        try:
            store.verify(candidate.path)
        except (CheckpointError, OSError) as error:
            self._refuse(candidate.path, error)
            return False
        return True

    def _load(self, holder: Holder) -> State | None:
        """This rank's own; None when it cannot be read after all."""
        path = self._own[holder.row].path
        try:
            return store.load(store.verify(path, check_hashes=False))
        except (CheckpointError, OSError) as error:
            self._refuse(path, error)
            return None

    def _broadcast(self, holder: Holder) -> State | None:
        """The holder's, on every rank."""
        state = self._load(holder) if holder.rank == self._collective.rank else None
        if not broadcast_object(self._collective, state is not None, holder.rank):
            return None
        return state if self._collective.size == 1 else broadcast_arrays(self._collective, state, holder.rank)

    def _put(self, state: State | None, part: int, parts: int, holder: Holder) -> bool:
        """Give the strategy a part; False when it does not fit."""
        if state is None:
            return False
        try:
            self._strategy.restore(state, part, parts)
        except ValueError as error:
            if holder.rank == self._collective.rank:
                self._refuse(self._own[holder.row].path, error)
            return False
        return True

    def _agree_on_start(
        self, complete: CompleteState, holders: list[Holder], *, own_parts: bool, restored: bool
    ) -> ResumePoint | None:
        """None when no rank could restore it. Raises JobError when only some could."""
        results = all_gather_object(self._collective, restored)
        if not any(results):
            return None
        if not all(results):
            raise JobError(
                f"the state of update {complete.update} could be restored on some ranks or in part only: remove it, "
                "and resume again"
            )
        row = self._row(holders[0])
        rank = None if own_parts else holders[0].rank
        return ResumePoint(row.iteration, complete.update, row.window, row.source, rank)

    def _report(self, point: ResumePoint, seconds: float, refused: int) -> None:
        self._reporter.event(
            "resumed",
            source=point.source,
            iteration=point.iteration,
            update=point.update,
            from_rank=point.rank,
            seconds=seconds,
            refused=refused,
        )
        if not point.update:
            weights = ", with the weights of resume_adapter_file" if point.source == "adapter" else ""
            why = _why_no_state(refused)
            self._reporter.warn(f"no state to resume from ({why}): the training starts at iteration 1{weights}")
            return
        kind = {"emergency": "an emergency checkpoint"}.get(point.source, f"a {point.source}")
        whose = "every rank's own part of it" if point.rank is None else f"rank {point.rank}'s"
        self._reporter.print(
            f"resumes after iteration {point.iteration} (update {point.update}) from {kind}, {whose}, "
            f"in {seconds:.2f} s"
        )


def _why_no_state(refused: int) -> str:
    return f"{refused} were refused" if refused else "no rank has any"
