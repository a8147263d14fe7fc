"""The supervisor of one run: a detached process that takes it from its plan to its end, or adopts it from a dead one.

`python -m engine.run.supervisor <run directory> --lock FD [--adopt | --resume [accept_changed_data] [without_state]]`,
started by engine.run.supervisor_process. It alone writes the run's journal, its record in the store, preflight.json,
the mirrors and metrics.jsonl. TERM and INT request an abort; HUP is ignored. Exit code 0 when the run has been brought
to an end, whatever that end was."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from engine.cluster.bundle import node_bundle
from engine.cluster.transport.fleet import Fleet
from engine.config.models import needs_all_nodes
from engine.errors import FlightDeckError, LaunchError, StateError
from engine.models import CheckStatus, PreflightReport, Reason, RunState
from engine.node import processes
from engine.protocol.attempt import write_atomic
from engine.run import events
from engine.run.attempt import keep_secrets, next_attempt
from engine.run.attempt_monitor import TICK_S
from engine.run.attempt_runner import Aborted, AttemptRunner, RunContext, until_abort
from engine.run.decide import Finish, Restart, Wait, decide, failed_run, original_failure, refusal
from engine.run.history import RunHistory
from engine.run.journal import FOLLOWERS, RunRecorder
from engine.run.preflight import excluded_nodes, preflight_context, preflight_verdict, replan, run_preflight
from engine.run.run_plan import RunPlan, read_plan_and_damage, write_plan
from engine.run.shutdown import kill_everywhere
from engine.run.supervisor_process import AFTERMATH_S, take_requests
from engine.run.tracker_process import RunTrackers
from engine.store.layout import RunDir, node_root
from engine.store.store import Store

_SHORT_AFTERMATH_S = 30.0
"""For a run that has waited for its nodes before."""
_RESUME = "`flightdeck resume` goes on from the newest state that the nodes have"
_ABORTED_EARLY = events.Verdict(
    RunState.ABORTED, Reason.USER_ABORT, "stopped as requested, before anything was launched"
)


class Supervisor:
    def __init__(self, run_dir: RunDir, plan: RunPlan, recorder: RunRecorder, nodes: Path) -> None:
        """`nodes` is this machine's own node root."""
        fleet = Fleet(run_dir.home)
        self._run = RunContext(run_dir, plan, recorder, fleet, nodes)
        self._recorder = recorder
        self._signals: list[events.RequestReceived] = []
        self._checks = preflight_context(self._run.plan, fleet)
        self._runner = AttemptRunner(self._run, self._requested_abort)
        self._trackers = RunTrackers(run_dir, plan.config.job)
        self._rng = random.Random()
        self._unconfirmed: tuple[str, ...] = ()
        """Nodes on which the kill of everything has failed."""
        self._aftermath_s = AFTERMATH_S

    @property
    def _history(self) -> RunHistory:
        return self._recorder.history

    def take_charge(self, *, adopted: bool) -> None:
        """Record who supervises from here on; with supervisor.json there, the launch has been accepted."""
        pid, boot_id = os.getpid(), processes.boot_id()
        who = events.SupervisorStarted(pid=pid, start=processes.known_start(pid), boot_id=boot_id, adopted=adopted)
        self._recorder.append(who)
        write_atomic(self._run.run_dir.supervisor, who.model_dump_json(include={"pid", "start", "boot_id"}))

    def abort(self, by: str) -> None:
        """Request an abort from a signal handler. It is recorded later: another thread may be at the journal now."""
        self._signals.append(events.RequestReceived(request="abort", by=by))

    async def supervise(self, *, adopt: bool) -> None:
        """Take the run to its end, also when a fault of ours comes in between: what was launched is then adopted from
        the journal, once; after a second fault everything of the run is killed, and that is how it ended."""
        async with self._run.fleet:
            reading = asyncio.create_task(self._run.clock.run(), name="clock")
            try:
                await self._supervise_twice(adopt=adopt)
            finally:
                reading.cancel()
                await asyncio.wait({reading})
                await asyncio.to_thread(self._trackers.close)
                self._record_trackers()
        if self._recorder.state is not RunState.COMPLETED:
            # Nothing comes any more that has to be redacted.
            with contextlib.suppress(OSError):
                self._run.run_dir.secrets.unlink(missing_ok=True)

    async def _supervise_twice(self, *, adopt: bool) -> None:
        for adopting in (adopt, True):
            try:
                await self._supervise(adopt=adopting)
                return
            except Exception as fault:
                self._record_fault(fault)
                cause = f"the supervisor failed: {type(fault).__name__}: {fault}"
        await self._kill_everywhere()
        if not self._recorder.state.ended:
            self._record_end(events.Verdict(RunState.FAILED, Reason.SUPERVISOR_LOST, cause))

    async def _supervise(self, *, adopt: bool) -> None:
        """From the plan, or from where an earlier supervisor stopped, to the run's end and what is left to do then."""
        try:
            if self._recorder.state.ended:
                await self._prove_end()
            else:
                self._trackers.start()
                self._record_end(await self._run_attempts(adopt=adopt))
            await self._runner.confirm_all(self._aftermath_s)
            await self._correct_end()
        finally:
            await self._runner.close()
            await self._checks.close()

    async def _run_attempts(self, *, adopt: bool) -> events.Verdict:
        """One attempt after the other, for as long as `decide` restarts: the run's verdict."""
        try:
            verdict = await (self._adopt() if adopt else self._launch())
        except Aborted:
            return _ABORTED_EARLY
        try:
            # Without a recorded failure there is nothing to restart from: an adopted launch that never got going.
            while verdict.state is RunState.FAILED and self._history.failures:
                recovering = self._recorder.state is RunState.RECOVERING
                decision = await self._decide() if recovering else refusal(failed_run(self._run.plan, self._history))
                if isinstance(decision, events.Verdict):
                    return decision
                if not isinstance(decision, Restart):
                    return self._refuse_restart(decision) if decision is not None else verdict
                verdict = await self._restart(decision)
            return verdict
        except Aborted:
            return await self._runner.abort_recovery()

    async def _launch(self) -> events.Verdict:
        """Preflight and the first attempt. Raises Aborted before anything has started."""
        if self._requested_abort() is not None:
            raise Aborted
        self._recorder.change(RunState.PREFLIGHT)
        try:
            report = await until_abort(self._check(), self._requested_abort)
        except FlightDeckError as error:
            return events.Verdict(RunState.FAILED, Reason.PREFLIGHT_FAILED, str(error))
        failed = next((result for result in report.checks if result.status is CheckStatus.FAIL), None)
        return preflight_verdict(failed) if failed is not None else await self._runner.launch_first(self._checks)

    async def _adopt(self) -> events.Verdict:
        """The rest of an earlier supervisor's last attempt. Raises Aborted before anything has started."""
        if (unknown := self._run.unknown_attempt) is not None:
            # Nothing of it can be watched: it must not train on unseen.
            if (known := await self._runner.end_unknown()) is not None:
                return known
            cause = f"{unknown}: what was left of it has been ended, and how far it came is not known"
            if self._requested_abort() is not None:
                return events.Verdict(RunState.ABORTED, Reason.USER_ABORT, cause)
            return events.Verdict(RunState.LOST, Reason.SUPERVISOR_LOST, cause, fix=_RESUME)
        attempt = self._history.last_attempt
        if attempt is not None and self._history.launched:
            return await self._runner.adopt(attempt)
        if self._requested_abort() is not None:
            raise Aborted
        # Nobody waits for it any more, and what was checked then is not true now: it is not launched by surprise.
        return events.Verdict(
            RunState.FAILED, Reason.SUPERVISOR_LOST, "its supervisor was lost before anything was launched"
        )

    async def _decide(self) -> Restart | Finish | events.Verdict:
        """Wait until it is decided what follows a failed attempt; a verdict where it has not failed, as its nodes show
        only now. Raises Aborted."""
        began, reported = self._run.clock(), None
        while True:
            await self._tick()
            known = await self._runner.reconsider()
            if known is not None and (
                known.state is RunState.SUCCEEDED or (known.state is RunState.COMPLETED and self._history.end_unseen)
            ):
                return known
            state = replace(
                failed_run(self._run.plan, self._history),
                nodes=self._runner.presence(),
                waited_s=self._run.clock() - began,
                jitter=self._rng.uniform(0.5, 1.0),
            )
            decision = decide(state)
            if not isinstance(decision, Wait):
                return decision
            if decision.why != reported:
                reported = decision.why
                self._recorder.append(events.RestartDelayed(after=state.last.attempt, why=reported))
            await asyncio.sleep(TICK_S)

    async def _restart(self, restart: Restart) -> events.Verdict:
        """The next attempt, to its end. Raises Aborted before anything of it has started."""
        planned = events.RestartPlanned(
            attempt=next_attempt(self._run.run_dir, self._history),
            after=self._history.failures[-1].attempt,
            members=restart.members,
            left_out=restart.left_out,
            delay_s=round(restart.delay_s, 3),
            why=restart.why,
        )
        self._recorder.append(planned)
        deadline = self._run.clock() + restart.delay_s
        while (left := deadline - self._run.clock()) > 0:
            await self._tick()
            await asyncio.sleep(min(TICK_S, left))
        return await self._runner.relaunch(self._run.plan_on(restart.members))

    async def _tick(self) -> None:
        """Between two attempts. Raises Aborted."""
        if self._requested_abort() is not None:
            raise Aborted
        await self._runner.confirm()

    def _refuse_restart(self, finish: Finish) -> events.Verdict:
        """The run's verdict: of the last failures the one that the others follow from."""
        failures = self._history.failures
        self._recorder.append(events.RestartRefused(after=failures[-1].attempt, why=finish.why))
        return failures[original_failure(failures)].verdict

    def _record_end(self, verdict: events.Verdict) -> None:
        if verdict.state not in FOLLOWERS[self._recorder.state]:
            # Adopted while it ran, and nothing of it is left that could be monitored to its end.
            self._recorder.change(RunState.FINISHING)
        unconfirmed = self._unconfirmed or tuple(self._runner.unconfirmed)
        self._recorder.change(verdict.state, verdict, self._runner.figures, unconfirmed)
        self._trackers.end()

    async def _prove_end(self) -> None:
        """The run has ended: go on with the nodes on which an earlier supervisor could not prove that."""
        record, attempt = self._history.record, self._history.last_attempt
        if self._run.unknown_attempt is not None:
            await self._runner.end_unknown()
            return
        # The verdict that may follow needs the ends of all ranks.
        nodes = attempt.plan.nodes if attempt is not None and self._history.end_unseen else record.unconfirmed
        if attempt is None or not (nodes or attempt.missing):
            return
        await self._runner.prove_ended(attempt, nodes)
        if record.ended_at is not None:
            age_s = (datetime.now(UTC) - record.ended_at).total_seconds()
            self._aftermath_s = max(self._aftermath_s - age_s, _SHORT_AFTERMATH_S)

    async def _correct_end(self) -> None:
        """The ends of all ranks may be known only now."""
        known = await self._runner.reconsider() if self._history.end_unseen else None
        if known is not None and known.state in FOLLOWERS[self._recorder.state]:
            self._record_end(known)

    def _record_fault(self, fault: Exception) -> None:
        traceback.print_exception(fault, chain=False)
        # What comes next, a kill at the worst, must not depend on a journal that may be what has failed.
        with contextlib.suppress(OSError):
            self._recorder.append(events.Note(message=f"a fault in the supervisor: {type(fault).__name__}: {fault}"))

    async def _kill_everywhere(self) -> None:
        last = self._history.last_attempt
        plan = self._run.plan_on(last.plan.nodes) if last is not None else self._run.plan
        layouts = last.plan.layouts if last is not None else ()
        self._unconfirmed = await kill_everywhere(self._run.fleet, plan.config.nodes, layouts, self._history.nonce)

    async def _check(self) -> PreflightReport:
        """The plan's preflight. Where it excludes nodes, the plan is made again for the others and checked again: their
        ring is another one."""
        run = self._run
        while True:
            report = await run_preflight(run.run_dir, run.plan, self._checks)
            excluded = excluded_nodes(report)
            if not excluded:
                return report
            why = "; ".join(dict.fromkeys(excluded.values()))
            if needs_all_nodes(run.plan.config) and self._history.attempts:
                raise LaunchError(
                    "the run cannot go on without a node",
                    where=", ".join(excluded),
                    why=f"each node has a part of its state; {why}",
                    todo="fix it there",
                )
            world_size = len(replan(run.run_dir, run.plan, excluded).nodes)
            self._recorder.append(events.NodesExcluded(nodes=tuple(excluded), why=why, world_size=world_size))
            await self._checks.close()
            self._checks = preflight_context(run.plan, run.fleet)

    def _record_trackers(self) -> None:
        # Their threads must not write the journal: another thread may be at it.
        for fault in self._trackers.faults():
            self._recorder.append(fault)

    def _requested_abort(self) -> events.RequestReceived | None:
        self._record_trackers()
        while self._signals:
            self._recorder.append(self._signals.pop(0))
        for request in take_requests(self._run.run_dir):
            self._recorder.append(request)
        return self._history.abort


def reopen(recorder: RunRecorder, **wishes: bool) -> None:
    """Let a run that has ended go on, with the `wishes` of RunReopened. Raises StateError when it has not ended."""
    if not recorder.state.ended:
        raise StateError("the run has not ended", why=f"it is {recorder.state}")
    recorder.append(events.RunReopened.model_validate(wishes))


async def _supervise(supervisor: Supervisor, *, adopt: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.abort, f"signal {number.name.removeprefix('SIG')}")
    await supervisor.supervise(adopt=adopt)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="engine.run.supervisor", description="Supervise one run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--lock", type=int, required=True, help="descriptor that holds the run's lock")
    parser.add_argument("--adopt", action="store_true", help="go on with what an earlier supervisor has left")
    parser.add_argument("--resume", nargs="*", metavar="WISH", help="take up a run that has ended (RunReopened)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run_dir = RunDir(options.run_dir.absolute())
    os.set_inheritable(options.lock, False)
    try:
        # An upgrade of this package must not change what the run's nodes get.
        node_bundle()
        plan, damage = read_plan_and_damage(run_dir.plan)
        keep_secrets(run_dir, os.environ, adopted=options.adopt)
        recorder = RunRecorder(run_dir.journal, plan, Store(run_dir.home).put_run)
        if damage is not None:
            write_plan(run_dir.plan, plan)
            recorder.append(events.Note(message=damage))
        if options.resume is not None:
            reopen(recorder, **dict.fromkeys(options.resume, True))
        supervisor = Supervisor(run_dir, plan, recorder, node_root())
        supervisor.take_charge(adopted=options.adopt)
    except (FlightDeckError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    # Also where no rank runs on this machine, whose keeper would do the same.
    print(f"sleep prevented: {processes.stay_awake(os.getpid(), '-i')}", flush=True)
    asyncio.run(_supervise(supervisor, adopt=options.adopt))
    recorder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
