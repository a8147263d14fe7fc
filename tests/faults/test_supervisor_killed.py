"""kill -9 of the supervisor: the run goes on, is adopted once, and nothing of its output is lost or doubled."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from engine.errors import LaunchError
from engine.models import Reason, RunState
from engine.node import processes
from engine.protocol.attempt import write_atomic
from engine.run import supervisor_process
from engine.run.events import Event, LauncherStarted, RankLaunched, RequestReceived
from engine.run.journal import Journal
from engine.run.run_plan import copy_of
from engine.run.supervisor_process import adopt_orphans, orphans, request_abort
from tests.faults.local_runs import SHORT_GRACES, Run, kill_and_await, plan_run, ring, start_run


def test_the_run_is_adopted_once_and_succeeds(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring())
    run.await_output("step")
    assert orphans(home) == []
    kill_and_await(run.supervisor)
    assert adopt_orphans(home) == [run.dir.id]
    assert adopt_orphans(home) == []
    with pytest.raises(LaunchError, match="already has a supervisor"):
        supervisor_process.start_supervisor(run.dir, "--adopt")
    run.finish()
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 1), run.troubles()
    started = [event.rank for event in run.events_of(RankLaunched)]
    assert sorted(started) == [0, 1]


def test_an_unobserved_end_gets_its_verdict_from_the_exit_records(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring("if rank == 1 and step == 20: raise ValueError('unseen')"))
    run.await_output("step")
    kill_and_await(run.supervisor)
    run.wait(lambda: run.files.exit(0).exists() and run.files.exit(1).exists())
    adopt_orphans(home)
    record = run.ended()
    assert (record.state, record.reason, record.rank) == (RunState.FAILED, Reason.RANK_FAILED, 1)
    assert record.cause == "exited with code 1: ValueError: unseen"


def test_an_abort_without_a_supervisor_is_done_by_the_next(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring())
    run.await_output("step")
    kill_and_await(run.supervisor)
    request_abort(run.dir, by="test")
    adopt_orphans(home)
    assert run.ended().state is RunState.ABORTED


@pytest.mark.slow
def test_an_abort_that_the_dead_one_had_noted_is_done_by_the_next(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring())
    run.await_output("step")
    kill_and_await(run.supervisor)
    note(run, RequestReceived(request="abort", by="test"))
    adopt_orphans(home)
    assert run.ended().state is RunState.ABORTED


def test_a_run_of_which_nothing_is_left_is_reported(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring())
    run.await_state(RunState.RUNNING)
    kill_and_await(run.supervisor)
    end_all(run)
    shutil.rmtree(run.files.directory)
    without_launcher = [line for line in run.dir.journal.read_text().splitlines(True) if '"launcher"' not in line]
    run.dir.journal.write_text("".join(without_launcher))
    adopt_orphans(home)
    run.wait(lambda: run.record.state.ended)
    assert (run.record.state, run.record.reason) == (RunState.FAILED, Reason.SUPERVISOR_LOST)


def test_a_run_from_before_a_restart_of_the_machine_is_lost_and_its_pids_are_nobodys(
    home: Path, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    run = start_run(home, tmp_path, script=ring())
    run.await_state(RunState.RUNNING)
    kill_and_await(run.supervisor)
    end_all(run)
    for rank in (0, 1):
        # As a power cut leaves it.
        run.files.exit(rank).unlink(missing_ok=True)
        identity = run.identity(rank)
        write_atomic(run.files.identity(rank), json.dumps(asdict(replace(identity, boot_id="another boot"))))
    run.dir.journal.write_text(run.dir.journal.read_text().replace(processes.boot_id(), "another boot"))
    note(run, LauncherStarted(pid=bystander.pid, start=processes.start_time(bystander.pid) or ""))
    adopt_orphans(home)
    run.wait(lambda: run.record.state.ended)
    assert (run.record.state, run.record.reason) == (RunState.LOST, Reason.SUPERVISOR_LOST)
    assert bystander.poll() is None


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody else's that leads its group."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def note(run: Run, event: Event) -> None:
    """The last event of a dead supervisor."""
    journal = Journal(run.dir.journal)
    journal.append(event)
    journal.close()


def end_all(run: Run) -> None:
    """Every process of the run, as a power cut does."""
    while left := processes.with_nonce(run.nonce):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_an_abort_that_comes_after_the_last_rank_changes_nothing(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring())
    run.await_output("step")
    kill_and_await(run.supervisor)
    run.finish()
    run.wait(lambda: run.files.exit(0).exists() and run.files.exit(1).exists())
    request_abort(run.dir, by="test")
    adopt_orphans(home)
    assert run.ended().state is RunState.SUCCEEDED


def test_without_a_supervisor_the_lease_ends_the_ranks(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring(), recovery=SHORT_GRACES.model_copy(update={"lease_s": 8.0}))
    run.await_output("step")
    kill_and_await(run.supervisor)
    run.wait(lambda: run.files.exit(0).exists() and run.files.exit(1).exists())
    adopt_orphans(home)
    record = run.ended()
    assert (record.state, record.reason) == (RunState.FAILED, Reason.SUPERVISOR_LOST)
    assert record.cause is not None and "lease" in record.cause


def test_a_plan_whose_supervisor_never_came_is_reported_and_not_launched(home: Path, tmp_path: Path) -> None:
    run = plan_run(home, tmp_path, script=ring())
    assert orphans(home) == [], "its launch may be under way"
    supervisor_process.start_supervisor(run.dir, "--adopt")
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.FAILED, Reason.SUPERVISOR_LOST, 0)


def test_a_plan_that_cannot_be_read_is_a_launch_error(home: Path, tmp_path: Path) -> None:
    run = plan_run(home, tmp_path, script=ring())
    for path in (run.dir.plan, copy_of(run.dir.plan)):
        path.write_text("{")
    with pytest.raises(LaunchError, match="the plan is not valid"):
        supervisor_process.start_supervisor(run.dir)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_at_random_moments(home: Path, tmp_path: Path, seed: int) -> None:
    """Whenever the supervisor dies: what was launched is adopted and finished by the next, what was not is reported."""
    moment = random.Random(seed)
    run = start_run(home, tmp_path, script=ring())
    time.sleep(moment.uniform(0.0, 3.0))
    kill_and_await(run.supervisor)
    adopt_orphans(home)
    run.finish()
    record = run.ended()
    launched = bool([*run.events_of(LauncherStarted), *run.events_of(RankLaunched)])
    expected = (RunState.SUCCEEDED, Reason.COMPLETED) if launched else (RunState.FAILED, Reason.SUPERVISOR_LOST)
    assert (record.state, record.reason) == expected, run.troubles()
