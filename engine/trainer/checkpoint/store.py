"""A folder of checkpoints on disk, and the snapshot of one finished update that a checkpoint is written from.

    step-000000390/          weights.safetensors, optimizer.safetensors, manifest.json (written last)
    .step-000000400.…/       being written; the next writer removes what a killed one has left

Each checkpoint is written completely or not at all, by one writer."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx.core as mx

from engine.protocol.attempt import read_regular, sync_folder
from engine.protocol.checksums import package_versions
from engine.protocol.job import JobError
from engine.protocol.safetensors import CheckpointError, check_header
from engine.trainer.weights import State
from engine.training import checkpoint_files
from engine.training.checkpoint_files import TrainingPoint
from engine.training.reporting import Reporter

PACKAGES = ("mlx", "mlx_lm")
"""That a training is computed with."""


@dataclass(frozen=True)
class Snapshot(TrainingPoint):
    """References to arrays that never change: no copy, and no memory while they are the training's own."""

    state: State = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been verified or just been written."""

    path: Path
    manifest: checkpoint_files.Manifest
    durable: bool = True
    """It survives a power cut; False for one just written to a volume without F_FULLFSYNC."""


def write(folder: Path, snapshot: Snapshot, origin: checkpoint_files.Origin, compression: str = "none") -> Checkpoint:
    """Commit `snapshot`, on any thread: its arrays have been evaluated. When this returns, the checkpoint survives a
    power cut where `durable`; when it raises (OSError, JobError), nothing of it is left and every older one is as it
    was. One of the same update is replaced."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # What a killed writer has left: there is one writer, so that none of it is in use.
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    target = folder / checkpoint_files.folder_name(snapshot.update)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=folder, ignore_cleanup_errors=True) as temporary:
        scratch = Path(temporary) / target.name
        scratch.mkdir(mode=0o700)
        entries = [_write_group(scratch, stem, arrays, compression) for stem, arrays in snapshot.state.items()]
        manifest = checkpoint_files.Manifest(
            **asdict(origin),
            **snapshot.facts(),
            versions=package_versions(*PACKAGES),
            files=tuple(entries),
        )
        with contextlib.closing(checkpoint_files.HashedFile(scratch, checkpoint_files.MANIFEST_NAME, "none")) as file:
            file.write(manifest.to_json())
            file.commit()
            durable = file.durable
        sync_folder(scratch)
        checkpoint_files.replace_folder(scratch, target)
        sync_folder(folder)
    return Checkpoint(target, manifest, durable)


def list_checkpoints(folder: Path) -> list[Path]:
    """All paths that are named as checkpoints, oldest first. Raises OSError."""
    try:
        return sorted(path for path in folder.iterdir() if checkpoint_files.update_of(path.name) is not None)
    except FileNotFoundError:
        return []


def verify(path: Path, *, check_hashes: bool = True) -> Checkpoint:
    """Compare every byte with the manifest, or only names and sizes. Raises CheckpointError, OSError."""
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError("it is not a folder")
    try:
        with checkpoint_files.open_stored(path / checkpoint_files.MANIFEST_NAME) as file:
            raw = file.read(checkpoint_files.MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise CheckpointError("it has no manifest: it was never finished") from error
    if len(raw) > checkpoint_files.MAX_MANIFEST_BYTES:
        raise CheckpointError("its manifest is too long")
    manifest = checkpoint_files.Manifest.from_json(raw)
    if manifest.update != checkpoint_files.update_of(path.name):
        raise CheckpointError(f"its manifest is of update {manifest.update}")
    for entry in manifest.files:
        checkpoint_files.verify_file(path, entry, check_hash=check_hashes)
    return Checkpoint(path, manifest)


def load(checkpoint: Checkpoint) -> dict[str, dict[str, mx.array]]:
    """File stem → arrays, evaluated. Raises CheckpointError, OSError."""
    groups = {}
    for entry in checkpoint.manifest.files:
        with contextlib.ExitStack() as stack:
            path = checkpoint.path / entry.name
            if entry.compression != "none":
                # Beside it: it may not fit where temporary files are.
                scratch = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix=".unpacked.", dir=checkpoint.path.parent)
                )
                path = Path(scratch) / entry.name.rsplit(".", 1)[0]
                with path.open("wb") as file:
                    for data in checkpoint_files.unpacked(checkpoint.path, entry):
                        file.write(data)
            try:
                tensors = check_header(path).tensors
            except CheckpointError as refused:
                raise CheckpointError(f"{entry.name}: {refused}") from refused
            arrays = cast("dict[str, mx.array]", mx.load(str(path), format="safetensors")) if tensors else {}
            mx.eval(arrays)
            groups[entry.name.split(".", 1)[0]] = arrays
    return groups


def retain(folder: Path, count: int, committed: int) -> list[str]:
    """Remove all but the newest `count` complete checkpoints (by names and sizes), from update `committed` backwards,
    which has just been verified; returns what is wrong with those that cannot be removed. An incomplete one does not
    count, and is removed when `count` newer ones are there.

    Those of a later update are removed in any case: the training has resumed from an earlier one."""
    kept, problems = 0, []
    for path in reversed(list_checkpoints(folder)):
        if kept < count and (checkpoint_files.update_of(path.name) or 0) <= committed:
            with contextlib.suppress(CheckpointError, OSError):
                verify(path, check_hashes=False)
                kept += 1
            continue
        try:
            shutil.rmtree(checkpoint_files.move_aside(path), ignore_errors=True)
        except OSError as error:
            problems.append(f"the checkpoint {path.name} cannot be removed: {error.strerror or error}")
    return problems


def _write_group(
    folder: Path, stem: str, arrays: Mapping[str, mx.array], compression: str
) -> checkpoint_files.FileEntry:
    with contextlib.closing(checkpoint_files.HashedFile(folder, f"{stem}.safetensors", compression)) as file:
        try:
            mx.save_safetensors(cast(BinaryIO, file), dict(arrays))
        except RuntimeError as error:
            raise OSError(f"{file.name} could not be written: {error}") from error
        return file.commit()


class CheckpointFolder:
    """One rank's checkpoints on this node, and their copies behind an fsspec URL (s3://, gs://, file://), if there is
    one: uploaded whole, the manifest last, and fetched when needed."""

    def __init__(self, path: Path, url: str | None = None, recorded: checkpoint_files.Recorded = ()) -> None:
        """Raises JobError when this node cannot reach such a URL."""
        self.path, self.url, self._recorded = path, url and url.rstrip("/"), recorded
        if not self.url:
            return
        try:
            # mlx-lm depends on it; only jobs with a URL need it.
            self._files, self._root = importlib.import_module("fsspec.core").url_to_fs(self.url)
        except ImportError as error:
            why = f"{self.url.split('://', 1)[0]}:// needs a package that this node does not have: {error}"
            raise JobError(f"[checkpoint] destination: {why}") from error
        except Exception as error:  # each kind of storage has errors of its own
            raise JobError(f"[checkpoint] destination: {self.url}: {error}") from error

    def location(self, name: str) -> str:
        """Where the checkpoint of this name can be found."""
        return f"{self.url or self.path}/{name}"

    def put(self, checkpoint: Checkpoint) -> None:
        """Copy a verified checkpoint to the URL, if any. Raises OSError."""
        if not self.url:
            return
        target = f"{self._root}/{checkpoint.path.name}"
        names = [entry.name for entry in checkpoint.manifest.files]
        self._call(self._files.makedirs, target, exist_ok=True)
        # Files of an earlier one of this name must not be replaced while its manifest is there.
        with contextlib.suppress(FileNotFoundError):
            self._call(self._files.rm_file, f"{target}/{checkpoint_files.MANIFEST_NAME}")
        for name in [*names, checkpoint_files.MANIFEST_NAME]:
            self._call(self._files.put_file, str(checkpoint.path / name), f"{target}/{name}")

    def retain(self, count: int, committed: int) -> list[str]:
        """As the function `retain`, here and at the URL. Raises OSError."""
        updates, problems = self._updates(), retain(self.path, count, committed)
        kept = [update for update in updates if update <= committed][-count:]
        for update in updates:
            if update in kept:
                continue
            try:
                self._call(self._files.rm, f"{self._root}/{checkpoint_files.folder_name(update)}", recursive=True)
            except OSError as error:
                problems.append(f"the checkpoint {checkpoint_files.folder_name(update)} cannot be removed: {error}")
        return problems

    def fetch(self, count: int, reporter: Reporter) -> bool:
        """Download the newest `count` checkpoints that verify, unless they are here already; True when the URL has any.
        One that cannot be downloaded or verified is reported and does not count."""
        try:
            updates = self._updates()
        except OSError as error:
            reporter.warn(f"{self.url} cannot be read, so only states on this node are used: {error}")
            return False
        verified = 0
        for update in reversed(updates):
            if verified == count:
                break
            name = checkpoint_files.folder_name(update)
            try:
                if not self._is_valid(self.path / name):
                    self._download(name, reporter)
            except (CheckpointError, OSError) as error:
                reporter.warn(f"the copy of {name} is not used: {error}")
            else:
                verified += 1
        return bool(updates)

    def _download(self, name: str, reporter: Reporter) -> None:
        source = f"{self._root}/{name}"
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=self.path, ignore_cleanup_errors=True) as temporary:
            copy = Path(temporary) / name
            copy.mkdir(mode=0o700)
            manifest = checkpoint_files.MANIFEST_NAME
            if self._size(f"{source}/{manifest}") > checkpoint_files.MAX_MANIFEST_BYTES:
                raise CheckpointError("its manifest is too long")
            self._call(self._files.get_file, f"{source}/{manifest}", str(copy / manifest))
            for entry in checkpoint_files.Manifest.from_json(read_regular(copy / manifest)).files:
                size = self._size(f"{source}/{entry.name}")
                entry.check_size(size)
                self._call(self._files.get_file, f"{source}/{entry.name}", str(copy / entry.name))
                # The head sees progress, however long all of it takes.
                reporter.event("fetched", path=f"{name}/{entry.name}", bytes=size)
            verify(copy).manifest.check_recorded(self._recorded)
            checkpoint_files.replace_folder(copy, self.path / name)

    def _is_valid(self, path: Path) -> bool:
        try:
            verify(path).manifest.check_recorded(self._recorded)
        except (CheckpointError, OSError):
            return False
        return True

    def _updates(self) -> list[int]:
        """The updates of those with a manifest at the URL, if any, oldest first. Raises OSError."""
        if not self.url:
            return []
        paths: list[Any] = self._call(self._files.glob, f"{self._root}/step-*/{checkpoint_files.MANIFEST_NAME}")
        updates = (checkpoint_files.update_of(str(path).rsplit("/", 2)[-2]) for path in paths)
        return sorted(update for update in updates if update is not None)

    def _size(self, path: str) -> int:
        return int(self._call(self._files.size, path) or 0)

    def _call(self, operation: Callable[..., Any], *arguments: object, **options: object) -> Any:
        """Raises OSError for whatever a storage's own package raises."""
        try:
            return operation(*arguments, **options)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {error}") from error
