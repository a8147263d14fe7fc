"""The journal of a run: append-only JSON lines, the truth about its states, written by its supervisor alone; and the
recorder, which also keeps the history and the store's record of the run up to date, and knows which state may follow
which."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from engine.errors import StateError
from engine.models import ENDED, RunRecord, RunState
from engine.run.events import (
    EVENTS,
    JOURNAL_VERSION,
    UNSTAMPED,
    Event,
    Note,
    RunPlanned,
    StateChanged,
    SyncedEvent,
)
from engine.run.history import RunHistory, fold, run_history
from engine.run.json_lines import LineFile, LineTail, parse_json_line
from engine.run.run_plan import RunPlan, read_plan
from engine.security.redact import Redactor
from engine.store.layout import RunDir

E = TypeVar("E", bound=Event)
Clock = Callable[[], datetime]


def _now() -> datetime:
    return datetime.now(UTC)


_WORDS = frozenset({"cause", "fix", "message", "error", "why", "left", "stopped_by"})
_LONGEST_TEXT = 4_000


class Journal:
    """The writing side. One per run at a time: the supervisor's lock sees to that."""

    def __init__(self, path: Path, clock: Clock = _now, redactor: Redactor | None = None) -> None:
        """A line that a killed writer left incomplete is cut off. `redactor`: for what is said in words."""
        self._clock = clock
        self._redactor = redactor or Redactor()
        self._file = LineFile(path)

    def append(self, event: E) -> E:
        """Append `event`, stamped with the time unless it has one, by one write; a synced one is on the disk when this
        returns. Its words have no secrets, and an end.

        On a full disk the event waits in memory and is written with the next one (or by `flush`), so that training is
        not stopped for it. Raises OSError for any other fault."""
        stamped = event if event.at != UNSTAMPED else event.model_copy(update={"at": self._clock()})
        fields = stamped.model_dump(mode="json", exclude_none=True)
        if (shown := self._shown(fields)) != fields:
            fields, stamped = shown, type(event).model_validate(shown)
        line = json.dumps({"event": event.kind, **fields}, ensure_ascii=False)
        self._file.append(line.encode(errors="backslashreplace"), sync=isinstance(event, SyncedEvent))
        return stamped

    def _shown(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Only texts that a person reads: by the others the run is adopted."""
        shown = dict[str, Any]()
        for name, value in fields.items():
            if name in _WORDS:
                texts = value if isinstance(value, list) else [value]
                # A node may have such a name, with a figure.
                texts = [self._redactor(text)[:_LONGEST_TEXT] if isinstance(text, str) else text for text in texts]
                shown[name] = texts if isinstance(value, list) else texts[0]
            else:
                shown[name] = self._shown(value) if isinstance(value, dict) else value
        return shown

    def flush(self) -> bool:
        """Write what a full disk held back; False while there is still no room."""
        return self._file.flush(sync=True)

    def close(self) -> None:
        self._file.close()


class JournalTail:
    """Follows a journal as it grows. A torn last line waits for its end; a damaged line is counted and skipped."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self._line = 0
        self.damaged: list[int] = []
        """Numbers of the lines, from 1, that are no event."""

    def events(self) -> Iterator[Event]:
        """The new events in order; none while there is no journal. Raises StateError for a newer format."""
        for line in self._tail.lines():
            self._line += 1
            fields = parse_json_line(line)
            if self._line == 1:
                self._refuse_newer(fields or {})
            event = _event(fields)
            if event is not None:
                yield event
            elif line.strip():
                self.damaged.append(self._line)

    def _refuse_newer(self, first: dict[str, Any]) -> None:
        version = first.get("version")
        if not isinstance(version, int) or version <= JOURNAL_VERSION:
            return
        # As often as it is read.
        self._line = self._tail.offset = 0
        why = f"its format is version {version}, and this one reads up to version {JOURNAL_VERSION}"
        todo = "use the release that launched the run, or upgrade this one"
        raise StateError("the journal is of a newer release", where=str(self._tail.path), why=why, todo=todo)


def read_journal(path: Path) -> tuple[Event, ...]:
    """Empty when there is no journal. Raises StateError for a newer format."""
    return tuple(JournalTail(path).events())


def read_history(run_dir: RunDir) -> RunHistory:
    """The run as its journal has it; its plan is read where the journal's first line is missing. Raises StateError
    without both, or for a newer format."""
    events = read_journal(run_dir.journal)
    try:
        return fold(events)
    except StateError:
        return run_history(events, read_plan(run_dir.plan))


def describe_damage(lines: Sequence[int]) -> str | None:
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


_UNSUCCESSFUL = ENDED - {RunState.COMPLETED, RunState.SUCCEEDED}

FOLLOWERS: Mapping[RunState, frozenset[RunState]] = {
    RunState.PLANNED: frozenset({RunState.PREFLIGHT, RunState.FINISHING}) | _UNSUCCESSFUL,
    RunState.PREFLIGHT: frozenset({RunState.LAUNCHING, RunState.FINISHING}) | _UNSUCCESSFUL,
    RunState.LAUNCHING: frozenset({RunState.RUNNING, RunState.RECOVERING, RunState.FINISHING}) | _UNSUCCESSFUL,
    RunState.RUNNING: frozenset({RunState.RECOVERING, RunState.FINISHING}),
    RunState.RECOVERING: frozenset({RunState.LAUNCHING, RunState.FINISHING}),
    RunState.FINISHING: ENDED,
    RunState.COMPLETED: frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.LOST}),
    RunState.SUCCEEDED: frozenset(),
    RunState.FAILED: frozenset({RunState.COMPLETED, RunState.SUCCEEDED}),
    RunState.ABORTED: frozenset(),
    RunState.LOST: frozenset({RunState.COMPLETED, RunState.SUCCEEDED}),
}
"""Success is decided after the ranks are gone, so it follows FINISHING, or an end that was not known of every rank."""

_RESERVE_BYTES = 32_768
_ROOM_LIMIT_S = 600.0
_RETRY_S = 1.0


class RunRecorder:
    """Enters each event once: into the journal, the history, and the run's record in the store.

    The journal is the truth; a store that cannot be written is noted and does not stop a run. It is written in a thread
    of its own: another writer's lock, or a slow disk, must not delay a heartbeat."""

    def __init__(self, path: Path, plan: RunPlan, put: Callable[[RunRecord], object], clock: Clock = _now) -> None:
        """Begins the journal with `plan` when there is none. Raises StateError when it cannot be read."""
        tail = JournalTail(path)
        events = list(tail.events())
        self._journal = Journal(path, clock, plan.config.job.redactor())
        self._put = put
        self._store = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._problems: deque[str] = deque()
        self._reserve = path.with_name(f".{path.name}.reserve")
        _reserve_room(self._reserve)
        planned = RunPlanned(run=plan.record(), nonce=plan.nonce)
        self.history = run_history(events or [self._journal.append(planned)], plan)
        """With everything that was appended so far."""
        if not events:
            self._store.submit(self._put_newest, self.history.record)
        if (damage := describe_damage(tail.damaged)) is not None:
            self.append(Note(message=damage))

    @property
    def state(self) -> RunState:
        return self.history.record.state

    def append(self, event: Event) -> None:
        """Raises ValueError for a state that may not follow, OSError for a fault of the disk that is not a full one."""
        before = self.history.record
        if isinstance(event, StateChanged) and event.state not in (before.state, *FOLLOWERS[before.state]):
            raise ValueError(f"a run that is {before.state} does not become {event.state}")
        self.history = fold([self._journal.append(event)], self.history)
        if self.history.record is not before:
            self._store.submit(self._put_newest, self.history.record)
        self._note_problems()
        if isinstance(event, StateChanged) and event.state.ended:
            # On a full disk the end goes into room that was reserved; its supervisor may stay for the rest of the logs.
            self._reserve.unlink(missing_ok=True)
            self._journal.flush()

    def close(self) -> None:
        """Returns when journal and store have everything: on a full disk it waits for room."""
        self._reserve.unlink(missing_ok=True)
        deadline = time.monotonic() + _ROOM_LIMIT_S
        while not self._journal.flush() and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
        self._store.shutdown(wait=True)
        self._note_problems()
        self._journal.close()

    def _put_newest(self, record: RunRecord) -> None:
        if record is not self.history.record:
            # A newer one follows.
            return
        try:
            self._put(record)
        except (StateError, OSError) as error:
            self._problems.append(str(error))

    def _note_problems(self) -> None:
        while self._problems:
            self._journal.append(Note(message=f"the store cannot be written: {self._problems.popleft()}"))


def _reserve_room(reserve: Path) -> None:
    try:
        reserve.write_bytes(b" " * _RESERVE_BYTES)
    except OSError:
        # No room to begin with: then there is nothing to keep.
        reserve.unlink(missing_ok=True)
