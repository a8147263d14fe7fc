"""Where the checkpoints of a run are: folders on this node, and copies behind an fsspec URL (s3://, gs://, file://),
uploaded whole and fetched when needed.

A checkpoint is written and verified on the node's own disk first. Then its files are copied one by one, the manifest
last: without it, nothing is a checkpoint."""

from __future__ import annotations

import contextlib
import importlib
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.protocol.attempt import read_regular
from engine.protocol.job import JobError
from engine.protocol.safetensors import CheckpointError
from engine.trainer.checkpoint.emergency import emergency_folder
from engine.trainer.checkpoint.resume import Author, StateFolders
from engine.trainer.checkpoint.store import Checkpoint, verify
from engine.trainer.collective import Collective
from engine.training import checkpoint_files
from engine.training.reporting import Reporter

_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+")
_EMERGENCY = re.compile(r"/([0-9]+)/rank([0-9]+)$")


class Remote:
    """A folder of checkpoints behind a URL."""

    def __init__(self, url: str, recorded: checkpoint_files.Recorded = ()) -> None:
        """Raises JobError when this node cannot reach such a URL."""
        self._recorded = recorded
        self.url = url.rstrip("/")
        scheme = url.split("://", 1)[0]
        try:
            # mlx-lm depends on it; only jobs with a URL need it.
            self._files, self._root = importlib.import_module("fsspec.core").url_to_fs(self.url)
        except ImportError as error:
            why = f"{scheme}:// needs a package that this node does not have: {error}"
            raise JobError(f"[checkpoint] destination: {why}") from error
        except Exception as error:  # each kind of storage has errors of its own
            raise JobError(f"[checkpoint] destination: {self.url}: {error}") from error

    def put(self, checkpoint: Checkpoint) -> None:
        """Copy a verified checkpoint. Raises OSError."""
        target = f"{self._root}/{checkpoint.path.name}"
        names = [entry.name for entry in checkpoint.manifest.files]
        self._call(self._files.makedirs, target, exist_ok=True)
        # Files of an earlier one of this name must not be replaced while its manifest is there.
        with contextlib.suppress(FileNotFoundError):
            self._call(self._files.rm_file, f"{target}/{checkpoint_files.MANIFEST_NAME}")
        for name in [*names, checkpoint_files.MANIFEST_NAME]:
            self._call(self._files.put_file, str(checkpoint.path / name), f"{target}/{name}")

    def retain(self, count: int, committed: int) -> list[str]:
        """Remove all but the newest `count` from update `committed` backwards, as store.retain does. Raises OSError."""
        updates, problems = self._updates(), []
        kept = [update for update in updates if update <= committed][-count:]
        for update in updates:
            if update in kept:
                continue
            try:
                self._call(self._files.rm, f"{self._root}/{checkpoint_files.folder_name(update)}", recursive=True)
            except OSError as error:
                problems.append(f"the checkpoint {checkpoint_files.folder_name(update)} cannot be removed: {error}")
        return problems

    def fetch(self, folder: Path, count: int, reporter: Reporter) -> bool:
        """Download the newest `count` checkpoints that verify into `folder`, unless they are there already; True when
        the remote has any. One that cannot be downloaded or verified is reported and does not count."""
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
                if not self._is_valid(folder / name):
                    self._download(folder, name, reporter)
            except (CheckpointError, OSError) as error:
                reporter.warn(f"the copy of {name} is not used: {error}")
            else:
                verified += 1
        return bool(updates)

    def _download(self, folder: Path, name: str, reporter: Reporter) -> None:
        source = f"{self._root}/{name}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder, ignore_cleanup_errors=True) as temporary:
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
            checkpoint_files.replace_folder(copy, folder / name)

    def _is_valid(self, path: Path) -> bool:
        try:
            verify(path).manifest.check_recorded(self._recorded)
        except (CheckpointError, OSError):
            return False
        return True

    def _updates(self) -> list[int]:
        """The updates of those with a manifest, oldest first. Raises OSError."""
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


@dataclass(frozen=True)
class Destination:
    """Where one rank's checkpoints are written, and copied to."""

    folder: Path
    remote: Remote | None = None

    def location(self, name: str) -> str:
        """Where the checkpoint of this name can be found."""
        return f"{self.remote.url}/{name}" if self.remote is not None else str(self.folder / name)

    def fetch(self, count: int, reporter: Reporter) -> bool:
        """See Remote.fetch; False without a remote."""
        return self.remote is not None and self.remote.fetch(self.folder, count, reporter)


@dataclass(frozen=True)
class CheckpointLocations:
    """The locations of a run's states. A partitioned state has a folder for each part."""

    home: Path
    """The run's folder on the node."""
    base: Path
    """The checkpoints' folder on the node."""
    url: str | None
    """Where they are copied to."""
    recorded: checkpoint_files.Recorded = ()

    @classmethod
    def of(cls, home: Path, workdir: Path, run_id: str, destination: str | None) -> CheckpointLocations:
        """`destination`: a path or fsspec URL, below which each run has its own folder. None: the node's own disk."""
        if destination is None or _URL.fullmatch(destination):
            return cls(home, home / "checkpoints", destination and f"{destination.rstrip('/')}/{run_id}")
        return cls(home, workdir / Path(destination).expanduser() / run_id, None)

    def destination(self, part: int, parts: int) -> Destination:
        """Raises JobError when this node cannot reach the URL."""
        name = f"part{part}" if parts > 1 else ""
        return Destination(self.base / name, Remote(f"{self.url}/{name}", self.recorded) if self.url else None)

    def states(self) -> StateFolders:
        """Emergency checkpoints first."""
        emergency = {
            folder: Author(int(match[1]), int(match[2]))
            for folder in sorted(emergency_folder(self.home).glob("*/rank*"))
            if (match := _EMERGENCY.search(str(folder)))
        }
        return {**emergency, self.base: None, **dict.fromkeys(sorted(self.base.glob("part*")))}

    def fetch(self, collective: Collective, keep: int, reporter: Reporter, *, replicated: bool) -> None:
        """Download the newest `keep` checkpoints that are not on this node: all of them on rank 0, or on each rank the
        parts assigned to it. Failures are reported as warnings. Raises JobError."""
        if replicated:
            if collective.rank == 0:
                self.destination(0, 1).fetch(keep, reporter)
            return
        part = collective.rank
        while self.destination(part, 2).fetch(keep, reporter):
            part += collective.size
