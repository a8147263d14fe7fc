"""A run's state as its supervisor writes it: each change once in the journal, then in the store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.models import RunRecord, RunState
from engine.runs.journal import Journal, read_journal, replay
from engine.supervision.states import follow
from engine.supervision.store_writer import Put, StoreWriter

_CHANGES_THE_RECORD = frozenset({"planned", "state", "attempt", "rank_started"})


class Logbook:
    """Journal, current record, and the way to the store. The journal is the truth; a store that cannot be written is
    noted and does not stop a run."""

    def __init__(self, path: Path, put: Put, clock: Callable[[], datetime]) -> None:
        self._journal = Journal(path, clock)
        self._store = StoreWriter(put)
        self.entries = read_journal(path)
        """What an earlier supervisor has written; not added to."""
        self.record: RunRecord | None = replay(self.entries) if self.entries else None

    @property
    def state(self) -> RunState:
        return self.record.state if self.record is not None else RunState.PLANNED

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
        """Returns when journal and store have what there is; waits for the store's other writers."""
        self._store.close()
        if (problem := self._store.problem()) is not None:
            self._journal.append("note", message=f"the store cannot be written: {problem}")
        self._journal.close()
