"""Runs over ssh on four nodes with their own users, homes and pythons: how they go, end and are stopped."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from engine.config.models import NodeConfig, RecoveryConfig
from engine.models import Reason, RunState
from engine.run.events import RankLaunched
from engine.run.supervisor_process import adopt_orphans
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import demo_on, ring_config, start_on
from tests.faults.local_runs import DEAF, DOUBLE_FORK, aborted, kill_and_await, ring, start_config

pytestmark = pytest.mark.busy


# A recording of the first is among those of tests/unit/run/test_recordings.py; two ranks succeed in other tests.
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mlx.launch", "direct"])
def test_four_ranks_succeed(nodes: Cluster, home: Path, launcher: str) -> None:
    run = start_on(nodes, home, ring_config(nodes, launcher=launcher))
    run.everybody_steps()
    run.finish()
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.SUCCEEDED, Reason.COMPLETED, 1), run.troubles()
    assert [run.conditions(node.name) for node in run.nodes] == [["connected"]] * 4


@pytest.mark.slow
def test_a_training_on_four_nodes_is_adopted_and_its_figures_are_there_once(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, demo_on(nodes, home, iters=16))

    def trained() -> list[int]:
        rows = run.dir.metrics.read_text().splitlines() if run.dir.metrics.exists() else []
        return [row["iteration"] for row in map(json.loads, rows) if row["kind"] == "train"]

    run.wait(lambda: 3 in trained())
    kill_and_await(run.supervisor)
    assert adopt_orphans(home) == [run.dir.id]
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.SUCCEEDED, Reason.COMPLETED, 1), run.troubles()
    assert (record.iteration, record.iterations, trained()) == (16, 16, list(range(1, 17)))
    started = [event.rank for event in run.events_of(RankLaunched)]
    assert sorted(started) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "names", [("ana", "cyd"), pytest.param((), marks=pytest.mark.slow)], ids=["two nodes", "four nodes"]
)
def test_an_abort_leaves_nothing_on_any_node(nodes: Cluster, home: Path, names: tuple[str, ...]) -> None:
    script = DEAF + DOUBLE_FORK + ring()
    run = start_on(nodes, home, ring_config(nodes, script=script, recovery=RecoveryConfig(), names=names))
    run.everybody_steps()
    assert all(len(run.left_on(node)) >= 4 for node in run.nodes)
    aborted(run)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_with_its_node(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, ring_config(nodes))
    run.everybody_steps()
    run.kill(2, run.identity(2).trainer_pid)
    record = run.ended()
    named = (record.state, record.reason, record.rank, record.host, record.signal)
    assert named == (RunState.FAILED, Reason.RANK_KILLED, 2, "cyd", signal.SIGKILL), run.troubles()


@pytest.mark.slow
def test_the_output_of_ssh_is_the_cause_when_a_node_refuses_us(nodes: Cluster, home: Path) -> None:
    node = nodes["dov"]
    node.write("~/.ssh/authorized_keys", "", mode=0o600)
    try:
        record = start_on(nodes, home, ring_config(nodes)).ended()
    finally:
        node.write("~/.ssh/authorized_keys", nodes["ana"].read("~/.ssh/authorized_keys"), mode=0o600)
    assert (record.state, record.reason) == (RunState.FAILED, Reason.LAUNCH_FAILED)
    assert record.cause is not None and "dov" in record.cause, record.cause


@pytest.mark.slow
def test_a_missing_interpreter_is_named_with_its_node(nodes: Cluster, home: Path) -> None:
    config = ring_config(nodes)
    wrong = config.nodes[1].model_copy(update={"python": "/no/such/python"})
    config = config.model_copy(update={"nodes": (config.nodes[0], wrong, *config.nodes[2:])})
    record = start_on(nodes, home, config).ended()
    assert (record.state, record.reason) == (RunState.FAILED, Reason.LAUNCH_FAILED), record
    assert record.cause is not None and "/no/such/python" in record.cause and "bea" in record.cause


def test_the_head_as_one_of_the_nodes_and_its_launcher_killed(nodes: Cluster, home: Path, tmp_path: Path) -> None:
    config = ring_config(nodes, names=("ana",))
    here = NodeConfig(name="head", ips=(nodes.head,), python=sys.executable, workdir=str(tmp_path))
    run = start_config(home, config.model_copy(update={"nodes": (here, *config.nodes)}))
    run.await_output("step", 1)
    kill_and_await(run.launcher)
    run.wait(lambda: any("mlx.launch has ended" in note for note in run.notes))
    (tmp_path / "enough").touch()
    run.wait(lambda: run.record.state.ended)
    assert run.record.state is RunState.SUCCEEDED, run.troubles()


@pytest.mark.slow
def test_a_flood_over_ssh_arrives_whole(nodes: Cluster, home: Path) -> None:
    flood = "import sys, time\nline = 'x' * 90\nfor second in range(20):\n"
    flood += "    sys.stdout.write(''.join(f'{second} {n} {line}\\n' for n in range(5000))); time.sleep(0.1)\n"
    config = ring_config(nodes, script=flood, names=("ana", "bea"))
    run = start_on(nodes, home, config)
    record = run.ended(within_s=180.0)
    assert record.state is RunState.SUCCEEDED, run.troubles()
    assert run.steps(0) == run.steps(1) == 100_000
