"""A rank's structured events (JSON lines in rank<k>.events.jsonl), and its output at exit: the tails of its logs and
its last events."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.protocol.attempt import NodeFiles, open_regular

STEP_FIELD = b'"event": "step"'
"""As EventWriter writes it. No text within an event holds it: its quotes would be escaped."""
UPDATE_FIELD = b'"update": '
"""As EventWriter writes it. Of the `step` events only that of an update's last micro-batch has it."""
_PHASE_TAIL_BYTES = 65_536
_SAVES = ("checkpoint", "emergency_checkpoint")


class EventWriter:
    """Appends events, each with one write of a whole line, numbered from 0 (`seq`): a program that its keeper started
    again goes on in the same file, and its events begin with the next 0. A full disk loses events and never stops the
    training."""

    def __init__(self, path: Path | None, rank: int, attempt: int) -> None:
        """`path` None writes nothing (a trainer run by hand)."""
        self._rank = rank
        self._attempt = attempt
        self._seq = 0
        # The program before this one may have ended in the middle of a line.
        self._torn = path is not None and tail(path, size=1) not in ("", "\n")
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
        with contextlib.suppress(OSError):
            self._torn = os.write(self._descriptor, line) < len(line)


def has_stepped(path: Path) -> bool:
    """The rank has made a step in the attempt, whichever of its programs that was."""
    try:
        with open_regular(path) as file:
            return any(STEP_FIELD in line for line in file)
    except OSError:
        return False


def last_phase(path: Path, begin: int = 0) -> str | None:
    """The last phase announced after offset `begin` by the trainer that was started last, None before the first and
    after its `end`."""
    for event in _events_backwards(path, _PHASE_TAIL_BYTES, begin):
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


_TAIL_BYTES = 16_384
"""torch prints some KB of C++ stack below an error, and torchrun its own traceback and a table."""
_EVENT_TAIL_BYTES = 262_144


@dataclass(frozen=True)
class ExitOutput:
    """One rank's output. Texts are raw: neither sanitised nor redacted."""

    log: str = ""
    """The end of its log."""
    keeper: str = ""
    """The end of its keeper's own log."""
    failure: dict[str, Any] | None = None
    """The trainer's last `failure` event since it was last started."""
    end: dict[str, Any] | None = None
    """The trainer's last `end` event since it was last started."""


def exit_output(files: NodeFiles, rank: int) -> ExitOutput:
    last: dict[str, dict[str, Any]] = {}
    for event in _events_backwards(files.events(rank), _EVENT_TAIL_BYTES):
        last.setdefault(str(event.get("event")), event)
    return ExitOutput(tail(files.log(rank)), tail(files.keeper_log(rank)), last.get("failure"), last.get("end"))


def tail(path: Path, begin: int = 0, size: int = _TAIL_BYTES) -> str:
    """The last `size` bytes of a file after offset `begin`, as text; "" without a file."""
    try:
        with open_regular(path) as file:
            end = file.seek(0, 2)
            file.seek(max(begin, end - size))
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""


def _events_backwards(path: Path, size: int, begin: int = 0) -> Iterator[dict[str, Any]]:
    """The events of the last program in the last `size` bytes after offset `begin`, newest first; what is torn or none
    of ours is skipped."""
    # Not splitlines: in JSON only the newline ends a line, and a message may hold a U+2028.
    for line in reversed(tail(path, begin, size).split("\n")):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event
            if event.get("seq") == 0:
                # What is before it was written by a program that has ended.
                return
