"""An abort at any moment: aborted, proved, and quickly. `Run.ended` checks that no process with the nonce is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from engine.config.models import RecoveryConfig
from engine.models import CheckStatus, PreflightReport, RunState
from engine.node import processes
from engine.run.events import StopStageReached
from engine.run.supervisor_process import request_abort
from tests.faults.local_runs import DEAF, DOUBLE_FORK, SHORT_GRACES, aborted, ring, start_run


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_at_random_moments(home: Path, tmp_path: Path, seed: int) -> None:
    moment = random.Random(seed)
    run = start_run(home, tmp_path, script=ring(), recovery=RecoveryConfig(), skip=() if seed % 2 else None)
    # The moment is what is under test: from before the preflight to well into the training.
    time.sleep(moment.uniform(0.0, 3.0))
    aborted(run, now=seed % 3 == 0)


def mentioning(path: Path) -> list[str]:
    """The command lines on this machine that name `path`."""
    listed = subprocess.run(["ps", "-axww", "-o", "command="], capture_output=True, text=True, check=True).stdout
    return [command for command in listed.splitlines() if str(path) in command]


@pytest.mark.needs("ps")
def test_in_the_middle_of_preflights_all_sum(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring(), skip=(), all_sum_s=30.0)
    run.wait(lambda: any("allreduce_check" in command for command in mentioning(home)), every_s=0.1)
    aborted(run)
    assert run.record.attempts == 0
    report = PreflightReport.model_validate_json(run.dir.preflight.read_bytes())
    assert CheckStatus.RUNNING not in {report.overall_status, *(check.status for check in report.checks)}
    # Only the supervisor's own last moments may still be there.
    run.wait(lambda: mentioning(home) == [], within_s=30.0, every_s=0.1, after_end=True)


def test_twice_and_after_the_end(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring())
    run.await_output("step")
    request_abort(run.dir, by="test")
    request_abort(run.dir, by="test", now=True)
    aborted(run)
    events = run.events
    request_abort(run.dir, by="test")
    assert run.events == events


@pytest.mark.slow
def test_the_stages_are_in_the_journal_with_who_has_answered(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring(), recovery=SHORT_GRACES.model_copy(update={"stop_grace_s": 30.0}))
    run.await_output("step")
    aborted(run)
    stops = run.events_of(StopStageReached)
    assert [event.stage for event in stops] == ["asked", "stop", "verifying", "stopped"]
    assert [event.acknowledged for event in stops[1:]] == [(), (0, 1), (0, 1)]


def test_term_to_the_supervisor_is_an_abort_and_hup_is_nothing(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring())
    run.await_output("step")
    os.kill(run.supervisor, signal.SIGHUP)
    run.await_output("step 10")
    os.kill(run.supervisor, signal.SIGTERM)
    assert run.ended().state is RunState.ABORTED


@pytest.mark.slow
def test_a_suspended_rank(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring(), recovery=RecoveryConfig())
    run.await_output("step")
    os.kill(run.identity(1).trainer_pid, signal.SIGSTOP)
    aborted(run)


@pytest.mark.slow
def test_a_suspended_keeper(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring(), recovery=RecoveryConfig())
    run.await_output("step")
    os.kill(run.identity(1).keeper_pid, signal.SIGSTOP)
    aborted(run)


def test_ranks_deaf_to_hup_and_term_with_a_child_that_has_left_their_session(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=DEAF + DOUBLE_FORK + ring(), recovery=RecoveryConfig())
    run.await_output("step")
    assert len(processes.with_nonce(run.nonce)) >= 6
    aborted(run)
