"""What a rank said last: the ends of its log and its keeper's, and the events that tell how it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .wire import NodeFiles

_TAIL_BYTES = 4096
_EVENT_TAIL_BYTES = 262_144
_WHERE_THE_NAME_IS = 64


@dataclass(frozen=True)
class LastWords:
    """Of one rank. Texts are as they were printed: nothing is sanitised or redacted yet."""

    log: str = ""
    """The end of its log."""
    keeper: str = ""
    """The end of its keeper's own log."""
    failure: dict[str, Any] | None = None
    """The trainer's last `failure` event."""
    end: dict[str, Any] | None = None
    """The trainer's last `end` event."""


def last_words(files: NodeFiles, rank: int) -> LastWords:
    """As its files say now."""
    # Not splitlines: in JSON only the newline ends a line, and a message may hold a U+2028.
    events = tail(files.events(rank), size=_EVENT_TAIL_BYTES).split("\n")
    return LastWords(
        log=tail(files.log(rank)),
        keeper=tail(files.keeper_log(rank)),
        failure=_last_event(events, "failure"),
        end=_last_event(events, "end"),
    )


def tail(path: Path, begin: int = 0, size: int = _TAIL_BYTES) -> str:
    """The last `size` bytes of a file after offset `begin`, as text; "" when there is none."""
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
        if wanted not in line[:_WHERE_THE_NAME_IS]:
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            return event
    return None
