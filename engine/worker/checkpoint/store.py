"""A folder of checkpoints: written whole or not at all, by one committer; the newest that proves itself is read.

.step-….<pid>/        being written; what a killed writer has left is cleared away by the next
step-000000390/       weights.safetensors, optimizer.safetensors, …, manifest.json (last)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx.core as mx

from .errors import Refused
from .manifest import MANIFEST_BYTES, NAME, Manifest, folder_name, update_of
from .safetensors import check_header
from .streams import HashedFile, folder_to_disk, to_disk, unpacked, verify, verify_size

Arrays = Mapping[str, mx.array]
Told = Callable[[Path, str], object]
"""Hears of each checkpoint that is refused, and why."""


@dataclass(frozen=True)
class Checkpoint:
    """One that has proved itself: every byte of it has been compared with its hash."""

    path: Path
    manifest: Manifest


def write(
    folder: Path,
    groups: Mapping[str, Arrays],
    *,
    update: int,
    config_hash: str,
    world_size: int,
    state: Mapping[str, Any],
    versions: Mapping[str, str],
    compression: str = "none",
) -> Checkpoint:
    """Commit `groups` (file stem → arrays, which have been evaluated: this may run in a thread of its own) and `state`.

    When this returns, the checkpoint survives a power cut; when it raises (OSError, ValueError), nothing of it is left
    and every older one is as it was. One of the same update is replaced.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _clear_torn(folder)
    target = folder / folder_name(update)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=folder))
    try:
        entries = [_write_group(temporary, stem, arrays, compression) for stem, arrays in groups.items()]
        manifest = Manifest(update, config_hash, world_size, dict(state), dict(versions), tuple(entries))
        _write_manifest(temporary, manifest)
        folder_to_disk(temporary)
        _put(temporary, target)
        folder_to_disk(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Checkpoint(target, manifest)


def newest(folder: Path, refused: Told, *, config_hash: str | None = None) -> Checkpoint | None:
    """The newest checkpoint that proves itself, of the job with this hash where one is given; None when there is none.
    Each that does not is told. Raises OSError when the folder cannot be read."""
    for path in reversed(listed(folder)):
        try:
            checkpoint = prove(path)
            if config_hash is not None and checkpoint.manifest.config_hash != config_hash:
                raise Refused("it is of another job")
        except (Refused, OSError) as error:
            refused(path, str(error))
        else:
            return checkpoint
    return None


def listed(folder: Path) -> list[Path]:
    """All that are named as checkpoints, oldest first."""
    try:
        names = sorted(name for name in os.listdir(folder) if update_of(name) is not None)  # noqa: PTH208
    except FileNotFoundError:
        return []
    return [folder / name for name in names]


def prove(path: Path, *, thorough: bool = True) -> Checkpoint:
    """Compare every byte with the manifest; not `thorough`: the names and sizes only. Raises Refused, OSError."""
    if path.is_symlink() or not path.is_dir():
        raise Refused("it is no folder")
    try:
        descriptor = os.open(path / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Refused("it has no manifest: it was never finished") from error
    with os.fdopen(descriptor, "rb") as file:
        raw = file.read(MANIFEST_BYTES + 1)
    if len(raw) > MANIFEST_BYTES:
        raise Refused("its manifest is too long")
    manifest = Manifest.from_json(raw)
    if manifest.update != update_of(path.name):
        raise Refused(f"its manifest is of update {manifest.update}")
    for entry in manifest.files:
        if thorough:
            verify(path, entry)
        else:
            verify_size(path, entry)
    return Checkpoint(path, manifest)


def load(checkpoint: Checkpoint) -> dict[str, dict[str, mx.array]]:
    """File stem → arrays, evaluated. Raises Refused, OSError."""
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
                    for data in unpacked(checkpoint.path, entry):
                        file.write(data)
            try:
                tensors = check_header(path).tensors
            except Refused as refused:
                raise Refused(f"{entry.name}: {refused}") from refused
            arrays = cast("dict[str, mx.array]", mx.load(str(path), format="safetensors")) if tensors else {}
            mx.eval(arrays)
            groups[entry.name.split(".", 1)[0]] = arrays
    return groups


def retain(folder: Path, count: int, committed: int, refused: Told) -> list[Path]:
    """Remove all but the newest `count` that are whole, as far as their sizes tell, from the update `committed` on
    backwards: that one has just been proved when this is called. What was removed. One that is not whole counts for
    nothing, and is removed when `count` newer ones are. Raises nothing: what cannot be removed is told.

    Those of a later update are of a time that the training has gone back from: they are removed, whole or not."""
    kept, removed = 0, []
    for path in reversed(listed(folder)):
        if kept < count and (update_of(path.name) or 0) <= committed:
            try:
                prove(path, thorough=False)
            except (Refused, OSError):
                continue
            kept += 1
            continue
        try:
            _remove(path)
        except OSError as error:
            refused(path, f"it cannot be removed: {error.strerror or error}")
        else:
            removed.append(path)
    return removed


def _write_group(folder: Path, stem: str, arrays: Arrays, compression: str) -> Any:
    file = HashedFile(folder, f"{stem}.safetensors", compression)
    try:
        try:
            mx.save_safetensors(cast(BinaryIO, file), dict(arrays))
        except RuntimeError as error:
            raise OSError(f"{file.name} could not be written: {error}") from error
        return file.commit()
    finally:
        file.close()


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    descriptor = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(manifest.to_json())
        file.flush()
        to_disk(file.fileno())


def _put(temporary: Path, target: Path) -> None:
    """Rename a whole folder into its place; one that is there goes out of the way first, by one rename too."""
    if target.exists() or target.is_symlink():
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        target.rename(aside / "replaced")
        temporary.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        temporary.rename(target)


def _remove(path: Path) -> None:
    """Out of sight by one rename, so that a kill in the middle leaves nothing that looks like a checkpoint."""
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    path.rename(aside / "removed")
    shutil.rmtree(aside, ignore_errors=True)


def _clear_torn(folder: Path) -> None:
    """What a killed writer or remover has left: there is one committer, so that none of it is being written."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
