"""The queue of this home: runs that start one after the other, each when its nodes are free."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, time, timedelta

from engine.api.runs import RunsApi
from engine.api.session import Session
from engine.checks.runner import validate_skip
from engine.cluster.host_locks import host_key
from engine.config.models import Config
from engine.errors import InputError, StateError
from engine.models import RunRecord
from engine.protocol.attempt import read_regular
from engine.queue.autostart import Autostart, autostart, install, uninstall
from engine.queue.items import Queue, QueueItem, QueueSnapshot, waits_for
from engine.queue.queue_files import QueueFiles
from engine.queue.runner_process import runner_alive, start_runner
from engine.run.run_plan import read_plan
from engine.security.audit import audit_log
from engine.security.identifiers import safe_repr
from engine.security.paths import make_home
from engine.security.sanitise import json_object, json_or_none

_ENDED_SHOWN = 20


class QueueApi:
    def __init__(self, session: Session, runs: RunsApi) -> None:
        self._home = session.home
        self._runs = runs
        self._files = QueueFiles(session.home)
        self._hosts: dict[str, tuple[str, ...]] = {}
        """Run that has not ended → its machines."""

    def snapshot(self) -> QueueSnapshot:
        """The items, of those that have ended the newest, and the runs that go on beside them. Raises StateError."""
        items, active = self._files.read().items, self.active()
        ended = [item.id for item in items if item.state in ("ended", "cancelled")][:-_ENDED_SHOWN]
        queued = {item.run for item in items}
        attended, why, notes = runner_alive(self._home), "", dict[str, object]()
        # Before the first item there is neither of them.
        with contextlib.suppress(OSError):
            if not attended and not shutil.disk_usage(self._home).free:
                why = "room: the disk is full"
            notes = json_object(json_or_none(read_regular(self._files.notes)))
        again = {item: f"another try: {note}" for item, note in notes.items()}
        waits = {item: text or again.get(str(item), why) for item, text in self.waits(active).items()}
        return QueueSnapshot(
            tuple(item for item in items if item.id not in ended),
            waits,
            tuple(run for run in active if run.id not in queued),
            attended,
        )

    def active(self) -> list[RunRecord]:
        """The runs that have not ended."""
        return [run for run in self._runs.all() if not run.state.ended]

    def waits(self, active: Iterable[RunRecord]) -> dict[int, str]:
        """Item that waits → for what; "" when it may start."""
        items, used = self._files.read().items, dict[str, str]()
        for run in active:
            used |= dict.fromkeys(self._machines(run), run.id)
        for item in items:
            if item.state == "launching":
                used |= dict.fromkeys(item.hosts.values(), f"item {item.id}")
        return waits_for(items, used, datetime.now(UTC))

    def _machines(self, run: RunRecord) -> tuple[str, ...]:
        key = f"{run.id} {len(run.excluded)}"
        if key not in self._hosts:
            with contextlib.suppress(StateError):
                nodes = read_plan(self._runs.directory(run.id).plan).without(run.excluded).config.nodes
                self._hosts[key] = tuple(host_key(node.ssh) for node in nodes)
        return self._hosts.get(key, ())

    def users(self, config: Config) -> list[str]:
        """The runs and items that use one of its machines, or are to start there before it."""
        wanted = {host_key(node.ssh) for node in config.nodes}
        runs = [run.id for run in self.active() if not wanted.isdisjoint(self._machines(run))]
        items = [item for item in self._files.read().items if item.state in ("waiting", "launching")]
        return runs + [f"item {item.id} of the queue" for item in items if not wanted.isdisjoint(item.hosts.values())]

    def add(
        self,
        configs: Sequence[Config],
        *,
        skip: Iterable[str] | Mapping[str, str] = (),
        after: datetime | None = None,
        budget_s: float | None = None,
        stop_on_failure: bool = False,
    ) -> list[QueueItem]:
        """Put runs at the end of the queue, in this order. A person has accepted what they make run. Raises InputError,
        StateError."""
        make_home(self._home)
        wishes = {"after": after, "budget_s": budget_s, "stop_on_failure": stop_on_failure}
        added = [self._put(config, {**wishes, "skip": validate_skip(skip)}) for config in configs]
        context = {"items": [item.id for item in added], "names": [item.name for item in added]}
        why = {"why": dict(skip)} if isinstance(skip, Mapping) and skip else {}
        audit_log("queue", "added", {**context, **why}, home=self._home)
        start_runner(self._home)
        return added

    def autostart(self) -> Autostart:
        """The start of the queue when this machine has been restarted, or would. Raises InputError."""
        return autostart(self._home)

    def install(self, made: Autostart) -> None:
        """Raises StateError."""
        try:
            install(made)
        finally:
            # An agent that is loaded again ends the process that it had started.
            start_runner(self._home)
        audit_log("queue", "installed", {"kind": made.kind}, home=self._home)

    def uninstall(self, made: Autostart) -> None:
        """Raises StateError."""
        uninstall(made)
        audit_log("queue", "uninstalled", {"kind": made.kind}, home=self._home)

    def _put(self, config: Config, wishes: Mapping[str, object]) -> QueueItem:
        def add(queue: Queue) -> Queue:
            number = max((item.id for item in queue.items), default=0) + 1
            hosts = {node.name: host_key(node.ssh) for node in config.nodes}
            file = str(config.file) if config.file is not None else None
            more = {"id": number, "name": config.job.name, "hosts": hosts, "file": file, "added_at": datetime.now(UTC)}
            self._files.put_config(number, config)
            return queue.added(QueueItem.model_validate({**more, **wishes}))

        return self._files.change(add).items[-1]

    def move(self, item: int, place: int) -> QueueItem:
        """To this place, from 1, among those that have not started. Raises InputError, StateError."""
        return self._files.change(lambda queue: queue.moved(item, place)).item(item)

    def hold(self, item: int) -> QueueItem:
        """Raises InputError, StateError."""
        return self._files.change(lambda queue: queue.changed(item, "held")).item(item)

    def release(self, item: int) -> QueueItem:
        """Raises InputError, StateError."""
        released = self._files.change(lambda queue: queue.changed(item, "released")).item(item)
        start_runner(self._home)
        return released

    def cancel(self, item: int) -> QueueItem:
        """Raises InputError, StateError."""
        cancelled = self._files.change(lambda queue: queue.changed(item, "cancelled")).item(item)
        self._files.config_file(item).unlink(missing_ok=True)
        audit_log("queue", "cancelled", {"item": item, "name": cancelled.name}, home=self._home)
        return cancelled


def starting_time(text: str, now: datetime | None = None) -> datetime:
    """The next time that it is "22:00" here, or "2026-12-01 22:00". Raises InputError."""
    now = (now or datetime.now(UTC)).astimezone()
    try:
        if clock := re.fullmatch(r"(\d{1,2}):(\d\d)", text.strip()):
            today = datetime.combine(now.date(), time(int(clock[1]), int(clock[2])))
            # A day of the calendar, which has 23 or 25 hours where the clocks change.
            moment = next(one for day in (0, 1) if (one := (today + timedelta(day)).astimezone()) > now)
        else:
            moment = datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError) as error:
        todo = 'give "22:00" or "2026-12-01 22:00", in the time of this machine'
        raise InputError(f"{safe_repr(text)} is no time", todo=todo) from error
    if moment <= now:
        raise InputError(f"{safe_repr(text)} has passed", why=f"it is {now:%Y-%m-%d %H:%M}")
    return moment.astimezone(UTC)
