"""The audit log: who let what happen, one JSON line each, in `<home>/audit.jsonl`, 10 MB × 5."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.errors import StateError
from engine.security.home import make_home, state_home
from engine.security.identifiers import shown
from engine.security.redact import redact_document

MAX_BYTES = 10_000_000
FILES = 5
"""audit.jsonl and audit.jsonl.1 (newest) to .4."""
MAX_LINE = 64_000
"""A longer context is cut: the log is for people, and must not be filled by one line."""


def audit_log(
    event_type: str,
    status: str,
    context: Mapping[str, Any],
    *,
    home: Path | None = None,
    now: datetime | None = None,
) -> bool:
    """Append `{"at", "event_type", "status", "context", "pid"}`; whether it could be written. It does not raise when
    the disk is full or the directory is gone: an abort must not fail for want of its record.

    JSON escapes every control character, so text from outside cannot end the line and begin one of its own.
    """
    home = home or state_home()
    at = (now or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="milliseconds")
    entry = {"at": at, "event_type": event_type, "status": status, "context": dict(context), "pid": os.getpid()}
    line = json.dumps(redact_document(entry), default=shown)
    if len(line) > MAX_LINE:
        line = json.dumps(entry | {"context": {"cut": shown(redact_document(entry["context"]), 2000)}}, default=shown)
    try:
        make_home(home)
        with _locked(home / "audit.lock"):
            log = home / "audit.jsonl"
            _rotate(log, len(line) + 1)
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                _append(descriptor, line.encode() + b"\n")
            finally:
                os.close(descriptor)
    except (OSError, StateError):
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _append(descriptor: int, line: bytes) -> None:
    """All of the line or nothing: what a full disk cuts off is taken back."""
    before = os.fstat(descriptor).st_size
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError("cut off")
    except OSError:
        os.ftruncate(descriptor, before)
        raise


def _rotate(log: Path, coming: int) -> None:
    try:
        if log.stat().st_size + coming <= MAX_BYTES:
            return
    except FileNotFoundError:
        return
    for number in range(FILES - 1, 0, -1):
        older = log if number == 1 else log.with_name(f"{log.name}.{number - 1}")
        with contextlib.suppress(FileNotFoundError):
            older.replace(log.with_name(f"{log.name}.{number}"))
