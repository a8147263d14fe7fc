"""Has the items of a home's queue started: `python -m engine.api.queue_runner HOME`, one per home for as long as there
are any. What it has decided is in the queue's files, so that another one goes on after its death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.api.engine import Engine
from engine.api.launches import run_id
from engine.cluster.agent_client import value_of
from engine.cluster.probe_results import OccupiedReport
from engine.config.models import Config
from engine.errors import FlightDeckError, InputError, NodesInUse, NodeUnreachable, StateError
from engine.models import RunState
from engine.node.processes import stay_awake
from engine.notify.channels import queue_empty
from engine.protocol.attempt import write_atomic
from engine.queue.items import Queue, QueueItem
from engine.queue.queue_files import QueueFiles
from engine.queue.runner_process import runner_alive, take_charge
from engine.run.run_plan import read_plan
from engine.run.supervisor_process import start_supervisor
from engine.run.watch import supervisor_alive
from engine.store.storage import try_lock

_POLL_S = 1.0
_RETRY_S = 15.0
_ADOPT_S = 20.0
"""Between two looks for runs that have lost their supervisor."""
_PROBE_S = 20.0
_TRIES = 5
"""Launches of an item that fail, before it has failed."""
_AWAY_S = 600.0
"""A node that does not answer for longer is left to preflight, which says so and ends the item."""


class QueueRunner:
    def __init__(self, home: Path) -> None:
        self._engine = Engine(home)
        self._files = QueueFiles(home)
        self._notes: dict[int, str] = {}
        self._noted = ""
        self._not_before: dict[int, float] = {}
        """Item → when it is tried again."""
        self._tries: dict[int, int] = {}
        self._away_since: dict[int, float] = {}
        self._adopted_at = float("-inf")
        self._emptied = False

    async def run(self) -> None:
        """To the queue's end. Neither a full disk, also at its start, nor an item that is broken ends it."""
        in_charge = False
        async with self._engine:
            while True:
                pause = _POLL_S
                try:
                    if not in_charge:
                        take_charge(self._files)
                        in_charge = True
                    if not (in_charge := await self._turn()):
                        await asyncio.to_thread(self._tell_empty)
                        return
                except Exception as error:
                    pause = _RETRY_S
                    with contextlib.suppress(OSError):
                        traceback.print_exception(error, limit=-5, chain=False)
                await asyncio.sleep(pause)

    async def _turn(self) -> bool:
        """False when nothing is left to start or to wait for."""
        if time.monotonic() - self._adopted_at > _ADOPT_S:
            self._adopted_at = time.monotonic()
            await asyncio.to_thread(self._engine.runs.adopt_orphans)
        for item in (await asyncio.to_thread(self._files.read)).items:
            if item.state in ("launching", "started"):
                await self._trying(item, self._follow)
        active = await asyncio.to_thread(self._engine.queue.active)
        waits = await asyncio.to_thread(self._engine.queue.waits, active)
        queue = await asyncio.to_thread(self._files.read)
        for item in queue.items:
            if item.state == "waiting" and waits.get(item.id) == "":
                await self._trying(item, self._start)
        await asyncio.to_thread(self._write_notes)
        return any(item.open for item in queue.items) or not await asyncio.to_thread(self._leave)

    async def _trying(self, item: QueueItem, step: Callable[[QueueItem], Awaitable[None]]) -> None:
        """A step of one item, the failure of which touches no other."""
        if time.monotonic() < self._not_before.get(item.id, 0.0):
            return
        self._notes.pop(item.id, None)
        try:
            await step(item)
        except (NodesInUse, NodeUnreachable) as error:
            self._wait(item, str(error))
        except Exception as error:
            tries = self._tries[item.id] = self._tries.get(item.id, 0) + 1
            self._wait(item, str(error) or type(error).__name__)
            # A full disk, for example, is waited for.
            final = isinstance(error, InputError) or (tries >= _TRIES and not isinstance(error, StateError | OSError))
            if final and item.state != "started":
                self._change(item, "ended", outcome=RunState.FAILED, why=self._notes.pop(item.id))
                self._files.config_file(item.id).unlink(missing_ok=True)

    def _wait(self, item: QueueItem, why: str) -> None:
        self._notes[item.id] = why
        self._not_before[item.id] = time.monotonic() + _RETRY_S

    def _change(self, item: QueueItem, change: str, **fields: Any) -> None:
        self._files.change(lambda queue: queue.changed(item.id, change, **fields))

    def _write_notes(self) -> None:
        if (notes := json.dumps(self._notes)) != self._noted:
            with contextlib.suppress(OSError):
                write_atomic(self._files.notes, notes)
                self._noted = notes

    async def _start(self, item: QueueItem) -> None:
        config = self._files.config(item.id)
        if config is None:
            raise StateError("its configuration is gone", where=str(self._files.config_file(item.id)))
        if (why := await self._occupied(item, config)) is not None:
            self._wait(item, why)
            return
        run = run_id(config.job.name, datetime.now(UTC))

        def launch(queue: Queue) -> Queue:
            # A person may have held or cancelled it meanwhile.
            waits = queue.item(item.id).state == "waiting"
            return queue.changed(item.id, "launching", run=run) if waits else queue

        begun = (await asyncio.to_thread(self._files.change, launch)).item(item.id)
        if begun.state == "launching":
            await self._follow(begun)

    async def _occupied(self, item: QueueItem, config: Config) -> str | None:
        """Which of the other machines has processes of a run of another head, or has not told."""
        for node in {node.ssh: node for node in config.nodes if not node.local}.values():
            agent = self._engine.fleet.agent(node)
            try:
                answer = await agent.probe("occupied", result_type=OccupiedReport, timeout_s=_PROBE_S)
                report = value_of(answer, node)
            except FlightDeckError as error:
                since = self._away_since.setdefault(item.id, time.monotonic())
                if time.monotonic() - since > _AWAY_S:
                    return None
                return f"{node.name} has not told if it is free: {error}"
            if report.nonces:
                return f"a run of another Flight Deck on {node.name}"
        self._away_since.pop(item.id, None)
        return None

    async def _follow(self, item: QueueItem) -> None:
        """An item for which a run was begun, perhaps by an earlier process: whatever of it is there is not made
        again."""
        assert item.run is not None
        directory = self._engine.runs.directory(item.run)
        if item.state == "started":
            await asyncio.to_thread(self._follow_run, item, item.run)
            return
        if not directory.plan.exists():
            config = self._files.config(item.id)
            if config is None:
                self._change(item, "ended", why="its run was deleted")
                return
            make = self._engine.launches.make
            await asyncio.to_thread(make, config, item.skip, run_id=item.run, budget_s=item.budget_s, unattended=True)
        # Before anything starts: from here on, a run that is not there was deleted.
        self._files.config_file(item.id).unlink(missing_ok=True)
        if not directory.journal.exists() and not supervisor_alive(directory):
            await asyncio.to_thread(start_supervisor, directory)
        await asyncio.to_thread(self._change, item, "started")

    def _follow_run(self, item: QueueItem, run: str) -> None:
        if not self._engine.runs.directory(run).path.exists():
            self._change(item, "ended", why="its run was deleted")
        elif (record := self._engine.runs.record(run)).state.ended:
            self._change(item, "ended", outcome=record.state, reason=record.reason)

    def _leave(self) -> bool:
        """Recorded together with the end of this process, so that whoever adds an item meanwhile starts another. Where
        that cannot be written, the process is still in charge."""
        left = False

        def leave(queue: Queue) -> Queue:
            nonlocal left
            left = not any(item.open for item in queue.items)
            held = any(item.state == "held" for item in queue.items)
            self._emptied = left and not held and not queue.told_empty
            return queue.model_copy(update={"told_empty": True}) if self._emptied else queue

        def give_up_charge() -> None:
            if left:
                self._files.runner.unlink(missing_ok=True)

        self._files.change(leave, give_up_charge)
        return left

    def _tell_empty(self) -> None:
        """As the configuration of the newest run that has not been deleted wants it."""
        runs = [item.run for item in self._files.read().items if item.run is not None] if self._emptied else []
        for run in sorted(runs, reverse=True):
            with contextlib.suppress(StateError):
                queue_empty(self._engine.home, read_plan(self._engine.runs.directory(run).plan).config)
                return


def _lock(files: QueueFiles) -> int | None:
    """None where another process has the queue: one that has recorded its end is waited for."""
    for _ in range(1200):
        if (held := try_lock(files.runner_lock)) is not None:
            return held
        if runner_alive(files.folder.parent):
            break
        time.sleep(0.05)
    return None


def main(arguments: list[str] | None = None) -> int:
    (home,) = arguments or sys.argv[1:]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    files = QueueFiles(Path(home))
    if not files.items.exists() or (held := _lock(files)) is None:
        return 0
    with os.fdopen(held):
        stay_awake(os.getpid(), "-i")
        asyncio.run(QueueRunner(Path(home)).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
