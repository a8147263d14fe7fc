"""The audit log: every security-relevant action as one JSON line in `<home>/audit.jsonl`, rotated at 10 MB, 5 files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from engine.errors import StateError
from engine.protocol.attempt import regular_descriptor
from engine.security.identifiers import safe_repr
from engine.security.paths import make_home, state_home
from engine.security.redact import Redactor

MAX_BYTES = 10_000_000
FILES = 5
"""audit.jsonl and audit.jsonl.1 (newest) to .4."""
MAX_LINE = 64_000
"""Bytes; a longer context is cut, so that one entry cannot fill the log."""


def audit_log(
    event_type: str, status: str, context: Mapping[str, Any], *, home: Path | None = None, now: datetime | None = None
) -> bool:
    """Append `{"at", "event_type", "status", "context", "pid"}`; JSON escapes every control character, so that no text
    starts a line of its own. Returns False, without raising, when the disk is full or the directory is gone: an abort
    must not fail because it cannot be recorded. Raises ValueError for a `context` that is no table."""
    if not isinstance(context, Mapping):
        raise ValueError(f"context = {safe_repr(context)}: must be a table of names and values")
    home = home or state_home()
    at = (now or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="milliseconds")
    entry = {"at": at, "event_type": event_type, "status": status, "context": dict(context), "pid": os.getpid()}
    redacted = Redactor().document(entry)
    line = json.dumps(redacted, default=safe_repr)
    if len(line) > MAX_LINE:
        line = json.dumps(redacted | {"context": {"cut": safe_repr(redacted["context"], 2000)}}, default=safe_repr)
    try:
        make_home(home)
        with _opened(home / "audit.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            log = home / "audit.jsonl"
            _rotate(log, len(line) + 1)
            with _opened(log) as file:
                _append(file.fileno(), line.encode() + b"\n")
    except (OSError, StateError):
        return False
    return True


def _opened(path: Path) -> FileIO:
    return os.fdopen(regular_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def _append(descriptor: int, line: bytes) -> None:
    """Write the whole line or nothing: a line that a full disk cuts off is removed."""
    before = os.fstat(descriptor).st_size
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError("cut off")
    except OSError:
        os.ftruncate(descriptor, before)
        raise


def _rotate(log: Path, size: int) -> None:
    if not log.exists() or log.stat().st_size + size <= MAX_BYTES:
        return
    for number in range(FILES - 1, 0, -1):
        older = log if number == 1 else log.with_name(f"{log.name}.{number - 1}")
        with contextlib.suppress(FileNotFoundError):
            older.replace(log.with_name(f"{log.name}.{number}"))
