"""Runs, as the state directory tells of them: their records, figures and logs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from engine.errors import RunNotFound, StateError
from engine.events import Diagnosis, RunSnapshot
from engine.models import RunRecord
from engine.runs.layout import LAUNCHER_SOURCE, RunDir
from engine.runs.watch import RunWatch, supervisor_alive
from engine.session.room import Room

_REPORT_ONLY = frozenset({"kind", "attempt", "at"})
"""What the head adds to mlx-lm's report dicts."""


class Runs(Room):
    """Every run that this state directory knows. Only read: a run's files are its supervisor's."""

    def __init__(self, home: Path | None = None) -> None:
        super().__init__(home)
        self._watches: dict[str, RunWatch] = {}

    def runs(self) -> list[RunRecord]:
        """Every run, newest first; running ones with their live figures."""
        return [record if record.state.ended else self._live(record) for record in self._stored()]

    def find(self, run: str) -> RunDir:
        """A run by id, unique id prefix, name (its newest) or "last". Raises RunNotFound."""
        from engine.security.identifiers import shown

        records = self._stored()
        if not records:
            raise RunNotFound("there are no runs yet", where=str(self.home), todo="`flightdeck demo` makes one")
        if run == "last":
            return self._directory(records[0].id)
        named = next((record for record in records if run in (record.id, record.name)), None)
        if named is not None:
            return self._directory(named.id)
        matching = [record.id for record in records if run and record.id.startswith(run)]
        if len(matching) == 1:
            return self._directory(matching[0])
        if matching:
            why = f"{len(matching)} ids begin with it: {', '.join(matching[:4])}{', …' if len(matching) > 4 else ''}"
            raise RunNotFound(f"{shown(run)} is not one run", why=why, todo="give more of the id")
        raise RunNotFound(f"no run {shown(run)}", why="no id, id prefix or name is that", todo="see `flightdeck runs`")

    def record(self, run: str) -> RunRecord:
        """One run as it is now. Raises RunNotFound."""
        return self.watch(self.find(run).id).poll().record

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """mlx-lm's report dicts in order."""
        from engine.runs.json_lines import JsonLinesTail

        rows = JsonLinesTail(self.find(run).metrics).objects()
        return [{key: value for key, value in row.items() if key not in _REPORT_ONLY} for row in rows]

    def watch(self, run: str) -> RunWatch:
        """A new watch of a run: it is for one reader. Raises RunNotFound, StateError."""
        return RunWatch(self.find(run), diagnose=_diagnose)

    def supervised(self, run: str) -> bool:
        """Whether a supervisor of the run is alive. Raises RunNotFound."""
        return supervisor_alive(self.find(run))

    def evidence(self, run: str, snapshot: RunSnapshot, *, limit: int = 8) -> list[str]:
        """The log lines that prove why a run ended badly, sanitised, at most `limit`: from the diagnosed line on, else
        the last ones of the rank that was first. Raises RunNotFound."""
        from engine.runs.log_reader import LogReader

        record, found = snapshot.record, snapshot.diagnosis
        source = found.source if found is not None and found.source is not None else record.rank
        if not record.state.ended or record.reason is None or (source is None and found is None):
            return []
        reader = LogReader(self.find(run), LAUNCHER_SOURCE if source is None else source)
        try:
            reader.refresh()
            number = None
            if found is not None and found.offset is not None and source is not None:
                number = reader.number_of(source, found.offset)
            start = max(0, reader.line_count - limit) if number is None else max(0, number - limit // 2)
            return [line.text for line in reader.lines(start, start + limit)]
        finally:
            reader.close()

    def adopt_orphans(self) -> list[str]:
        """Find runs whose supervisor is gone and start one that adopts or fences each; the ids."""
        from engine.supervision.adopt import adopt_orphans

        return adopt_orphans(self.home)

    def _stored(self) -> list[RunRecord]:
        """The store's records, newest first, and those of run directories that it does not know."""
        store = self._store()
        records = {record.id: record for record in store.runs()}
        known = len(records)
        for directory in self._directories():
            if directory.id not in records and directory.plan.exists():
                with contextlib.suppress(StateError):
                    records[directory.id] = RunWatch(directory).poll().record
        if store.notices and len(records) > known:
            # What was lost from the state is in the runs' own journals.
            store.rebuild(records.values())
        self.notices += [notice for notice in store.notices if notice not in self.notices]
        return sorted(records.values(), key=lambda record: (record.created_at, record.id), reverse=True)

    def _directories(self) -> list[RunDir]:
        try:
            return [RunDir(path) for path in (self.home / "runs").iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _directory(self, run: str) -> RunDir:
        return RunDir(self.home / "runs" / run)

    def _live(self, record: RunRecord) -> RunRecord:
        """The journal is the truth: the store's record only knows the last change of state."""
        try:
            watch = self._watches.setdefault(record.id, RunWatch(self._directory(record.id)))
        except StateError:
            return record
        live = watch.poll().record
        if live.state.ended:
            self._watches.pop(record.id, None)
        return live


def _diagnose(directory: RunDir) -> Diagnosis | None:
    from engine.runs.diagnosis import diagnose

    return diagnose(directory)
