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
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import FlightDeckError, LaunchError, NodeUnreachable, StateError
from engine.launch.ports import fresh_ports
from engine.models import PreflightReport, Reason, RunState
from engine.preflight.checklist import first_failure
from engine.runs.layout import LAUNCHER_SOURCE, RunDir, node_root
from engine.runs.plan_file import Plan, read_plan
from engine.store.store import Store
from engine.supervision import lock
from engine.supervision.adopt import AFTERMATH_S
from engine.supervision.attempt import Attempt, Launched, intend, launch
from engine.supervision.culprit import Verdict, judge
from engine.supervision.explanation import explained
from engine.supervision.flight import TICK_S, Flight, known_identities
from engine.supervision.inheritance import anybody_came, kill_everywhere, old_launcher
from engine.supervision.launcher_watch import LauncherWatch
from engine.supervision.links.links import Links, links_to
from engine.supervision.logbook import Logbook
from engine.supervision.preflight_phase import check, excluded, replan, scene_of, verdict_of
from engine.supervision.requests import ABORT, Request, take_requests
from engine.supervision.states import may_follow
from engine.transport.fleet import Fleet
from engine.worker import processes
from engine.worker.wire import write_atomic

_ABORTED_EARLY = Verdict(RunState.ABORTED, Reason.USER_ABORT, "stopped as asked, before anything was launched")

T = TypeVar("T")


class _Aborted(Exception):
    """An abort was asked for while something was waited for; that has been ended."""


class Supervisor:
    """One run's supervisor."""

    def __init__(self, run_dir: RunDir, plan: Plan, logbook: Logbook, nodes: Path) -> None:
        self._run_dir = run_dir
        self._plan = plan
        self._logbook = logbook
        self._nodes = nodes
        self._abort: Request | None = None
        self._signalled: list[Request] = []
        self._nonce = _nonce(logbook) or uuid.uuid4().hex
        self._figures: dict[str, Any] = {}
        self._fleet = Fleet(plan.config.nodes, _home(run_dir))
        self._unconfirmed: list[str] = []
        self._scene = scene_of(plan, self._fleet)
        self._links: Links | None = None
        self._flight: Flight | None = None
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
            if self._flight is not None:
                await self._flight.aftermath(self._aftermath_s)
        finally:
            if self._flight is not None:
                await asyncio.to_thread(self._flight.close)
                self._flight = None
            if self._links is not None:
                await self._links.close()
                self._links = None
            await self._scene.close()

    def _stumble(self, fault: Exception) -> None:
        traceback.print_exception(fault, chain=False)
        # What comes next, a kill at the worst, must not depend on a journal that may be what has failed.
        with contextlib.suppress(OSError):
            self._logbook.append("note", message=f"a fault in the supervisor: {type(fault).__name__}: {fault}")
            self._logbook.reread()

    async def _kill_everywhere(self) -> None:
        planned = _last(self._logbook.entries, "attempt")
        places = Attempt.from_entry(planned, self._nonce).places if planned else ()
        missed = await kill_everywhere(self._fleet, self._plan.config.nodes, places, self._nonce)
        self._unconfirmed = list(missed)

    async def _from_the_plan(self) -> Verdict:
        if self._asked_to_stop() is not None:
            return _ABORTED_EARLY
        self._logbook.change(RunState.PREFLIGHT)
        try:
            failed = first_failure(await self._until_abort(self._check()))
        except _Aborted:
            return _ABORTED_EARLY
        except FlightDeckError as error:
            return Verdict(RunState.FAILED, Reason.PREFLIGHT_FAILED, str(error))
        if failed is not None:
            return verdict_of(failed)
        self._logbook.change(RunState.LAUNCHING)
        try:
            attempt = await self._until_abort(self._prepare())
            launched = await self._launch(attempt)
        except _Aborted:
            return _ABORTED_EARLY
        except (LaunchError, NodeUnreachable) as error:
            return Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, str(error))
        # Not on the loop: the ranks have started, and a disk that stalls must not hold up their beats.
        launcher = await asyncio.to_thread(self._watch_on, launched, attempt)
        return await self._watch(attempt, launcher, refusals=_refusals(launched))

    async def _from_the_journal(self) -> Verdict:
        entries = self._logbook.entries
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
        attempt = Attempt.from_entry(planned, self._nonce)
        links = self._link(attempt)
        # Pids of before a restart of the machine are anybody's.
        launcher = None if rebooted else old_launcher(self._run_dir, self._logbook, attempt)
        if launcher is None and not rebooted and not await anybody_came(links):
            return Verdict(
                RunState.FAILED, Reason.SUPERVISOR_LOST, "its supervisor was lost in the middle of the launch"
            )
        return await self._watch(attempt, launcher, adopted=True, rebooted=rebooted)

    async def _after_the_end(self) -> None:
        """Go on with what an earlier supervisor had left to do for a run that has ended: nodes whose stop could not be
        proved."""
        record, planned = self._logbook.record, _last(self._logbook.entries, "attempt")
        if record is None or not record.unconfirmed or not planned:
            return
        attempt = Attempt.from_entry(planned, self._nonce)
        links = self._link(attempt)
        self._flight = await asyncio.to_thread(self._make_flight, attempt, links, None, adopted=True)
        self._flight.resume_aftermath(record.unconfirmed)
        if record.ended_at is not None:
            self._aftermath_s -= (datetime.now(UTC) - record.ended_at).total_seconds()

    async def _until_abort(self, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of `work`. Raises _Aborted when an abort is asked for; `work` has then been ended."""
        task = asyncio.create_task(work)
        while not task.done():
            if self._asked_to_stop() is not None:
                task.cancel()
                await asyncio.wait({task})
                raise _Aborted
            await asyncio.wait({task}, timeout=TICK_S)
        return task.result()

    async def _check(self) -> PreflightReport:
        """The plan's preflight. Where that leaves nodes out, the plan is made again for the others, and checked again:
        their ring is another one."""
        home = _home(self._run_dir)
        while True:
            report = await check(self._run_dir, self._plan, self._scene, home)
            left_out = excluded(report)
            if not left_out:
                return report
            self._plan = replan(self._run_dir, self._plan, left_out, home)
            why = "; ".join(dict.fromkeys(left_out.values()))
            self._logbook.append("replanned", excluded=list(left_out), why=why, world_size=len(self._plan.ranks))
            await self._scene.close()
            self._scene = scene_of(self._plan, self._fleet)

    async def _prepare(self) -> Attempt:
        """What the next attempt will be, entered in the journal before anything of it starts."""
        number = (self._logbook.record.attempts if self._logbook.record is not None else 0) + 1
        config = self._plan.config
        wiring, places = await asyncio.gather(self._scene.wiring(), self._scene.places())
        port = await fresh_ports(self._fleet, config.nodes, wiring, config.cluster.starting_port)
        attempt = intend(self._run_dir, self._plan, number, self._nonce, places, wiring, port)
        self._logbook.append("attempt", **attempt.entry())
        return attempt

    async def _launch(self, attempt: Attempt) -> Launched:
        """Start the ranks. When an abort comes in between, whatever has started by then is left to the watch."""
        # The links connect while the ranks start.
        self._link(attempt)
        try:
            return await self._until_abort(launch(self._run_dir, self._plan, attempt, self._fleet))
        except _Aborted:
            return Launched(None)

    def _watch_on(self, launched: Launched, attempt: Attempt) -> LauncherWatch | None:
        if launched.launcher is None:
            return None
        log = self._run_dir.log(LAUNCHER_SOURCE)
        launcher = LauncherWatch.of(launched.launcher, log, attempt.log_bases[LAUNCHER_SOURCE])
        self._logbook.append("launcher", pid=launcher.pid, start=launcher.start)
        return launcher

    def _link(self, attempt: Attempt) -> Links:
        """The links to the attempt's hosts, started."""
        known = known_identities(self._logbook)
        self._links = links_to(self._plan, attempt, self._fleet, self._nodes, known)
        self._links.start()
        return self._links

    async def _watch(
        self,
        attempt: Attempt,
        launcher: LauncherWatch | None,
        *,
        refusals: Mapping[int, tuple[int, str]] | None = None,
        adopted: bool = False,
        rebooted: bool = False,
    ) -> Verdict:
        assert self._links is not None
        # Not on the loop: the indices of a week of logs may want mending, and the ranks want their beats.
        flight = self._flight = await asyncio.to_thread(
            self._make_flight, attempt, self._links, launcher, refusals=refusals, adopted=adopted, rebooted=rebooted
        )
        evidence = await flight.watch(self._asked_to_stop)
        self._figures = flight.intake.latest
        self._unconfirmed = flight.unconfirmed
        environment = {**os.environ, **self._plan.config.job.env}
        return await asyncio.to_thread(
            explained, judge(evidence), evidence, self._run_dir, attempt.log_bases, environment
        )

    def _make_flight(
        self,
        attempt: Attempt,
        links: Links,
        launcher: LauncherWatch | None,
        *,
        refusals: Mapping[int, tuple[int, str]] | None = None,
        adopted: bool = False,
        rebooted: bool = False,
    ) -> Flight:
        return Flight(
            self._run_dir,
            self._plan,
            attempt,
            links=links,
            launcher=launcher,
            logbook=self._logbook,
            refusals=refusals,
            adopted=adopted,
            rebooted=rebooted,
        )

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
        self._logbook.change(verdict.state, **fields, **self._figures, unconfirmed=self._unconfirmed)


def _refusals(launched: Launched) -> dict[int, tuple[int, str]]:
    """The ranks that did not start, where nobody else tells of them → (exit code, words)."""
    unknown = 255
    return {each.rank: (unknown if each.code is None else each.code, each.words) for each in launched.failures}


def _home(run_dir: RunDir) -> Path:
    """The state directory that the run lies in, whatever FLIGHTDECK_HOME says by now."""
    return run_dir.path.parent.parent


def _last(entries: list[dict[str, Any]], event: str) -> dict[str, Any]:
    return next((entry for entry in reversed(entries) if entry["event"] == event), {})


def _nonce(logbook: Logbook) -> str | None:
    return _last(logbook.entries, "planned").get("nonce")


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
