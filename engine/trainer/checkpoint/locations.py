"""Where the checkpoints of a run are: folders on this node, and copies behind an fsspec URL (s3://, gs://, file://),
uploaded whole and fetched when needed.

A checkpoint is written and verified on the node's own disk first. Then its files are copied one by one, the manifest
last: without it, nothing is a checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.protocol.job import JobError
from engine.protocol.safetensors import CheckpointError
from engine.trainer.checkpoint.emergency import emergency_folder
from engine.trainer.checkpoint.files import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, folder_name, update_of
from engine.trainer.checkpoint.resume import Author, StateFolder
from engine.trainer.checkpoint.store import Checkpoint, OnRefused, verify
from engine.trainer.collective import Collective
from engine.trainer.reporting import Reporter

_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+")

OnFetched = Callable[[Path, int], object]
"""Called with each file that has been fetched, and its bytes."""


class Remote:
    """A folder of checkpoints behind a URL."""

    def __init__(self, url: str) -> None:
        """Raises ValueError, in one line, when this node cannot reach such a URL."""
        self._url = url.rstrip("/")
        scheme = url.split("://", 1)[0]
        try:
            # mlx-lm depends on it; only jobs with a URL need it.
            self._files, self._root = importlib.import_module("fsspec.core").url_to_fs(self._url)
        except ImportError as error:
            raise ValueError(f"{scheme}:// needs a package that this node does not have: {error}") from error
        except Exception as error:  # each kind of storage has errors of its own
            raise ValueError(f"{self._url}: {error}") from error

    def location(self, name: str) -> str:
        return f"{self._url}/{name}"

    def put(self, checkpoint: Checkpoint) -> None:
        """Copy a verified checkpoint. Raises OSError."""
        target = f"{self._root}/{checkpoint.path.name}"
        names = [entry.name for entry in checkpoint.manifest.files]
        self._call(self._files.makedirs, target, exist_ok=True)
        # Files of an earlier one of this name must not be replaced while its manifest is there.
        with contextlib.suppress(FileNotFoundError):
            self._call(self._files.rm_file, f"{target}/{MANIFEST_NAME}")
        for name in [*names, MANIFEST_NAME]:
            self._call(self._files.put_file, str(checkpoint.path / name), f"{target}/{name}")

    def retain(self, count: int, committed: int, on_refused: OnRefused) -> None:
        """Remove all but the newest `count` from update `committed` backwards, as store.retain does. Raises OSError
        when they cannot be listed."""
        updates = self._updates()
        kept = [update for update in updates if update <= committed][-count:]
        for update in updates:
            if update in kept:
                continue
            old = f"{self._root}/{folder_name(update)}"
            try:
                self._call(self._files.rm, old, recursive=True)
            except OSError as error:
                on_refused(Path(folder_name(update)), f"it cannot be removed: {error}")

    def fetch(self, folder: Path, count: int, on_refused: OnRefused, on_fetched: OnFetched) -> bool:
        """Download the newest `count` checkpoints that verify into `folder`, unless they are there already; True when
        the remote has any. One that cannot be downloaded or verified does not count. Raises OSError."""
        updates, verified = self._updates(), 0
        for update in reversed(updates):
            if verified == count:
                break
            try:
                if not _is_valid(folder / folder_name(update)):
                    self._download(folder, update, on_fetched)
            except (CheckpointError, OSError) as error:
                on_refused(Path(folder_name(update)), str(error))
            else:
                verified += 1
        return bool(updates)

    def _download(self, folder: Path, update: int, on_fetched: OnFetched) -> None:
        name = folder_name(update)
        source = f"{self._root}/{name}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder, ignore_cleanup_errors=True) as temporary:
            copy = Path(temporary) / name
            copy.mkdir(mode=0o700)
            if self._size(f"{source}/{MANIFEST_NAME}") > MAX_MANIFEST_BYTES:
                raise CheckpointError("its manifest is too long")
            self._call(self._files.get_file, f"{source}/{MANIFEST_NAME}", str(copy / MANIFEST_NAME))
            for entry in Manifest.from_json((copy / MANIFEST_NAME).read_bytes()).files:
                size = self._size(f"{source}/{entry.name}")
                if size != entry.stored_bytes:
                    raise CheckpointError(
                        f"{entry.name} has {size:,} bytes, and its manifest says {entry.stored_bytes:,}"
                    )
                self._call(self._files.get_file, f"{source}/{entry.name}", str(copy / entry.name))
                on_fetched(copy / entry.name, size)
            verify(copy)
            shutil.rmtree(folder / name, ignore_errors=True)
            copy.rename(folder / name)

    def _updates(self) -> list[int]:
        """The updates of those with a manifest, oldest first. Raises OSError."""
        found: list[Any] = self._call(self._files.glob, f"{self._root}/step-*/{MANIFEST_NAME}")
        updates = (update_of(str(path).rsplit("/", 2)[-2]) for path in found)
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
            raise OSError(f"{self._url}: {error}") from error


def _is_valid(path: Path) -> bool:
    try:
        verify(path)
    except (CheckpointError, OSError):
        return False
    return True


@dataclass(frozen=True)
class Destination:
    """Where one rank's checkpoints are written, and copied to."""

    folder: Path
    remote: Remote | None = None

    def location(self, name: str) -> str:
        """Where the checkpoint of this name can be found."""
        return self.remote.location(name) if self.remote is not None else str(self.folder / name)


@dataclass(frozen=True)
class CheckpointLocations:
    """The locations of a run's states. A partitioned state has a folder for each part."""

    home: Path
    """The run's folder on the node."""
    base: Path
    """The checkpoints' folder on the node."""
    url: str | None
    """Where they are copied to."""

    @classmethod
    def of(cls, home: Path, workdir: Path, run_id: str, destination: str | None) -> CheckpointLocations:
        """`destination`: a path or an fsspec URL, below which each run has its own folder. None: the node's own
        disk."""
        if destination is None:
            return cls(home, home / "checkpoints", None)
        if _URL.fullmatch(destination):
            return cls(home, home / "checkpoints", f"{destination.rstrip('/')}/{run_id}")
        return cls(home, workdir / Path(destination).expanduser() / run_id, None)

    def destination(self, part: int, parts: int) -> Destination:
        """Raises JobError when this node cannot reach the URL."""
        name = f"part{part}" if parts > 1 else ""
        if self.url is None:
            return Destination(self.base / name)
        try:
            return Destination(self.base / name, Remote(f"{self.url}/{name}"))
        except ValueError as error:
            raise JobError(f"[checkpoint] destination: {error}") from error

    def states(self) -> list[StateFolder]:
        """All folders that may hold states, emergency checkpoints first."""
        emergency = sorted(emergency_folder(self.home).glob("[0-9]*/rank[0-9]*"))
        parts = sorted(self.base.glob("part*"))
        return [
            *(StateFolder("emergency", folder, _author_of(folder)) for folder in emergency),
            *(StateFolder("checkpoint", folder) for folder in (self.base, *parts)),
        ]

    def fetch(self, collective: Collective, keep: int, reporter: Reporter, *, replicated: bool) -> None:
        """Download the newest `keep` checkpoints that are not on this node: all of them on rank 0, or on each rank the
        parts assigned to it. Failures are reported as warnings. Raises JobError."""
        rank, size = collective.rank, collective.size
        if self.url is None or (replicated and rank > 0):
            return
        if replicated:
            self._fetch(self.destination(0, 1), keep, reporter)
            return
        part = rank
        while self._fetch(self.destination(part, 2), keep, reporter):
            part += size

    def _fetch(self, destination: Destination, keep: int, reporter: Reporter) -> bool:
        """True when the remote has any."""
        assert destination.remote is not None

        def on_refused(path: Path, why: str) -> None:
            reporter.warn(f"the copy of {path.name} is not used: {why}")

        def on_fetched(path: Path, size: int) -> None:
            # The head sees progress, however long all of it takes.
            reporter.event("fetched", path=f"{path.parent.name}/{path.name}", bytes=size)

        try:
            return destination.remote.fetch(destination.folder, keep, on_refused, on_fetched)
        except OSError as error:
            reporter.warn(f"{self.url} cannot be read, so only states on this node are used: {error}")
            return False


def _author_of(folder: Path) -> Author | None:
    """By the name of an emergency checkpoint's folder; None for a name that is not ours."""
    attempt, rank = folder.parent.name, folder.name.removeprefix("rank")
    return Author(int(attempt), int(rank)) if attempt.isdecimal() and rank.isdecimal() else None
