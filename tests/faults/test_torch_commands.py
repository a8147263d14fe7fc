"""PyTorch jobs with a command of the user's own, on nodes without MLX: launched, followed, stopped and recovered."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from engine.config.models import Config, JobConfig, RecoveryConfig
from engine.models import Reason, RunState
from engine.protocol.launchers import LAUNCHERS
from engine.run.command_watch import RANKS_APART
from engine.run.events import AlarmRaised
from engine.run.watch import RunWatch
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import ClusterRun, ring_config, start_on
from tests.faults.local_runs import DOUBLE_FORK, SHORT_GRACES, aborted
from tests.needs import TORCH

pytestmark = [pytest.mark.busy, pytest.mark.needs("torch")]

FOUR = ("ana", "bea", "cyd", "dov")
SCRIPT = """
import atexit, json, os, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
atexit.register(dist.destroy_process_group)
rank, step, enough = dist.get_rank(), 0, False
print("rank", rank, "of", dist.get_world_size(), "local", os.environ["LOCAL_RANK"], "is up", flush=True)
weight = torch.ones(4, requires_grad=True)
while not enough:
    step += 1
    loss = (torch.ones(2, 4) @ weight).square().mean()
    (gradient,) = torch.autograd.grad(loss, [weight])
    dist.all_reduce(gradient)
    with torch.no_grad(): weight -= 0.001 * gradient
    wish = torch.tensor(float(os.path.exists("enough")))
    dist.all_reduce(wish)
    enough = wish.item() > 0
    if step % 2 == 0:
        print("rank", rank, "step", step, flush=True)
        if rank == 0: print(json.dumps(dict(step=step, loss=loss.item())), flush=True)
    {fault}
    time.sleep(0.05)
print("rank", rank, "done", flush=True)
"""
"""As local_runs.RING, with a loss, over gloo. An optimizer or DistributedDataParallel would import torch._dynamo: two
seconds of a core for each rank."""


def torch_config(
    cluster: Cluster, *names: str, script: str = "", recovery: RecoveryConfig = SHORT_GRACES, **job: Any
) -> Config:
    """A script on these nodes, started as by torchrun, with a python that has torch and no MLX."""
    config = ring_config(cluster, names=names, recovery=recovery)
    workdir = config.nodes[0].workdir
    for node in cluster.nodes:
        node.write(f"{workdir}/train.py", script or SCRIPT.format(fault="pass"))
    nodes = tuple(node.model_copy(update={"python": str(TORCH)}) for node in config.nodes)
    own = JobConfig(**{"name": "torch", "framework": "torch", "command": ("torchrun", "train.py"), **job})
    return config.model_copy(update={"nodes": nodes, "job": own})


def finish(run: ClusterRun) -> None:
    for node in run.nodes:
        node.write(f"{run.workdir}/enough", "")


@pytest.mark.parametrize("names", [FOUR[:2], pytest.param(FOUR, marks=pytest.mark.slow)], ids=len)
def test_ranks_are_started_as_by_torchrun_and_succeed(nodes: Cluster, home: Path, names: tuple[str, ...]) -> None:
    run = start_on(nodes, home, torch_config(nodes, *names))
    run.everybody_steps()
    run.wait(lambda: run.dir.metrics.exists() and run.dir.metrics.read_bytes().count(b"\n") >= 3)
    finish(run)
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.SUCCEEDED, Reason.COMPLETED, 1), run.troubles()
    rows = [json.loads(line) for line in run.dir.metrics.read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(2, 2 * len(rows) + 1, 2)), rows
    assert rows[0]["train_loss"] > rows[-1]["train_loss"] >= 0 and record.iteration == rows[-1]["iteration"]
    assert record.backend == "gloo"
    for rank in range(len(names)):
        assert f"rank {rank} of {len(names)} local 0 is up" in run.dir.log(rank).read_text()


# tests/unit/run/test_recordings.py has recordings of such attempts.
@pytest.mark.slow
def test_the_rank_that_was_killed_is_named_and_not_the_one_that_lost_its_peer(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, torch_config(nodes, "ana", "bea"))
    run.everybody_steps()
    run.kill(1, run.identity(1).trainer_pid)
    record = run.ended()
    assert (record.state, record.reason, record.rank) == (RunState.FAILED, Reason.RANK_KILLED, 1), run.troubles()


@pytest.mark.slow
def test_the_exception_of_a_script_is_the_cause_although_its_peer_prints_more(nodes: Cluster, home: Path) -> None:
    fault = 'if rank == 1 and step == 3: raise ValueError("the labels are shifted")'
    recorded = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        f"@record\ndef main():\n{textwrap.indent(SCRIPT.format(fault=fault), '    ')}\nmain()\n"
    )
    run = start_on(nodes, home, torch_config(nodes, "ana", "bea", script=recorded))
    record = run.ended()
    assert (record.state, record.reason, record.rank) == (RunState.FAILED, Reason.RANK_FAILED, 1), run.troubles()
    assert record.cause is not None and "ValueError: the labels are shifted" in record.cause
    assert '"error_type": "ValueError"' in run.dir.events(1).read_text()


UNREAD = SCRIPT.replace("loss=", "perte=")
"""Prints no step that is read."""


@pytest.mark.slow
def test_a_stopped_rank_is_named_though_no_step_is_read(nodes: Cluster, home: Path) -> None:
    limits = SHORT_GRACES.model_copy(update={"hang_s": 6.0, "stall_s": 40.0})
    run = start_on(nodes, home, torch_config(nodes, "ana", "bea", script=UNREAD.format(fault="pass"), recovery=limits))
    run.everybody_steps()
    run.wait(lambda: RunWatch(run.dir).poll().activity is not None)
    nodes["bea"].run(["kill", "-STOP", str(run.identity(1).trainer_pid)])
    record = run.ended()
    assert (record.state, record.reason, record.rank) == (RunState.FAILED, Reason.HUNG, 1), run.troubles()
    assert record.cause is not None and "SIGSTOP" in record.cause


@pytest.mark.slow
def test_a_command_that_ran_is_restarted_though_no_step_was_read(nodes: Cluster, home: Path) -> None:
    recovery = SHORT_GRACES.model_copy(update={"restart_commands": True, "max_restarts": 1})
    fault = "assert step < 120 or os.environ['TORCHELASTIC_RESTART_COUNT'] != '0', 'no such file'"
    run = start_on(nodes, home, torch_config(nodes, "ana", "bea", script=UNREAD.format(fault=fault), recovery=recovery))
    run.wait(lambda: len(run.history.attempts) == 2)
    finish(run)
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()


@pytest.mark.slow
@pytest.mark.parametrize("script", [SCRIPT, UNREAD], ids=["read", "unread"])
def test_copies_that_a_launcher_inside_the_command_trains_are_no_success(
    nodes: Cluster, home: Path, script: str
) -> None:
    command = ("bash", "-c", f"{TORCH} -m torch.distributed.run --standalone train.py")
    run = start_on(nodes, home, torch_config(nodes, "ana", "bea", script=script.format(fault="pass"), command=command))
    run.wait(lambda: any(each.alarm == RANKS_APART for each in run.events_of(AlarmRaised)))
    finish(run)
    run.wait(lambda: run.record.state.ended)
    assert (run.record.state, run.record.reason) == (RunState.FAILED, Reason.SEPARATE_GROUPS), run.troubles()
    assert run.record.fix is not None and "remove the launcher" in run.record.fix


@pytest.mark.slow
def test_a_killed_rank_is_restarted_where_the_command_restores_itself(nodes: Cluster, home: Path) -> None:
    recovery = SHORT_GRACES.model_copy(update={"restart_commands": True, "max_restarts": 1})
    run = start_on(nodes, home, torch_config(nodes, *FOUR, recovery=recovery))
    run.everybody_steps()
    run.kill(0, run.identity(0).trainer_pid)
    run.wait(lambda: len(run.history.attempts) == 2)
    finish(run)
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()


# tests/faults/test_abort.py and test_cluster_run.py abort rings: what carries a run's nonce is ended whatever it is.
@pytest.mark.slow
@pytest.mark.parametrize("names", [FOUR[:1], FOUR[:2], FOUR], ids=len)
def test_an_abort_leaves_nothing_of_a_torch_job(nodes: Cluster, home: Path, names: tuple[str, ...]) -> None:
    script = DOUBLE_FORK + SCRIPT.format(fault="pass")
    run = start_on(nodes, home, torch_config(nodes, *names, script=script))
    run.everybody_steps()
    aborted(run)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "torchrun"])
def test_scripts_get_what_their_launcher_would_give_them(nodes: Cluster, home: Path, launcher: str) -> None:
    script = {
        "accelerate": "from accelerate import Accelerator\n"
        "state = Accelerator().state\nprint(state.distributed_type, state.num_processes, state.process_index)\n",
        "deepspeed": "import sys, deepspeed\ndeepspeed.init_distributed('gloo')\n"
        "print(sys.argv[1], deepspeed.comm.get_world_size(), deepspeed.comm.get_rank())\n",
    }[launcher]
    printed = {"accelerate": "DistributedType.MULTI_CPU 2 {}", "deepspeed": "--local_rank=0 2 {}"}[launcher]
    run = start_on(
        nodes, home, torch_config(nodes, "ana", "bea", script=script, command=(*LAUNCHERS[launcher], "train.py"))
    )
    record = run.ended()
    assert record.state is RunState.SUCCEEDED, run.troubles()
    for rank in (0, 1):
        assert printed.format(rank) in run.dir.log(rank).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True])
def test_what_accelerates_tracker_writes_are_the_metrics(nodes: Cluster, home: Path, elastic: bool) -> None:
    script = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir="logs")
accelerator.init_trackers("own", config={"lr": 0.1})
for step in (10, 20, 30):
    accelerator.log({"train_loss": 3.0 - step / 20, "lr": 0.125, "accuracy": 0.5}, step=step)
accelerator.log({"eval_loss": 1.75}, step=30)
accelerator.end_training()
"""
    command = ("python", "-u", "train.py") if elastic else (*LAUNCHERS["accelerate"], "train.py")
    own: dict[str, Any] = {"script": script, "command": command, "logging_dir": "logs", "elastic": elastic}
    run = start_on(nodes, home, torch_config(nodes, "ana", "bea", **own))
    record = run.ended()
    assert record.state is RunState.SUCCEEDED, run.troubles()
    rows = [json.loads(line) for line in run.dir.metrics.read_text().splitlines()]
    trained = [(row["iteration"], row["train_loss"], row["learning_rate"]) for row in rows if row["kind"] == "train"]
    assert trained == [(10, 2.5, 0.125), (20, 2.0, 0.125), (30, 1.5, 0.125)]
    assert [(row["iteration"], row["val_loss"]) for row in rows if row["kind"] != "train"] == [(30, 1.75)]
    assert (record.train_loss, record.val_loss) == (1.5, 1.75)


@pytest.mark.slow
def test_an_elastic_job_goes_on_without_a_lost_node(nodes: Cluster, home: Path) -> None:
    recovery = SHORT_GRACES.model_copy(update={"min_nodes": 2, "max_restarts": 3, "lease_s": 5.0})
    run = start_on(nodes, home, torch_config(nodes, "ana", "bea", "cyd", recovery=recovery, elastic=True))
    run.await_output("of 3", 0)
    run.await_output("step 4", 0)
    nodes["cyd"].power_off()
    run.await_output("of 2", 0)
    finish_at = [nodes["ana"], nodes["bea"]]
    for node in finish_at:
        node.write(f"{run.workdir}/enough", "")
    run.wait(lambda: run.record.state.ended)
    assert (run.record.state, run.record.attempts) == (RunState.SUCCEEDED, 1), run.troubles()
    assert any("cyd" in note for note in run.notes)
    nodes["cyd"].power_on()
    run.wait(lambda: not run.left(), after_end=True)
