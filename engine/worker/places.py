"""Where the states of a run lie on this node, and elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .checkpoint import streams
from .checkpoint.remote import Remote, is_address
from .job import JobError
from .reporting import Reporter
from .rescue import author_of, rescue_root
from .resume import Place


@dataclass(frozen=True)
class Places:
    """Of one rank. A state that has parts has a folder for each of them."""

    home: Path
    """The run's folder on the node."""
    base: Path
    """Of the checkpoints on this node."""
    address: str | None
    """Where they are copied to."""

    @classmethod
    def of(cls, home: Path, workdir: Path, run_id: str, destination: str | None) -> Places:
        """`destination`: a path, or an address that fsspec knows; runs have folders of their own in it. None is the
        node's own disk."""
        if destination is None:
            return cls(home, home / "checkpoints", None)
        if is_address(destination):
            return cls(home, home / "checkpoints", f"{destination.rstrip('/')}/{run_id}")
        return cls(home, workdir / Path(destination).expanduser() / run_id, None)

    def folder(self, part: int, parts: int) -> Path:
        return self.base / _name(part) if parts > 1 else self.base

    def remote(self, part: int, parts: int) -> Remote | None:
        """Raises JobError when nothing on this node can reach it."""
        if self.address is None:
            return None
        try:
            return Remote(f"{self.address}/{_name(part)}" if parts > 1 else self.address)
        except ValueError as error:
            raise JobError(f"[checkpoint] destination: {error}") from error

    def states(self) -> list[Place]:
        """All folders in which there may be one, rescues first."""
        rescued = sorted(rescue_root(self.home).glob("[0-9]*/rank[0-9]*"))
        parts = sorted(self.base.glob("part*"))
        return [
            *(Place("rescue", folder, author_of(folder)) for folder in rescued),
            *(Place("checkpoint", folder) for folder in (self.base, *parts)),
        ]

    def fetch(self, rank: int, size: int, *, replicated: bool, keep: int, reporter: Reporter) -> None:
        """Bring the newest `keep` that lie elsewhere and not here: all of them to rank 0, or to each rank the parts
        that fall to it. What cannot be brought is told. Raises JobError."""
        if self.address is None:
            return
        if replicated:
            if rank == 0:
                self._fetch(self.remote(0, 1), self.base, keep, reporter)
            return
        part, more = rank, True
        while more:
            more = self._fetch(self.remote(part, 2), self.folder(part, 2), keep, reporter)
            part += size

    def _fetch(self, remote: Remote | None, folder: Path, keep: int, reporter: Reporter) -> bool:
        """Whether there was anything."""
        assert remote is not None

        def refused(path: Path, why: str) -> None:
            reporter.warn(f"the copy of {path.name} is not used: {why}")

        def brought(path: Path, size: int) -> None:
            # So that the head sees it move, however long all of it takes.
            reporter.event("fetched", path=f"{path.parent.name}/{path.name}", bytes=size)

        try:
            return remote.fetch(folder, keep, refused, brought)
        except OSError as error:
            reporter.warn(f"{self.address} cannot be read, so that only what lies on the node is used: {error}")
            return False


def check_compression(compression: str) -> None:
    """Raises JobError when this node cannot do it."""
    try:
        streams.check(compression)
    except ValueError as error:
        raise JobError(f"[checkpoint] compression: {error}") from error


def _name(part: int) -> str:
    return f"part{part}"
