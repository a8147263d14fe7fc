"""The runs in the state directory: their records, metrics and logs, and abort. A run's files are written by its
supervisor alone."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from engine.api.session import Session
from engine.config.models import Config
from engine.errors import InputError, LaunchError, RunNotFound, StateError, did_you_mean
from engine.models import RunRecord, RunState
from engine.queue.queue_files import queued_configs
from engine.queue.runner_process import start_runner
from engine.run.deletion import delete_folders, delete_here
from engine.run.failure_cause import diagnose
from engine.run.journal import read_history
from engine.run.json_lines import LineTail
from engine.run.logs.reader import LogReader
from engine.run.metrics import figures
from engine.run.run_filter import run_filter, sorted_runs
from engine.run.run_plan import read_plan
from engine.run.series.reader import RunSeries
from engine.run.supervisor_process import adopt_orphans, request_abort, start_supervisor, take_lock
from engine.run.watch import RunWatch, supervisor_alive
from engine.security.audit import audit_log
from engine.security.identifiers import is_identifier, safe_repr, validate_identifier
from engine.security.sanitise import plain
from engine.snapshots import Deletion, ResultFile, RunSnapshot, StopProgress
from engine.store.layout import LAUNCHER_SOURCE, RunDir, run_names

_REPORT_ONLY = frozenset({"kind", "attempt", "at"})
"""Keys that the head adds to mlx-lm's report dicts."""
_EVIDENCE_CHARACTERS = 1_000
"""Shown of one line."""
_NOTE_LIMIT = 500
_POLL_S = 0.05
_SUPERVISOR_STARTS = 3
"""How often an abort starts another supervisor for a run before it gives up."""


class RunsApi:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._watches: dict[str, RunWatch] = {}
        self._directories: tuple[int | None, Mapping[str, object], list[str]] = (None, {}, [])
        """When the folder of runs had changed last, the store's records then, and the runs that these lacked."""
        self._listed: tuple[Mapping[str, object], list[RunRecord]] = ({}, [])
        """The store's records when all were read last, and what they were: the console asks every second."""

    def all(self, limit: int | None = None) -> list[RunRecord]:
        """Every run, newest first, at most `limit`; running ones with their live figures."""
        fields = self._session.store.run_fields()
        if limit is not None or fields is not self._listed[0] or self._unlisted(fields):
            records = self._stored(limit=limit)
            self._listed = (fields, records) if limit is None else self._listed
        else:
            records = self._listed[1]
        return [record if record.state.ended else self._live(record) for record in records]

    def select(self, filter: str = "", order: str | None = None, limit: int | None = None) -> list[RunRecord]:
        """The runs that a filter takes (engine.run.run_filter), newest first or in the order of a field. Raises
        InputError."""
        now = datetime.now(UTC)
        taken = run_filter(filter, now)
        runs = [run for run in self.all(None if filter or order else limit) if taken(run)]
        return (sorted_runs(runs, order, now) if order is not None else runs)[:limit]

    def find(self, run: str) -> RunDir:
        """A run by id, unique id prefix, name (its newest) or "last". Raises RunNotFound."""
        if run == "last":
            if newest := self._stored(limit=1):
                return self.directory(newest[0].id)
            where, todo = str(self._session.home), "`flightdeck demo` makes one"
            raise RunNotFound("there are no runs yet", where=where, todo=todo)
        if is_identifier(run) and self.directory(run).plan.exists():
            return self.directory(run)
        records = self._stored(lambda fields: run == fields.get("name") or str(fields.get("id")).startswith(run))
        named = [record.id for record in records if run in (record.id, record.name)]
        matching = [record.id for record in records if run and record.id.startswith(run)]
        if named or len(matching) == 1:
            return self.directory((named or matching)[0])
        if matching:
            why = f"{len(matching)} ids begin with it: {', '.join(matching[:4])}{', …' if len(matching) > 4 else ''}"
            raise RunNotFound(f"{safe_repr(run)} is not one run", why=why, todo="give more of the id")
        why = "no id, id prefix or name is that"
        names = {name for record in self._stored() for name in (record.name, record.id)}
        todo = did_you_mean(run, names) or "see `flightdeck runs`"
        raise RunNotFound(f"no run {safe_repr(run)}", why=why, todo=todo)

    def tasks_of(self, run: str) -> list[RunRecord]:
        """The tasks on the result of the run of this id, newest first."""
        tasks = self._stored(lambda fields: fields.get("source") == run)
        return [task if task.state.ended else self._live(task) for task in tasks]

    def fused(self, run: str) -> tuple[ResultFile, ...]:
        """The files of the model that the newest successful fusion of what the run of this id has trained has left."""
        fusions = (task.id for task in self.tasks_of(run) if (task.task, task.state) == ("fuse", RunState.SUCCEEDED))
        results = (RunWatch(self.directory(fusion)).poll().result for fusion in fusions)
        return next((model for result in results if result is not None and (model := result.newest("model"))), ())

    def configs_in_use(self) -> dict[str, Config]:
        """Those of the runs that have not ended and of the queued items, by what is said of each. Raises StateError,
        InputError."""
        going = (record.id for record in self.all() if not record.state.ended)
        configs = {f"the run {run} has not ended": read_plan(self.directory(run).plan).config for run in going}
        queued = queued_configs(self._session.home)
        return configs | {f"queued item {number} is to use it": config for number, config in queued.items()}

    def find_trained(self, run: str) -> RunDir:
        """As `find`, but "last" is the newest training. Raises InputError for what is no training."""
        newest = self._stored(lambda fields: fields.get("task") is None, limit=1) if run == "last" else []
        directory = self.find(newest[0].id if newest else run)
        record = self.record(directory.id)
        if record.task is not None:
            why = f"it is a task ({record.task}) on the result of {record.source}"
            raise InputError(f"{record.id} has trained nothing", why=why, todo="name that run")
        return directory

    def record(self, run: str) -> RunRecord:
        """One run as it is now; by its id without the store. Raises RunNotFound, StateError."""
        return RunWatch(self.find(run)).poll().record

    def metrics(self, run: str) -> list[dict[str, int | float | None]]:
        """mlx-lm's report dicts in order."""
        return [figures(row, _REPORT_ONLY) for row in LineTail(self.find_trained(run).metrics).objects()]

    def series(self, run: str) -> RunSeries:
        """The run's series, for a chart. Raises RunNotFound."""
        return RunSeries(self.find(run))

    def watch(self, run: str) -> RunWatch:
        """A new watch of a run, for one reader. Raises RunNotFound, StateError."""
        return RunWatch(self.find(run), diagnose=diagnose)

    def evidence(self, run: str, snapshot: RunSnapshot, *, limit: int = 8) -> list[str]:
        """The log lines that prove why a run failed, sanitised, at most `limit`: around the diagnosed line, else the
        last ones of the rank that failed first. Raises RunNotFound."""
        record, diagnosis = snapshot.record, snapshot.diagnosis
        source = diagnosis.source if diagnosis is not None and diagnosis.source is not None else record.rank
        if not record.state.ended or record.reason is None or (source is None and diagnosis is None):
            return []
        with contextlib.closing(LogReader(self.find(run), LAUNCHER_SOURCE if source is None else source)) as reader:
            number = None
            if diagnosis is not None and diagnosis.offset is not None and source is not None:
                number = reader.number_of(source, diagnosis.offset)
            start = max(0, reader.line_count - limit) if number is None else max(0, number - limit // 2)
            return [line.text[:_EVIDENCE_CHARACTERS] for line in reader.lines(start, start + limit)]

    def adopt_orphans(self) -> list[str]:
        """Start a supervisor for every run that has lost its own, which adopts or fences it, and the process of a queue
        that has lost it; the ids of the runs."""
        adopted = adopt_orphans(self._session.home, self._session.notify)
        try:
            start_runner(self._session.home, wait=False)
        except StateError as error:
            self._session.notify(str(error))
        return adopted

    async def abort(self, run: str, *, now: bool = False) -> AsyncIterator[StopProgress]:
        """Ask the run's supervisor to stop it and follow until that is proved; `now` leaves out the cooperative
        stop. Ends at once, with no progress, when the run has ended. Idempotent. Raises RunNotFound, and LaunchError
        when no supervisor can be kept alive for it."""
        directory = await asyncio.to_thread(self.find, run)
        watch = RunWatch(directory)
        snapshot = await asyncio.to_thread(watch.poll)
        if snapshot.record.state.ended:
            return
        await asyncio.to_thread(request_abort, directory, now=now, by="flightdeck")
        audit_log("abort", "asked", {"run": directory.id, "now": now}, home=self._session.home)
        reported = StopProgress("asked", datetime.now(UTC))
        yield reported
        # Only the caller gives up: the supervisor retries a stop that cannot be proved.
        starts = 0
        while not snapshot.record.state.ended:
            if not snapshot.supervised:
                starts += 1
                if starts > _SUPERVISOR_STARTS:
                    raise LaunchError(
                        "no supervisor stays with the run", where=directory.id, todo=f"see {directory.supervisor_log}"
                    )
                # Another one may be faster than we are, and is as good.
                with contextlib.suppress(LaunchError):
                    await asyncio.to_thread(start_supervisor, directory, "--adopt")
            await asyncio.sleep(_POLL_S)
            snapshot = await asyncio.to_thread(watch.poll)
            if snapshot.stop is not None and snapshot.stop != reported:
                reported = snapshot.stop
                yield reported

    def annotate(
        self, run: str, *, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None
    ) -> RunRecord:
        """Add and remove tags of a run, and replace its note ("" removes it, None leaves it). Raises RunNotFound,
        InputError for what is no tag, StateError."""
        record = self.listed(self.find(run).id)
        added, removed = ({validate_identifier(tag, "tag") for tag in tags} for tags in (add, remove))
        text = None if note is None else plain(note, _NOTE_LIMIT).strip()
        store = self._session.store
        if record.id not in store.run_fields():
            store.put_run(record)
        return record.model_copy(update=store.annotate(record.id, add=added, remove=removed, note=text))

    def listed(self, run: str) -> RunRecord:
        """The run of this id with what a person has written about it. Raises RunNotFound."""
        store = self._session.store
        row = store.run_fields().get(run)
        records = store.valid_runs([row]) if row is not None else self._stored(lambda fields: fields.get("id") == run)
        if not records:
            raise RunNotFound(f"no run {safe_repr(run)}", todo="see `flightdeck runs`")
        return records[0]

    async def delete(self, run: str, *, go: bool, anyway: bool = False) -> Deletion:
        """The space that a run takes here and on its nodes; with `go` it is deleted. A node that does not answer, or
        refuses, keeps the run in the list, until a later deletion finds that node, unless it is deleted `anyway`.
        Raises RunNotFound, InputError for a run that has not ended or is in use, StateError."""
        directory = await asyncio.to_thread(self.find, run)
        if (held := await asyncio.to_thread(self._hold, directory)) is None:
            why = "its supervisor is still at work: a node has not answered, or logs are copied"
            raise InputError("the run is not deleted", where=directory.id, why=why, todo="try again later")
        try:
            deletion = await delete_folders(self._session.fleet, directory, go=go)
            if go and (anyway or not deletion.problems):
                await asyncio.to_thread(self._session.store.delete_run, directory.id)
                await asyncio.to_thread(delete_here, directory)
                deletion = replace(deletion, deleted=True)
        except OSError as error:
            raise StateError("the run's directory cannot be deleted", where=str(directory.path), why=error) from error
        finally:
            os.close(held)
        if go:
            context = {"run": directory.id, "left": deletion.problems, "kept": deletion.kept}
            audit_log("delete", "done" if deletion.deleted else "incomplete", context, home=self._session.home)
        return deletion

    def _hold(self, directory: RunDir) -> int | None:
        """Keep supervisors from a run that has ended and that no other uses; None while it has one. Raises InputError,
        StateError."""
        active = [run.id for run in self.all() if not run.state.ended]
        if directory.id in active:
            todo = f"flightdeck abort {directory.id}"
            raise InputError("the run is not deleted", where=directory.id, why="it has not ended", todo=todo)
        for run in active:
            try:
                why = f"{run} uses it" if read_plan(self.directory(run).plan).uses(directory.id) else None
            except StateError as error:
                why = f"{run} may use it: {error}"
            if why is not None:
                todo = f"flightdeck abort {run}"
                raise InputError("the run is not deleted", where=directory.id, why=why, todo=todo)
        return take_lock(directory)

    def _stored(
        self, chosen: Callable[[Mapping[str, Any]], bool] = lambda fields: True, limit: int | None = None
    ) -> list[RunRecord]:
        """The records of the store, and of run directories that it does not know, newest first: at most `limit` of
        those that `chosen` takes by their fields. Of thousands only these are checked."""
        store = self._session.store
        fields = store.run_fields()
        unknown = [record for name in self._unlisted(fields) if (record := self._read(name)) is not None]
        if store.notices and unknown:
            # What was lost from the state is in the runs' own journals.
            store.rebuild(unknown)
        taken = [row for row in fields.values() if chosen(row)]
        if limit is not None:
            taken = heapq.nlargest(limit, taken, key=lambda row: str(row.get("created_at")))
        records = store.valid_runs(taken)
        self._session.report_damage(store)
        if others := [record for record in unknown if chosen(vars(record))]:
            records = sorted([*records, *others], key=lambda record: (record.created_at, record.id), reverse=True)
        return records[:limit]

    def _unlisted(self, fields: Mapping[str, object]) -> list[str]:
        """Run directories that the store does not know: looked for where there is another run, or record, than at the
        last time."""
        changed_at = None
        with contextlib.suppress(FileNotFoundError):
            changed_at = (self._session.home / "runs").stat().st_mtime_ns
        before, listed, names = self._directories
        if changed_at != before or listed is not fields:
            names = [name for name in run_names(self._session.home) if name not in fields]
            self._directories = changed_at, fields, names
        return names

    def _read(self, run: str) -> RunRecord | None:
        """A run as its own directory has it."""
        directory = self.directory(run)
        with contextlib.suppress(StateError):
            return RunWatch(directory).poll().record
        with contextlib.suppress(StateError):
            return read_history(directory).record
        return None

    def directory(self, run: str) -> RunDir:
        return RunDir(self._session.home / "runs" / run)

    def _live(self, record: RunRecord) -> RunRecord:
        """The journal is the truth: the store's record only knows the last change of state."""
        try:
            if record.id not in self._watches:
                self._watches[record.id] = RunWatch(self.directory(record.id))
            snapshot = self._watches[record.id].poll()
        except StateError as error:
            if supervisor_alive(self.directory(record.id)):
                return record
            self._session.notify(f"{record.id}: {error}")
            return record.model_copy(update={"state": RunState.LOST, "cause": str(error)})
        live = snapshot.record.model_copy(update={"tags": record.tags, "note": record.note})
        for text in snapshot.damage:
            self._session.notify(f"{record.id}: {text}")
        if live.state.ended:
            self._watches.pop(record.id, None)
        return live
