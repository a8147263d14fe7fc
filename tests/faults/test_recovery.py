"""A run goes on by itself: what a lost, hung or killed rank costs, when it is not tried again, and who may end it."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config.models import FlightConfig, RecoveryConfig
from engine.demo import demo_config
from engine.errors import InputError
from engine.models import Reason, RunState
from engine.runs.watch import supervisor_alive
from engine.session import Engine
from engine.supervision.adopt import adopt_orphans
from tests.demo_copies import demo_below
from tests.faults.flying import HURRIED, Run, fly, fly_config, kill_and_await, ring
from tests.faults.test_training import await_iteration, trained, with_keys

ITERATIONS = 24
"""Steps of some 0.1 s: time enough to be noticed at one of them, and killed, before the last."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> FlightConfig:
    """Two ranks of the demo, with nothing saved on the way."""
    config = demo_config(demo_below(tmp_path_factory.mktemp("demo")), ranks=2, iters=ITERATIONS)
    keys = {"batch_size": 2, "max_seq_length": 64, "save_every": 1000, "val_batches": 0}
    return with_keys(config, **keys).model_copy(update={"recovery": RecoveryConfig()})


@pytest.fixture(scope="module")
def undisturbed(demo: FlightConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same training when nothing happens to it."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("undisturbed")
        patch.setenv("FLIGHTDECK_HOME", str(home))
        run = fly_config(home, demo)
        assert run.ended().state is RunState.SUCCEEDED, run.troubles()
        return losses(run)


def losses(run: Run, attempt: int | None = None) -> dict[int, float]:
    """Iteration → the global loss that rank 0 told of, to the last bit."""
    events = [json.loads(line) for line in run.dir.events(0).read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step" and attempt in (None, event["attempt"])]
    return {event["iteration"]: event["loss"] for event in steps}


def with_recovery(config: FlightConfig, **keys: Any) -> FlightConfig:
    return config.model_copy(update={"recovery": config.recovery.model_copy(update=keys)})


def entries_of(run: Run, event: str) -> list[dict[str, Any]]:
    return [entry for entry in run.entries if entry["event"] == event]


def states(run: Run) -> list[str]:
    return [entry["state"] for entry in entries_of(run, "state")]


def signal_rank(run: Run, rank: int, number: signal.Signals, attempt: int = 1) -> None:
    os.kill(run.identity(rank, attempt).trainer_pid, number)


def test_a_killed_rank_costs_at_most_one_step_and_no_bit_of_the_losses(
    home: Path, demo: FlightConfig, undisturbed: dict[int, float]
) -> None:
    moment = random.Random(5)
    run = fly_config(home, demo)
    await_iteration(run, moment.randint(3, 8))
    time.sleep(moment.uniform(0.0, 0.2))
    signal_rank(run, moment.randint(0, 1), signal.SIGKILL)
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.SUCCEEDED, Reason.COMPLETED, 2), run.troubles()
    assert losses(run) == undisturbed
    first, second = losses(run, 1), losses(run, 2)
    assert len(set(first) & set(second)) <= 1, "steps that were made twice"
    assert states(run) == [
        *("preflight", "launching", "running", "recovering", "launching", "running", "finishing", "succeeded")
    ]
    (ended,), (told,) = entries_of(run, "attempt_ended"), entries_of(run, "recovered")
    assert (ended["attempt"], ended["reason"], ended["unconfirmed"]) == (1, "rank_killed", [])
    assert (told["attempt"], told["source"], told["repeated"] <= 1) == (2, "rescue", True)
    assert told["iteration"] == min(second) - 1


@pytest.mark.slow
def test_a_suspended_rank_is_found_and_named(home: Path, demo: FlightConfig, undisturbed: dict[int, float]) -> None:
    run = fly_config(home, with_recovery(demo, hang_s=2.0))
    await_iteration(run, 7)
    signal_rank(run, 1, signal.SIGSTOP)
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()
    (ended,) = entries_of(run, "attempt_ended")
    assert (ended["reason"], ended["rank"], ended["host"]) == ("hung", 1, "node1"), ended
    assert losses(run) == undisturbed


def kill_in_each_attempt(run: Run, rank: int, last: int) -> None:
    """One more step than before, then kill -9, in every attempt up to `last`."""
    for attempt in range(1, last + 1):
        run.wait(functools.partial(has_stepped, run, attempt))
        signal_rank(run, rank, signal.SIGKILL, attempt)
        run.wait(functools.partial(has_failed, run, attempt))


def has_stepped(run: Run, attempt: int) -> bool:
    return run.dir.events(0).exists() and bool(losses(run, attempt))


def has_failed(run: Run, attempt: int) -> bool:
    return len(entries_of(run, "attempt_ended")) == attempt


@pytest.mark.slow
def test_restarts_are_bounded_and_the_first_cause_is_the_end(home: Path, demo: FlightConfig) -> None:
    run = fly_config(home, with_recovery(with_keys(demo, iters=5000), max_restarts=1))
    kill_in_each_attempt(run, 1, last=2)
    record = run.ended()
    named = (record.state, record.reason, record.rank, record.signal, record.attempts)
    assert named == (RunState.FAILED, Reason.RANK_KILLED, 1, signal.SIGKILL, 2), run.troubles()
    (given_up,) = entries_of(run, "given_up")
    assert "max_restarts" in given_up["why"]


@pytest.mark.slow
def test_the_same_failure_without_a_step_in_between_is_not_tried_again(home: Path, demo: FlightConfig) -> None:
    run = fly_config(home, with_keys(demo, iters=5000))
    await_iteration(run, 3)
    signal_rank(run, 1, signal.SIGKILL)
    run.wait(lambda: len(entries_of(run, "rank_started")) == 4)
    signal_rank(run, 1, signal.SIGKILL, attempt=2)
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.FAILED, Reason.RANK_KILLED, 2), run.troubles()
    assert "the same failure" in entries_of(run, "given_up")[0]["why"]


@pytest.mark.slow
def test_a_program_of_the_users_own_is_restarted_only_when_that_is_asked_for(home: Path, tmp_path: Path) -> None:
    fault = (
        "if rank == 1 and step == 40 and not os.path.exists('once'): open('once', 'w').close(); os.kill(os.getpid(), 9)"
    )
    first = fly(home, tmp_path / "a", script=ring(fault)).ended()
    assert (first.state, first.attempts) == (RunState.FAILED, 1)
    again = HURRIED.model_copy(update={"restart_commands": True})
    run = fly(home, tmp_path / "b", script=ring(fault), recovery=again)
    run.wait(lambda: len(entries_of(run, "rank_started")) == 4)
    run.finish()
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()


def long_pause(config: FlightConfig) -> FlightConfig:
    """The second attempt fails at its start; the third would come after a long time."""
    return with_recovery(with_keys(config, iters=5000), backoff_s=600.0)


def in_back_off(home: Path, demo: FlightConfig) -> Run:
    """A run that waits for its third attempt."""
    run = fly_config(home, long_pause(demo))
    await_iteration(run, 3)
    signal_rank(run, 1, signal.SIGKILL)
    run.wait(lambda: len(entries_of(run, "rank_started")) == 4)
    # Another rank, so that it is not the same failure.
    signal_rank(run, 0, signal.SIGKILL, attempt=2)
    run.wait(lambda: len(entries_of(run, "recovery")) == 2)
    assert entries_of(run, "recovery")[1]["delay_s"] > 20
    return run


@pytest.mark.slow
def test_an_abort_in_the_back_off_works_at_once(home: Path, demo: FlightConfig) -> None:
    run = in_back_off(home, demo)
    assert run.abort() < 3.0
    record = run.record
    assert (record.state, record.reason, record.unconfirmed) == (RunState.ABORTED, Reason.USER_ABORT, [])
    assert record.cause is not None and "recovered from rank 0's death" in record.cause
    assert [entry["stage"] for entry in entries_of(run, "stop") if entry["purpose"] == "abort"] == ["asked", "stopped"]


@pytest.mark.slow
def test_a_supervisor_killed_in_the_back_off_is_adopted(home: Path, demo: FlightConfig) -> None:
    run = in_back_off(home, demo)
    kill_and_await(run.supervisor)
    assert adopt_orphans(home) == [run.dir.id]
    run.wait(lambda: len(entries_of(run, "recovery")) == 3)
    assert len(run.attempts()) == 2 and run.left() == [], "nothing is started before its time"
    assert run.abort() < 20.0
    assert run.record.state is RunState.ABORTED


def killed_while(
    home: Path, demo: FlightConfig, condition: Callable[[Run], bool], undisturbed: dict[int, float]
) -> Run:
    """The supervisor is killed when `condition` has come true in a recovery; the next one brings the run home."""
    run = fly_config(home, demo)
    await_iteration(run, 5)
    signal_rank(run, 1, signal.SIGKILL)
    run.wait(lambda: condition(run))
    kill_and_await(run.supervisor)
    assert adopt_orphans(home) == [run.dir.id]
    record = run.ended()
    assert record.state is RunState.SUCCEEDED, run.troubles()
    assert losses(run) == undisturbed
    alive_twice = [entry for entry in entries_of(run, "attempt") if entry["attempt"] == record.attempts]
    assert len(alive_twice) == 1
    return run


AT = {
    "fencing": lambda run: "recovering" in states(run),
    "fenced": lambda run: bool(entries_of(run, "attempt_ended")),
    "launching": lambda run: len(entries_of(run, "attempt")) == 2,
    "launched": lambda run: len(entries_of(run, "launcher")) == 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", AT)
def test_a_supervisor_killed_in_a_recovery(
    home: Path, demo: FlightConfig, undisturbed: dict[int, float], moment: str
) -> None:
    killed_while(home, demo, AT[moment], undisturbed)


@pytest.mark.slow
def test_divergence_is_not_tried_again(home: Path, demo: FlightConfig) -> None:
    record = fly_config(home, with_keys(demo, iters=200, learning_rate=1e30)).ended()
    assert (record.state, record.reason, record.attempts) == (RunState.FAILED, Reason.DIVERGED, 1)


@pytest.mark.slow
def test_the_metrics_have_every_iteration(home: Path, demo: FlightConfig) -> None:
    run = fly_config(home, demo)
    await_iteration(run, 4)
    signal_rank(run, 0, signal.SIGKILL)
    assert run.ended().state is RunState.SUCCEEDED, run.troubles()
    assert sorted(set(trained(run))) == list(range(1, ITERATIONS + 1))


@pytest.mark.slow
async def test_a_run_that_was_aborted_is_taken_up_where_it_was(
    home: Path, demo: FlightConfig, undisturbed: dict[int, float]
) -> None:
    run = fly_config(home, demo)
    await_iteration(run, 4)
    run.abort()
    run.wait(lambda: not supervisor_alive(run.dir))
    record = await Engine(home).resume(run.dir.id)
    assert not record.state.ended
    record = run.ended()
    assert (record.state, record.attempts, record.reason) == (RunState.SUCCEEDED, 2, Reason.COMPLETED), run.troubles()
    assert losses(run) == undisturbed
    (told,) = entries_of(run, "recovered")
    assert told["iteration"] >= 4
    with pytest.raises(InputError, match="has succeeded"):
        await Engine(home).resume(run.dir.id)


@pytest.mark.slow
async def test_a_supervisor_killed_after_a_run_was_taken_up_does_not_remember_the_abort_of_before(
    home: Path, demo: FlightConfig, undisturbed: dict[int, float]
) -> None:
    run = fly_config(home, demo)
    await_iteration(run, 3)
    run.abort()
    run.wait(lambda: not supervisor_alive(run.dir))
    await Engine(home).resume(run.dir.id)
    run.wait(lambda: has_stepped(run, 2))
    kill_and_await(run.supervisor)
    assert adopt_orphans(home) == [run.dir.id]
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()
    assert losses(run) == undisturbed


@pytest.mark.slow
def test_a_hang_is_still_one_when_the_supervisor_that_found_it_is_killed(
    home: Path, demo: FlightConfig, undisturbed: dict[int, float]
) -> None:
    run = fly_config(home, with_recovery(demo, hang_s=2.0))
    await_iteration(run, 7)
    signal_rank(run, 1, signal.SIGSTOP)
    run.wait(lambda: bool(entries_of(run, "hung")))
    kill_and_await(run.supervisor)
    assert adopt_orphans(home) == [run.dir.id]
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()
    (ended,) = entries_of(run, "attempt_ended")
    assert ended["reason"] == "hung", ended
    assert len(entries_of(run, "hung")) == 1
    assert losses(run) == undisturbed
