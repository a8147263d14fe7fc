"""Our own trainer under the supervisor: metrics once each, cooperative stops, and failures by their own name."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engine.config.models import Config, ConsistencyConfig, RecoveryConfig
from engine.demo import demo_config
from engine.models import Reason, RunState
from engine.run.events import AlarmRaised, HangDetected
from engine.run.supervisor_process import adopt_orphans
from engine.run.watch import RunWatch
from tests.demo_copies import demo_below
from tests.faults.local_runs import Run, kill_and_await, start_config
from tests.training.test_replicas import CORRUPTING

pytestmark = pytest.mark.busy


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The demo on two ranks with small batches; its model and data are made once."""
    config = demo_config(demo_below(tmp_path_factory.mktemp("demo")), ranks=2, iters=8)
    once = RecoveryConfig(max_restarts=0)
    return with_keys(config, batch_size=2, max_seq_length=64).model_copy(update={"recovery": once})


def with_keys(config: Config, **keys: Any) -> Config:
    job = config.job.model_copy(update={"mlx_lm": {**config.job.mlx_lm, **keys}})
    return config.model_copy(update={"job": job})


def trained(run: Run) -> list[int]:
    """The iterations that metrics.jsonl has a training loss of, in its order."""
    if not run.dir.metrics.exists():
        return []
    rows = [json.loads(line) for line in run.dir.metrics.read_text().splitlines()]
    return [row["iteration"] for row in rows if row["kind"] == "train"]


def await_iteration(run: Run, iteration: int) -> None:
    run.wait(lambda: iteration in trained(run))


@pytest.mark.slow
def test_a_training_succeeds_and_its_figures_are_in_the_record(home: Path, demo: Config) -> None:
    run = start_config(home, demo)
    record = run.ended()
    assert (record.state, record.reason) == (RunState.SUCCEEDED, Reason.COMPLETED), run.troubles()
    assert (record.iteration, record.iterations, record.world_size) == (8, 8, 2)
    assert trained(run) == list(range(1, 9))
    last = json.loads(run.dir.metrics.read_text().splitlines()[-1])
    assert record.train_loss == last.get("train_loss", record.train_loss)
    assert record.train_loss is not None and math.isfinite(record.train_loss)
    assert record.val_loss is not None and record.tokens_per_second is not None


@pytest.mark.slow
def test_what_every_trainer_has_completed_is_finished_though_a_keeper_does_not_answer(home: Path, demo: Config) -> None:
    impatient = RecoveryConfig(max_restarts=1, hang_s=5.0, stall_s=60.0)
    run = start_config(home, with_keys(demo, iters=20).model_copy(update={"recovery": impatient}))
    await_iteration(run, 3)
    os.kill(run.identity(1).keeper_pid, signal.SIGSTOP)
    record = run.ended()
    assert (record.state, record.reason, record.iteration) == (RunState.SUCCEEDED, Reason.COMPLETED, 20), run.troubles()
    assert (record.attempts, run.events_of(HangDetected)) == (1, [])


@pytest.mark.slow
def test_a_supervisor_killed_in_training_doubles_no_metric(home: Path, demo: Config) -> None:
    run = start_config(home, with_keys(demo, iters=20))
    for iteration in (3, 8):
        await_iteration(run, iteration)
        kill_and_await(run.supervisor)
        assert adopt_orphans(home) == [run.dir.id]
    assert run.ended().state is RunState.SUCCEEDED, run.troubles()
    assert trained(run) == list(range(1, 21))


@pytest.mark.slow
def test_an_abort_is_cooperative_and_all_ranks_leave_at_the_same_step(home: Path, demo: Config) -> None:
    run = start_config(home, with_keys(demo, iters=5000))
    await_iteration(run, 3)
    assert run.abort() < 20.0
    record = run.record
    assert (record.state, record.reason, record.unconfirmed) == (RunState.ABORTED, Reason.USER_ABORT, [])
    ends = [
        next(json.loads(line) for line in run.dir.events(rank).read_text().splitlines() if '"event": "end"' in line)
        for rank in (0, 1)
    ]
    assert ends[0]["stopped"] is ends[1]["stopped"] is True
    assert ends[0]["iteration"] == ends[1]["iteration"]


@pytest.mark.slow
def test_a_killed_trainer_is_the_cause_and_its_peer_is_not(home: Path, demo: Config) -> None:
    run = start_config(home, with_keys(demo, iters=5000))
    await_iteration(run, 2)
    os.kill(run.identity(0).trainer_pid, signal.SIGKILL)
    record = run.ended()
    assert (record.state, record.reason, record.rank, record.host) == (
        RunState.FAILED,
        Reason.RANK_KILLED,
        0,
        "node0",
    ), run.troubles()
    assert record.signal == signal.SIGKILL


@pytest.mark.slow
def test_divergence_is_named(home: Path, demo: Config) -> None:
    run = start_config(home, with_keys(demo, iters=200, learning_rate=1e30, val_batches=0))
    record = run.ended()
    assert (record.state, record.reason) == (RunState.FAILED, Reason.DIVERGED), run.troubles()


@pytest.mark.slow
def test_data_that_is_missing_is_the_trainers_own_line(home: Path, demo: Config, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    nodes = tuple(node.model_copy(update={"data": str(empty)}) for node in demo.nodes)
    record = start_config(home, demo.model_copy(update={"nodes": nodes})).ended()
    assert (record.state, record.reason) == (RunState.FAILED, Reason.RANK_FAILED)
    assert record.cause is not None and "train.jsonl is missing" in record.cause


def test_preflight_blocks_and_names_rank_node_and_check(home: Path, demo: Config) -> None:
    nodes = (demo.nodes[0], demo.nodes[1].model_copy(update={"python": "/no/such/python"}))
    run = start_config(home, demo.model_copy(update={"nodes": nodes}), skip=())
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.FAILED, Reason.PREFLIGHT_FAILED, 0)
    assert (record.rank, record.host) == (1, "node1")
    assert record.cause is not None and "/no/such/python" in record.cause


@pytest.mark.slow
def test_a_rank_corrupted_on_purpose_is_named_in_record_journal_and_audit_log(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = demo_config(demo_below(tmp_path_factory.mktemp("three")), ranks=3, iters=40)
    config = with_keys(config, batch_size=3, max_seq_length=64, val_batches=0, save_every=4)
    environment = {**config.job.env, "PYTHONPATH": str(CORRUPTING), "CORRUPT": "1 6 trained"}
    job = config.job.model_copy(update={"env": environment})
    run = start_config(home, config.model_copy(update={"job": job, "consistency": ConsistencyConfig(every=5)}))
    record = run.ended()
    assert (record.state, record.reason, record.rank, record.host) == (
        RunState.FAILED,
        Reason.CORRUPTED,
        1,
        config.nodes[1].name,
    ), run.troubles()
    assert record.cause is not None and "the parameters of rank 1 are corrupted" in record.cause
    assert record.fix is not None and "memory" in record.fix
    # Flipped after the sixth update, found before what would have been saved at the eighth.
    (alarm,) = [event for event in run.events_of(AlarmRaised) if event.alarm == "REPLICAS_DIFFER"]
    assert (alarm.ranks, alarm.workers, alarm.iteration) == ((1,), (config.nodes[1].name,), 8)
    audited = [json.loads(line) for line in (home / "audit.jsonl").read_text().splitlines()]
    assert [entry["context"]["ranks"] for entry in audited if entry["event_type"] == "worker_consistency"][-1:] == [[1]]
    snapshot = RunWatch(run.dir).poll()
    assert [line.good for line in snapshot.verification if line.name in ("backend", "replicas")] == [True, False]
    assert alarm.message in [found.message for found in snapshot.alarms]
