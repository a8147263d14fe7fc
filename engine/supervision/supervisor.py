"""The supervisor of one run: a detached process that takes it from its plan to its end, or over from one that died.

`python -m engine.supervision.supervisor <run directory> --lock FD [--adopt]`, started by engine.supervision.spawn. It
alone writes the run's journal, its record in the store, preflight.json, the mirrors and metrics.jsonl. TERM and INT are
a request to abort; HUP is nothing to it. Exit code 0 when the run has been brought to an end, whatever that end was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
import traceback
import uuid
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, LaunchError, StateError
from engine.launch.hostfile import as_configured, port_count
from engine.launch.ports import ring_ports
from engine.launch.staging import prepare
from engine.models import CheckResult, CheckStatus, PreflightReport, Reason, RunState
from engine.preflight.checklist import first_failure, run_checks
from engine.runs.diagnosis import explain
from engine.runs.layout import LAUNCHER_SOURCE, RunDir, node_root
from engine.runs.plan_file import Plan, read_plan
from engine.security.audit import audit_log
from engine.security.sanitise import sanitise
from engine.store.store import Store
from engine.supervision import lock
from engine.supervision.attempt import Attempt, intend, launch
from engine.supervision.culprit import Evidence, Verdict, judge
from engine.supervision.flight import TICK_S, Flight
from engine.supervision.launcher_watch import LauncherWatch
from engine.supervision.logbook import Logbook
from engine.supervision.requests import ABORT, Request, take_requests
from engine.supervision.states import may_follow
from engine.transport.local import LocalTransport
from engine.worker import processes
from engine.worker.wire import write_atomic

_ABORTED_EARLY = Verdict(RunState.ABORTED, Reason.USER_ABORT, "stopped as asked, before anything was launched")


class _Here:
    """Every node is this machine, until the supervisor has a Fleet."""

    def to(self, node: NodeConfig) -> LocalTransport:
        return LocalTransport()


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
        self._unconfirmed: list[str] = []

    def take_over(self, *, adopted: bool) -> None:
        """Write who is in charge from here on; with supervisor.json there, the launch has been accepted."""
        if self._logbook.record is None:
            self._logbook.plan(self._plan.record(), self._nonce)
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
        self._end(await self._from_the_plan())

    async def adopt(self) -> None:
        """Go on where an earlier supervisor has stopped."""
        if self._logbook.state.ended:
            return
        self._end(await self._from_the_journal())

    async def see_through(self, *, adopt: bool) -> None:
        """Bring the run to its end also when a fault of ours comes in between: what was launched is taken over anew
        from the journal, once; after a second fault everything of the run is killed, and that is how it ended."""
        try:
            await (self.adopt() if adopt else self.fly())
        except Exception as fault:
            self._stumble(fault)
            try:
                await self.adopt()
            except Exception as again:
                self._stumble(again)
                await asyncio.to_thread(processes.kill_with_nonce, self._nonce)
                cause = f"the supervisor failed: {type(again).__name__}: {again}"
                self._end(Verdict(RunState.FAILED, Reason.SUPERVISOR_LOST, cause))

    def _stumble(self, fault: Exception) -> None:
        traceback.print_exception(fault, chain=False)
        self._logbook.append("note", message=f"a fault in the supervisor: {type(fault).__name__}: {fault}")
        self._logbook.reread()

    async def _from_the_plan(self) -> Verdict:
        if self._asked_to_stop() is not None:
            return _ABORTED_EARLY
        self._logbook.change(RunState.PREFLIGHT)
        try:
            report = await self._preflight()
        except FlightDeckError as error:
            return Verdict(RunState.FAILED, Reason.PREFLIGHT_FAILED, str(error))
        if report is None:
            return _ABORTED_EARLY
        failed = first_failure(report)
        if failed is not None:
            return _failed_check(failed)
        self._logbook.change(RunState.LAUNCHING)
        if self._asked_to_stop() is not None:
            return _ABORTED_EARLY
        try:
            attempt, launcher = await self._launch()
        except LaunchError as error:
            return Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, str(error))
        return await self._watch(attempt, launcher)

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
        # Pids of before a restart of the machine are anybody's.
        launcher = None if rebooted else self._old_launcher(attempt)
        if launcher is None and not self._anybody_came(attempt):
            return Verdict(
                RunState.FAILED, Reason.SUPERVISOR_LOST, "its supervisor was lost in the middle of the launch"
            )
        return await self._watch(attempt, launcher, adopted=True, rebooted=rebooted)

    async def _preflight(self) -> PreflightReport | None:
        """Run the checks; None when an abort came in between. What they started is gone when this returns."""
        results: dict[str, CheckResult] = {}

        def keep(result: CheckResult) -> None:
            results[result.name] = result
            so_far = PreflightReport(
                checks=list(results.values()),
                overall_status=CheckStatus.RUNNING,
                overridden=list(self._plan.skip),
                finished_at=datetime.now(UTC),
            )
            _write_report(self._run_dir, so_far)

        audit = functools.partial(audit_log, home=_home(self._run_dir))
        checking = run_checks(self._plan.config, skip=self._plan.skip, on_result=keep, audit=audit)
        checks = asyncio.create_task(checking, name="preflight")
        while not checks.done():
            await asyncio.wait({checks}, timeout=TICK_S)
            if self._asked_to_stop() is not None:
                checks.cancel()
                await asyncio.wait({checks})
                _write_report(self._run_dir, _cut_short(results.values(), self._plan.skip))
                return None
        report = checks.result()
        _write_report(self._run_dir, report)
        return report

    async def _launch(self) -> tuple[Attempt, LauncherWatch]:
        number = (self._logbook.record.attempts if self._logbook.record is not None else 0) + 1
        config = self._plan.config
        wiring = as_configured(config.nodes)
        places = await prepare(_Here(), config.nodes)
        port = ring_ports(port_count(wiring), config.cluster.starting_port)
        attempt = intend(self._run_dir, self._plan, number, self._nonce, places, wiring, port)
        self._logbook.append("attempt", **attempt.entry())
        launched = await launch(self._run_dir, self._plan, attempt, _Here())
        assert launched.launcher is not None
        launcher = LauncherWatch.of(
            launched.launcher,
            self._run_dir.log(LAUNCHER_SOURCE),
            attempt.log_bases[LAUNCHER_SOURCE],
        )
        self._logbook.append("launcher", pid=launcher.pid, start=launcher.start)
        return attempt, launcher

    def _old_launcher(self, attempt: Attempt) -> LauncherWatch | None:
        """The launcher of an earlier supervisor; one whose start it had no time to enter is found by its nonce."""
        entry = _last(self._logbook.entries, "launcher")
        if not entry:
            found = [each.pid for each in processes.with_nonce(attempt.nonce) if "mlx.launch" in each.command]
            leader = next((pid for pid in found if _leads_its_group(pid)), None)
            if leader is None:
                return None
            entry = {"pid": leader, "start": processes.start_time(leader) or ""}
            self._logbook.append("launcher", **entry)
        return LauncherWatch(
            int(entry["pid"]),
            str(entry["start"]),
            self._run_dir.attempt(attempt.number) / "launcher.in",
            self._run_dir.log(LAUNCHER_SOURCE),
            attempt.log_bases[LAUNCHER_SOURCE],
        )

    def _anybody_came(self, attempt: Attempt) -> bool:
        """Whether a rank has ever started in an attempt, or is about to."""
        files = attempt.files(self._plan.run_id, 0)
        left = (files.identity(rank.rank).exists() or files.exit(rank.rank).exists() for rank in self._plan.ranks)
        return any(left) or bool(processes.with_nonce(attempt.nonce))

    async def _watch(
        self, attempt: Attempt, launcher: LauncherWatch | None, *, adopted: bool = False, rebooted: bool = False
    ) -> Verdict:
        flight = Flight(
            self._run_dir,
            self._plan,
            attempt,
            launcher=launcher,
            logbook=self._logbook,
            adopted=adopted,
            rebooted=rebooted,
        )
        evidence = await flight.watch(self._asked_to_stop)
        self._figures = flight.intake.latest
        self._unconfirmed = flight.unconfirmed
        return _with_fix(judge(evidence), evidence)

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


def _with_fix(verdict: Verdict, evidence: Evidence) -> Verdict:
    """The verdict with what is known to mend its cause, from the last words of the rank that it names."""
    if verdict.state is not RunState.FAILED or verdict.fix is not None:
        return verdict
    blamed = [rank for rank in evidence.ranks if rank.rank == verdict.rank]
    words = [word for rank in blamed for word in (rank.tail, rank.keeper_tail)] or [evidence.launcher_tail]
    lines = [sanitise(line.encode(errors="replace")) for text in words for line in text.splitlines()]
    explained = explain(lines)
    return verdict if explained is None else replace(verdict, fix=explained[1])


def _home(run_dir: RunDir) -> Path:
    """The state directory that the run lies in, whatever FLIGHTDECK_HOME says by now."""
    return run_dir.path.parent.parent


def _failed_check(failed: CheckResult) -> Verdict:
    rank, node = failed.blames if failed.blames is not None else (None, None)
    return Verdict(
        RunState.FAILED,
        Reason.PREFLIGHT_FAILED,
        f"{failed.name}: {failed.summary}",
        rank,
        node,
        fix=failed.fix_command,
    )


def _cut_short(results: Iterable[CheckResult], skip: tuple[str, ...]) -> PreflightReport:
    """The report of a preflight that an abort has ended."""
    unfinished = {"status": CheckStatus.SKIP, "summary": "not finished: the run was aborted"}
    checks = [
        result.model_copy(update=unfinished) if result.status is CheckStatus.RUNNING else result for result in results
    ]
    return PreflightReport(
        checks=checks, overall_status=CheckStatus.SKIP, overridden=list(skip), finished_at=datetime.now(UTC)
    )


def _write_report(run_dir: RunDir, report: PreflightReport) -> None:
    """For those who look; a full disk must not end the run that it tells of."""
    with contextlib.suppress(OSError):
        write_atomic(run_dir.preflight, report.model_dump_json(indent=1))


def _leads_its_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


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
