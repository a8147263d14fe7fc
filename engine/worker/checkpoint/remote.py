"""Copies of checkpoints behind an fsspec address (s3://, gs://, file://): put there whole, fetched when needed.

A checkpoint is written and proved on the node's own disk first. There its files are copied one by one, the manifest
last: without it, nothing is a checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .errors import Refused
from .manifest import MANIFEST_BYTES, NAME, Manifest, folder_name, update_of
from .store import Checkpoint, Told, prove

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://.+")

Brought = Callable[[Path, int], object]
"""Hears of each file that has been fetched, and its bytes."""


def is_address(destination: str) -> bool:
    """Whether it is an address and no path."""
    return _ADDRESS.fullmatch(destination) is not None


class Remote:
    """One folder of checkpoints elsewhere."""

    def __init__(self, address: str) -> None:
        """Raises ValueError, in one line, when nothing on this node can reach such an address."""
        self._address = address.rstrip("/")
        scheme = address.split("://", 1)[0]
        try:
            # What mlx-lm brings along; only who names an address needs it.
            self._files, self._root = importlib.import_module("fsspec.core").url_to_fs(self._address)
        except ImportError as error:
            raise ValueError(f"{scheme}:// needs a package that this node has not: {error}") from error
        except Exception as error:  # each kind of storage has errors of its own
            raise ValueError(f"{address}: {error}") from error

    def address(self, name: str) -> str:
        return f"{self._address}/{name}"

    def put(self, checkpoint: Checkpoint) -> None:
        """Copy one that has been proved. Raises OSError."""
        target = f"{self._root}/{checkpoint.path.name}"
        names = [entry.name for entry in checkpoint.manifest.files]
        self._try(partial(self._files.makedirs, target, exist_ok=True))
        # Of one that is there, another time's, the files must not be replaced below its manifest.
        with contextlib.suppress(FileNotFoundError):
            self._try(partial(self._files.rm_file, f"{target}/{NAME}"))
        for name in [*names, NAME]:
            self._try(partial(self._files.put_file, str(checkpoint.path / name), f"{target}/{name}"))

    def retain(self, count: int, committed: int, told: Told) -> None:
        """Remove all but the newest `count` from the update `committed` on backwards, as store.retain does; what cannot
        be removed is told. Raises OSError when it cannot be listed."""
        updates = self._updates()
        kept = [update for update in updates if update <= committed][-count:]
        for update in updates:
            if update in kept:
                continue
            old = f"{self._root}/{folder_name(update)}"
            try:
                self._try(partial(self._files.rm, old, recursive=True))
            except OSError as error:
                told(Path(folder_name(update)), f"it cannot be removed: {error}")

    def fetch(self, folder: Path, count: int, told: Told, brought: Brought) -> bool:
        """Have the newest `count` checkpoints that prove themselves in `folder`: which of them can be used is found out
        later. One that is there and proves itself is not brought again; one that cannot be brought, or does not prove
        itself then, is told and counts for nothing. Whether there are any. Raises OSError."""
        updates, whole = self._updates(), 0
        for update in reversed(updates):
            if whole == count:
                break
            try:
                if not _proved(folder / folder_name(update)):
                    self._bring(folder, update, brought)
            except (Refused, OSError) as error:
                told(Path(folder_name(update)), str(error))
            else:
                whole += 1
        return bool(updates)

    def _bring(self, folder: Path, update: int, brought: Brought) -> None:
        name = folder_name(update)
        source = f"{self._root}/{name}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder))
        try:
            copy = temporary / name
            copy.mkdir(mode=0o700)
            if self._size(f"{source}/{NAME}") > MANIFEST_BYTES:
                raise Refused("its manifest is too long")
            self._get(f"{source}/{NAME}", copy / NAME)
            for entry in Manifest.from_json((copy / NAME).read_bytes()).files:
                size = self._size(f"{source}/{entry.name}")
                if size != entry.stored_bytes:
                    raise Refused(f"{entry.name} has {size:,} bytes, and its manifest says {entry.stored_bytes:,}")
                self._get(f"{source}/{entry.name}", copy / entry.name)
                brought(copy / entry.name, size)
            prove(copy)
            shutil.rmtree(folder / name, ignore_errors=True)
            copy.rename(folder / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _updates(self) -> list[int]:
        """Of those that have a manifest, oldest first. Raises OSError."""
        found: list[Any] = self._try(partial(self._files.glob, f"{self._root}/step-*/{NAME}"))
        updates = (update_of(str(path).rsplit("/", 2)[-2]) for path in found)
        return sorted(update for update in updates if update is not None)

    def _size(self, place: str) -> int:
        return int(self._try(partial(self._files.size, place)) or 0)

    def _get(self, place: str, to: Path) -> None:
        self._try(partial(self._files.get_file, place, str(to)))

    def _try(self, work: Callable[[], Any]) -> Any:
        """Raises OSError for whatever a storage's own package raises."""
        try:
            return work()
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self._address}: {error}") from error


def _proved(path: Path) -> bool:
    try:
        prove(path)
    except (Refused, OSError):
        return False
    return True
