"""Where the states of a run are, and where it resumes: the newest complete state that any rank has, restored on all.

Every rank lists the states on its disk (emergency checkpoints of earlier attempts, periodic checkpoints), all ranks
see all lists, and take the same decision from them. A state is used only when every byte has been compared with its
hash; each one that is refused is reported, and the next older one is tried.

A corrupted parameter may not have been found before a peer was lost: then the emergency checkpoints of one attempt
differ, and its ranks are outvoted. Those of different attempts may always differ, since another number of ranks sums in
another order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from engine.protocol.attempt import AttemptSpec
from engine.protocol.job import JobError
from engine.protocol.safetensors import CheckpointError
from engine.trainer.checkpoint import store
from engine.trainer.checkpoint.saving import emergency_folder, kept
from engine.trainer.checkpoint.store import CheckpointFolder
from engine.trainer.collective import Collective, Groups, all_gather_object, broadcast_arrays, broadcast_object
from engine.trainer.replica_check import Corrupted, ReplicaMismatch, find_mismatch
from engine.trainer.strategies.base import Strategy
from engine.trainer.weights import State
from engine.training.checkpoint_files import (
    FileEntry,
    Manifest,
    Origin,
    ResumePoint,
    best_so_far,
    check_inputs,
    check_manifest,
    first_restored,
)
from engine.training.reporting import Reporter

Result = TypeVar("Result")

_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+")
_EMERGENCY = re.compile(r"/([0-9]+)/rank([0-9]+)$")

_MAX_STATES = 32
"""Per rank."""


class Author(NamedTuple):
    """The rank that saved an emergency checkpoint."""

    attempt: int
    rank: int
    """In that attempt: the ranks of this one may be others."""


StateFolders = Mapping[Path, Author | None]
"""Folders that may hold states, with the author of an emergency checkpoint."""


@dataclass(frozen=True)
class CheckpointLocations:
    """The locations of a run's states. A partitioned state has a folder for each part."""

    spec: AttemptSpec
    rank: int
    home: Path
    """The run's folder on the node."""

    @property
    def base(self) -> Path:
        """The checkpoints' folder on the node."""
        node = self.spec.rank(self.rank)
        if node.checkpoint_folder is None or _URL.fullmatch(node.checkpoint_folder):
            return self.home / "checkpoints"
        return Path(node.workdir) / Path(node.checkpoint_folder).expanduser() / self.spec.run_id

    def folder(self, part: int, parts: int) -> CheckpointFolder:
        """That of one part. Raises JobError when this node cannot reach the URL."""
        name, url = f"part{part}" if parts > 1 else "", self.spec.rank(self.rank).checkpoint_folder
        copies = f"{url.rstrip('/')}/{self.spec.run_id}/{name}" if url and _URL.fullmatch(url) else None
        return CheckpointFolder(self.base / name, copies, self.spec.manifests)

    def states(self) -> StateFolders:
        """Emergency checkpoints first."""
        emergency = {
            folder: Author(int(match[1]), int(match[2]))
            for folder in sorted(emergency_folder(self.home).glob("*/rank*"))
            if (match := _EMERGENCY.search(str(folder)))
        }
        return {**emergency, self.base: None, **dict.fromkeys(sorted(self.base.glob("part*")))}

    def fetch(self, collective: Collective, reporter: Reporter, *, replicated: bool) -> None:
        """Download the newest checkpoints that are not on this node, as many as are kept: all of them on rank 0, or on
        each rank the parts assigned to it. Failures are reported as warnings. Raises JobError."""
        if replicated:
            if collective.rank == 0:
                self.folder(0, 1).fetch(kept(self.spec, 1), reporter)
            return
        part = collective.rank
        while self.folder(part, 2).fetch(kept(self.spec, collective.size), reporter):
            part += collective.size


class StateCopy(NamedTuple):
    """A state, or a part of one, on a rank's disk, complete by names and sizes."""

    rank: int
    number: int
    """Among that rank's, from 0."""
    manifest: Manifest
    author: Author | None
    """The author of an emergency checkpoint."""


CompleteState = list[list[StateCopy]]
"""A state of which every part is on some node. Per part: all copies, that of the rank of the part's number first."""


def complete_states(copies: Iterable[StateCopy], *, any_part: bool = False) -> list[CompleteState]:
    """All complete states in every rank's `copies`, newest first; of one update, that in the fewest parts first.
    `any_part`: one part is complete, with whatever other parts there are."""
    states: dict[tuple[int, int], dict[int, list[StateCopy]]] = {}
    for copy in copies:
        state = states.setdefault((-copy.manifest.update, copy.manifest.parts), {})
        state.setdefault(copy.manifest.part, []).append(copy)
    return [
        [sorted(held[part], key=lambda copy: (copy.rank != part, copy.rank, copy.number)) for part in sorted(held)]
        for (_, parts), held in sorted(states.items())
        if len(held) == parts or any_part
    ]


def differing_authors(copies: Iterable[StateCopy]) -> list[tuple[int, ReplicaMismatch]]:
    """The attempts whose ranks have saved different states of one update, with the ranks that differ. An author listed
    twice, as by two ranks of one node, counts once."""
    attempts: dict[int, dict[int, tuple[FileEntry, ...]]] = {}
    for copy in copies:
        if copy.author is not None:
            attempts.setdefault(copy.author.attempt, {})[copy.author.rank] = copy.manifest.files
    differing = []
    for attempt, files in sorted(attempts.items()):
        ranks = sorted(files)
        if (mismatch := find_mismatch([[files[rank]] for rank in ranks], None)) is not None:
            of_attempt = tuple(ranks[index] for index in mismatch.ranks)
            differing.append((attempt, replace(mismatch, ranks=of_attempt)))
    return differing


@dataclass
class Resume:
    """The search of one rank. Every call is made by every rank."""

    collective: Collective
    strategy: Strategy
    origin: Origin
    """Job and inputs of the states that this rank saves."""
    reporter: Reporter
    spec: AttemptSpec
    _refused: int = 0
    _paths: list[Path] = field(default_factory=list)
    """This rank's copies, by number."""
    _present: list[dict[str, str]] = field(default_factory=list)
    """Every rank's Origin.inputs."""

    def run(self, folders: StateFolders, *, adapter: bool = False) -> ResumePoint:
        """Restore the newest complete state and report it. `adapter`: the model has the weights of an adapter file,
        where there is no state. Raises PeerLost; on all ranks JobError, Corrupted."""
        start, needs_state = ResumePoint(source="adapter" if adapter else "none"), self.spec.needs_state

        def refused() -> int:
            return sum(all_gather_object(self.collective, self._refused))

        return first_restored(self._restored(folders), refused, needs_state, self.reporter, start)

    def _restored(self, folders: StateFolders) -> Iterator[ResumePoint | None]:
        """The complete states, the newest first, each restored when it is asked for; None where that fails."""
        table = all_gather_object(self.collective, self._own_copies(folders))
        copies = [
            StateCopy(rank, number, Manifest.from_json(manifest.encode()), author and Author(*author))
            for rank, rows in enumerate(table)
            for number, (manifest, author) in enumerate(rows)
        ]
        states = complete_states(copies, any_part=self.strategy.any_part)
        if states:
            self._present = all_gather_object(self.collective, dict(self.origin.inputs))
            check_inputs(states[0][0][0].manifest, self._present, self.reporter, accept=self.spec.accept_changed_data)
        yield from map(self._restore, states)

    def _own_copies(self, folders: StateFolders) -> list[tuple[str, Author | None]]:
        """The manifests of those on this rank's disk, as JSON, with their authors."""
        readable = []
        for folder, author in folders.items():
            try:
                paths = store.list_checkpoints(folder)
            except OSError as error:
                self.reporter.warn(f"{folder} cannot be read: {error.strerror or error}")
                continue
            for path in reversed(paths[-_MAX_STATES:]):
                manifest = self._read(path, partial(self._manifest, author=author))
                if manifest is not None:
                    readable.append((path, manifest, author))
        newest = sorted(readable, key=lambda entry: -entry[1].update)[:_MAX_STATES]
        self._paths = [path for path, _, _ in newest]
        return [(manifest.to_json().decode(), author) for _, manifest, author in newest]

    def _manifest(self, path: Path, author: Author | None) -> Manifest:
        manifest = store.verify(path, check_hashes=False).manifest
        check_manifest(manifest, self.origin.config_hash, self.spec.manifests, author)
        return manifest

    def _read(self, path: Path, read: Callable[[Path], Result]) -> Result | None:
        """None, reported, when it cannot be read."""
        try:
            return read(path)
        except (CheckpointError, OSError) as error:
            self._refuse(path, error)
            return None

    def _refuse(self, path: Path, why: Exception) -> None:
        self._refused += 1
        self.reporter.warn(f"the state in {path} is not used: {why}")

    def _restore(self, complete: CompleteState) -> ResumePoint | None:
        """Restore it on all ranks or on none; None when nobody who has a part can read it."""
        outvoted = self._outvoted(complete)
        verified = [self._first_verified(copies, outvoted) for copies in complete]
        chosen = [copy for copy in verified if copy is not None]
        if not chosen or (len(chosen) < len(complete) and not self.strategy.any_part):
            return None
        size = self.collective.size
        if len(chosen) == size > 1 and [copy.rank for copy in chosen] == list(range(size)):
            copy = chosen[self.collective.rank]
            state = self._load(copy)
            fits = all_gather_object(self.collective, None if state is None else self.strategy.fits(state))
            if None in fits:
                return None
            if state is not None and all(fits):
                return self._agree_on_start(chosen, None, restored=self._put(state, 0, 1, copy))
            # The same number of ranks, partitioned differently: each picks its own out of all parts.
            del state
        return self._agree_on_start(chosen, chosen[0].rank, restored=self._restore_parts(chosen))

    def _restore_parts(self, chosen: Sequence[StateCopy]) -> bool:
        """Every part, on every rank; False when one cannot be read (nothing is restored then) or does not fit."""
        restored = True
        for part, copy in enumerate(chosen):
            state = self._load(copy) if copy.rank == self.collective.rank else None
            if not broadcast_object(self.collective, state is not None, copy.rank):
                return False
            received = broadcast_arrays(self.collective, state, copy.rank)
            restored = self._put(received, part, len(chosen), copy) and restored
            del state, received
        return restored

    def _outvoted(self, complete: CompleteState) -> set[Author | None]:
        """Authors whose emergency checkpoint their attempt's others outvote. Raises Corrupted without a majority."""
        if len(complete) > 1:
            return set()
        (copies,) = complete
        outvoted: set[Author | None] = set()
        for attempt, mismatch in differing_authors(copies):
            ranks = ", ".join(map(str, mismatch.ranks))
            update = copies[0].manifest.update
            message = f"the states of update {update} that the ranks of attempt {attempt} saved differ: "
            if mismatch.certain:
                self.reporter.warn(f"{message}rank {ranks} is outvoted by the others, and its state is not used")
                outvoted |= {Author(attempt, rank) for rank in mismatch.ranks}
                continue
            message += f"ranks {ranks} disagree, and there is no majority that tells which is right"
            if self.spec.on_corruption == "stop":
                raise Corrupted(f"{message}; remove the wrong one, and resume again", mismatch)
            self.reporter.warn(message)
        return outvoted

    def _first_verified(self, copies: Sequence[StateCopy], outvoted: set[Author | None]) -> StateCopy | None:
        """The first that has the right hashes."""
        for copy in copies:
            if copy.author in outvoted:
                continue
            here = copy.rank == self.collective.rank
            verified = here and self._read(self._paths[copy.number], store.verify) is not None
            if broadcast_object(self.collective, verified, copy.rank):
                return copy
        return None

    def _load(self, copy: StateCopy) -> State | None:
        """This rank's own; None when it cannot be read after all."""
        return self._read(self._paths[copy.number], lambda path: store.load(store.verify(path, check_hashes=False)))

    def _put(self, state: Groups, part: int, parts: int, copy: StateCopy) -> bool:
        """Give the strategy a part; False when it does not fit."""
        try:
            self.strategy.restore(state, part, parts)
        except ValueError as error:
            if copy.rank == self.collective.rank:
                self._refuse(self._paths[copy.number], error)
            return False
        return True

    def _agree_on_start(self, chosen: Sequence[StateCopy], rank: int | None, *, restored: bool) -> ResumePoint | None:
        """None when no rank could restore it. Raises JobError when only some could."""
        manifest, results = chosen[0].manifest, all_gather_object(self.collective, restored)
        if not any(results):
            return None
        if not all(results):
            raise JobError(
                f"the state of update {manifest.update} could be restored on some ranks or in part only: remove it, "
                "and resume again"
            )
        source = "checkpoint" if chosen[0].author is None else "emergency"
        recorded = all(copy.manifest.check_recorded(self.spec.manifests, copy.author) for copy in chosen)
        whose = ", every rank's own part of it" if rank is None else f", rank {rank}'s"
        facts = {**manifest.facts(), "best": best_so_far(manifest, self._present)}
        return ResumePoint(**facts, source=source, rank=rank, recorded=recorded, saved_by=whose)
