"""Checkpoints of the training's state, from which another attempt goes on, with the same or another number of ranks.

    step-000000390/          the strategy's files, and manifest-<rank>.json of each rank with their hashes
    .step-000000400.partial/ being written

Each rank writes to its node's disk, and the nodes need not share one: a checkpoint is complete when the manifests of
all its ranks are on some node, and every file that they name. Where nothing is partitioned, one rank of each disk
writes the whole, as if it were rank 0, so that any node has all that a restart needs. On resuming, the ranks send each
node what it lacks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from engine.protocol.attempt import open_regular, read_regular, replacing, sync_file, sync_folder, write_atomic
from engine.protocol.job import JobError
from engine.protocol.safetensors import CheckpointError
from engine.torch_trainer.strategies import TorchStrategy
from engine.training import checkpoint_files
from engine.training.checkpoint_files import (
    FileEntry,
    ResumePoint,
    TrainingPoint,
    best_so_far,
    check_inputs,
    check_manifest,
    first_restored,
    hashed,
)
from engine.training.process import TrainingProcess
from engine.training.reporting import first_line

_MANIFEST = re.compile(r"manifest-(\d{1,6})\.json")
_WRITER = re.compile(r"(?:zero_pp_rank_|__)(\d+)_")
"""In a file's name, the rank that wrote it: DeepSpeed's and torch.distributed.checkpoint's. All others are rank 0's."""


@dataclass(frozen=True)
class StateManifest(checkpoint_files.Manifest):
    _: KW_ONLY
    attempt: int
    """The attempt that wrote it: parts of two attempts are no state, though they are of one update."""
    layout: str
    """TorchStrategy.layout"""


Listing = dict[int, dict[str, str | None]]
"""By update: the names of all files on a disk, with the text of a manifest."""


class StateCheckpoints:
    """The checkpoints of one run. Every call is made by every rank."""

    def __init__(
        self,
        process: TrainingProcess,
        origin: checkpoint_files.Origin,
        strategy: TorchStrategy,
        versions: dict[str, str],
    ) -> None:
        """Raises JobError, OSError."""
        self._spec, self._reporter, self._rank = process.spec, process.reporter, process.rank
        self._origin, self._strategy, self._versions = origin, strategy, versions
        node = self._spec.rank(self._rank)
        self._base = process.home / "checkpoints"
        if node.checkpoint_folder is not None:
            self._base = Path(node.workdir) / Path(node.checkpoint_folder).expanduser() / self._spec.run_id
        self._saved: int | None = None
        self._refused = 0
        self._leaders = self._find_leaders()
        """Per disk, the rank that acts for all ranks that share it."""
        self._leads = self._rank in self._leaders

    def _find_leaders(self) -> list[int]:
        """The lowest of the ranks that see each other's marks in their checkpoints' folder."""
        self._base.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark = self._base / f".rank-{self._spec.nonce}-{self._rank}"
        mark.touch()
        dist.barrier()
        sharing = [int(path.name.rpartition("-")[2]) for path in self._base.glob(f".rank-{self._spec.nonce}-*")]
        leaders = sorted(set(all_gather_object(min(sharing))))
        # Those of attempts that were killed, too.
        for path in self._base.glob(".rank-*"):
            path.unlink(missing_ok=True)
        if self._rank in leaders:
            for path in self._base.glob(".step-*"):
                shutil.rmtree(path, ignore_errors=True)
        return leaders

    def due(self, update: int) -> bool:
        return self._spec.checkpoint_every > 0 and update % self._spec.checkpoint_every == 0

    def save(self, point: TrainingPoint) -> None:
        """Write the state at `point`, unless it has been. A full disk is a warning; older ones stay."""
        if self._saved == point.update:
            return
        started = time.perf_counter()
        target = self._base / checkpoint_files.folder_name(point.update)
        facts: dict[str, Any] = {"kind": "state", "iteration": point.iteration, "update": point.update}
        self._reporter.phase("saving")
        self._reporter.event("checkpoint", phase="begin", path=str(target), **facts)
        scratch, written = target.with_name(f".{target.name}.partial"), dict[str, Any]()

        def make_folder() -> None:
            if self._leads:
                scratch.mkdir(mode=0o700, exist_ok=True)

        def write() -> None:
            nonlocal written
            if self._origin.parts > 1 or self._leads:
                self._strategy.save(scratch)
                manifest = self._write_manifest(scratch, point)
                written = {"bytes": manifest.stored_bytes, **manifest.journal_entry()}
                written |= manifest.fetchable(target, f"manifest-{manifest.part}.json")

        def commit() -> None:
            if self._leads:
                sync_folder(scratch)
                # Not there when a leader of another node shares the disk after all, and was first.
                with contextlib.suppress(FileNotFoundError):
                    checkpoint_files.replace_folder(scratch, target)
                sync_folder(self._base)

        failure = first_failure(make_folder) or first_failure(write) or first_failure(commit)
        if failure is not None:
            if self._leads:
                shutil.rmtree(scratch, ignore_errors=True)
            self._reporter.event("checkpoint", phase="failed", path=str(target), message=failure, **facts)
            self._reporter.warn(f"no checkpoint of update {point.update} (iteration {point.iteration}): {failure}")
            return
        self._saved = point.update
        self._retain(point.update)
        seconds = time.perf_counter() - started
        facts |= {"bytes": 0, **written}
        self._reporter.event("checkpoint", phase="committed", path=str(target), seconds=seconds, **facts)

    def _write_manifest(self, folder: Path, point: TrainingPoint) -> StateManifest:
        """Hash what this rank has written. Raises OSError."""
        entries = []
        for name in _files(folder):
            writer = _WRITER.search(name)
            # Manifests of the other ranks are perhaps being written, under other names.
            if (int(writer[1]) if writer else 0) == self._origin.part and "manifest-" not in name:
                with (folder / name).open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    entries.append(FileEntry(name, hashed(file, size), size, size, "none"))
                    sync_file(file.fileno())
        manifest = StateManifest(
            **asdict(self._origin),
            **point.facts(),
            versions=self._versions,
            files=tuple(entries),
            attempt=self._spec.attempt,
            layout=self._strategy.layout,
        )
        write_atomic(folder / f"manifest-{self._origin.part}.json", manifest.to_json().decode())
        return manifest

    def _retain(self, committed: int) -> None:
        """Remove all but the newest; also those of a later update, since the training has resumed from an earlier
        one."""
        if not self._leads:
            return
        updates = sorted(update for update in self._list() if update <= committed)
        kept = {checkpoint_files.folder_name(update) for update in updates[-max(1, self._spec.checkpoint_keep) :]}
        for path in self._base.glob("step-*"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def resume(self) -> ResumePoint:
        """Restore the newest complete state, and report it. Raises JobError where it cannot go on."""
        return first_restored(self._restored(), lambda: self._refused, self._spec.needs_state, self._reporter)

    def _restored(self) -> Iterator[ResumePoint]:
        table: list[Listing] = all_gather_object(self._list() if self._leads else {})
        for update in sorted({update for listing in table for update in listing}, reverse=True):
            folder = self._base / checkpoint_files.folder_name(update)
            try:
                manifests = self._complete(update, table)
                check_inputs(manifests[0], [self._origin.inputs], self._reporter, accept=self._spec.accept_changed_data)
                self._assemble(update, manifests)
            except CheckpointError as error:
                self._refused += 1
                self._reporter.warn(f"the state in {folder} is not used: {error}")
                continue
            newest = manifests[0]
            self._load(folder, newest)
            self._saved = update
            recorded = all(manifest.check_recorded(self._spec.manifests) for manifest in manifests)
            ranks = f" of {newest.world_size} ranks"
            facts = {**newest.facts(), "best": best_so_far(newest, [self._origin.inputs])}
            yield ResumePoint(**facts, source="checkpoint", recorded=recorded, saved_by=ranks)

    def _load(self, folder: Path, manifest: StateManifest) -> None:
        """Raises JobError."""
        target = self._base / f".{folder.name}.converted"
        same = manifest.world_size == self._spec.world_size and manifest.layout == self._strategy.layout
        converted = self._strategy.converts and not same

        def convert() -> None:
            if converted and self._leads:
                self._strategy.convert(folder, target)

        failure = first_failure(convert)
        try:
            if failure is not None:
                raise CheckpointError(failure)
            self._strategy.load(target if converted else folder, converted=converted)
        except CheckpointError as error:
            saved = "" if same else f", which {manifest.world_size} ranks have saved as {manifest.layout}"
            raise JobError(f"the state in {folder}{saved}, cannot be restored: {error}") from error
        # A rank that is done removes nothing that another one still reads.
        dist.barrier()
        if converted and self._leads:
            shutil.rmtree(target, ignore_errors=True)

    def _list(self) -> Listing:
        """The states on this rank's disk."""
        listing, limit = Listing(), checkpoint_files.MAX_MANIFEST_BYTES
        for path in self._base.glob("step-*"):
            if (update := checkpoint_files.update_of(path.name)) is None or path.is_symlink():
                continue
            texts: dict[str, str | None] = dict.fromkeys(_files(path))
            listing[update] = texts
            for name in filter(_MANIFEST.fullmatch, texts):
                # One that cannot be read is as good as none.
                with contextlib.suppress(OSError):
                    if (path / name).stat().st_size <= limit:
                        texts[name] = read_regular(path / name).decode(errors="replace")
        return listing

    def _complete(self, update: int, table: list[Listing]) -> list[StateManifest]:
        """The manifests of all ranks that wrote it. Raises CheckpointError, on all ranks."""
        present = [file for listing in table for file in listing.get(update, {}).items()]
        texts = [text for _, text in present if text is not None]
        config_hash, recorded = self._origin.config_hash, self._spec.manifests
        manifests, refused = _newest(texts, partial(check_manifest, config_hash=config_hash, recorded=recorded))
        if refused is not None:
            folder = self._base / checkpoint_files.folder_name(update)
            self._reporter.warn(f"a copy of the state in {folder} is not used: {refused}")
        for manifest in manifests:
            if manifest.update != update:
                raise CheckpointError(f"its manifest is of update {manifest.update}")
        names = {entry.name for manifest in manifests for entry in manifest.files}
        written, read = (layout.split()[0] for layout in (manifests[0].layout, self._strategy.layout))
        if written != read:
            raise CheckpointError(f"its format is {written}, and this strategy reads {read}")
        if missing := sorted(names - dict(present).keys()):
            raise CheckpointError(f"{', '.join(missing[:3])} is on no node that takes part")
        return manifests

    def _assemble(self, update: int, manifests: list[StateManifest]) -> None:
        """Verify every file on the disk of each leader, and send the leaders what they lack. Raises CheckpointError, on
        all ranks, when a file is intact nowhere."""
        folder = self._base / checkpoint_files.folder_name(update)
        entries = {entry.name: entry for manifest in manifests for entry in manifest.files}
        intact: list[set[str]] = all_gather_object(set(self._verified(folder, entries)) if self._leads else set())
        lost = [name for name in entries if not any(name in names for names in intact)]
        if lost:
            raise CheckpointError(f"{', '.join(lost[:3])} is damaged on every node that has it")
        for name, entry in entries.items():
            lacking = [rank for rank in self._leaders if name not in intact[rank]]
            if lacking:
                source = next(rank for rank in self._leaders if name in intact[rank])
                send = partial(self._send, folder, entry, source, self._rank in lacking)
                if (failure := first_failure(send)) is not None:
                    raise CheckpointError(f"{name} cannot be sent to the nodes that lack it: {failure}")

        def write_manifests() -> None:
            for manifest in manifests if self._leads else ():
                write_atomic(folder / f"manifest-{manifest.part}.json", manifest.to_json().decode())

        if (failure := first_failure(write_manifests)) is not None:
            raise CheckpointError(failure)

    def _verified(self, folder: Path, entries: Mapping[str, FileEntry]) -> Iterator[str]:
        for name, entry in entries.items():
            try:
                checkpoint_files.verify_file(folder, entry, check_hash=True)
            except (CheckpointError, OSError) as error:
                if os.path.lexists(folder / name):
                    self._reporter.warn(f"{folder}: {error}")
            else:
                yield name
            self._reporter.going_on()

    def _send(self, folder: Path, entry: FileEntry, source: int, lacking: bool) -> None:
        send_file(folder, folder if lacking else None, entry, source, self._reporter.going_on)
        if lacking:
            self._reporter.event("fetched", path=f"{folder.name}/{entry.name}", bytes=entry.stored_bytes)


def send_file(folder: Path, target: Path | None, entry: FileEntry, owner: int, going_on: Callable[[], object]) -> None:
    """From rank `owner`'s `folder` to the folder `target` of each rank that has one, where `going_on` is called at each
    piece. Every rank takes part to the end; then raises CheckpointError, OSError, where it has failed."""
    pieces, digest = _broadcast_file(folder / entry.name, entry.stored_bytes, owner), hashlib.sha256()
    try:
        if target is not None:
            path = target / entry.name
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with replacing(path, 0o600) as file:
                for data in pieces:
                    digest.update(data)
                    file.write(data)
                    going_on()
                if digest.hexdigest() != entry.sha256:
                    raise CheckpointError("it has arrived damaged")
    finally:
        # Whose disk is full, too.
        for _ in pieces:
            pass


def _broadcast_file(path: Path, size: int, source: int) -> Iterator[bytes]:
    """The content of rank `source`'s file on every rank, piece by piece. Raises CheckpointError, on all of them, where
    it cannot be read."""
    with contextlib.ExitStack() as stack:
        file = None
        while size:
            piece: list[bytes | str] = [b""]
            if dist.get_rank() == source:
                try:
                    file = file or stack.enter_context(open_regular(path))
                    piece = [file.read(min(checkpoint_files.CHUNK_BYTES, size)) or "it has become shorter"]
                except OSError as error:
                    piece = [str(error)]
            dist.broadcast_object_list(piece, source)
            (data,) = piece
            if isinstance(data, str):
                raise CheckpointError(data)
            size -= len(data)
            yield data


def first_failure(step: Callable[[], None]) -> str | None:
    """Take a step on every rank; why it has failed on the first of those where it has, on all of them."""
    failure = None
    try:
        step()
    except (OSError, CheckpointError, JobError) as error:
        failure = first_line(error)
    return next((reported for reported in all_gather_object(failure) if reported is not None), None)


def _newest(texts: list[str], check: Callable[[StateManifest], None]) -> tuple[list[StateManifest], str | None]:
    """The manifests of the newest attempt that all parts are there of, and why others were refused (by `check`). Raises
    CheckpointError."""
    attempts: dict[int, dict[int, StateManifest]] = {}
    refused, why = None, "it has no manifest"
    for text in texts:
        try:
            manifest = StateManifest.from_json(text.encode())
            check(manifest)
            attempts.setdefault(manifest.attempt, {})[manifest.part] = manifest
        except CheckpointError as error:
            refused = str(error)
    for attempt, parts in sorted(attempts.items(), reverse=True):
        complete = [parts[part] for part in sorted(parts)]
        if sorted(parts) == list(range(complete[0].parts)):
            return complete, refused
        why = f"of attempt {attempt} only the manifests of rank {', '.join(map(str, sorted(parts)))} are there"
    raise CheckpointError(refused or why)


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    table: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(table, value)
    return table


def _files(folder: Path) -> list[str]:
    """The names of all files in a folder and its subfolders."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
