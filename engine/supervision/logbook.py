"""A run's state as its supervisor writes it: each change once in the journal, then in the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.models import RunRecord, RunState
from engine.runs.journal import Journal, read_journal, replay
from engine.supervision.states import follow
from engine.supervision.store_writer import Put, StoreWriter

_RESERVE_BYTES = 32_768
_ROOM_LIMIT_S = 600.0
_LOOK_EVERY_S = 1.0
_CHANGES_THE_RECORD = frozenset({"planned", "replanned", "reopened", "state", "attempt", "rank_started", "confirmed"})


class Logbook:
    """Journal, current record, and the way to the store. The journal is the truth; a store that cannot be written is
    noted and does not stop a run."""

    def __init__(self, path: Path, put: Put, clock: Callable[[], datetime]) -> None:
        self._path = path
        self._journal = Journal(path, clock)
        self._store = StoreWriter(put)
        self._reserve = path.with_name(f".{path.name}.reserve")
        _set_aside(self._reserve)
        self.entries = read_journal(path)
        """What an earlier supervisor has written; not added to, except by `reread`."""
        self.record: RunRecord | None = replay(self.entries) if self.entries else None

    @property
    def state(self) -> RunState:
        return self.record.state if self.record is not None else RunState.PLANNED

    def reread(self) -> None:
        """Take what has been written until now for an earlier supervisor's."""
        self.entries = read_journal(self._path)

    def plan(self, record: RunRecord, nonce: str) -> None:
        """The first entry of all."""
        self.append("planned", run=record.model_dump(mode="json"), nonce=nonce)

    def change(self, state: RunState, **fields: Any) -> None:
        """Go over to `state`; at the end `fields` say how. Raises ValueError for a change that cannot be."""
        if state is not self.state:
            follow(self.state, state)
        self.append("state", state=state.value, **fields)

    def append(self, event: str, **fields: Any) -> None:
        entry = self._journal.append(event, **fields)
        if event in _CHANGES_THE_RECORD:
            # Replaying one entry onto the record that the others have led to is replaying them all.
            before = [] if self.record is None else [{"event": "planned", "run": self.record.model_dump(mode="json")}]
            self.record = replay([*before, entry])
            self._store.put(self.record)
        if (problem := self._store.problem()) is not None:
            self._journal.append("note", message=f"the store cannot be written: {problem}")

    def close(self) -> None:
        """Returns when journal and store have what there is. On a full disk the journal's end goes into room that was
        set aside, since nothing else is written by now; failing that, it waits for room."""
        self._reserve.unlink(missing_ok=True)
        deadline = time.monotonic() + _ROOM_LIMIT_S
        while not self._journal.flush() and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        self._store.close()
        if (problem := self._store.problem()) is not None:
            self._journal.append("note", message=f"the store cannot be written: {problem}")
        self._journal.close()


def _set_aside(reserve: Path) -> None:
    try:
        reserve.write_bytes(b" " * _RESERVE_BYTES)
    except OSError:
        # No room to begin with: then there is nothing to keep.
        reserve.unlink(missing_ok=True)
