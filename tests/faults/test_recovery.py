"""A run goes on by itself: what a lost, hung or killed rank costs, when it is not tried again, and who may end it."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.api import Engine
from engine.config.models import CheckpointConfig, Config, RecoveryConfig
from engine.demo import demo_config
from engine.errors import InputError
from engine.models import Reason, RunState
from engine.protocol.attempt import read_exit
from engine.protocol.exit_codes import TrainerExit
from engine.run.events import (
    AttemptFailed,
    AttemptPlanned,
    AttemptResumed,
    HangDetected,
    LauncherStarted,
    RankLaunched,
    RestartPlanned,
    RestartRefused,
    StateChanged,
    StateSaved,
    StopStageReached,
)
from engine.run.supervisor_process import adopt_orphans
from engine.run.watch import supervisor_alive
from tests.demo_copies import demo_below
from tests.faults.local_runs import SHORT_GRACES, Run, kill_and_await, ring, start_config, start_run
from tests.faults.test_training import await_iteration, trained, with_keys
from tests.training.states import tamper

pytestmark = pytest.mark.busy

ITERATIONS = 14
"""Steps of some 0.1 s: time enough to be noticed at one of them, and killed, before the last."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Two ranks of the demo, with nothing saved on the way."""
    config = demo_config(demo_below(tmp_path_factory.mktemp("demo")), ranks=2, iters=ITERATIONS)
    keys = {"batch_size": 2, "max_seq_length": 64, "save_every": 1000, "val_batches": 0}
    return with_keys(config, **keys).model_copy(update={"recovery": RecoveryConfig()})


@pytest.fixture(scope="module")
def undisturbed(demo: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same training when nothing happens to it."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("undisturbed")
        patch.setenv("FLIGHTDECK_HOME", str(home))
        run = start_config(home, demo)
        assert run.ended().state is RunState.SUCCEEDED, run.troubles()
        return losses(run)


def losses(run: Run, attempt: int | None = None) -> dict[int, float]:
    """Iteration → the global loss of ranks 0 and 1, to the last bit. A killed rank may lack its last report."""
    files = [run.dir.events(rank) for rank in (1, 0)]
    events = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step" and attempt in (None, event["attempt"])]
    return {event["iteration"]: event["loss"] for event in steps}


def failures(run: Run, rank: int) -> list[str]:
    """The failures that a rank reported."""
    events = [json.loads(line) for line in run.dir.events(rank).read_text().splitlines()]
    return [event["error_type"] for event in events if event["event"] == "failure"]


def with_recovery(config: Config, **keys: Any) -> Config:
    return config.model_copy(update={"recovery": config.recovery.model_copy(update=keys)})


def states(run: Run) -> list[str]:
    return [event.state for event in run.events_of(StateChanged)]


def signal_rank(run: Run, rank: int, number: signal.Signals, attempt: int = 1) -> None:
    os.kill(run.identity(rank, attempt).trainer_pid, number)


def test_a_killed_rank_costs_at_most_one_step_and_no_bit_of_the_losses(
    home: Path, demo: Config, undisturbed: dict[int, float]
) -> None:
    moment = random.Random(5)
    run = start_config(home, demo)
    await_iteration(run, moment.randint(2, 5))
    time.sleep(moment.uniform(0.0, 0.2))
    victim = moment.randint(0, 1)
    signal_rank(run, victim, signal.SIGKILL)
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.SUCCEEDED, Reason.COMPLETED, 2), run.troubles()
    assert losses(run) == undisturbed
    first, second = losses(run, 1), losses(run, 2)
    assert len(set(first) & set(second)) <= 1, "steps that were made twice"
    assert states(run) == [
        *("preflight", "launching", "running", "recovering", "launching", "running", "finishing", "succeeded")
    ]
    (ended,), (resumed,) = run.events_of(AttemptFailed), run.events_of(AttemptResumed)
    assert (ended.attempt, ended.verdict.reason, ended.unconfirmed) == (1, Reason.RANK_KILLED, ())
    assert (resumed.attempt, resumed.resumed.source) == (2, "emergency")
    assert resumed.repeated is not None and resumed.repeated <= 1
    assert resumed.resumed.iteration == min(second) - 1
    ends = {rank: read_exit(run.files.exit(rank)) for rank in (victim, 1 - victim)}
    killed, survivor = ((end and (end.code, end.signal)) for end in ends.values())
    assert (killed, survivor) == ((None, signal.SIGKILL), (TrainerExit.PEER_LOST, None))
    # The head may end the survivor before it waits for its peer.
    assert failures(run, victim) == [] and failures(run, 1 - victim) in ([], ["PeerLost"])


@pytest.mark.slow
def test_a_suspended_rank_is_found_and_named(home: Path, demo: Config, undisturbed: dict[int, float]) -> None:
    run = start_config(home, with_recovery(demo, hang_s=2.0))
    await_iteration(run, 7)
    signal_rank(run, 1, signal.SIGSTOP)
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()
    (ended,) = run.events_of(AttemptFailed)
    assert (ended.verdict.reason, ended.verdict.rank, ended.verdict.host) == (Reason.HUNG, 1, "node1"), ended
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
    return len(run.events_of(AttemptFailed)) == attempt


@pytest.mark.slow
def test_restarts_are_bounded_and_the_first_cause_is_the_end(home: Path, demo: Config) -> None:
    run = start_config(home, with_recovery(with_keys(demo, iters=5000), max_restarts=1))
    kill_in_each_attempt(run, 1, last=2)
    record = run.ended()
    named = (record.state, record.reason, record.rank, record.signal, record.attempts)
    assert named == (RunState.FAILED, Reason.RANK_KILLED, 1, signal.SIGKILL, 2), run.troubles()
    (given_up,) = run.events_of(RestartRefused)
    assert "max_restarts" in given_up.why


@pytest.mark.slow
def test_the_same_failure_without_a_step_in_between_is_not_tried_again(home: Path, demo: Config) -> None:
    run = start_config(home, with_keys(demo, iters=5000))
    await_iteration(run, 3)
    signal_rank(run, 1, signal.SIGKILL)
    run.wait(lambda: len(run.events_of(RankLaunched)) == 4)
    signal_rank(run, 1, signal.SIGKILL, attempt=2)
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.FAILED, Reason.RANK_KILLED, 2), run.troubles()
    assert "the same failure" in run.events_of(RestartRefused)[0].why


@pytest.mark.slow
def test_a_program_of_the_users_own_is_restarted_only_when_configured(home: Path, tmp_path: Path) -> None:
    fault = (
        "if rank == 1 and step == 10 and not os.path.exists('once'): open('once', 'w').close(); os.kill(os.getpid(), 9)"
    )
    first = start_run(home, tmp_path / "a", script=ring(fault)).ended()
    assert (first.state, first.attempts) == (RunState.FAILED, 1)
    again = SHORT_GRACES.model_copy(update={"restart_commands": True})
    run = start_run(home, tmp_path / "b", script=ring(fault), recovery=again)
    run.wait(lambda: len(run.events_of(RankLaunched)) == 4)
    run.finish()
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()


def long_pause(config: Config) -> Config:
    """The second attempt fails at its start; the third would come after a long time."""
    return with_recovery(with_keys(config, iters=5000), backoff_s=600.0)


def in_back_off(home: Path, demo: Config) -> Run:
    """A run that waits for its third attempt."""
    run = start_config(home, long_pause(demo))
    await_iteration(run, 3)
    signal_rank(run, 1, signal.SIGKILL)
    run.wait(lambda: len(run.events_of(RankLaunched)) == 4)
    # Another rank, so that it is not the same failure.
    signal_rank(run, 0, signal.SIGKILL, attempt=2)
    run.wait(lambda: len(run.events_of(RestartPlanned)) == 2)
    assert run.events_of(RestartPlanned)[1].delay_s > 20
    return run


@pytest.mark.slow
def test_an_abort_in_the_back_off_works_at_once(home: Path, demo: Config) -> None:
    run = in_back_off(home, demo)
    assert run.abort() < 3.0
    record = run.record
    assert (record.state, record.reason, record.unconfirmed) == (RunState.ABORTED, Reason.USER_ABORT, [])
    assert record.cause is not None and "recovered from rank 0's death" in record.cause
    assert [event.stage for event in run.events_of(StopStageReached) if event.purpose == "abort"] == [
        "asked",
        "stopped",
    ]


@pytest.mark.slow
def test_a_supervisor_killed_in_the_back_off_is_adopted(home: Path, demo: Config) -> None:
    run = in_back_off(home, demo)
    kill_and_await(run.supervisor)
    assert adopt_orphans(home) == [run.dir.id]
    run.wait(lambda: len(run.events_of(RestartPlanned)) == 3)
    assert len(run.attempts()) == 2 and run.left() == [], "nothing is started before its time"
    assert run.abort() < 20.0
    assert run.record.state is RunState.ABORTED


def killed_while(home: Path, demo: Config, condition: Callable[[Run], bool], undisturbed: dict[int, float]) -> Run:
    """The supervisor is killed when `condition` has come true in a recovery; the next one finishes the run."""
    run = start_config(home, demo)
    await_iteration(run, 5)
    signal_rank(run, 1, signal.SIGKILL)
    run.wait(lambda: condition(run))
    kill_and_await(run.supervisor)
    assert adopt_orphans(home) == [run.dir.id]
    record = run.ended()
    assert record.state is RunState.SUCCEEDED, run.troubles()
    assert losses(run) == undisturbed
    alive_twice = [event for event in run.events_of(AttemptPlanned) if event.attempt.number == record.attempts]
    assert len(alive_twice) == 1
    return run


AT = {
    "fencing": lambda run: "recovering" in states(run),
    "fenced": lambda run: bool(run.events_of(AttemptFailed)),
    "launching": lambda run: len(run.events_of(AttemptPlanned)) == 2,
    "launched": lambda run: len(run.events_of(LauncherStarted)) == 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", AT)
def test_a_supervisor_killed_in_a_recovery(
    home: Path, demo: Config, undisturbed: dict[int, float], moment: str
) -> None:
    killed_while(home, demo, AT[moment], undisturbed)


@pytest.mark.slow
def test_divergence_is_not_tried_again(home: Path, demo: Config) -> None:
    record = start_config(home, with_keys(demo, iters=200, learning_rate=1e30)).ended()
    assert (record.state, record.reason, record.attempts) == (RunState.FAILED, Reason.DIVERGED, 1)


@pytest.mark.slow
def test_the_metrics_have_every_iteration(home: Path, demo: Config) -> None:
    run = start_config(home, demo)
    await_iteration(run, 4)
    signal_rank(run, 0, signal.SIGKILL)
    assert run.ended().state is RunState.SUCCEEDED, run.troubles()
    assert sorted(set(trained(run))) == list(range(1, ITERATIONS + 1))


@pytest.mark.slow
async def test_a_run_that_was_aborted_is_taken_up_where_it_was(
    home: Path, demo: Config, undisturbed: dict[int, float]
) -> None:
    run = start_config(home, demo)
    await_iteration(run, 4)
    run.abort()
    run.wait(lambda: not supervisor_alive(run.dir), after_end=True)
    record = await Engine(home).launches.resume(run.dir.id)
    assert not record.state.ended
    record = run.ended()
    assert (record.state, record.attempts, record.reason) == (RunState.SUCCEEDED, 2, Reason.COMPLETED), run.troubles()
    assert losses(run) == undisturbed
    (resumed,) = run.events_of(AttemptResumed)
    assert resumed.resumed.iteration >= 4
    with pytest.raises(InputError, match="has succeeded"):
        await Engine(home).launches.resume(run.dir.id)


@pytest.mark.slow
async def test_a_supervisor_killed_after_a_run_was_taken_up_does_not_remember_the_abort_of_before(
    home: Path, demo: Config, undisturbed: dict[int, float]
) -> None:
    run = start_config(home, demo)
    await_iteration(run, 3)
    run.abort()
    run.wait(lambda: not supervisor_alive(run.dir), after_end=True)
    await Engine(home).launches.resume(run.dir.id)
    run.wait(lambda: has_stepped(run, 2))
    kill_and_await(run.supervisor)
    assert adopt_orphans(home) == [run.dir.id]
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()
    assert losses(run) == undisturbed


@pytest.mark.slow
def test_a_hang_is_still_one_when_the_supervisor_that_found_it_is_killed(
    home: Path, demo: Config, undisturbed: dict[int, float]
) -> None:
    run = start_config(home, with_recovery(demo, hang_s=2.0))
    await_iteration(run, 7)
    signal_rank(run, 1, signal.SIGSTOP)
    run.wait(lambda: bool(run.events_of(HangDetected)))
    kill_and_await(run.supervisor)
    assert adopt_orphans(home) == [run.dir.id]
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()
    (ended,) = run.events_of(AttemptFailed)
    assert ended.verdict.reason is Reason.HUNG, ended
    assert len(run.events_of(HangDetected)) == 1
    assert losses(run) == undisturbed


@pytest.mark.slow
async def test_a_state_that_was_changed_after_it_was_saved_is_refused_and_the_one_before_it_used(
    home: Path, demo: Config, undisturbed: dict[int, float]
) -> None:
    run = start_config(home, demo.model_copy(update={"checkpoint": CheckpointConfig(every=2)}))
    await_iteration(run, 6)
    run.abort()
    run.wait(lambda: not supervisor_alive(run.dir), after_end=True)
    folder = run.files.directory.parents[1] / "checkpoints"
    states = sorted(folder.glob("step-*"))
    known = {event.state: event.manifest for event in run.events_of(StateSaved)}
    names = [f"{int(path.name[5:])}.0" for path in states]
    assert len(states) == 3 and set(names) <= set(known)
    raw = (states[-1] / "manifest.json").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == known[names[-1]]
    tamper(states[-1])
    await Engine(home).launches.resume(run.dir.id)
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()
    (resumed,) = run.events_of(AttemptResumed)
    assert resumed.resumed.update == int(states[-2].name[5:])
    assert losses(run) == undisturbed
    log = run.dir.log(0).read_text()
    assert f"the state in {states[-1]} is not used: its manifest is not the one that it was saved with" in log
    assert known[names[-1]][:12] in log and "not recorded" not in log
