"""The state file: replaced whole or not at all, checked by its own checksum, its predecessor kept beside it.

`{"schema": 1, "sha256": "<of schema and body>", "body": {"runs": {…}}}`. What is written is on the disk when `write`
returns; a kill, a full disk or a power cut at any moment leaves the old state or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json
from tinydb.storages import Storage

from engine.errors import StateError

SCHEMA = 1
_HEADER = re.compile(rb'\{"schema": (\d{1,9}), "sha256": "([0-9a-f]{64})", "body": ')
_END = b"}\n"

Tables = dict[str, dict[str, Any]]


class Unreadable(Exception):
    """The bytes of a state file are not what was written; why, in words."""


def encode(tables: Tables) -> bytes:
    """The document as it is on the disk; a number that is not finite becomes null."""
    body = to_json(tables, inf_nan_mode="null")
    return b'{"schema": %d, "sha256": "%s", "body": ' % (SCHEMA, _checksum(SCHEMA, body)) + body + _END


def decode(content: bytes) -> Tables:
    """Raises Unreadable when it is not what `encode` wrote, StateError when it is of a newer schema."""
    header = _HEADER.match(content)
    schema = int(header[1]) if header is not None else _foreign_schema(content)
    if schema > SCHEMA:
        # Before the checksum: what a later release writes must not be set aside by this one, whatever its form.
        raise StateError(
            f"the state is of schema {schema}",
            why=f"a newer flightdeck wrote it, this one knows {SCHEMA}",
            todo="upgrade mlx-flightdeck, or set FLIGHTDECK_HOME to another directory",
        )
    if header is None:
        raise Unreadable("it does not begin as a state file does" if content else "it is empty")
    body = content[header.end() : -len(_END)]
    if not content.endswith(_END) or _checksum(schema, body) != header[2]:
        raise Unreadable("its checksum does not match")
    tables: Tables = from_json(body)
    return tables


def _foreign_schema(content: bytes) -> int:
    try:
        document = from_json(content)
    except ValueError:
        return 0
    schema = document.get("schema") if isinstance(document, dict) else None
    return schema if isinstance(schema, int) else 0


def _checksum(schema: int, body: bytes) -> bytes:
    return hashlib.sha256(b"%d\n" % schema + body).hexdigest().encode()


def previous_copy(path: Path) -> Path:
    """Where the state before the last change is kept."""
    return path.with_name(f"{path.name}.previous")


class AtomicStorage(Storage):
    """TinyDB's storage on that file. Reading changes nothing and needs no lock; a writer's caller holds the lock."""

    def __init__(self, path: Path, say: Callable[[str], object], clock: Callable[[], datetime]) -> None:
        """`say` is told, one line each, what was found damaged and what was done about it."""
        self._path = path
        self._copy = previous_copy(path)
        self._say = say
        self._clock = clock
        self._damaged: list[Path] = []
        self._verified = False

    def read(self) -> Tables | None:
        """The tables; those of the copy when the file is damaged or gone; none when both are; None before the first
        write. Raises StateError for a newer schema or a file that may not be read."""
        self._damaged.clear()
        # In this order: where a copy was, a file was before it.
        had_copy = self._copy.exists()
        tables = self._load(self._path)
        self._verified = tables is not None
        if tables is not None or not (had_copy or self._damaged):
            return tables
        if not self._damaged:
            self._say(f"{self._path} is missing")
        tables = self._load(self._copy)
        if tables is None:
            self._say("the list of runs is lost; the runs' journals have it")
            return {}
        self._say("the copy before the last change was loaded")
        return tables

    def write(self, data: Tables) -> None:
        """Raises OSError; what was there is then as it was."""
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            _write_new(new, encode(data))
            for damaged in self._damaged:
                self._set_aside(damaged)
            # Only a file that has been read whole may take the place of the good copy.
            if self._verified:
                _keep(self._path, self._copy)
            new.replace(self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        _sync_directory(self._path.parent)
        self._damaged.clear()
        self._verified = True

    def _load(self, path: Path) -> Tables | None:
        try:
            return decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except Unreadable as why:
            self._say(f"{path} is unreadable: {why}")
            self._damaged.append(path)
            return None
        except StateError as newer:
            raise StateError(newer.what, where=str(path), why=newer.why, todo=newer.todo) from None
        except OSError as fault:
            raise StateError("the state cannot be read", where=str(path), why=fault.strerror or str(fault)) from fault

    def _set_aside(self, path: Path) -> None:
        stem = f"{path.name}.corrupt-{self._clock().astimezone(UTC):%Y%m%dT%H%M%SZ}"
        aside, number = path.with_name(stem), 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{stem}.{number}")
        path.rename(aside)
        self._say(f"{path} was set aside as {aside.name}")


def _write_new(path: Path, content: bytes) -> None:
    # The name is fixed, so what a killed writer left is used up by the next one.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _keep(path: Path, copy: Path) -> None:
    new = copy.with_name(f"{copy.name}.new")
    new.unlink(missing_ok=True)
    try:
        os.link(path, new)
    except OSError:
        # A file system without hard links.
        _write_new(new, path.read_bytes())
    new.replace(copy)
    # When both are names of one file, rename does nothing.
    new.unlink(missing_ok=True)


def _sync(descriptor: int) -> None:
    if sys.platform == "darwin":
        # There fsync leaves the data in the drive's own cache; network volumes know no other.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
