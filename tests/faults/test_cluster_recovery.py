"""Recovery on four nodes: a rank that is killed, a node that is gone for good, a node that is away for a while."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.config.models import Config, RecoveryConfig
from engine.models import Reason, RunState
from engine.run.events import (
    AttemptFailed,
    AttemptPlanned,
    AttemptResumed,
    RestartDelayed,
    RestartPlanned,
    RestartRefused,
)
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import ClusterRun, demo_on, start_on
from tests.faults.test_recovery import losses
from tests.faults.test_training import await_iteration, with_keys

pytestmark = pytest.mark.busy

ITERATIONS = 16


def training(cluster: Cluster, home: Path, recovery: RecoveryConfig, iters: int = ITERATIONS) -> Config:
    """The demo on all nodes; nothing is saved on the way, and the batch can be shared by three, too."""
    keys = {"batch_size": 12, "save_every": 1000, "val_batches": 0}
    return with_keys(demo_on(cluster, home, iters=iters, recovery=recovery), **keys)


@pytest.fixture(scope="module")
def undisturbed(session_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLIGHTDECK_SSH_CONFIG", str(session_cluster.ssh_config))
        home = tmp_path_factory.mktemp("undisturbed")
        patch.setenv("FLIGHTDECK_HOME", str(home))
        run = start_on(session_cluster, home, training(session_cluster, home, RecoveryConfig()))
        assert run.ended(within_s=200.0).state is RunState.SUCCEEDED, run.troubles()
        return losses(run)


def killed_at_random(nodes: Cluster, home: Path, seed: int) -> ClusterRun:
    """A run of which one rank was killed at a random step."""
    moment = random.Random(seed)
    run = start_on(nodes, home, training(nodes, home, RecoveryConfig()))
    await_iteration(run, moment.randint(2, ITERATIONS - 5))
    rank = moment.randint(0, 3)
    run.kill(rank, run.identity(rank).trainer_pid)
    record = run.ended(within_s=200.0)
    assert (record.state, record.reason, record.attempts) == (RunState.SUCCEEDED, Reason.COMPLETED, 2), run.troubles()
    return run


def whole_and_exact(run: ClusterRun, undisturbed: dict[int, float]) -> None:
    assert losses(run) == undisturbed
    assert len(set(losses(run, 1)) & set(losses(run, 2))) <= 1, "steps that were made twice"
    (event,) = run.events_of(AttemptResumed)
    assert event.resumed.source == "emergency" and event.repeated is not None and event.repeated <= 1, event


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_killed_at_a_random_step(nodes: Cluster, home: Path, undisturbed: dict[int, float], seed: int) -> None:
    whole_and_exact(killed_at_random(nodes, home, seed), undisturbed)


SHORT = RecoveryConfig(lease_s=3.0, save_grace_s=3.0, stop_grace_s=1.0, term_grace_s=0.5)


@pytest.mark.slow
def test_three_go_on_when_a_node_is_gone_for_good(nodes: Cluster, home: Path, undisturbed: dict[int, float]) -> None:
    recovery = SHORT.model_copy(update={"min_nodes": 3})
    run = start_on(nodes, home, training(nodes, home, recovery))
    await_iteration(run, 4)
    nodes["bea"].power_off()
    run.wait(lambda: run.record.state.ended, 200.0)
    record = run.record
    assert (record.state, record.attempts, record.world_size) == (RunState.SUCCEEDED, 2, 3), run.troubles()
    assert record.unconfirmed == ["bea"], "nobody has seen that nothing is left there"
    (restart,) = run.events_of(RestartPlanned)
    assert (restart.members, restart.left_out) == (("ana", "cyd", "dov"), ("bea",))
    members = {event.attempt.number: event.attempt.nodes for event in run.events_of(AttemptPlanned)}
    assert members[2] == ("ana", "cyd", "dov")
    (ended,) = run.events_of(AttemptFailed)
    assert (ended.verdict.reason, ended.verdict.host) == (Reason.NODE_LOST, "bea")
    found = losses(run)
    assert sorted(found) == list(range(1, ITERATIONS + 1))
    assert max(abs(found[step] - undisturbed[step]) for step in found) < 1e-4
    nodes["bea"].power_on()
    run.wait(lambda: run.record.unconfirmed == [], 60.0, after_end=True)


@pytest.mark.slow
def test_a_node_that_is_needed_is_waited_for(nodes: Cluster, home: Path, undisturbed: dict[int, float]) -> None:
    run = start_on(nodes, home, training(nodes, home, SHORT))
    await_iteration(run, 4)
    nodes["cyd"].power_off()
    run.wait(lambda: [event.why for event in run.events_of(RestartDelayed)] == ["waits for cyd"], 100.0)
    assert len(run.attempts()) == 1
    nodes["cyd"].power_on()
    record = run.ended(within_s=200.0)
    assert (record.state, record.attempts, record.world_size) == (RunState.SUCCEEDED, 2, 4), run.troubles()
    assert losses(run) == undisturbed


@pytest.mark.slow
def test_a_node_that_does_not_come_back_ends_the_run_by_its_name(nodes: Cluster, home: Path) -> None:
    recovery = SHORT.model_copy(update={"node_wait_s": 3.0})
    run = start_on(nodes, home, training(nodes, home, recovery, iters=5000))
    await_iteration(run, 3)
    nodes["dov"].power_off()
    run.wait(lambda: run.record.state.ended, 100.0)
    record = run.record
    assert (record.state, record.reason, record.host) == (RunState.FAILED, Reason.NODE_LOST, "dov"), run.troubles()
    assert "dov has not come back" in run.events_of(RestartRefused)[0].why
