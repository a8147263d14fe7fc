"""A run that lost all its ranks before it saved a state begins anew, by itself or when it is resumed by hand."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from engine.api import Engine
from engine.config.models import CheckpointConfig, ClusterConfig, Config, RecoveryConfig
from engine.demo import demo_config
from engine.models import Reason, RunState
from engine.run.events import AttemptPlanned, AttemptResumed, RestartRefused
from engine.run.watch import RunWatch, supervisor_alive
from tests.demo_copies import demo_below
from tests.faults.local_runs import Run, start_config
from tests.faults.test_recovery import losses, signal_rank, with_recovery
from tests.faults.test_training import await_iteration, trained, with_keys
from tests.needs import TORCH
from tui.formatting import attempt_summary

pytestmark = pytest.mark.busy

ITERATIONS, EVERY, KILLED_AFTER = 18, 16, 3
"""Of a training, and from one checkpoint to the next: its ranks are killed long before the first."""


@pytest.fixture
def demo(tmp_path: Path) -> Config:
    """Two ranks of the demo, with a first checkpoint soon before the end."""
    config = demo_config(demo_below(tmp_path / "demo"), ranks=2, iters=ITERATIONS)
    keys = {"batch_size": 2, "max_seq_length": 64, "save_every": 1000, "val_batches": 1, "steps_per_eval": 5}
    updates = {"recovery": RecoveryConfig(), "checkpoint": CheckpointConfig(every=EVERY)}
    return with_keys(config, **keys).model_copy(update=updates)


def dividing(config: Config, strategy: str) -> Config:
    """`config` with another strategy; with one of PyTorch's, a PyTorch job."""
    updates: dict[str, Any] = {"strategy": strategy}
    if strategy in ("ddp", "fsdp"):
        config = with_keys(config, precision="fp32").model_copy(update={"cluster": ClusterConfig()})
        # The ranks share the cores of this machine: threads that wait for each other would keep them busy.
        updates |= {"framework": "torch", "env": {**config.job.env, "OMP_NUM_THREADS": "1"}}
        nodes = tuple(node.model_copy(update={"python": str(TORCH)}) for node in config.nodes)
        config = config.model_copy(update={"nodes": nodes})
    return config.model_copy(update={"job": config.job.model_copy(update=updates)})


def kill_all(run: Run) -> None:
    """No rank can save what another one's loss leaves."""
    await_iteration(run, KILLED_AFTER)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for rank in range(len(run.plan.nodes)):
            signal_rank(run, rank, number)


def weights(run: Run) -> dict[str, bytes]:
    adapters = run.plan.config.job.mlx_lm["adapter_path"]
    (path,) = {(Path(node.workdir) / str(adapters)).resolve() for node in run.plan.config.nodes}
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}


TORCH_STRATEGIES = [
    pytest.param(name, marks=[pytest.mark.slow, pytest.mark.needs("torch")]) for name in ("ddp", "fsdp")
]
STRATEGIES = [
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("data", "sharded", "pipeline", "local")),
    *TORCH_STRATEGIES,
]


@pytest.mark.slow
def test_a_run_that_lost_its_rank_early_begins_anew(home: Path, demo: Config) -> None:
    run = begins_anew(home, demo.model_copy(update={"nodes": demo.nodes[:1]}))
    first, second = losses(run, 1), losses(run, 2)
    assert len(first) >= KILLED_AFTER and first.items() <= second.items()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_lost_all_its_ranks_early_begins_anew(home: Path, demo: Config, strategy: str) -> None:
    config = dividing(demo, strategy)
    undisturbed = start_config(home, config)
    assert undisturbed.ended().state is RunState.SUCCEEDED, undisturbed.troubles()
    expected = weights(undisturbed)
    run = begins_anew(home, config)
    assert losses(run, 2) == losses(undisturbed) and weights(run) == expected


def begins_anew(home: Path, config: Config) -> Run:
    run = start_config(home, config)
    kill_all(run)
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.SUCCEEDED, Reason.COMPLETED, 2), run.troubles()
    (resumed,) = run.events_of(AttemptResumed)
    reached = resumed.repeated
    assert (
        reached is not None
        and EVERY > reached >= KILLED_AFTER
        and (resumed.resumed.source, resumed.resumed.iteration) == ("none", 0)
    )
    summary = attempt_summary(run.history.attempts[1].status)
    assert f"at iteration {reached}, begins anew: no state was saved up to iteration {reached}, " in summary
    series = RunWatch(run.dir).poll().series
    assert [iteration for iteration, _ in series.train] == list(range(1, ITERATIONS + 1)), "one curve"
    assert trained(run).count(1) == 2, "the rows of both attempts are kept"
    return run


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data", *TORCH_STRATEGIES[:1]])
async def test_a_run_that_must_not_begin_anew_by_itself_does_when_it_is_told_to(
    home: Path, demo: Config, strategy: str
) -> None:
    run = start_config(home, with_recovery(dividing(demo, strategy), without_state="fail"))
    kill_all(run)
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.FAILED, Reason.RANK_KILLED, 2), run.troubles()
    reached = run.history.reached
    why = f"no state to resume from (no rank has any), and the run had reached iteration {reached} ([recovery] "
    (refused,) = run.events_of(RestartRefused)
    assert refused.why.startswith(f'a restart does not fix what a trainer refuses: {why}without_state is "fail"): ')
    assert "\n" not in refused.why and "`flightdeck resume last --without-state`" in refused.why
    for without_state, state, attempts in ((False, RunState.FAILED, 3), (True, RunState.SUCCEEDED, 4)):
        run.wait(lambda: not supervisor_alive(run.dir), after_end=True)
        await Engine(home).launches.resume(run.dir.id, without_state=without_state)
        record = run.ended()
        assert (record.state, record.attempts) == (state, attempts), run.troubles()
    assert sorted(losses(run, 4)) == list(range(1, ITERATIONS + 1))
    assert [bool(event.attempt.needs_state) for event in run.events_of(AttemptPlanned)] == [False, True, True, False]
