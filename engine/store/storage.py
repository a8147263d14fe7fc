"""TinyDB's storage in one file: replaced atomically, verified by its own checksum, with its predecessor kept beside it,
and written by one process at a time.

`{"schema": 1, "sha256": "<of schema and body>", "body": {"runs": {…}}}`. `write` returns once the data is on the disk;
a kill, a full disk or a power cut at any moment leaves the old state or the new one. The write lock is a kernel lock,
which ends with its process and cannot go stale, on a file that also holds the writer's pid for error messages."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json
from tinydb.storages import Storage

from engine.errors import StateError
from engine.protocol.attempt import read_regular, sync_file, sync_folder
from engine.security.sanitise import json_object, json_or_none

WAIT_S = 10.0
_PAUSE_S = 0.005


def try_lock(path: Path) -> int | None:
    """Take the lock; its open descriptor, or None when another process has it. A child gets it only when it is passed
    on."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def write_lock(path: Path, wait_s: float = WAIT_S, sleep: Callable[[float], object] = time.sleep) -> Iterator[None]:
    """Waits at most `wait_s` for the lock, then raises StateError with the holder's pid."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateError("the state cannot be locked", where=str(path), why=error) from error
    try:
        _acquire(descriptor, path, wait_s, sleep)
        # A full disk has no room for the pid, which is no reason to refuse the lock.
        with contextlib.suppress(OSError):
            os.pwrite(descriptor, b"%-19d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, wait_s: float, sleep: Callable[[float], object]) -> None:
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                pid = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
                holder = f"pid {pid}" if pid.isdecimal() else "an unknown pid"
                raise StateError(
                    "the state is being written by another process",
                    where=str(path),
                    why=f"{holder} has held it for {wait_s:g} s or more",
                    todo="try again, or end that process if it hangs",
                ) from None
        sleep(_PAUSE_S)


SCHEMA = 1
_HEADER = re.compile(rb'\{"schema": (\d{1,9}), "sha256": "([0-9a-f]{64})", "body": ')
_END = b"}\n"

Tables = dict[str, dict[str, Any]]


class Unreadable(Exception):
    """A state file is damaged; the message says how."""


def encode(tables: Tables) -> bytes:
    """The content of the file; a number that is not finite becomes null."""
    body = to_json(tables, inf_nan_mode="null")
    return b'{"schema": %d, "sha256": "%s", "body": ' % (SCHEMA, _checksum(SCHEMA, body)) + body + _END


def decode(content: bytes) -> Tables:
    """Raises Unreadable for anything that `encode` did not write, StateError for a newer schema."""
    header = _HEADER.match(content)
    schema: Any = int(header[1]) if header is not None else json_object(json_or_none(content)).get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        # Before the checksum: a later release's file, whatever its form, must not be set aside as damaged.
        raise StateError(
            f"the state is of schema {schema}",
            why=f"a newer flightdeck wrote it, this one knows {SCHEMA}",
            todo="upgrade mlx-flightdeck, or set FLIGHTDECK_HOME to another directory",
        )
    if header is None:
        raise Unreadable("it does not begin like a state file" if content else "it is empty")
    body = content[header.end() : -len(_END)]
    if not content.endswith(_END) or _checksum(schema, body) != header[2]:
        raise Unreadable("its checksum does not match")
    tables: Tables = from_json(body)
    return tables


def _checksum(schema: int, body: bytes) -> bytes:
    return hashlib.sha256(b"%d\n" % schema + body).hexdigest().encode()


class AtomicStorage(Storage):
    """TinyDB's storage on that file. Reading changes nothing and needs no lock; whoever writes holds the lock."""

    def __init__(self, path: Path, notify: Callable[[str], object]) -> None:
        """`notify` gets one line about each damage found and what was done about it."""
        self._path = path
        self._copy = path.with_name(f"{path.name}.previous")
        """The state before the last change."""
        self._notify = notify
        self._damaged: list[Path] = []
        self._verified = False

    def read(self) -> Tables | None:
        """The tables of the file, of the copy when the file is damaged or missing, {} when both are; None before the
        first write. Raises StateError for a newer schema or a file that may not be read."""
        self._damaged.clear()
        # Checked first: wherever there is a copy, there was a file before it.
        had_copy = self._copy.exists()
        tables = self._load(self._path)
        self._verified = tables is not None
        if tables is not None or not (had_copy or self._damaged):
            return tables
        if not self._damaged:
            self._notify(f"{self._path} is missing")
        tables = self._load(self._copy)
        if tables is None:
            self._notify("the list of runs is lost; the runs' journals have it")
            return {}
        self._notify("the copy before the last change was loaded")
        return tables

    def write(self, data: Tables) -> None:
        """Raises OSError, and leaves the file unchanged then."""
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            _write_new(new, encode(data))
            for damaged in self._damaged:
                self._set_aside(damaged)
            # Only a file that was read without damage may replace the good copy.
            if self._verified:
                _keep(self._path, self._copy)
            new.replace(self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        sync_folder(self._path.parent)
        self._damaged.clear()
        self._verified = True

    def _load(self, path: Path) -> Tables | None:
        try:
            return decode(read_regular(path))
        except FileNotFoundError:
            return None
        except Unreadable as why:
            self._notify(f"{path} is unreadable: {why}")
            self._damaged.append(path)
            return None
        except StateError as error:
            raise StateError(error.what, where=str(path), why=error.why, todo=error.todo) from None
        except OSError as error:
            raise StateError("the state cannot be read", where=str(path), why=error) from error

    def _set_aside(self, path: Path) -> None:
        stem = f"{path.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        aside, number = path.with_name(stem), 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{stem}.{number}")
        path.rename(aside)
        self._notify(f"{path} was set aside as {aside.name}")


def _write_new(path: Path, content: bytes) -> None:
    # A fixed name, so that the next writer removes what a killed one has left.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def _keep(path: Path, copy: Path) -> None:
    new = copy.with_name(f"{copy.name}.new")
    new.unlink(missing_ok=True)
    try:
        os.link(path, new)
    except OSError:
        # The file system has no hard links.
        _write_new(new, read_regular(path))
    new.replace(copy)
    # rename does nothing when both are names of one file.
    new.unlink(missing_ok=True)
