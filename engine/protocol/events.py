"""A rank's structured events (JSON lines in rank<k>.events.jsonl), and its output at exit: the tails of its logs and
its last events."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.protocol.attempt import NodeFiles

_PHASE_TAIL_BYTES = 65_536
_SAVES = ("checkpoint", "emergency_checkpoint")


class EventWriter:
    """Appends events, each with one write of a whole line. A full disk loses events and never stops the training."""

    def __init__(self, path: Path | None, rank: int, attempt: int) -> None:
        """`path` None writes nothing (a trainer run by hand)."""
        self._rank = rank
        self._attempt = attempt
        self._seq = 0
        self._torn = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path is not None else None

    def write(self, event: str, **fields: Any) -> None:
        """Append `event`; numbers that are not finite become null, as JSON has no other way."""
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
            file.seek(max(0, file.seek(0, os.SEEK_END) - _PHASE_TAIL_BYTES))
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
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


_TAIL_BYTES = 4096
_EVENT_TAIL_BYTES = 262_144
_EVENT_NAME_WITHIN = 64


@dataclass(frozen=True)
class ExitOutput:
    """One rank's output. Texts are raw: neither sanitised nor redacted."""

    log: str = ""
    """The end of its log."""
    keeper: str = ""
    """The end of its keeper's own log."""
    failure: dict[str, Any] | None = None
    """The trainer's last `failure` event."""
    end: dict[str, Any] | None = None
    """The trainer's last `end` event."""


def exit_output(files: NodeFiles, rank: int) -> ExitOutput:
    # Not splitlines: in JSON only the newline ends a line, and a message may hold a U+2028.
    events = tail(files.events(rank), size=_EVENT_TAIL_BYTES).split("\n")
    return ExitOutput(
        log=tail(files.log(rank)),
        keeper=tail(files.keeper_log(rank)),
        failure=_last_event(events, "failure"),
        end=_last_event(events, "end"),
    )


def tail(path: Path, begin: int = 0, size: int = _TAIL_BYTES) -> str:
    """The last `size` bytes of a file after offset `begin`, as text; "" without a file."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(begin, end - size))
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""


def _last_event(lines: list[str], name: str) -> dict[str, Any] | None:
    wanted = f'"event": "{name}"'
    for line in reversed(lines):
        if wanted not in line[:_EVENT_NAME_WITHIN]:
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            return event
    return None
