"""Locks on hosts: one locked file per host, `<home>/machines/<hash of its address>.lock`.

A calibration takes an exclusive lock. A launch takes a shared lock until its run is in the store, where a calibration
finds it. The kernel releases a lock when its holder ends; the holder's entry in the file is only for error messages."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from engine.errors import NodesInUse, StateError
from engine.models import FrozenModel
from engine.node.bootstrap import make_private
from engine.node.processes import alive, boot_id, known_start, same_boot
from engine.security.identifiers import SshTarget

_HOLDER_BYTES = 4096


class LockHolder(FrozenModel):
    """The process that holds the exclusive lock on a host."""

    what: str
    """Its activity, for example "a calibration of demo"."""
    pid: int
    start: str
    boot_id: str
    since: datetime


def host_key(host: str) -> str:
    """The same for every `[user@]host[:port]` with the same host name and port. Raises InputError."""
    target = SshTarget.parse(host)
    return f"{target.host.lower()}:{target.port or ''}"


@contextlib.contextmanager
def exclusive_hosts(home: Path, hosts: Iterable[str], what: str) -> Iterator[None]:
    """Lock `hosts` to do `what` on them alone. Raises NodesInUse, naming the holder, and StateError."""
    holder = LockHolder(
        what=what, pid=os.getpid(), start=known_start(os.getpid()), boot_id=boot_id(), since=datetime.now(UTC)
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
def shared_hosts(home: Path, hosts: Iterable[str]) -> Iterator[None]:
    """Keep others from locking `hosts` exclusively. Raises NodesInUse, naming the holder, and StateError."""
    with _locked(home, hosts, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def _locked(home: Path, hosts: Iterable[str], operation: int) -> Iterator[list[int]]:
    folder, descriptors = home / "machines", list[int]()
    try:
        for name, host in sorted({host_key(host): host for host in hosts}.items()):
            file = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"
            try:
                make_private(folder)
                descriptors.append(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                fcntl.flock(descriptors[-1], operation | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use_error(host, _holder(descriptors[-1])) from None
            except OSError as error:
                raise StateError("the nodes cannot be locked", where=str(file), why=error) from error
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _write(descriptor: int, content: bytes) -> None:
    # A full disk has no room for the holder, which is no reason to refuse the lock.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)


def _holder(descriptor: int) -> LockHolder | None:
    """The holder of an exclusive lock; None for a shared lock, or where it is not known."""
    try:
        holder = LockHolder.model_validate_json(os.pread(descriptor, _HOLDER_BYTES, 0))
    except (OSError, ValidationError):
        return None
    return holder if same_boot(holder.boot_id, boot_id()) and alive(holder.pid, holder.start) else None


def _in_use_error(host: str, holder: LockHolder | None) -> NodesInUse:
    if holder is None:
        return NodesInUse("a launch or a calibration is starting there", where=host, todo="try again in a moment")
    return NodesInUse(
        f"{holder.what} is going on there",
        where=host,
        why=f"pid {holder.pid} since {holder.since.astimezone():%H:%M:%S}",
        todo="wait for its end, or stop it",
    )
