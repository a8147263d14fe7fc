"""Runs whose state is divided over the ranks: no survivor has the whole of it, so the periodic checkpoint serves."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from engine.config.models import CheckpointConfig, Config, RecoveryConfig, select_nodes
from engine.demo import demo_config, ensure_made
from engine.models import Reason, RunState
from engine.run.events import AttemptResumed, RestartDelayed
from tests.cluster.cluster import Cluster
from tests.demo_copies import demo_below
from tests.faults.cluster_runs import demo_on, start_on
from tests.faults.local_runs import Run, start_config
from tests.faults.test_cluster_recovery import SHORT
from tests.faults.test_recovery import losses, signal_rank
from tests.faults.test_training import await_iteration, with_keys
from tests.training.tiny import write_weights

pytestmark = pytest.mark.busy

ITERATIONS = 10
EVERY = 3
"""Updates from one checkpoint to the next."""
KEYS = {"max_seq_length": 64, "save_every": 1000, "val_batches": 0}


def divided(config: Config, strategy: str, **keys: int) -> Config:
    config = with_keys(config, **KEYS, **keys)
    job = config.job.model_copy(update={"strategy": strategy})
    return config.model_copy(update={"job": job, "checkpoint": CheckpointConfig(every=EVERY)})


def has_checkpoint(run: Run) -> bool:
    """Every rank's part of one is on its disk."""
    return all(b'"phase": "committed"' in run.dir.events(rank).read_bytes() for rank in range(len(run.plan.nodes)))


def recovered(home: Path, tmp_path: Path, strategy: str) -> tuple[Config, Run]:
    """A run of which a rank was killed after its first checkpoints."""
    config = divided(demo_config(demo_below(tmp_path / "demo"), ranks=2, iters=ITERATIONS), strategy, batch_size=4)
    config = config.model_copy(update={"recovery": RecoveryConfig()})
    run = start_config(home, config)
    await_iteration(run, EVERY + 2)
    run.wait(lambda: has_checkpoint(run))
    signal_rank(run, 1, signal.SIGKILL)
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.SUCCEEDED, Reason.COMPLETED, 2), run.troubles()
    return config, run


@pytest.mark.slow
def test_a_killed_rank_costs_what_the_last_checkpoint_is_behind_and_no_bit(home: Path, tmp_path: Path) -> None:
    _, run = recovered(home, tmp_path, "sharded")
    (event,) = run.events_of(AttemptResumed)
    assert event.resumed.source == "checkpoint" and event.resumed.iteration % EVERY == 0, event
    assert event.repeated is not None and event.repeated <= 2 * EVERY, event
    first, second = losses(run, 1), losses(run, 2)
    twice = first.keys() & second.keys()
    assert twice and all(first[step] == second[step] for step in twice)
    assert sorted(losses(run)) == list(range(1, ITERATIONS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded", "pipeline"])
def test_its_losses_are_those_of_a_run_to_which_nothing_has_happened(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    config, run = recovered(home, tmp_path, strategy)
    monkeypatch.setenv("FLIGHTDECK_HOME", str(tmp_path / "calm"))
    calm = start_config(tmp_path / "calm", config)
    assert calm.ended().state is RunState.SUCCEEDED, calm.troubles()
    assert losses(run) == losses(calm) and len(losses(calm)) == ITERATIONS


@pytest.fixture
def three_layers(nodes: Cluster, home: Path, tmp_path: Path) -> str:
    """The demo's model with a layer more, on every node."""
    model = tmp_path / "three"
    shutil.copytree(ensure_made(demo_below(home)) / "model", model)
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 3}
    (model / "config.json").write_text(json.dumps(config))
    write_weights(model, config)
    for node in nodes.nodes:
        node.copy_in(model, "~/models/three")
    return "~/models/three"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded", "pipeline"])
def test_a_node_that_is_gone_is_waited_for_since_it_has_a_part_of_the_state(
    nodes: Cluster, home: Path, three_layers: str, strategy: str
) -> None:
    recovery = SHORT.model_copy(update={"min_nodes": 2})
    config = select_nodes(demo_on(nodes, home, iters=ITERATIONS, recovery=recovery), {"ana", "bea", "cyd"})
    job = config.job.model_copy(update={"model": three_layers})
    config = divided(config.model_copy(update={"job": job}), strategy, batch_size=6)
    run = start_on(nodes, home, config)
    await_iteration(run, EVERY + 2)
    run.wait(lambda: has_checkpoint(run))
    nodes["cyd"].power_off()
    run.wait(lambda: [event.why for event in run.events_of(RestartDelayed)] == ["waits for cyd"], 100.0)
    nodes["cyd"].power_on()
    record = run.ended(within_s=200.0)
    assert (record.state, record.attempts, record.world_size) == (RunState.SUCCEEDED, 2, 3), run.troubles()
    (event,) = run.events_of(AttemptResumed)
    assert event.resumed.source == "checkpoint" and event.resumed.iteration % EVERY == 0, event
    calm = start_on(nodes, home, config)
    assert calm.ended(within_s=200.0).state is RunState.SUCCEEDED, calm.troubles()
    assert losses(run) == losses(calm) and len(losses(calm)) == ITERATIONS
