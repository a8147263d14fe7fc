"""A run's state as its supervisor writes it: each change once in the journal, then in the store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.errors import StateError
from engine.models import RunRecord, RunState
from engine.runs.journal import Journal, read_journal, replay
from engine.supervision.states import follow

Put = Callable[[RunRecord], object]


class Logbook:
    """Journal, current record, and the way to the store. The journal is the truth; a store that cannot be written is
    noted and does not stop a run."""

    def __init__(self, path: Path, put: Put, clock: Callable[[], datetime]) -> None:
        self._journal = Journal(path, clock)
        self._put = put
        self._clock = clock
        self.entries = read_journal(path)
        """What an earlier supervisor has written; not added to."""
        self.record: RunRecord | None = replay(self.entries) if self.entries else None
        self._store_refuses = False

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
        if event not in ("planned", "state", "attempt", "rank_started"):
            return
        # Replaying one entry onto the record it has led to so far is replaying them all.
        before = [] if self.record is None else [{"event": "planned", "run": self.record.model_dump(mode="json")}]
        self.record = replay([*before, entry])
        self._store()

    def close(self) -> None:
        self._journal.close()

    def _store(self) -> None:
        if self.record is None:
            return
        try:
            self._put(self.record)
        except (StateError, OSError) as error:
            if not self._store_refuses:
                self._journal.append("note", message=f"the store cannot be written: {error}")
            self._store_refuses = True
        else:
            self._store_refuses = False
