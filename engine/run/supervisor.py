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
import signal
import sys
import traceback
from pathlib import Path

from engine.cluster.bundle import node_bundle
from engine.cluster.transport.fleet import Fleet
from engine.errors import FlightDeckError, StateError
from engine.models import Reason, RunState
from engine.node import processes
from engine.protocol.attempt import write_atomic
from engine.run import events
from engine.run.attempt import keep_secrets
from engine.run.driver import drive
from engine.run.journal import FOLLOWERS, RunRecorder
from engine.run.performer import LiveRun
from engine.run.run_context import RunContext
from engine.run.run_plan import RunPlan, read_plan_and_damage, write_plan
from engine.run.shutdown import kill_everywhere
from engine.run.step import begin
from engine.run.supervisor_process import read_requests
from engine.store.layout import RunDir, node_root
from engine.store.store import Store


class Supervisor:
    def __init__(self, run_dir: RunDir, plan: RunPlan, recorder: RunRecorder, nodes: Path) -> None:
        """`nodes` is this machine's own node root."""
        self._run = RunContext(run_dir, plan, recorder, Fleet(run_dir.home), nodes)
        self._recorder = recorder
        self._live = LiveRun(self._run)

    def take_charge(self, *, adopted: bool) -> None:
        """Record who supervises from here on; with supervisor.json there, the launch has been accepted."""
        pid, boot_id = os.getpid(), processes.boot_id()
        who = events.SupervisorStarted(pid=pid, start=processes.known_start(pid), boot_id=boot_id, adopted=adopted)
        self._recorder.append(who)
        write_atomic(self._run.run_dir.supervisor, who.model_dump_json(include={"pid", "start", "boot_id"}))

    def abort(self, by: str) -> None:
        """Request an abort from a signal handler."""
        self._live.request_abort(by)

    async def supervise(self, *, adopt: bool) -> None:
        """Take the run to its end, also when a fault of ours comes in between: what was launched is then adopted from
        the journal, once; after a second fault everything of the run is killed, and that is how it ended."""
        async with self._run.fleet:
            self._live.start()
            try:
                await self._supervise_twice(adopt=adopt)
            finally:
                await self._live.close()
        if self._recorder.state is not RunState.COMPLETED:
            # Nothing comes any more that has to be redacted.
            with contextlib.suppress(OSError):
                self._run.run_dir.secrets.unlink(missing_ok=True)

    async def _supervise_twice(self, *, adopt: bool) -> None:
        run = self._run
        for adopting in (adopt, True):
            state = begin(run.whole_plan, self._recorder.history, run.run_dir.newest_attempt(), adopting=adopting)
            try:
                await drive(state, self._live)
                return
            except Exception as fault:
                self._record_fault(fault)
                cause = f"the supervisor failed: {type(fault).__name__}: {fault}"
                await self._live.let_go()
        unconfirmed = await self._kill_everywhere()
        if not self._recorder.state.ended:
            if RunState.FAILED not in FOLLOWERS[self._recorder.state]:
                self._recorder.change(RunState.FINISHING)
            verdict = events.Verdict(RunState.FAILED, Reason.SUPERVISOR_LOST, cause)
            self._recorder.change(verdict.state, verdict, unconfirmed=unconfirmed)

    def _record_fault(self, fault: Exception) -> None:
        traceback.print_exception(fault, chain=False)
        # What comes next, a kill at the worst, must not depend on a journal that may be what has failed.
        with contextlib.suppress(OSError):
            self._recorder.append(events.Note(message=f"a fault in the supervisor: {type(fault).__name__}: {fault}"))

    async def _kill_everywhere(self) -> tuple[str, ...]:
        """The nodes on which that has failed."""
        run, last = self._run, self._recorder.history.last_attempt
        plan = run.plan_on(last.plan.nodes) if last is not None else run.plan
        layouts = last.plan.layouts if last is not None else ()
        return await kill_everywhere(run.fleet, plan.config.nodes, layouts, self._recorder.history.nonce)


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
            for path, _ in read_requests(run_dir):
                # Of the life that has ended.
                path.unlink(missing_ok=True)
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
