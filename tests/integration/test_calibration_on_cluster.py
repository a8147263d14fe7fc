"""calibrate on real nodes: measured at the same time, stored, and nothing of it left, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from engine.api import Engine
from engine.calibration.calibrate import is_complete
from engine.config.models import CalibrationConfig, Config, PreflightConfig, select_nodes
from engine.errors import NodesInUse
from engine.measurements import Calibration, CalibrationProgress
from tests.cluster.cluster import Cluster
from tests.cluster.node import Node
from tests.faults.cluster_runs import demo_on
from tests.integration.checks import assert_nothing_left, is_idle
from tests.unit.run.run_maker import MadeRun
from tests.waiting import wait_until

HEAD = """
import asyncio, sys
from pathlib import Path
from engine.config.models import Config
from engine.api import Engine

async def main():
    config = Config.model_validate_json(Path(sys.argv[1]).read_text())
    async for step in Engine(Path(sys.argv[2])).calibrations.measure(config):
        print(step, flush=True)

asyncio.run(main())
"""
PYTHON = """#!/bin/sh
# This python, but for what calibration runs.
if [ "$2" = engine.trainer.calibrate ]; then exec "{python}" "$HOME/slow/thrice.py" "$3"; fi
exec "{python}" "$@"
"""
THRICE = """
import os, runpy, sys
sys.path.insert(0, os.getcwd())
from engine.trainer.single_node_bench import SingleNodeTrainer

def thrice(self, batch_size, once=SingleNodeTrainer.step):
    steps = [once(self, batch_size) for _ in range(3)]
    return sum(seconds for seconds, _ in steps), steps[-1][1]

SingleNodeTrainer.step = thrice
runpy.run_module("engine.trainer.calibrate", run_name="__main__", alter_sys=True)
"""
"""The real program, with three times the work in each step: slower by that whatever else the machine does."""


@pytest.fixture
def config(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The demo's job on two of the nodes, hardly measured."""
    monkeypatch.setenv("FLIGHTDECK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    two = {node.name for node in cluster.nodes[:2]}
    timed = {"calibration": CalibrationConfig(seconds=0.3), "preflight": PreflightConfig(all_sum_s=0.2)}
    return select_nodes(demo_on(cluster, tmp_path / "home", iters=4), two).model_copy(update=timed)


def lengthy(config: Config) -> Config:
    return config.model_copy(update={"calibration": CalibrationConfig(seconds=600)})


async def calibrated(engine: Engine, config: Config) -> tuple[Calibration, list[CalibrationProgress]]:
    steps: list[CalibrationProgress] = []
    taken = None
    async for step in engine.calibrations.measure(config):
        if isinstance(step, Calibration):
            taken = step
        else:
            steps.append(step)
    assert taken is not None
    return taken, steps


def workers(node: Node) -> list[str]:
    return [process.command for process in node.processes() if "engine.trainer.calibrate" in process.command]


def is_measuring(node: Node) -> bool:
    return bool(workers(node))


@pytest.mark.busy
async def test_every_node_and_the_link_are_measured_and_kept(cluster: Cluster, config: Config, tmp_path: Path) -> None:
    async with Engine(tmp_path / "home") as engine:
        taken, steps = await calibrated(engine, config)
    assert is_complete(taken) and [measure.problem for measure in taken.nodes] == [None, None]
    for measure in taken.nodes:
        assert measure.examples_per_s and measure.tokens_per_s and measure.state_bytes and measure.steps
        assert [probe.batch for probe in measure.probes] == [1, 2]
    (link,) = taken.links
    assert link == taken.all_ranks and link.problem is None and link.latency_s and link.bandwidth_bytes_per_s
    assert taken.backend == "ring" and taken.gradient_bytes
    assert taken.connected_as == ("data", "local")
    assert Engine(tmp_path / "home").calibrations.latest(config) == taken
    # At the same time: the second has begun to load before the first was measured.
    first, second = (node.name for node in config.nodes)
    order = [(step.what, step.phase) for step in steps]
    assert order.index((second, "loading")) < order.index((first, "measured"))
    for node in cluster.nodes[:2]:
        assert_nothing_left(node)


@pytest.mark.busy
@pytest.mark.slow
async def test_a_node_with_three_times_the_work_gets_a_smaller_share(
    cluster: Cluster, config: Config, tmp_path: Path
) -> None:
    slow = cluster.nodes[1]
    slow.write("~/slow/python", PYTHON.replace("{python}", slow.python.replace("~", "$HOME", 1)), mode=0o755)
    slow.write("~/slow/thrice.py", THRICE)
    held = config.nodes[1].model_copy(update={"python": "~/slow/python"})
    timed = {"nodes": (config.nodes[0], held), "calibration": CalibrationConfig(seconds=5.0)}
    config = config.model_copy(update=timed)
    async with Engine(tmp_path / "home") as engine:
        taken, _ = await calibrated(engine, config)
    found = engine.calibrations.predict(config, engine.calibrations.latest(config))
    fast_s, slow_s = (measure.examples_per_s for measure in taken.nodes)
    # A third, as well as two nodes can be told apart that share a machine with others.
    assert fast_s and slow_s and 0.1 < slow_s / fast_s < 0.7
    assert found.shares.source == "calibrated"
    assert found.shares.parts[slow.name] == pytest.approx(slow_s / (fast_s + slow_s))
    assert found.throughput.speed_up is not None and found.throughput.examples_per_s is not None


@pytest.mark.slow
async def test_one_that_cannot_be_measured_is_told_of_and_nothing_is_kept(
    cluster: Cluster, config: Config, tmp_path: Path
) -> None:
    lost = config.nodes[1].model_copy(update={"model": "~/models/none"})
    config = config.model_copy(update={"nodes": (config.nodes[0], lost)})
    async with Engine(tmp_path / "home") as engine:
        taken, _ = await calibrated(engine, config)
    first, second = taken.nodes
    assert first.examples_per_s and second.examples_per_s is None
    assert second.problem is not None and "is not a directory on this node" in second.problem
    assert engine.calibrations.latest(config) is None


@pytest.mark.slow
async def test_a_node_that_is_not_there_is_not_measured_and_the_other_is(
    isolated_cluster: Cluster, config: Config, tmp_path: Path
) -> None:
    isolated_cluster.nodes[1].stop_sshd()
    async with Engine(tmp_path / "home") as engine:
        taken, _ = await calibrated(engine, config)
    first, second = taken.nodes
    assert first.examples_per_s and second.examples_per_s is None and second.problem
    assert taken.links == () and taken.all_ranks is not None
    assert taken.all_ranks.problem == f"{second.node} was not measured"


async def test_given_up_it_leaves_nothing(cluster: Cluster, config: Config, tmp_path: Path) -> None:
    engine = Engine(tmp_path / "home")
    measuring = asyncio.create_task(calibrated(engine, lengthy(config)))
    try:
        for node in cluster.nodes[:2]:
            await asyncio.to_thread(wait_until, partial(is_measuring, node), 180)
    finally:
        measuring.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await measuring
        await engine.close()
    for node in cluster.nodes[:2]:
        wait_until(partial(is_idle, node))
        assert_nothing_left(node)
    assert engine.calibrations.latest(config) is None


@pytest.mark.slow
def test_a_head_that_is_killed_leaves_nothing(cluster: Cluster, config: Config, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(lengthy(config).model_dump_json())
    argv = [sys.executable, "-c", HEAD, str(tmp_path / "config.json"), str(tmp_path / "home")]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as head:
        wait_until(lambda: all(map(workers, cluster.nodes[:2])) or head.poll() is not None, within_s=180)
        assert head.poll() is None
        head.kill()
    for node in cluster.nodes[:2]:
        wait_until(partial(is_idle, node), within_s=60)
        assert_nothing_left(node)


async def test_while_a_run_goes_on_there_nothing_is_measured(config: Config, tmp_path: Path) -> None:
    local = tuple(node.model_copy(update={"ssh": "127.0.0.1"}) for node in config.nodes)
    run = MadeRun(tmp_path / "home").state("preflight", "launching", "running").close()
    engine = Engine(tmp_path / "home")
    with pytest.raises(NodesInUse, match=f"run {run.id} is going on there"):
        await calibrated(engine, config.model_copy(update={"nodes": local}))
    await engine.close()


# test_scaling.py times the steps of such a group on this machine, tests/unit/calibration what follows from them.
@pytest.mark.busy
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded", "pipeline"])
async def test_all_ranks_are_measured_together_with_a_strategy_of_which_no_node_makes_a_step(
    cluster: Cluster, config: Config, tmp_path: Path, strategy: str
) -> None:
    job = config.job.model_copy(update={"strategy": strategy})
    config = config.model_copy(update={"job": job})
    async with Engine(tmp_path / "home") as engine:
        taken, _ = await calibrated(engine, config)
        found = engine.calibrations.predict(config, taken).throughput
    group = taken.group
    assert group is not None and group.problem is None and group.step_s is not None and group.steps >= 2
    assert group.compute_s.keys() == group.peak_bytes.keys() == {node.name for node in config.nodes}
    assert all(0 < seconds <= group.step_s for seconds in group.compute_s.values())
    assert found.step_s == group.step_s and found.tokens_per_s == group.tokens_per_s
    assert found.examples_per_s == pytest.approx(int(job.mlx_lm["batch_size"]) / group.step_s)
    for node in cluster.nodes[:2]:
        assert_nothing_left(node)
