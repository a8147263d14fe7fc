"""The built-in training with PyTorch on nodes of their own: launched, followed, stopped, and recovered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config.models import CheckpointConfig, ClusterConfig, Config, RecoveryConfig, select_nodes
from engine.models import Reason, RunState
from engine.run.events import AttemptPlanned, AttemptResumed, RestartDelayed, RestartRefused
from tests.cluster.cluster import Cluster, SharedDiskCluster
from tests.cluster.system import VOLUME
from tests.faults.cluster_runs import ClusterRun, demo_on, start_on
from tests.faults.local_runs import SHORT_GRACES, aborted
from tests.faults.test_cluster_recovery import SHORT
from tests.faults.test_divided_recovery import EVERY, has_checkpoint
from tests.faults.test_recovery import losses
from tests.faults.test_torch_commands import FOUR
from tests.faults.test_training import await_iteration, trained, with_keys
from tests.needs import TORCH
from tests.torch.test_trainings import DDP, FSDP, ZERO, assert_same_losses

pytestmark = [pytest.mark.busy, pytest.mark.needs("torch")]

ITERATIONS = 24
DIVISIONS = {"ddp": DDP, "fsdp": FSDP, **{f"ZeRO-{stage}": division for stage, division in ZERO.items()}}


def torch_training(
    cluster: Cluster,
    home: Path,
    division: str,
    names: tuple[str, ...] = FOUR,
    *,
    recovery: RecoveryConfig = SHORT_GRACES,
    **keys: Any,
) -> Config:
    """The demo with PyTorch on these nodes. Its batch can be shared by two, three or four."""
    config = select_nodes(demo_on(cluster, home, iters=ITERATIONS, recovery=recovery), set(names))
    strategy = DIVISIONS[division]
    own = {"batch_size": 12, "max_seq_length": 64, "save_every": 1000, "val_batches": 0, "precision": "fp32", **keys}
    config = with_keys(config, **own, **{key: value for key, value in strategy.items() if key != "strategy"})
    # The nodes share the cores of this machine: threads that wait for each other would keep them busy.
    env = {**config.job.env, "OMP_NUM_THREADS": "1"}
    job = config.job.model_copy(update={"framework": "torch", "strategy": strategy["strategy"], "env": env})
    nodes = tuple(node.model_copy(update={"python": str(TORCH)}) for node in config.nodes)
    updates = {"cluster": ClusterConfig(), "job": job, "nodes": nodes, "checkpoint": CheckpointConfig(every=EVERY)}
    return config.model_copy(update=updates)


def await_checkpoint(run: ClusterRun) -> None:
    await_iteration(run, EVERY + 1)
    run.wait(lambda: has_checkpoint(run))


def went_on(run: ClusterRun) -> dict[int, float]:
    """The losses of a run whose second attempt went on from a checkpoint, and repeated what the first had done."""
    (event,) = run.events_of(AttemptResumed)
    assert event.resumed.source == "checkpoint" and event.resumed.iteration % EVERY == 0 < event.resumed.iteration
    first, second = losses(run, 1), losses(run, 2)
    assert_same_losses(second, {**second, **{step: first[step] for step in first.keys() & second.keys()}})
    found = losses(run)
    assert sorted(found) == sorted(set(trained(run))) == list(range(1, ITERATIONS + 1))
    return found


def test_a_training_succeeds(nodes: Cluster, home: Path) -> None:
    """On one node: each rank costs five seconds of a core at each start. That a second attempt goes on from what the
    first has saved is in tests/torch, and that the head starts one in test_recovery."""
    run = start_on(nodes, home, torch_training(nodes, home, "fsdp", ("ana",), iters=4))
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.SUCCEEDED, Reason.COMPLETED, 1), run.troubles()
    assert (record.backend, record.world_size, record.iteration) == ("gloo", 1, 4)
    assert list(losses(run)) == trained(run) == [1, 2, 3, 4]
    (start,) = (
        event for event in map(json.loads, run.dir.events(0).read_text().splitlines()) if event["event"] == "start"
    )
    assert (start["strategy"], start["world_size"]) == ("fsdp", 1)
    assert "rank 0 of 1 on ana: loading" in run.dir.log(0).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("names", [FOUR[:1], FOUR[:2], FOUR], ids=len)
def test_a_killed_rank_is_recovered(nodes: Cluster, home: Path, division: str, names: tuple[str, ...]) -> None:
    run = start_on(nodes, home, torch_training(nodes, home, division, names))
    await_checkpoint(run)
    victim = min(1, len(names) - 1)
    run.kill(victim, run.identity(victim).trainer_pid)
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.SUCCEEDED, Reason.COMPLETED, 2), run.troubles()
    assert (record.backend, record.world_size, record.iteration) == ("gloo", len(names), ITERATIONS)
    went_on(run)
    for rank in range(len(names)):
        events = map(json.loads, run.dir.events(rank).read_text().splitlines())
        starts = [(event["strategy"], event["world_size"]) for event in events if event["event"] == "start"]
        assert starts == [(DIVISIONS[division]["strategy"], len(names))] * 2
        assert f"rank {rank} of {len(names)} on {names[rank]}: loading" in run.dir.log(rank).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
def test_an_abort_leaves_nothing(nodes: Cluster, home: Path, division: str) -> None:
    run = start_on(nodes, home, torch_training(nodes, home, division, iters=5000))
    await_iteration(run, 2)
    aborted(run)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["ana", "cyd"])
def test_ddp_goes_on_without_a_lost_node(nodes: Cluster, home: Path, lost: str) -> None:
    recovery = SHORT.model_copy(update={"min_nodes": 3})
    run = start_on(nodes, home, torch_training(nodes, home, "ddp", recovery=recovery))
    await_checkpoint(run)
    nodes[lost].power_off()
    run.wait(lambda: run.record.state.ended, 200.0)
    record = run.record
    assert (record.state, record.attempts, record.world_size) == (RunState.SUCCEEDED, 2, 3), run.troubles()
    assert record.unconfirmed == [lost], "nobody has seen that nothing is left there"
    members = {event.attempt.number: event.attempt.nodes for event in run.events_of(AttemptPlanned)}
    assert members[2] == tuple(name for name in FOUR if name != lost)
    went_on(run)
    nodes[lost].power_on()
    run.wait(lambda: run.record.unconfirmed == [], 60.0, after_end=True)


@pytest.mark.slow
@pytest.mark.parametrize("division", [name for name in DIVISIONS if name != "ddp"])
def test_a_node_with_a_part_of_the_state_is_waited_for(nodes: Cluster, home: Path, division: str) -> None:
    recovery = SHORT.model_copy(update={"min_nodes": 2})
    run = start_on(nodes, home, torch_training(nodes, home, division, recovery=recovery))
    await_checkpoint(run)
    nodes["cyd"].power_off()
    run.wait(lambda: [event.why for event in run.events_of(RestartDelayed)] == ["waits for cyd"], 100.0)
    nodes["cyd"].power_on()
    record = run.ended()
    assert (record.state, record.attempts, record.world_size) == (RunState.SUCCEEDED, 2, 4), run.troubles()
    went_on(run)


@pytest.mark.slow
def test_one_that_does_not_come_back_ends_the_run_by_its_name(nodes: Cluster, home: Path) -> None:
    recovery = SHORT.model_copy(update={"min_nodes": 2, "node_wait_s": 3.0})
    run = start_on(nodes, home, torch_training(nodes, home, "fsdp", iters=5000, recovery=recovery))
    await_checkpoint(run)
    nodes["dov"].power_off()
    run.wait(lambda: run.record.state.ended, 100.0)
    record = run.record
    assert (record.state, record.reason, record.host) == (RunState.FAILED, Reason.NODE_LOST, "dov"), run.troubles()
    assert "dov has not come back" in run.events_of(RestartRefused)[0].why


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Three nodes with a disk in common."""
    with SharedDiskCluster(3) as cluster:
        monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
        yield cluster


@pytest.mark.slow
@pytest.mark.needs("namespaces")
@pytest.mark.parametrize("division", [name for name in DIVISIONS if name != "ddp"])
def test_with_a_shared_destination_the_others_go_on(sharing: Cluster, home: Path, division: str) -> None:
    recovery = SHORT.model_copy(update={"min_nodes": 2})
    config = torch_training(sharing, home, division, FOUR[:3], recovery=recovery)
    shared = config.checkpoint.model_copy(update={"destination": VOLUME})
    run = start_on(sharing, home, config.model_copy(update={"checkpoint": shared}))
    await_checkpoint(run)
    sharing["cyd"].power_off()
    run.wait(lambda: run.record.state.ended)
    record = run.record
    assert (record.state, record.attempts, record.world_size) == (RunState.SUCCEEDED, 2, 2), run.troubles()
    went_on(run)
