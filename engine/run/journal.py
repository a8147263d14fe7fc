"""The journal of a run: append-only JSON lines, the truth about its states, written by its supervisor alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from engine.errors import StateError
from engine.run.events import EVENTS, JOURNAL_VERSION, Event
from engine.run.json_lines import LineFile, LineTail, parse_json_line

E = TypeVar("E", bound=Event)


class Journal:
    """The writing side. One per run at a time: the supervisor's lock sees to that."""

    def __init__(self, path: Path, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Opens `path` for appending; a line that a killed writer left incomplete is cut off."""
        self._clock = clock
        self._file = LineFile(path)

    def append(self, event: E) -> E:
        """Append `event`, stamped with the time, by one write; a synced one is on the disk when this returns.

        On a full disk the event waits in memory and is written with the next one (or by `flush`), so that training is
        not stopped for it. Raises OSError for any other fault.
        """
        stamped = event.model_copy(update={"at": self._clock()})
        fields = stamped.model_dump(mode="json", exclude_none=True)
        line = json.dumps({"event": fields["event"], **fields}, ensure_ascii=False)
        self._file.append(line.encode(errors="backslashreplace"), sync=event.synced)
        return stamped

    def flush(self) -> bool:
        """Write what a full disk held back; False while there is still no room."""
        return self._file.flush(sync=True)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class JournalContents:
    events: tuple[Event, ...] = ()
    damaged: tuple[int, ...] = ()
    """Numbers of the lines, from 1, that are no event."""


class JournalTail:
    """Follows a journal as it grows. A torn last line waits for its end; a damaged line is counted and skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tail = LineTail(path)
        self._line = 0
        self.damaged: list[int] = []
        """Numbers of the lines, from 1, that are no event."""
        self._newer: StateError | None = None

    def events(self) -> Iterator[Event]:
        """The new events in order; none while there is no journal. Raises StateError for a newer format."""
        if self._newer is not None:
            raise self._newer
        for line in self._tail.lines():
            self._line += 1
            fields = parse_json_line(line)
            if self._line == 1 and (newer := self._newer_version(fields or {})) is not None:
                self._newer = newer
                raise newer
            event = _event(fields)
            if event is not None:
                yield event
            elif line.strip():
                self.damaged.append(self._line)

    def _newer_version(self, first: dict[str, Any]) -> StateError | None:
        version = first.get("version")
        if not isinstance(version, int) or version <= JOURNAL_VERSION:
            return None
        why = f"its format is version {version}, and this one reads up to version {JOURNAL_VERSION}"
        todo = "use the release that launched the run, or upgrade this one"
        return StateError("the journal is of a newer release", where=str(self._path), why=why, todo=todo)


def read_journal(path: Path) -> JournalContents:
    """All whole events in order; empty when there is no journal. Raises StateError for a newer format."""
    tail = JournalTail(path)
    events = tuple(tail.events())
    return JournalContents(events, tuple(tail.damaged))


def read_journal_end(path: Path, size: int) -> list[Event]:
    """The whole events in the last `size` bytes. Raises FileNotFoundError."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - size))
        lines = file.read().split(b"\n")[:-1]
    return [event for line in lines if (event := _event(parse_json_line(line))) is not None]


def describe_damage(lines: Sequence[int]) -> str | None:
    """One line about the damaged lines of a journal; None when there are none."""
    if not lines:
        return None
    numbers = ", ".join(map(str, lines[:5])) + (", …" if len(lines) > 5 else "")
    skipped = f"line {numbers} is damaged and was" if len(lines) == 1 else f"lines {numbers} are damaged and were"
    return f"journal.jsonl: {skipped} skipped"


def _event(fields: dict[str, Any] | None) -> Event | None:
    kind = EVENTS.get(str(fields.get("event"))) if fields is not None else None
    if kind is None:
        return None
    try:
        return kind.model_validate(fields)
    except ValidationError:
        return None
