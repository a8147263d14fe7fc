"""Records a run's events: each once in the journal, and the run's record in the store; and which state may follow
which.

The store is written in a thread of its own: another writer's lock, or a slow disk, must not delay a heartbeat.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

from engine.errors import StateError
from engine.models import ENDED, RunRecord, RunState
from engine.run.events import Event, Figures, Note, StateChanged, Verdict
from engine.run.history import AttemptHistory, RunHistory, fold
from engine.run.journal import Journal, describe_damage, read_journal

_UNSUCCESSFUL = ENDED - {RunState.SUCCEEDED}

FOLLOWERS: Mapping[RunState, frozenset[RunState]] = {
    RunState.PLANNED: frozenset({RunState.PREFLIGHT, RunState.FINISHING}) | _UNSUCCESSFUL,
    RunState.PREFLIGHT: frozenset({RunState.LAUNCHING, RunState.FINISHING}) | _UNSUCCESSFUL,
    RunState.LAUNCHING: frozenset({RunState.RUNNING, RunState.RECOVERING, RunState.FINISHING}) | _UNSUCCESSFUL,
    RunState.RUNNING: frozenset({RunState.RECOVERING, RunState.FINISHING}),
    RunState.RECOVERING: frozenset({RunState.LAUNCHING, RunState.FINISHING}),
    RunState.FINISHING: ENDED,
    **{state: frozenset() for state in ENDED},
}
"""Success is decided after the ranks are gone, so it follows FINISHING alone."""

PutRecord = Callable[[RunRecord], object]


class StoreWriter:
    """Puts a run's newest record, in one thread of its own; a record that a newer one has overtaken is left out."""

    def __init__(self, put: PutRecord) -> None:
        self._put = put
        self._newest: RunRecord | None = None
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._problem: str | None = None

    def put(self, record: RunRecord) -> None:
        """Returns at once."""
        with self._lock:
            idle = self._newest is None
            self._newest = record
        if idle:
            self._thread.submit(self._drain)

    def problem(self) -> str | None:
        """Why the store could not be written, once for each time that it happened."""
        with self._lock:
            problem, self._problem = self._problem, None
        return problem

    def close(self) -> None:
        """Returns when the newest record has been put, or refused."""
        self._thread.shutdown(wait=True)

    def _drain(self) -> None:
        with self._lock:
            record, self._newest = self._newest, None
        if record is None:
            return
        try:
            self._put(record)
        except (StateError, OSError) as error:
            with self._lock:
                self._problem = str(error)


_RESERVE_BYTES = 32_768
_ROOM_LIMIT_S = 600.0
_RETRY_S = 1.0


class RunRecorder:
    """Journal, history, and the way to the store. The journal is the truth; a store that cannot be written is noted and
    does not stop a run."""

    def __init__(self, path: Path, put: PutRecord, clock: Callable[[], datetime]) -> None:
        """Raises StateError when the journal cannot be read."""
        self._reserve = path.with_name(f".{path.name}.reserve")
        contents = read_journal(path)
        self.history: RunHistory | None = fold(contents.events) if contents.events else None
        """With everything that was appended so far; None before the plan."""
        self._journal = Journal(path, clock)
        self._store = StoreWriter(put)
        _reserve_room(self._reserve)
        if self.history is not None and (damage := describe_damage(contents.damaged)) is not None:
            self.append(Note(message=damage))

    @property
    def record(self) -> RunRecord | None:
        return self.history.record if self.history is not None else None

    @property
    def state(self) -> RunState:
        return self.history.record.state if self.history is not None else RunState.PLANNED

    def attempt(self, number: int) -> AttemptHistory | None:
        return self.history.attempt(number) if self.history is not None else None

    def change(
        self,
        state: RunState,
        verdict: Verdict | None = None,
        figures: Figures | None = None,
        unconfirmed: tuple[str, ...] = (),
    ) -> None:
        """Go over to `state`; the other arguments describe the end. Raises ValueError when `state` may not follow."""
        if state is not self.state and state not in FOLLOWERS[self.state]:
            raise ValueError(f"a run that is {self.state} does not become {state}")
        self.append(StateChanged(state=state, verdict=verdict, figures=figures or Figures(), unconfirmed=unconfirmed))

    def append(self, event: Event) -> None:
        before, event = self.record, self._journal.append(event)
        self.history = fold([event], self.history)
        if self.history.record is not before:
            self._store.put(self.history.record)
        self._note_problem()

    def close(self) -> None:
        """Returns when journal and store have everything. On a full disk the journal's end goes into room that was
        reserved, since nothing else is written by now; failing that, it waits for room."""
        self._reserve.unlink(missing_ok=True)
        deadline = time.monotonic() + _ROOM_LIMIT_S
        while not self._journal.flush() and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
        self._store.close()
        self._note_problem()
        self._journal.close()

    def _note_problem(self) -> None:
        if (problem := self._store.problem()) is not None:
            self._journal.append(Note(message=f"the store cannot be written: {problem}"))


def _reserve_room(reserve: Path) -> None:
    try:
        reserve.write_bytes(b" " * _RESERVE_BYTES)
    except OSError:
        # No room to begin with: then there is nothing to keep.
        reserve.unlink(missing_ok=True)
