"""The decisions of the supervisor, row by row: when an attempt is stopped, and what follows its failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.models import CheckpointConfig, RecoveryConfig
from engine.models import Reason, RunState
from engine.run.decide import (
    LINGER_S,
    REFUSALS,
    STALLED_LIMIT,
    START_LIMIT_S,
    STOPS,
    FailedRun,
    Finish,
    NodePresence,
    RankState,
    Restart,
    RunningAttempt,
    Wait,
    backoff_s,
    decide,
    describe_failure,
    failed_run,
    needs_state,
    original_failure,
    refusal,
    stalled,
    stop_trigger,
)
from engine.run.events import (
    AttemptFailed,
    AttemptPlanned,
    Event,
    Figures,
    LogsMissing,
    RankExited,
    RunPlanned,
    RunReopened,
    StateChanged,
    StateSaved,
    Trigger,
    Verdict,
)
from engine.run.history import RunHistory, fold
from engine.run.run_plan import RunPlan
from engine.store.layout import RunDir
from tests.unit.run.run_maker import START, MadeRun, planned_attempt

RECOVERY = RecoveryConfig(max_restarts=3, backoff_s=1.0, node_wait_s=600.0)
NODES = ("ana", "bea", "cyd", "dov")
ALL_THERE = tuple(NodePresence(node, proved=True) for node in NODES)


def failure(
    attempt: int, reason: Reason, host: str | None = None, *, reached: int = 0, **verdict: Any
) -> AttemptFailed:
    how = Verdict(RunState.FAILED, reason, host=host, **verdict)
    return AttemptFailed(attempt=attempt, verdict=how, reached=reached, failed_at=START)


def changed(failed: AttemptFailed, **fields: Any) -> AttemptFailed:
    """`fields`: of the attempt, and of its verdict."""
    own: dict[str, Any] = {name: fields.pop(name) for name in ("attempt", "reached", "outputs") if name in fields}
    return failed.model_copy(update={**own, "verdict": replace(failed.verdict, **fields)})


UNREPORTED = failure(1, Reason.RANK_FAILED, "ana", exit_code=1).model_copy(update={"ran_long": True})
"""Of a command that reports no steps, after hours."""
KILLED = failure(1, Reason.RANK_KILLED, "bea", signal=9, reached=37, rank=1)

RUNS, GONE = RankState(started=True), RankState(started=True, ended=True)
MISSING = RankState()
OWN = RankState(started=True, ended=True, failed=True)
FOLLOWED = replace(OWN, consequence=True)
SPARE = RankState(started=True, dispensable=True)
LOST = replace(SPARE, ended=True)
DONE = replace(RUNS, completed=True)


@pytest.mark.parametrize(
    ("state", "trigger"),
    [
        (RunningAttempt((RUNS, RUNS)), None),
        (RunningAttempt((RUNS, RUNS), abort=True), Trigger.ABORT),
        (RunningAttempt((MISSING, MISSING), abort=True), Trigger.ABORT),
        (RunningAttempt((OWN, RUNS), abort=True), Trigger.ABORT),
        (RunningAttempt((GONE, GONE), abort=True), Trigger.ENDED),
        (RunningAttempt((GONE, OWN)), Trigger.ENDED),
        (RunningAttempt((GONE, RUNS)), None),
        (RunningAttempt((OWN, RUNS)), Trigger.RANK),
        (RunningAttempt((OWN, MISSING)), Trigger.RANK),
        (RunningAttempt((FOLLOWED, RUNS), failing_s=0.9), None),
        (RunningAttempt((FOLLOWED, RUNS), failing_s=1.1), Trigger.RANK),
        (RunningAttempt((FOLLOWED, OWN, RUNS), failing_s=0.0), Trigger.RANK),
        (RunningAttempt((FOLLOWED, MISSING), age_s=START_LIMIT_S + 1, launcher_gone_s=9.0, failing_s=0.5), None),
        (RunningAttempt((RUNS, RUNS), launcher_gone_s=30.0), None),
        (RunningAttempt((RUNS, MISSING), launcher_gone_s=0.9), None),
        (RunningAttempt((RUNS, MISSING), launcher_gone_s=1.1), Trigger.LAUNCHER_GONE),
        (RunningAttempt((RUNS, replace(MISSING, node_silent_s=5.0)), launcher_gone_s=5.0), None),
        (RunningAttempt((RUNS, replace(MISSING, node_silent_s=float("inf"))), launcher_gone_s=50.0), None),
        (RunningAttempt((RUNS, MISSING), launched=False, launcher_gone_s=1.1), Trigger.NOT_STARTED),
        (RunningAttempt((RUNS, MISSING), age_s=START_LIMIT_S), None),
        (RunningAttempt((RUNS, MISSING), age_s=START_LIMIT_S + 0.1), Trigger.NOT_STARTED),
        (RunningAttempt((RUNS, RUNS), age_s=1e6), None),
        (RunningAttempt((RUNS, LOST, LOST)), None),
        (RunningAttempt((OWN, LOST, SPARE)), Trigger.RANK),
        (RunningAttempt((RUNS, MISSING, LOST), age_s=START_LIMIT_S + 0.1), Trigger.NOT_STARTED),
        (RunningAttempt((RUNS, OWN, SPARE)), Trigger.RANK),
        (RunningAttempt((RUNS, LOST, LOST), abort=True), Trigger.ABORT),
        (RunningAttempt((GONE, LOST, LOST), abort=True), Trigger.ENDED),
        (RunningAttempt((GONE, LOST, SPARE), completed_s=LINGER_S), None),
        (RunningAttempt((GONE, LOST, SPARE), completed_s=LINGER_S + 0.1), Trigger.ENDED),
        (RunningAttempt((GONE, DONE), completed_s=LINGER_S), None),
        (RunningAttempt((GONE, DONE), completed_s=LINGER_S + 0.1), Trigger.ENDED),
        (RunningAttempt((DONE, RUNS), completed_s=LINGER_S + 0.1), None),
        (RunningAttempt((RUNS, RUNS), apart=True), Trigger.APART),
        (RunningAttempt((OWN, RUNS), apart=True), Trigger.RANK),
        (RunningAttempt((RUNS, RUNS), apart=True, abort=True), Trigger.ABORT),
    ],
)
def test_when_a_running_attempt_is_stopped(state: RunningAttempt, trigger: Trigger | None) -> None:
    assert stop_trigger(state) is trigger


@given(
    st.lists(st.builds(RankState, started=st.just(True), ended=st.booleans(), dispensable=st.just(True)), max_size=8),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
)
def test_while_rank_0_runs_no_loss_of_ranks_that_it_can_do_without_stops_it(
    others: list[RankState], age_s: float, silent_s: float
) -> None:
    state = RunningAttempt(
        (RUNS, *(replace(other, node_silent_s=silent_s) for other in others)),
        age_s=age_s,
        launched=False,
        launcher_gone_s=age_s,
    )
    assert stop_trigger(state) is None


def test_every_trigger_has_a_row() -> None:
    assert {trigger for _, trigger in STOPS} == set(Trigger) - {Trigger.HUNG}


def run(*failures: AttemptFailed, **changes: Any) -> FailedRun:
    """`changes`: of the state, and of [recovery]."""
    recovery = RECOVERY.model_copy(update={name: changes.pop(name) for name in ("max_restarts",) if name in changes})
    return replace(FailedRun(recovery, failures, needed=4, lost_after_s=98.0, nodes=ALL_THERE), **changes)


def failed(reason: Reason, **fields: Any) -> AttemptFailed:
    return changed(KILLED, reason=reason, **fields)


REFUSED = failure(2, Reason.RANK_FAILED, "bea", exit_code=3, reached=37, rank=1, cause="JobError: no")
BUSY = failure(1, Reason.LAUNCH_FAILED, "bea", exit_code=1, signature="ring.bind")
MISTAKE = failure(1, Reason.RANK_FAILED, "bea", exit_code=1)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (run(KILLED), None),
        (run(KILLED, why_never="a program of the user's own"), "a program of the user's own"),
        (run(failed(Reason.USER_ABORT)), "it was stopped as requested"),
        (run(failed(Reason.DIVERGED)), "the training has diverged"),
        (run(failed(Reason.CORRUPTED)), "parameters differ between the ranks"),
        (run(failed(Reason.PREFLIGHT_FAILED)), "preflight failed"),
        (run(failed(Reason.DISK_FULL)), "no room on a full disk"),
        (run(failed(Reason.SUPERVISOR_LOST)), "its supervisor was lost"),
        (run(failed(Reason.SUPERVISOR_LOST), unattended=True), None),
        (run(changed(MISTAKE, reason=Reason.SUPERVISOR_LOST), unattended=True), None),
        (run(failed(Reason.DIVERGED), unattended=True), "the training has diverged"),
        (run(failed(Reason.HEAD_SLEPT)), None),
        (run(failed(Reason.SEPARATE_GROUPS)), "train apart from one another again"),
        (run(KILLED, REFUSED), "what a trainer refuses"),
        (run(KILLED, changed(REFUSED, cause="JobError: no state (x)")), "what a trainer refuses: no state (x)"),
        (run(KILLED, changed(REFUSED, cause=None)), None),
        (run(KILLED, changed(REFUSED, reached=60)), None),
        (run(failed(Reason.RANK_FAILED, signature="lora.no_train")), "a restart does not fix that"),
        (run(failed(Reason.RANK_FAILED, signature="import.mlx")), "a restart does not fix that"),
        (run(failed(Reason.RANK_FAILED, signature="disk.full")), "a restart does not fix that"),
        (run(failed(Reason.RANK_FAILED, signature="launch.python_missing")), "a restart does not fix that"),
        (run(failed(Reason.RANK_FAILED, signature="metal.timeout")), None),
        (run(BUSY), None),
        (run(MISTAKE), "it never made a step"),
        (run(changed(MISTAKE, outputs=2)), "it never made a step, or none that is read"),
        (run(changed(MISTAKE, outputs=3)), None),
        (run(changed(MISTAKE, outputs=9), changed(MISTAKE, outputs=8)), "came again soon after the start"),
        (run(UNREPORTED, UNREPORTED), None),
        (run(changed(KILLED, reached=0)), None),
        (run(KILLED, changed(MISTAKE, reached=37)), None),
        (run(KILLED, max_restarts=0), "not restarted: [recovery] max_restarts"),
        (
            run(KILLED, changed(KILLED, reached=40), max_restarts=1),
            "restarted once: [recovery] max_restarts allows no more",
        ),
        (run(KILLED, changed(KILLED, attempt=2)), "the same failure came again at iteration 37"),
        (run(changed(KILLED, reached=0), changed(KILLED, reached=0)), "came again before the first step"),
        (run(KILLED, changed(KILLED, attempt=2, reached=38)), None),
        (run(KILLED, changed(KILLED, attempt=2, host="cyd", rank=2)), None),
        (
            run(*(changed(KILLED, host=host) for host in NODES), max_restarts=9),
            "3 attempts in a row made no progress",
        ),
    ],
)
def test_when_nothing_is_restarted(state: FailedRun, why: str | None) -> None:
    refused = refusal(state)
    assert (refused is None) == (why is None)
    if refused is not None and why is not None:
        assert why in refused.why
        assert decide(state) == refused


def test_every_refusal_has_a_row() -> None:
    assert len(REFUSALS) == 7


def test_a_rank_that_was_killed_is_recovered_from_almost_at_once() -> None:
    found = decide(run(KILLED))
    assert isinstance(found, Restart)
    assert (found.members, found.left_out, found.why) == (NODES, (), "recovers from rank 1's death at iteration 37")
    assert found.delay_s <= 0.2


@pytest.mark.parametrize(
    ("cause", "refused"),
    [
        ("JobError: no state to go on from", True),
        ("exited with code 3: JobError: no state to go on from", True),
        ("engine.protocol.job.JobError: no state to go on from", True),
        ("NotAJobError: x", False),
        (None, False),
    ],
)
def test_a_refused_job_is_recognised_by_its_cause(cause: str | None, refused: bool) -> None:
    why = refusal(run(KILLED, failure(2, Reason.RANK_FAILED, cause=cause, reached=37)))
    assert (why == Finish("a restart does not fix what a trainer refuses: no state to go on from")) is refused


DOV_AWAY = (*ALL_THERE[:3], NodePresence("dov", proved=False, silent_s=200.0))


def test_a_node_that_is_needed_is_waited_for_and_not_for_ever() -> None:
    away = run(KILLED, nodes=DOV_AWAY)
    assert decide(replace(away, waited_s=599.0)) == Wait("waits for dov")
    found = decide(replace(away, waited_s=601.0))
    assert isinstance(found, Finish) and "dov has not come back" in found.why


@pytest.mark.parametrize(
    ("silent_s", "lost_after_s", "goes_on"), [(97.0, 98.0, False), (99.0, 98.0, True), (99.0, None, False)]
)
def test_a_run_goes_on_without_a_node_only_when_its_lease_has_expired(
    silent_s: float, lost_after_s: float | None, goes_on: bool
) -> None:
    nodes = (*ALL_THERE[:3], NodePresence("dov", False, silent_s))
    found = decide(run(KILLED, needed=3, lost_after_s=lost_after_s, nodes=nodes))
    if goes_on:
        assert isinstance(found, Restart)
        assert (found.members, found.left_out) == (NODES[:3], ("dov",))
    else:
        assert found == Wait("waits for dov"), "its ranks may be going on there"


def test_the_back_off_doubles_while_nothing_comes_of_it() -> None:
    history = [KILLED]
    waits = []
    for attempt, host in enumerate(("cyd", "dov"), start=2):
        history.append(changed(KILLED, attempt=attempt, host=host))
        waits.append(backoff_s(run(*history)))
    assert waits[1] == pytest.approx(2 * waits[0])


def test_the_first_cause_is_what_the_attempts_after_it_follow_from() -> None:
    unlaunched = [failure(number, Reason.LAUNCH_FAILED, reached=37) for number in (2, 3)]
    assert original_failure([KILLED, *unlaunched]) == 0
    assert original_failure([KILLED, changed(KILLED, attempt=2, reached=50)]) == 1


failures = st.builds(
    cast(Callable[..., AttemptFailed], failure),
    attempt=st.integers(1, 9),
    reason=st.sampled_from([reason for reason in Reason if reason is not Reason.COMPLETED]),
    host=st.sampled_from([None, *NODES]),
    exit_code=st.sampled_from([None, 1, 3, 5]),
    signal=st.sampled_from([None, 9, 15]),
    signature=st.sampled_from([None, "ring.bind", "metal.timeout", "lora.no_train"]),
    reached=st.integers(0, 5),
    rank=st.sampled_from([None, 0, 1]),
)
recoveries = st.builds(
    RecoveryConfig,
    max_restarts=st.integers(0, 5),
    backoff_s=st.floats(0.0, 100.0),
    node_wait_s=st.floats(0.0, 900.0),
)
presences = st.builds(NodePresence, st.just("n"), proved=st.booleans(), silent_s=st.floats(0.0, 300.0))
states = st.builds(
    FailedRun,
    recoveries,
    st.lists(failures, min_size=1, max_size=8).map(tuple),
    needed=st.integers(1, 6),
    lost_after_s=st.none() | st.floats(1.0, 200.0),
    nodes=st.lists(presences, min_size=1, max_size=6).map(
        lambda nodes: tuple(replace(each, node=f"n{at}") for at, each in enumerate(nodes))
    ),
    waited_s=st.floats(0.0, 1000.0),
    jitter=st.floats(0.5, 1.0),
)


@given(states)
def test_every_decision_keeps_the_bounds(state: FailedRun) -> None:
    found, recovery = decide(state), state.recovery
    exhausted = len(state.failures) > recovery.max_restarts or stalled(state.failures) >= STALLED_LIMIT
    if state.last.verdict.reason.traits.never_restarted or exhausted:
        assert isinstance(found, Finish)
    if isinstance(found, Restart):
        proved = {each.node for each in state.nodes if each.proved}
        silent = {each.node: each.silent_s for each in state.nodes if not each.proved}
        assert set(found.members) == proved, "never a node that has not shown that nothing is left there"
        assert set(found.left_out) == set(silent)
        assert not silent or len(proved) >= state.needed
        assert all(state.lost_after_s is not None and each > state.lost_after_s for each in silent.values())
        assert 0.0 <= found.delay_s <= 60.0
    if isinstance(found, Wait):
        assert state.waited_s <= recovery.node_wait_s and any(not each.proved for each in state.nodes)


@given(st.integers(0, 5), st.lists(failures, min_size=12, max_size=12))
def test_whatever_happens_the_restarts_come_to_an_end(max_restarts: int, fate: list[AttemptFailed]) -> None:
    def attempts(fate: list[AttemptFailed]) -> int:
        return next(at for at in range(1, 13) if refusal(run(*fate[:at], max_restarts=max_restarts)) is not None)

    assert attempts(fate) <= max_restarts + 1
    assert attempts([changed(each, reached=0) for each in fate]) <= STALLED_LIMIT


def plan(home: Path, strategy: str, min_nodes: int | None, destination: str | None) -> RunPlan:
    config = MadeRun(home, ranks=3).plan.config
    job = config.job.model_copy(update={"strategy": strategy})
    recovery = config.recovery.model_copy(update={"min_nodes": min_nodes})
    changed = {"job": job, "recovery": recovery, "checkpoint": CheckpointConfig(destination=destination)}
    return RunPlan(nonce="n", config=config.model_copy(update=changed), run_id="run", created_at=START)


@pytest.mark.parametrize(
    ("strategy", "min_nodes", "destination", "needed"),
    [
        ("data", None, None, 3),
        ("data", 1, None, 1),
        ("data", 9, None, 3),
        ("sharded", 1, None, 3),
        ("sharded", 1, "/mnt/nas", 1),
        ("pipeline", 1, None, 3),
        ("pipeline", 1, "/mnt/nas", 2),
        ("pipeline", None, "/mnt/nas", 3),
        ("local", None, None, 3),
        ("local", 1, None, 1),
    ],
)
def test_a_restart_needs_as_many_nodes_as_are_configured_and_have_the_state(
    tmp_path: Path, strategy: str, min_nodes: int | None, destination: str | None, needed: int
) -> None:
    made = plan(tmp_path, strategy, min_nodes, destination)
    assert failed_run(made, history(made, 9), KILLED).needed == needed


def test_before_its_first_step_a_run_needs_no_more_nodes_than_are_configured(tmp_path: Path) -> None:
    made = plan(tmp_path, "sharded", 1, None)
    assert failed_run(made, history(made, 0), KILLED).needed == 1


def history(plan: RunPlan, reached: int) -> RunHistory:
    return RunHistory(plan.record(), "n", plan.created_at, reached=reached)


def planned(home: Path, number: int, *ranks: int) -> AttemptPlanned:
    """An attempt on the nodes of these ranks, planned at START."""
    attempt = planned_attempt(RunDir(home), plan(home / "planned", "data", None, None), [], number)
    nodes = tuple(f"node{rank}" for rank in ranks)
    return AttemptPlanned(at=START, attempt=attempt.model_copy(update={"nodes": nodes}))


def lost(attempt: int, reached: int, after_s: float) -> AttemptFailed:
    return changed(KILLED, attempt=attempt, reached=reached).model_copy(
        update={"failed_at": START + timedelta(seconds=after_s)}
    )


SAVED = StateSaved(rank=1, state="20.1@1.1", manifest="0" * 64)
EXITED = RankExited(at=START + timedelta(hours=9), rank=0, node="node0", signal=9)
STOPPED = StateChanged(at=START, state=RunState.ABORTED, figures=Figures(iteration=18))


@pytest.mark.parametrize(
    ("recovery", "events", "nodes", "why"),
    [
        ({}, (), 3, ""),
        ({}, (lost(1, 0, 9.0),), 3, ""),
        ({}, (lost(1, 8, 9.0),), 3, ""),
        ({}, (lost(1, 20, 9.0),), 3, ""),
        ({}, (lost(1, 21, 9.0),), 3, "had made 21 iterations in 9 s, more than [recovery] restart_from_scratch_within"),
        ({}, (lost(1, 8, 1800.0),), 3, ""),
        ({}, (lost(1, 8, 1801.0),), 3, "had made 8 iterations in 1801 s, more than [recovery] restart_from_scratch_wi"),
        ({"restart_from_scratch_within": 40}, (lost(1, 21, 9.0),), 3, ""),
        ({"restart_from_scratch_within": 0}, (lost(1, 1, 9.0),), 3, "lets it repeat (0 in 1800 s)"),
        ({"restart_from_scratch_within_s": 5}, (lost(1, 8, 9.0),), 3, "lets it repeat (20 in 5 s)"),
        ({"without_state": "fail"}, (lost(1, 8, 9.0),), 3, 'reached iteration 8 ([recovery] without_state is "fail")'),
        ({"without_state": "fail"}, (lost(1, 0, 9.0),), 3, ""),
        ({}, (SAVED, lost(1, 8, 9.0)), 3, "rank 1 on node1 had saved that of update 20"),
        ({"without_state": "fail"}, (SAVED, lost(1, 8, 9.0)), 3, "rank 1 on node1 had saved that of update 20"),
        ({}, (lost(1, 8, 9.0),), 2, "node2, which is left out, may have that of iteration 8"),
        (
            {},
            (lost(1, 0, 9.0), LogsMissing(attempt=1, files={}, reached=8)),
            2,
            "node2, which is left out, may have that",
        ),
        ({}, (lost(1, 8, 9.0), lost(2, 3, 2.0)), 3, ""),
        ({}, (EXITED, STOPPED, RunReopened()), 3, "had made 18 iterations in 32400 s"),
        ({}, (lost(1, 8, 9.0), STOPPED, RunReopened(), lost(2, 0, 9.0)), 3, ""),
        ({"without_state": "fail"}, (lost(1, 8, 9.0), STOPPED, RunReopened(), lost(2, 0, 9.0)), 3, "iteration 18"),
        ({}, (SAVED, lost(1, 90, 7200.0), STOPPED, RunReopened(without_state=True)), 2, ""),
        ({}, (SAVED, STOPPED, RunReopened(without_state=True), STOPPED, RunReopened()), 3, "of update 20"),
    ],
)
def test_a_run_begins_anew_where_no_state_was_saved_and_little_is_repeated(
    tmp_path: Path, recovery: dict[str, Any], events: tuple[Event, ...], nodes: int, why: str
) -> None:
    """With a checkpoint every ten updates of two iterations each."""
    made = plan(tmp_path, "data", None, None)
    job = made.config.job.model_copy(update={"mlx_lm": {"grad_accumulation_steps": 2}})
    updates = {"job": job, "recovery": RecoveryConfig(**recovery), "checkpoint": CheckpointConfig(every=10)}
    made = made.model_copy(update={"config": made.config.model_copy(update=updates)})
    began = RunPlanned(at=START, run=made.record(), nonce="n")
    history = fold([began, planned(tmp_path, 1, 0, 1, 2), *events])
    needed = needs_state(made.among(made.nodes[:nodes]), history)
    assert why in needed and bool(why) is bool(needed)


@pytest.mark.parametrize("enabled", [True, False])
def test_without_an_interval_of_its_own_that_of_the_saves_limits_what_is_repeated(
    tmp_path: Path, *, enabled: bool
) -> None:
    made = plan(tmp_path, "data", None, None)
    updates = {"checkpoint": CheckpointConfig(enabled=enabled)}
    made = made.model_copy(update={"config": made.config.model_copy(update=updates)})
    assert [bool(needs_state(made, history(made, reached))) for reached in (100, 101)] == [False, True]


def test_a_command_without_metrics_that_ran_long_has_made_progress() -> None:
    often = tuple(changed(UNREPORTED, attempt=number) for number in range(1, 4))
    for count in (1, 2, 3):
        state = FailedRun(RECOVERY, often[:count], needed=4, lost_after_s=None, nodes=ALL_THERE)
        assert isinstance(decide(state), Restart), count
    soon = tuple(failure.model_copy(update={"ran_long": False}) for failure in often)
    never = decide(FailedRun(RECOVERY, soon[:1], needed=4, lost_after_s=None, nodes=ALL_THERE))
    assert isinstance(never, Finish) and "never made a step" in never.why


@pytest.mark.parametrize(
    ("outputs", "wording"), [(0, "bea's loss before the first step"), (9, "bea's loss soon after the start")]
)
def test_where_a_command_failed_is_said_as_far_as_it_is_known(outputs: int, wording: str) -> None:
    assert describe_failure(failure(1, Reason.NODE_LOST, "bea").model_copy(update={"outputs": outputs})) == wording


def test_a_command_that_found_its_port_taken_is_started_again(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    job = made.plan.config.job.model_copy(update={"command": ("torchrun", "t.py"), "framework": "torch"})
    plan = made.plan.model_copy(update={"config": made.plan.config.model_copy(update={"job": job})})
    history = RunHistory(plan.record(), plan.nonce, plan.created_at)
    taken = failure(1, Reason.LAUNCH_FAILED, "ana", signature="c10d.port_in_use")
    assert refusal(failed_run(plan, history, taken)) is None
    assert refusal(failed_run(plan, history, changed(taken, reached=5))) is not None
    assert refusal(failed_run(plan, history, failure(1, Reason.RANK_KILLED, "ana"))) is not None
