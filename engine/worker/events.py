"""A rank's structured events: JSON lines in a file of their own, so that nothing a program prints can pass for one."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

_TAIL_BYTES = 65_536
_SAVES = ("checkpoint", "rescue")


class EventWriter:
    """Appends events, each by one write of a whole line. A full disk loses events and never stops the training."""

    def __init__(self, path: Path | None, rank: int, attempt: int) -> None:
        """`path` None writes nothing (a trainer run by hand)."""
        self._rank = rank
        self._attempt = attempt
        self._seq = 0
        self._torn = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path is not None else None

    def write(self, event: str, **fields: Any) -> None:
        """Append `event`; numbers that are not finite become null, which JSON has no other word for."""
        if self._descriptor is None:
            return
        head = {
            "event": event,
            "rank": self._rank,
            "seq": self._seq,
            "t": time.monotonic(),
            "at": time.time(),
            "attempt": self._attempt,
        }
        self._seq += 1
        line = json.dumps(_finite({**head, **fields}), ensure_ascii=False, default=str).encode() + b"\n"
        if self._torn:
            line = b"\n" + line
        try:
            self._torn = os.write(self._descriptor, line) < len(line)
        except OSError:
            return


def last_phase(path: Path) -> str | None:
    """The last phase that the trainer announced, None before the first and after its `end`."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read()
    except OSError:
        return None
    for line in reversed(tail.split(b"\n")):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("event") == "phase":
            return str(event.get("phase"))
        if event.get("event") in _SAVES and event.get("phase") == "begin" and not event.get("background"):
            return "saving"
        if event.get("event") == "end":
            return None
    return None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
