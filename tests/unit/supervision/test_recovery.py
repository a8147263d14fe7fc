"""What follows a failure: what is never tried again, how often and how soon the rest is, and with which nodes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models import Reason, RunState
from engine.supervision.history import Ended, reached_before
from engine.supervision.judging.verdict import Verdict
from engine.supervision.recovery import (
    STALLED_LIMIT,
    End,
    Failure,
    Policy,
    Present,
    Retry,
    Wait,
    backoff_s,
    first_cause,
    next_step,
    refusal,
    stalled,
)

POLICY = Policy(max_restarts=3, needed=4, backoff_s=1.0, node_wait_s=600.0, lost_after_s=98.0)
NODES = ("ana", "bea", "cyd", "dov")
ALL_THERE = [Present(node, proved=True) for node in NODES]
KILLED = Failure(1, Reason.RANK_KILLED, "bea", signal=9, reached=37, rank=1)
NEVER = (
    Reason.USER_ABORT,
    Reason.DIVERGED,
    Reason.CORRUPTED,
    Reason.PREFLIGHT_FAILED,
    Reason.DISK_FULL,
    Reason.SUPERVISOR_LOST,
)

failures = st.builds(
    Failure,
    attempt=st.integers(1, 9),
    reason=st.sampled_from([reason for reason in Reason if reason is not Reason.COMPLETED]),
    host=st.sampled_from([None, *NODES]),
    exit_code=st.sampled_from([None, 1, 3, 5]),
    signal=st.sampled_from([None, 9, 15]),
    signature=st.sampled_from([None, "ring.bind", "metal.timeout", "lora.no_train"]),
    reached=st.integers(0, 5),
    rank=st.sampled_from([None, 0, 1]),
)
histories = st.lists(failures, min_size=1, max_size=8)
presents = st.builds(Present, st.just("n"), proved=st.booleans(), silent_s=st.floats(0.0, 300.0))
rolls = st.lists(presents, min_size=1, max_size=6).map(
    lambda roll: [replace(each, node=f"n{at}") for at, each in enumerate(roll)]
)
policies = st.builds(
    Policy,
    max_restarts=st.integers(0, 5),
    needed=st.integers(1, 6),
    backoff_s=st.floats(0.0, 100.0),
    node_wait_s=st.floats(0.0, 900.0),
    lost_after_s=st.none() | st.floats(1.0, 200.0),
)


def step(
    *history: Failure, policy: Policy = POLICY, roll: list[Present] = ALL_THERE, waited_s: float = 0.0
) -> Retry | Wait | End:
    return next_step(policy, history, roll, waited_s, random.Random(1))


def test_a_rank_that_was_killed_is_recovered_from_almost_at_once() -> None:
    found = step(KILLED)
    assert isinstance(found, Retry)
    assert (found.members, found.left_out, found.why) == (NODES, (), "recovers from rank 1's death at iteration 37")
    assert found.delay_s <= 0.2


@pytest.mark.parametrize("reason", NEVER)
def test_what_is_never_tried_again(reason: Reason) -> None:
    assert isinstance(step(replace(KILLED, reason=reason)), End)


@pytest.mark.parametrize("signature", ["lora.no_train", "import.mlx", "disk.full", "launch.python_missing"])
def test_a_known_cause_in_the_job_or_the_software_is_not_tried_again(signature: str) -> None:
    assert isinstance(step(replace(KILLED, reason=Reason.RANK_FAILED, signature=signature)), End)


def test_what_a_trainer_refuses_is_not_tried_again_and_a_passing_fault_later_is() -> None:
    refused = Failure(2, Reason.RANK_FAILED, "bea", exit_code=3, reached=37, rank=1, of_the_job=True)
    assert isinstance(step(KILLED, refused), End)
    assert isinstance(step(KILLED, replace(refused, of_the_job=False)), Retry)
    assert isinstance(step(KILLED, replace(refused, reached=60)), Retry), "its data could not be read in the middle"


@pytest.mark.parametrize(
    ("cause", "of_the_job"),
    [
        ("JobError: no state to go on from", True),
        ("exited with code 3: JobError: no state to go on from", True),
        ("worker.job.JobError: no state to go on from", True),
        ("NotAJobError: x", False),
        (None, False),
    ],
)
def test_a_refused_job_is_told_by_its_cause_also_by_the_journal(cause: str | None, of_the_job: bool) -> None:
    ended = Ended.of(1, Verdict(RunState.FAILED, Reason.RANK_FAILED, cause), 37, "2026-01-01T00:00:00+00:00")
    assert ended.failure.of_the_job is of_the_job
    assert Ended.from_entry({"event": "attempt_ended", **ended.entry([])}) == ended


def test_how_far_a_run_had_come_is_known_over_all_of_its_journal() -> None:
    assert reached_before([]) == 0
    assert reached_before([{"event": "state", "state": "running"}]) == 0
    ended: list[dict[str, Any]] = [
        {"event": "attempt_ended", "reached": 37},
        {"event": "state", "iteration": 30},
        {"event": "reopened"},
    ]
    assert reached_before(ended) == 37
    assert reached_before(ended[1:]) == 30, "it was stopped"


def test_a_port_that_was_taken_is_tried_again_on_others() -> None:
    busy = Failure(1, Reason.LAUNCH_FAILED, "bea", exit_code=1, signature="ring.bind")
    assert isinstance(step(busy), Retry)


def test_a_mistake_before_the_first_step_is_the_end_and_a_kill_is_not() -> None:
    assert isinstance(step(Failure(1, Reason.RANK_FAILED, "bea", exit_code=1)), End)
    assert isinstance(step(replace(KILLED, reached=0)), Retry)


def test_the_same_failure_at_the_same_iteration_is_the_end() -> None:
    assert isinstance(step(KILLED, replace(KILLED, attempt=2)), End)
    assert isinstance(step(KILLED, replace(KILLED, attempt=2, reached=38)), Retry)
    assert isinstance(step(KILLED, replace(KILLED, attempt=2, host="cyd", rank=2)), Retry)


def test_a_node_that_is_needed_is_waited_for_and_not_for_ever() -> None:
    roll = [*ALL_THERE[:3], Present("dov", proved=False, silent_s=200.0)]
    assert step(KILLED, roll=roll, waited_s=599.0) == Wait("waits for dov")
    found = step(KILLED, roll=roll, waited_s=601.0)
    assert isinstance(found, End) and "dov has not come back" in found.why


def test_a_run_goes_on_without_a_node_only_when_its_lease_has_run_out() -> None:
    enough = replace(POLICY, needed=3)
    away = [*ALL_THERE[:3], Present("dov", proved=False, silent_s=97.0)]
    assert step(KILLED, policy=enough, roll=away) == Wait("waits for dov")
    gone = [*ALL_THERE[:3], Present("dov", proved=False, silent_s=99.0)]
    found = step(KILLED, policy=enough, roll=gone)
    assert isinstance(found, Retry)
    assert (found.members, found.left_out) == (NODES[:3], ("dov",))
    for_ever = replace(enough, lost_after_s=None)
    assert isinstance(step(KILLED, policy=for_ever, roll=gone), Wait), "its ranks may be going on there"


def test_the_back_off_doubles_while_nothing_comes_of_it() -> None:
    history = [KILLED]
    waits = []
    for attempt, host in enumerate(("cyd", "dov"), start=2):
        history.append(replace(KILLED, attempt=attempt, host=host))
        waits.append(backoff_s(POLICY, history, random.Random(1)))
    assert waits[1] == pytest.approx(2 * waits[0])


def test_the_first_cause_is_what_the_attempts_after_it_follow_from() -> None:
    unlaunched = [Failure(number, Reason.LAUNCH_FAILED, reached=37) for number in (2, 3)]
    assert first_cause([KILLED, *unlaunched]) is KILLED
    later = replace(KILLED, attempt=2, reached=50)
    assert first_cause([KILLED, later]) is later


@given(policies, histories, rolls, st.floats(0.0, 1000.0), st.randoms(use_true_random=False))
def test_every_decision_keeps_the_bounds(
    policy: Policy, history: list[Failure], roll: list[Present], waited_s: float, rng: random.Random
) -> None:
    found = next_step(policy, history, roll, waited_s, rng)
    if history[-1].reason in NEVER or len(history) > policy.max_restarts or stalled(history) >= STALLED_LIMIT:
        assert isinstance(found, End)
    if isinstance(found, Retry):
        proved = {each.node for each in roll if each.proved}
        silent = {each.node: each.silent_s for each in roll if not each.proved}
        assert set(found.members) == proved, "never a node that has not shown that nothing is left there"
        assert set(found.left_out) == set(silent)
        assert not silent or len(proved) >= policy.needed
        assert all(policy.lost_after_s is not None and each > policy.lost_after_s for each in silent.values())
        assert 0.0 <= found.delay_s <= 60.0
    if isinstance(found, Wait):
        assert waited_s <= policy.node_wait_s and any(not each.proved for each in roll)


@given(policies, st.lists(failures, min_size=12, max_size=12))
def test_whatever_happens_the_restarts_come_to_an_end(policy: Policy, fate: list[Failure]) -> None:
    attempts = next(at for at in range(1, len(fate) + 1) if refusal(policy, fate[:at]) is not None)
    assert attempts <= policy.max_restarts + 1
    without_progress = [replace(each, reached=0) for each in fate]
    attempts = next(at for at in range(1, len(fate) + 1) if refusal(policy, without_progress[:at]) is not None)
    assert attempts <= STALLED_LIMIT
