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
from collections.abc import Iterable
from pathlib import Path

from engine.cluster.bundle import node_bundle
from engine.cluster.transport.fleet import Fleet
from engine.errors import FlightDeckError, StateError
from engine.models import Reason, RunState
from engine.node import processes
from engine.node.bootstrap import node_root
from engine.protocol.attempt import write_atomic
from engine.run import events
from engine.run.attempt import keep_secrets
from engine.run.driver import LiveRun
from engine.run.journal import FOLLOWERS, RunRecorder
from engine.run.run_context import RunContext
from engine.run.run_plan import read_plan_and_damage, write_plan
from engine.run.shutdown import kill_everywhere
from engine.run.step import begin
from engine.run.supervisor_process import read_requests
from engine.store.layout import RunDir
from engine.store.store import Store


def take_charge(run: RunContext, *, adopted: bool) -> None:
    """Record who supervises from here on; with supervisor.json there, the launch has been accepted."""
    pid, boot_id = os.getpid(), processes.boot_id()
    who = events.SupervisorStarted(pid=pid, start=processes.known_start(pid), boot_id=boot_id, adopted=adopted)
    run.recorder.append(who)
    write_atomic(run.run_dir.supervisor, who.model_dump_json(include={"pid", "start", "boot_id"}))


def reopen(recorder: RunRecorder, **wishes: bool) -> None:
    """Let a run that has ended go on, with the `wishes` of RunReopened. Raises StateError when it has not ended."""
    if not recorder.state.ended:
        raise StateError("the run has not ended", why=f"it is {recorder.state}")
    recorder.append(events.RunReopened.model_validate(wishes))


async def supervise(run: RunContext, *, adopt: bool, aborted_by: Iterable[signal.Signals] = ()) -> None:
    """Take the run to its end, also when a fault of ours comes in between: what was launched is then adopted from
    the journal, once; after a second fault everything of the run is killed, and that is how it ended."""
    live, loop = LiveRun(run), asyncio.get_running_loop()
    for number in aborted_by:
        loop.add_signal_handler(number, live.request_abort, f"signal {number.name.removeprefix('SIG')}")
    async with run.fleet:
        live.start()
        try:
            for adopting in (adopt, True):
                if (fault := await _drive(run, live, adopting=adopting)) is None:
                    break
            else:
                await _end_by_fault(run, f"the supervisor failed: {fault}")
        finally:
            await live.close()
    if run.recorder.state is not RunState.COMPLETED:
        # Nothing comes any more that has to be redacted.
        with contextlib.suppress(OSError):
            run.run_dir.secrets.unlink(missing_ok=True)


async def _drive(run: RunContext, live: LiveRun, *, adopting: bool) -> str | None:
    """To the run's end, or to a fault of ours, which is returned."""
    try:
        await live.drive(begin(run.whole_plan, run.history, run.run_dir.newest_attempt(), adopting=adopting))
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
        traceback.print_exception(error, chain=False)
        # What comes next, a kill at the worst, must not depend on a journal that may be what has failed.
        with contextlib.suppress(OSError):
            run.recorder.append(events.Note(message=f"a fault in the supervisor: {fault}"))
        await live.let_go()
        return fault
    return None


async def _end_by_fault(run: RunContext, cause: str) -> None:
    last, recorder = run.history.last_attempt, run.recorder
    plan = run.plan_on(last.plan.nodes) if last is not None else run.plan
    layouts = last.plan.layouts if last is not None else ()
    unconfirmed = await kill_everywhere(run.fleet, plan.config.nodes, layouts, run.history.nonce)
    if not recorder.state.ended:
        if RunState.FAILED not in FOLLOWERS[recorder.state]:
            recorder.append(events.StateChanged(state=RunState.FINISHING))
        verdict = events.Verdict(RunState.FAILED, Reason.SUPERVISOR_LOST, cause)
        recorder.append(events.StateChanged(state=verdict.state, verdict=verdict, unconfirmed=unconfirmed))


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
        keep_secrets(run_dir, os.environ, adopted=options.adopt, named=plan.config.notify.variables)
        recorder = RunRecorder(run_dir.journal, plan, Store(run_dir.home).put_run)
        if damage is not None:
            write_plan(run_dir.plan, plan)
            recorder.append(events.Note(message=damage))
        if options.resume is not None:
            for path, _ in read_requests(run_dir):
                # Of the life that has ended.
                path.unlink(missing_ok=True)
            reopen(recorder, **dict.fromkeys(options.resume, True))
        run = RunContext(run_dir, plan, recorder, Fleet(run_dir.home), node_root())
        take_charge(run, adopted=options.adopt)
    except (FlightDeckError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    # Also where no rank runs on this machine, whose keeper would do the same.
    print(f"sleep prevented: {processes.stay_awake(os.getpid(), '-i')}", flush=True)
    asyncio.run(supervise(run, adopt=options.adopt, aborted_by=(signal.SIGTERM, signal.SIGINT)))
    recorder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
