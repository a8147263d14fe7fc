"""With strategy `local` the others go on without a rank other than rank 0, under a real supervisor: with a program that
stands in for the trainer, and knows nothing of the others; and with the trainer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from engine.checks.context import CheckContext
from engine.checks.plan_inputs import shared_plan
from engine.cluster.transport.fleet import Fleet
from engine.config.models import Config, JobConfig, RecoveryConfig
from engine.demo import demo_config
from engine.models import Reason, RunState
from engine.run.events import AttemptFailed, AttemptResumed, LauncherStarted, RankExited
from engine.store.store import Store
from tests.demo_copies import demo_below
from tests.faults.local_runs import Run, kill_and_await, start_config, start_run
from tests.faults.test_training import await_iteration, trained, with_keys
from tests.waiting import wait_until

ALONE = """
import os, time
with open(os.environ["FLIGHTDECK_EVENTS"], "a") as events: events.write('{"event": "step", "iteration": 1}\\n')
print("up", os.getpid(), os.path.getsize(os.environ["MLX_HOSTFILE"]) > 2, flush=True)
while not os.path.exists("enough"): time.sleep(0.02)
"""
LOSS = "rank 1 on right is lost: the others go on without it"


def start_local(home: Path, tmp_path: Path, **recovery: int | bool) -> Run:
    job = JobConfig(name="test", command=("python", "script.py"), strategy="local")
    limits = RecoveryConfig.model_validate({"stop_grace_s": 1.0, "term_grace_s": 0.5, **recovery})
    run = start_run(home, tmp_path, script=ALONE, job=job, recovery=limits)
    for rank in (0, 1):
        run.await_output("up", rank)
    return run


def kill_trainer(run: Run, rank: int) -> None:
    os.kill(run.identity(rank).trainer_pid, signal.SIGKILL)


def lines_up(run: Run, rank: int) -> list[str]:
    return [line for line in run.dir.log(rank).read_text().splitlines() if line.startswith("up ")]


def starts_of(run: Run, rank: int) -> int:
    return len(lines_up(run, rank))


def test_a_rank_that_is_killed_is_started_again_and_the_attempt_goes_on(home: Path, tmp_path: Path) -> None:
    run = start_local(home, tmp_path)
    kill_trainer(run, 1)
    run.wait(lambda: starts_of(run, 1) == 2)
    assert run.events_of(RankExited) == []
    run.finish()
    record = run.ended()
    assert (record.state, record.reason, record.attempts, record.cause) == (
        RunState.SUCCEEDED,
        Reason.COMPLETED,
        1,
        None,
    ), run.troubles()
    assert starts_of(run, 0) == 1
    addresses_known = [line.split()[2] for rank in (0, 1) for line in lines_up(run, rank)]
    assert addresses_known == ["True"] * 3
    assert run.events_of(LauncherStarted) == []


def test_a_rank_that_is_lost_for_good_is_noted_once_and_does_not_fail_the_run(home: Path, tmp_path: Path) -> None:
    run = start_local(home, tmp_path)
    kill_and_await(run.identity(1).keeper_pid)
    run.wait(lambda: LOSS in run.notes)
    run.finish()
    record = run.ended()
    assert (record.state, record.reason, record.unconfirmed) == (RunState.SUCCEEDED, Reason.COMPLETED, [])
    assert record.cause == "rank 1 on right did not complete: the others went on without it"
    assert run.notes.count(LOSS) == 1


def test_a_run_restarts_when_rank_0_is_lost(home: Path, tmp_path: Path) -> None:
    run = start_local(home, tmp_path, restart_commands=True)
    kill_trainer(run, 0)
    run.wait(lambda: run.record.attempts == 2 and starts_of(run, 0) == starts_of(run, 1) == 2)
    run.finish()
    assert run.ended().state is RunState.SUCCEEDED, run.troubles()
    [failed] = run.events_of(AttemptFailed)
    assert (failed.verdict.rank, failed.verdict.signal) == (0, signal.SIGKILL)
    [resumed] = run.events_of(AttemptResumed)
    wait_until(lambda: all(record.state.ended for record in Store(home).runs()))
    assert resumed.seconds is not None
    assert asyncio.run(expected_recovery_s(run)) == resumed.seconds, "in the plan of the job's next run"


async def expected_recovery_s(run: Run) -> float | None:
    async with (
        Fleet(run.dir.home) as fleet,
        CheckContext(run.plan.config, fleet) as context,
    ):
        return (await shared_plan(context)).checkpoint_strategy.expected_recovery_time


def test_an_abort_ends_a_rank_that_waits_to_be_started_again(home: Path, tmp_path: Path) -> None:
    run = start_local(home, tmp_path)
    kill_trainer(run, 1)
    run.abort()
    assert run.record.state is RunState.ABORTED


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A training of some seconds, with an averaging after every third step."""
    config = demo_config(demo_below(tmp_path_factory.mktemp("demo")), ranks=2, iters=60)
    keys = {"batch_size": 2, "max_seq_length": 64, "save_every": 1000, "val_batches": 0, "local_steps": 3}
    job = with_keys(config, **keys).job.model_copy(update={"strategy": "local"})
    return config.model_copy(update={"job": job, "recovery": RecoveryConfig()})


@pytest.mark.slow
def test_a_killed_trainer_joins_again_and_the_run_takes_one_attempt(home: Path, demo: Config) -> None:
    run = start_config(home, demo)
    await_iteration(run, 4)
    kill_trainer(run, 1)
    run.wait(lambda: "rank 1 has joined again" in run.dir.log(0).read_text())
    record = run.ended()
    assert (record.state, record.attempts, record.cause) == (RunState.SUCCEEDED, 1, None), run.troubles()
    assert trained(run) == list(range(1, 61))
    assert "completed at iteration 60" in run.dir.log(1).read_text()


@pytest.mark.slow
def test_without_rank_0_the_next_attempt_goes_on_from_what_another_saved(home: Path, demo: Config) -> None:
    run = start_config(home, demo)
    await_iteration(run, 8)
    kill_trainer(run, 0)
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()
    (resumed,) = run.events_of(AttemptResumed)
    assert (resumed.resumed.source, resumed.repeated in (0, 1)) == ("emergency", True)


@pytest.mark.slow
def test_a_rank_that_is_lost_before_the_first_update_is_the_cause_of_another_attempt(home: Path, demo: Config) -> None:
    run = start_config(home, with_keys(demo, iters=6))
    run.wait(lambda: b'"loading"' in run.dir.events(1).read_bytes() if run.dir.events(1).exists() else False)
    kill_trainer(run, 1)
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()
    [failed] = run.events_of(AttemptFailed)
    assert (failed.verdict.rank, failed.verdict.signal, failed.reached) == (1, signal.SIGKILL, 0)
