"""Who has which machines for itself: a locked file for each, `<home>/machines/<hash of its address>.lock`.

A calibration measures, so it holds its machines alone. A launch holds them together with others, until its run is in
the state: from then on that says that the run goes on. The kernel drops a lock with its holder, however that ends; what
the file says of the holder is for the message alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.errors import NodesInUse, StateError
from engine.security.home import make_private
from engine.security.hosts import SshTarget
from engine.worker.processes import alive, boot_id, start_time

_HOLDER_BYTES = 4096


class Holder(BaseModel):
    """The process that has a machine for itself."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    what: str
    """What it does there, "a calibration of demo"."""
    pid: int
    start: str
    boot_id: str
    since: datetime

    @property
    def lives(self) -> bool:
        return self.boot_id == boot_id() and alive(self.pid, self.start)


def machine(host: str) -> str:
    """The same for every `[user@]host[:port]` that leads to the same sshd by the same name. Raises InputError."""
    target = SshTarget.parse(host)
    return f"{target.host.lower()}:{target.port or ''}"


@contextlib.contextmanager
def alone(home: Path, hosts: Iterable[str], what: str) -> Iterator[None]:
    """Have the machines of `hosts` for oneself, to do `what`. Raises NodesInUse, naming the holder, StateError."""
    holder = Holder(
        what=what, pid=os.getpid(), start=start_time(os.getpid()) or "", boot_id=boot_id(), since=datetime.now(UTC)
    )
    with _locked(home, hosts, fcntl.LOCK_EX) as descriptors:
        for descriptor in descriptors:
            _write(descriptor, holder.model_dump_json().encode())
        try:
            yield
        finally:
            for descriptor in descriptors:
                _write(descriptor, b"")


@contextlib.contextmanager
def together(home: Path, hosts: Iterable[str]) -> Iterator[None]:
    """Let nobody have the machines of `hosts` for himself meanwhile. Raises NodesInUse, naming who has, StateError."""
    with _locked(home, hosts, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def _locked(home: Path, hosts: Iterable[str], operation: int) -> Iterator[list[int]]:
    folder, descriptors = home / "machines", list[int]()
    try:
        for name, host in sorted({machine(host): host for host in hosts}.items()):
            file = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"
            try:
                make_private(folder)
                descriptors.append(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                fcntl.flock(descriptors[-1], operation | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _refusal(host, _holder(descriptors[-1])) from None
            except OSError as fault:
                why = fault.strerror or str(fault)
                raise StateError("the nodes cannot be locked", where=str(file), why=why) from fault
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _write(descriptor: int, words: bytes) -> None:
    # A full disk has no room for a name, and no reason to refuse the lock.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, words, 0)


def _holder(descriptor: int) -> Holder | None:
    """Who has the lock alone; None where that is not known, or where it is held together."""
    try:
        holder = Holder.model_validate_json(os.pread(descriptor, _HOLDER_BYTES, 0))
    except (OSError, ValidationError):
        return None
    return holder if holder.lives else None


def _refusal(host: str, holder: Holder | None) -> NodesInUse:
    if holder is None:
        return NodesInUse("a launch or a calibration is just beginning there", where=host, todo="try again in a moment")
    since = f"{holder.since.astimezone():%H:%M:%S}"
    return NodesInUse(
        f"{holder.what} is going on there",
        where=host,
        why=f"pid {holder.pid} since {since}",
        todo="wait for its end, or stop it",
    )
