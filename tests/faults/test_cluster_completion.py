"""All ranks complete while a node or the supervisor is away for longer than the lease: the run is completed, and
nothing of it is trained again.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from engine.api import Engine
from engine.config.models import Config, RecoveryConfig
from engine.errors import InputError
from engine.models import Reason, RunState
from engine.run.events import AttemptFailed, RankExited, RestartPlanned
from engine.run.supervisor_process import adopt_orphans
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import ClusterRun, nodes_of, start_on
from tests.faults.local_runs import kill_and_await
from tests.faults.test_cluster_recovery import training
from tests.faults.test_recovery import losses
from tests.faults.test_training import await_iteration, trained, with_keys

pytestmark = pytest.mark.slow

ITERATIONS = 16
AWAY_AT = 4
LEASE_S = 12.0
RECOVERY = RecoveryConfig(lease_s=LEASE_S, save_grace_s=2.0, stop_grace_s=1.0, term_grace_s=0.5)
"""Time enough for the last steps before the lease ends the ranks."""
TOO_LONG_S = LEASE_S + 5.0 + 2.0 + 0.5 + 2.0
"""After which a silent node's ranks have ended in any case."""


def two_nodes(cluster: Cluster, home: Path, recovery: RecoveryConfig = RECOVERY) -> Config:
    config = training(cluster, home, recovery, iters=ITERATIONS)
    return with_keys(config.model_copy(update={"nodes": nodes_of(cluster, names=("ana", "bea"))}), batch_size=2)


def take_away(cluster: Cluster, *names: str) -> None:
    """No ssh from now on; the ring goes on."""
    for name in names:
        cluster[name].stop_sshd()
        cluster[name].reset_ssh()


def await_completion(run: ClusterRun) -> None:
    """Every rank has ended by itself, as its node shows."""
    records = [run.files_of(rank).exit(rank) for rank in range(len(run.nodes))]
    run.wait(lambda: all(record.exists() for record in records), after_end=True)
    assert all(b'"code": 0' in record.read_bytes() for record in records), run.troubles()
    assert all(b'"stopped_by": null' in record.read_bytes() for record in records), run.troubles()


def succeeds(run: ClusterRun) -> None:
    run.wait(lambda: run.record.state is RunState.SUCCEEDED, within_s=60.0, after_end=True)
    record = run.record
    assert (record.reason, record.attempts, record.iteration) == (Reason.COMPLETED, 1, ITERATIONS), run.troubles()
    assert (record.cause, record.fix, record.unconfirmed) == (None, None, [])
    assert run.events_of(RestartPlanned) == []
    assert sorted(losses(run)) == trained(run) == list(range(1, ITERATIONS + 1))
    assert {event.rank: event.code for event in run.events_of(RankExited)} == {0: 0, 1: 0}
    run.nothing_left()
    run.mirrors_are_equal()


@pytest.mark.parametrize("name", ["ana", "bea"])
def test_a_node_that_was_away_when_its_rank_completed(nodes: Cluster, home: Path, name: str) -> None:
    run = start_on(nodes, home, two_nodes(nodes, home))
    await_iteration(run, AWAY_AT)
    take_away(nodes, name)
    await_completion(run)
    run.wait(lambda: run.record.state.ended, within_s=2 * TOO_LONG_S + 60.0)
    record = run.record
    assert (record.state, record.reason, record.attempts) == (RunState.COMPLETED, Reason.COMPLETED, 1), run.troubles()
    assert record.unconfirmed == [name] and record.cause is not None and f"on {name}" in record.cause
    assert ("adapters" in record.cause) == (name == "ana")
    assert run.events_of(AttemptFailed) == []
    with pytest.raises(InputError, match=f"completed.*{name} can be reached"):
        Engine(home).launches._resume(run.dir)
    nodes[name].start_sshd()
    succeeds(run)
    assert run.record.ended_at == record.ended_at, "that is when it ended"


def test_an_adopter_fetches_what_was_missing(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, two_nodes(nodes, home))
    await_iteration(run, AWAY_AT)
    take_away(nodes, "bea")
    kill_and_await(run.supervisor)
    await_completion(run)
    assert adopt_orphans(home) == [run.dir.id]
    run.wait(lambda: run.record.state.ended, within_s=2 * TOO_LONG_S + 60.0)
    assert run.record.state is RunState.COMPLETED, run.troubles()
    kill_and_await(run.supervisor)
    nodes["bea"].start_sshd()
    assert adopt_orphans(home) == [run.dir.id], "there is still something to do"
    succeeds(run)


def test_all_nodes_away_and_nothing_known_of_any_rank(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, two_nodes(nodes, home))
    await_iteration(run, AWAY_AT)
    take_away(nodes, "ana", "bea")
    await_completion(run)
    run.await_state(RunState.RECOVERING)
    for name in ("ana", "bea"):
        nodes[name].start_sshd()
    succeeds(run)


def test_all_nodes_away_for_longer_than_they_are_waited_for(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, two_nodes(nodes, home, RECOVERY.model_copy(update={"node_wait_s": 1.0})))
    await_iteration(run, AWAY_AT)
    take_away(nodes, "ana", "bea")
    await_completion(run)
    run.wait(lambda: run.record.state.ended)
    assert (run.record.state, run.record.reason) == (RunState.FAILED, Reason.NODE_LOST), run.troubles()
    assert run.dir.secrets.exists(), "its logs may still come, and have to be redacted"
    for name in ("ana", "bea"):
        nodes[name].start_sshd()
    succeeds(run)


def test_a_supervisor_that_was_stopped_for_longer_than_the_lease(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, two_nodes(nodes, home))
    await_iteration(run, AWAY_AT)
    stopped = run.supervisor
    os.kill(stopped, signal.SIGSTOP)
    try:
        await_completion(run)
        ended = max(run.files_of(rank).exit(rank).stat().st_mtime for rank in (0, 1))
        run.wait(lambda: time.time() - ended > TOO_LONG_S, after_end=True)
    finally:
        os.kill(stopped, signal.SIGCONT)
    succeeds(run)
