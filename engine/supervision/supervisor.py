"""The supervisor of one run: a detached process that takes it from its plan to its end, or over from one that died.

`python -m engine.supervision.supervisor <run directory> --lock FD [--adopt]`, started by engine.supervision.spawn. It
alone writes the run's journal, its record in the store, preflight.json, the mirrors and metrics.jsonl. TERM and INT are
a request to abort; HUP is nothing to it. Exit code 0 when the run has been brought to an end, whatever that end was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import traceback
import uuid
from collections.abc import Awaitable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.config.divided import parted
from engine.errors import FlightDeckError, LaunchError, StateError
from engine.models import PreflightReport, Reason, RunState
from engine.preflight.checklist import first_failure
from engine.runs.layout import RunDir, node_root
from engine.runs.plan_file import Plan, read_plan
from engine.store.store import Store
from engine.supervision import lock
from engine.supervision.adopt import AFTERMATH_S
from engine.supervision.attempt import Attempt, plan_of
from engine.supervision.attempts import Attempts
from engine.supervision.inheritance import kill_everywhere
from engine.supervision.interruption import Aborted, until_abort
from engine.supervision.judging.verdict import Verdict
from engine.supervision.logbook import Logbook
from engine.supervision.preflight_phase import check, excluded, replan, scene_of, verdict_of, whole_plan
from engine.supervision.requests import ABORT, Request, take_requests
from engine.supervision.states import may_follow
from engine.transport.fleet import Fleet
from engine.worker import processes
from engine.worker.wire import write_atomic

_ABORTED_EARLY = Verdict(RunState.ABORTED, Reason.USER_ABORT, "stopped as asked, before anything was launched")


class Supervisor:
    """One run's supervisor."""

    def __init__(self, run_dir: RunDir, plan: Plan, logbook: Logbook, nodes: Path) -> None:
        self._run_dir = run_dir
        self._plan = plan
        self._whole = whole_plan(run_dir, plan)
        self._logbook = logbook
        self._nodes = nodes
        self._abort: Request | None = None
        self._signalled: list[Request] = []
        self._nonce = _nonce(logbook) or uuid.uuid4().hex
        self._fleet = Fleet(plan.config.nodes, _home(run_dir))
        self._unconfirmed: list[str] = []
        self._scene = scene_of(plan, self._fleet)
        self._attempts: Attempts | None = None
        self._aftermath_s = AFTERMATH_S

    def take_over(self, *, adopted: bool) -> None:
        """Write who is in charge from here on; with supervisor.json there, the launch has been accepted."""
        if self._logbook.record is None:
            self._logbook.plan(self._plan.record(), self._nonce)
            if self._plan.division is not None:
                self._logbook.append("shares", **self._plan.division.model_dump(mode="json"))
        who = {
            "pid": os.getpid(),
            "start": processes.start_time(os.getpid()) or "",
            "boot_id": processes.boot_id(),
        }
        self._logbook.append("supervisor", **who, adopted=adopted)
        write_atomic(self._run_dir.supervisor, json.dumps(who))

    def abort(self, by: str) -> None:
        """Ask for an abort, as a request would. It is noted at the next look: now a thread may be at the journal."""
        self._signalled.append(Request(ABORT, by=by))

    async def fly(self) -> None:
        """From the plan to the end."""
        await self._bring_home(self._from_the_plan())

    async def adopt(self) -> None:
        """Go on where an earlier supervisor has stopped."""
        if self._logbook.state.ended:
            await self._bring_home(self._after_the_end())
        else:
            await self._bring_home(self._from_the_journal())

    async def see_through(self, *, adopt: bool) -> None:
        """Bring the run to its end also when a fault of ours comes in between: what was launched is taken over anew
        from the journal, once; after a second fault everything of the run is killed, and that is how it ended."""
        async with self._fleet:
            try:
                await (self.adopt() if adopt else self.fly())
            except Exception as fault:
                self._stumble(fault)
                try:
                    await self.adopt()
                except Exception as again:
                    self._stumble(again)
                    await self._kill_everywhere()
                    cause = f"the supervisor failed: {type(again).__name__}: {again}"
                    if not self._logbook.state.ended:
                        self._end(Verdict(RunState.FAILED, Reason.SUPERVISOR_LOST, cause))

    async def _bring_home(self, life: Awaitable[Verdict | None]) -> None:
        """The run's end, and what is left to do after it."""
        try:
            verdict = await life
            if verdict is not None:
                self._end(verdict)
            if self._attempts is not None:
                await self._attempts.aftermath(self._aftermath_s)
        finally:
            if self._attempts is not None:
                await self._attempts.close()
                self._attempts = None
            await self._scene.close()

    def _stumble(self, fault: Exception) -> None:
        traceback.print_exception(fault, chain=False)
        # What comes next, a kill at the worst, must not depend on a journal that may be what has failed.
        with contextlib.suppress(OSError):
            self._logbook.append("note", message=f"a fault in the supervisor: {type(fault).__name__}: {fault}")
            self._logbook.reread()

    async def _kill_everywhere(self) -> None:
        planned = _last(self._logbook.entries, "attempt")
        attempt = Attempt.from_entry(planned, self._nonce) if planned else None
        plan = plan_of(attempt, self._plan, self._whole) if attempt is not None else self._plan
        nodes = plan.config.nodes
        places = attempt.places if attempt is not None else ()
        missed = await kill_everywhere(self._fleet, nodes, places, self._nonce)
        self._unconfirmed = list(missed)

    async def _from_the_plan(self) -> Verdict:
        if self._asked_to_stop() is not None:
            return _ABORTED_EARLY
        self._logbook.change(RunState.PREFLIGHT)
        try:
            failed = first_failure(await until_abort(self._check(), self._asked_to_stop))
        except Aborted:
            return _ABORTED_EARLY
        except FlightDeckError as error:
            return Verdict(RunState.FAILED, Reason.PREFLIGHT_FAILED, str(error))
        if failed is not None:
            return verdict_of(failed)
        try:
            return await self._make_attempts().fly(self._scene)
        except Aborted:
            return _ABORTED_EARLY

    async def _from_the_journal(self) -> Verdict:
        entries = _since_reopened(self._logbook.entries)
        rebooted = _last(entries, "supervisor").get("boot_id", processes.boot_id()) != processes.boot_id()
        asked = [entry for entry in entries if entry["event"] == "request" and entry.get("request") == ABORT]
        if asked:
            self._abort = Request(ABORT, now=any(entry.get("now") is True for entry in asked), by="the journal")
        planned = _last(entries, "attempt")
        if not planned and self._asked_to_stop() is not None:
            return _ABORTED_EARLY
        if not planned:
            # Nobody waits for it any more, and what was checked then is not true now: it is not launched by surprise.
            return Verdict(
                RunState.FAILED, Reason.SUPERVISOR_LOST, "its supervisor was lost before anything was launched"
            )
        return await self._make_attempts().take_up(planned, rebooted=rebooted)

    async def _after_the_end(self) -> None:
        """Go on with what an earlier supervisor had left to do for a run that has ended: nodes whose stop could not be
        proved."""
        record, planned = self._logbook.record, _last(self._logbook.entries, "attempt")
        if record is None or not record.unconfirmed or not planned:
            return
        await self._make_attempts().after_the_end(planned, record.unconfirmed)
        if record.ended_at is not None:
            self._aftermath_s -= (datetime.now(UTC) - record.ended_at).total_seconds()

    def _make_attempts(self) -> Attempts:
        self._attempts = Attempts(
            self._run_dir,
            self._plan,
            self._logbook,
            self._fleet,
            nonce=self._nonce,
            nodes=self._nodes,
            asked=self._asked_to_stop,
            whole=self._whole,
        )
        return self._attempts

    async def _check(self) -> PreflightReport:
        """The plan's preflight. Where that leaves nodes out, the plan is made again for the others, and checked again:
        their ring is another one."""
        home = _home(self._run_dir)
        while True:
            report = await check(self._run_dir, self._plan, self._scene, home)
            left_out = excluded(report)
            if not left_out:
                return report
            if parted(self._plan.config) and _last(self._logbook.entries, "attempt"):
                raise _not_without(left_out)
            self._plan = replan(self._run_dir, self._plan, left_out, home)
            why = "; ".join(dict.fromkeys(left_out.values()))
            self._logbook.append("replanned", excluded=list(left_out), why=why, world_size=len(self._plan.ranks))
            await self._scene.close()
            self._scene = scene_of(self._plan, self._fleet)

    def _asked_to_stop(self) -> Request | None:
        while self._signalled:
            self._note_request(self._signalled.pop(0))
        for request in take_requests(self._run_dir):
            self._note_request(request)
        return self._abort

    def _note_request(self, request: Request) -> None:
        self._logbook.append("request", **asdict(request))
        if request.request == ABORT and (self._abort is None or request.now):
            self._abort = request

    def _end(self, verdict: Verdict) -> None:
        fields = {key: value for key, value in asdict(verdict).items() if key != "state" and value is not None}
        if not may_follow(self._logbook.state, verdict.state):
            # Adopted while it ran, and nothing of it is left that could be watched to its end.
            self._logbook.change(RunState.FINISHING)
        figures = self._attempts.figures if self._attempts is not None else {}
        unconfirmed = self._unconfirmed or (self._attempts.unconfirmed if self._attempts is not None else [])
        self._logbook.change(verdict.state, **fields, **figures, unconfirmed=unconfirmed)


def _not_without(nodes: Mapping[str, str]) -> LaunchError:
    """Of a run that has been in the air: preflight would leave these out."""
    why = f"each node has a part of its state; {'; '.join(dict.fromkeys(nodes.values()))}"
    return LaunchError("the run cannot go on without a node", where=", ".join(nodes), why=why, todo="mend it there")


def _home(run_dir: RunDir) -> Path:
    """The state directory that the run lies in, whatever FLIGHTDECK_HOME says by now."""
    return run_dir.path.parent.parent


def _last(entries: list[dict[str, Any]], event: str) -> dict[str, Any]:
    return next((entry for entry in reversed(entries) if entry["event"] == event), {})


def _since_reopened(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What belongs to the life of the run that is going on: an abort of before it was taken up again is done with."""
    begun = max((at for at, entry in enumerate(entries) if entry["event"] == "reopened"), default=0)
    return entries[begun:]


def _nonce(logbook: Logbook) -> str | None:
    return _last(logbook.entries, "planned").get("nonce")


def reopen(logbook: Logbook) -> None:
    """Let a run that has ended begin anew, with its next attempt. Raises StateError when it has not ended."""
    if logbook.record is None or not logbook.state.ended:
        raise StateError("the run has not ended", why=f"it is {logbook.state}")
    logbook.append("reopened")
    logbook.reread()


async def _supervise(supervisor: Supervisor, *, adopt: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.abort, f"signal {number.name.removeprefix('SIG')}")
    await supervisor.see_through(adopt=adopt)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="engine.supervision.supervisor", description="Supervise one run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--lock", type=int, default=None, help="descriptor that holds the run's lock")
    parser.add_argument("--adopt", action="store_true", help="go on with what an earlier supervisor has left")
    parser.add_argument("--resume", action="store_true", help="take up a run that has ended")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run_dir = RunDir(options.run_dir.absolute())
    held = options.lock if options.lock is not None else lock.take(run_dir)
    if held is None:
        print("another supervisor of this run is there", file=sys.stderr)
        return 1
    os.set_inheritable(held, False)
    try:
        plan = read_plan(run_dir.plan)
        store = Store(_home(run_dir))
        logbook = Logbook(run_dir.journal, store.put_run, lambda: datetime.now(UTC))
        if options.resume:
            reopen(logbook)
        supervisor = Supervisor(run_dir, plan, logbook, node_root())
        supervisor.take_over(adopted=options.adopt)
    except (FlightDeckError, StateError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    asyncio.run(_supervise(supervisor, adopt=options.adopt))
    logbook.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
