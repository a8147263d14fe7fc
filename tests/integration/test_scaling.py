"""The real steps of a job over 1, 2, … ranks: kept when complete, and what there is of it when interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.api import Engine
from engine.calibration.group import time_steps
from engine.checks.context import CheckContext
from engine.cluster.facts import probe_all
from engine.cluster.transport.fleet import Fleet
from engine.config.models import CalibrationConfig, ClusterConfig, Config, select_nodes
from engine.demo import demo_config
from engine.errors import LaunchError
from engine.measurements import CalibrationProgress, Scaling
from engine.models import NodeFacts, NvidiaGpu
from engine.protocol.measurements import GroupStepReport
from tests.cluster.cluster import Cluster
from tests.cluster.node import Node
from tests.demo_copies import demo_below
from tests.faults.cluster_runs import demo_on
from tests.integration.checks import assert_nothing_left, is_idle
from tests.needs import TORCH
from tests.waiting import wait_until

PARTS = ("data_s", "compute_s", "communicate_s", "update_s")


@pytest_asyncio.fixture
async def engine(home: Path) -> AsyncIterator[Engine]:
    async with Engine(demo_below(home)) as engine:
        yield engine


def local(home: Path, ranks: int, **job: Any) -> Config:
    """The demo on this machine, hardly measured."""
    config = demo_config(home, ranks)
    keys = {"batch_size": 4, "max_seq_length": 64, **job.pop("mlx_lm", {})}
    changed = {"mlx_lm": {**config.job.mlx_lm, **keys}, **job}
    timed: dict[str, Any] = {
        "job": config.job.model_copy(update=changed),
        "calibration": CalibrationConfig(seconds=0.1),
    }
    if changed.get("framework") == "torch":
        timed["cluster"] = ClusterConfig(name="demo", backend="gloo")
        timed["nodes"] = tuple(node.model_copy(update={"python": str(TORCH)}) for node in config.nodes)
    return config.model_copy(update=timed)


def with_torch(strategy: str, *, slow: bool = False) -> Any:
    marks = [pytest.mark.needs("torch"), *([pytest.mark.slow] if slow else [])]
    return pytest.param({"framework": "torch", "strategy": strategy}, marks=marks, id=strategy)


async def measured(engine: Engine, config: Config, **how: Any) -> tuple[Scaling, list[CalibrationProgress]]:
    steps, found = list[CalibrationProgress](), list[Scaling]()
    async for step in engine.calibrations.measure_scaling(config, **how):
        found.append(step) if isinstance(step, Scaling) else steps.append(step)
    return found[-1], steps


def benches(node: Node) -> list[str]:
    return [process.command for process in node.processes() if "engine.training.group_bench" in process.command]


def assert_adds_up(scaling: Scaling) -> None:
    for point in scaling.points:
        assert point.problem is None and point.step_s and point.steps >= 3
        assert point.examples_per_s == pytest.approx(point.batch / point.step_s)
        # The ranks' mean is at most the slowest's step.
        assert 0.5 * point.step_s < sum(getattr(point, part) for part in PARTS) < 1.05 * point.step_s
        assert point.tokens_per_s and point.peak_bytes and (point.communicate_s or 0) >= 0


@pytest.mark.busy
@pytest.mark.parametrize(
    ("job", "per_rank_batch"),
    [
        ({}, True),
        pytest.param({"strategy": "sharded"}, False, marks=pytest.mark.slow),
        pytest.param({"strategy": "local", "mlx_lm": {"local_steps": 3}}, False, marks=pytest.mark.slow),
        pytest.param({"mlx_lm": {"grad_accumulation_steps": 2}}, False, marks=pytest.mark.slow),
        pytest.param(
            {"framework": "torch", "strategy": "auto", "mlx_lm": {"grad_accumulation_steps": 2}},
            False,
            marks=[pytest.mark.needs("torch"), pytest.mark.slow],
        ),
    ],
)
async def test_two_ranks_of_this_machine(
    engine: Engine, home: Path, job: dict[str, Any], *, per_rank_batch: bool
) -> None:
    config = local(home, 2, **job)
    scaling, steps = await measured(engine, config, per_rank_batch=per_rank_batch)
    assert_adds_up(scaling)
    assert [point.batch for point in scaling.points] == ([2, 4] if per_rank_batch else [4, 4])
    assert scaling.complete and scaling.nodes == ("node0", "node1") and scaling.framework == config.job.framework
    assert scaling.strategy == (config.job.strategy if config.job.strategy != "auto" else "ddp")
    assert [(step.what, step.phase) for step in steps] == [
        (ranks, phase) for ranks in ("1 rank", "2 ranks") for phase in ("measuring", "measured")
    ]
    assert engine.calibrations.latest_scaling(config) == scaling
    other = config.job.model_copy(update={"strategy": "pipeline"})
    assert engine.calibrations.latest_scaling(config.model_copy(update={"job": other})) is None


@pytest.mark.busy
@pytest.mark.parametrize(
    "job",
    [
        pytest.param({}, marks=pytest.mark.slow, id="data"),
        with_torch("ddp", slow=True),
        with_torch("fsdp", slow=True),
        with_torch("deepspeed", slow=True),
    ],
)
async def test_the_time_in_which_a_rank_waits_for_a_slower_one_is_none_of_its_passes(
    home: Path, job: dict[str, Any]
) -> None:
    config = local(demo_below(home), 2, **job)
    batch = {"mlx_lm": {**config.job.mlx_lm, "batch_size": 16, "max_seq_length": 256}}
    nodes = tuple(node.model_copy(update={"share": share}) for node, share in zip(config.nodes, (15, 1), strict=True))
    config = config.model_copy(update={"job": config.job.model_copy(update=batch), "nodes": nodes})
    async with Fleet(home) as fleet, CheckContext(config, fleet) as context:
        reports = await time_steps(context, config, 0.1)
    slow, fast = reports["node0"], reports["node1"]
    assert slow.compute_s and fast.compute_s and slow.compute_s > 2 * fast.compute_s
    assert slow.communicate_s is not None and fast.communicate_s is not None
    assert fast.communicate_s > slow.communicate_s + 0.3 * (slow.compute_s - fast.compute_s)


@pytest.mark.slow
async def test_a_number_of_ranks_that_fails_is_told_of_and_the_others_are_measured(engine: Engine, home: Path) -> None:
    config = local(home, 2)
    lost = config.nodes[1].model_copy(update={"data": str(home / "nowhere")})
    scaling, _ = await measured(engine, config.model_copy(update={"nodes": (config.nodes[0], lost)}))
    one, two = scaling.points
    assert one.examples_per_s and one.problem is None
    assert two.problem is not None and two.examples_per_s is None
    assert "rank 1 on node1: the data" in two.problem and "nowhere is not a directory on this node" in two.problem


@pytest.mark.needs("torch")
async def test_every_number_of_ranks_has_the_backend_of_all(
    engine: Engine, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By themselves, one rank of a machine with one GPU would use nccl, and two gloo."""
    used = list[str]()

    async def with_gpu(config: Config, fleet: Fleet) -> list[NodeFacts]:
        gpus = (NvidiaGpu(name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30),)
        return [facts.model_copy(update={"gpus": gpus}) for facts in await probe_all(config, fleet)]

    async def backend(context: CheckContext, *_: Any) -> dict[str, GroupStepReport]:
        used.append((await context.network_plan()).backend)
        raise LaunchError("not measured")

    monkeypatch.setattr("engine.checks.context.probe_all", with_gpu)
    monkeypatch.setattr("engine.calibration.group.time_steps", backend)
    config = local(home, 2, framework="torch", strategy="ddp")
    auto = config.cluster.model_copy(update={"backend": "auto"})
    scaling, _ = await measured(engine, config.model_copy(update={"cluster": auto}))
    assert (scaling.backend, used) == ("gloo", ["gloo", "gloo"])


async def test_closed_before_its_end_it_ends_and_what_tells_nothing_yet_is_not_kept(engine: Engine, home: Path) -> None:
    config = local(home, 2)
    async with aclosing(engine.calibrations.measure_scaling(config)) as steps:
        async for step in steps:
            if isinstance(step, Scaling):
                assert len(step.points) == 1 and not step.complete
                break
    assert engine.calibrations.latest_scaling(config) is None
    assert not list((home / "node" / "runs").glob("*"))


@pytest.mark.busy
@pytest.mark.slow
async def test_four_nodes_and_what_remains_of_it_when_it_is_interrupted(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLIGHTDECK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    config = demo_on(cluster, tmp_path / "home", iters=4)
    config = config.model_copy(update={"calibration": CalibrationConfig(seconds=0.3)})
    async with Engine(tmp_path / "home") as engine:
        scaling, _ = await measured(engine, config)
        assert_adds_up(scaling)
        assert [point.ranks for point in scaling.points] == [1, 2, 3, 4] and not scaling.notes
        assert scaling.own_rate and scaling.speed_up(scaling.points[0]) == 1
        async with aclosing(engine.calibrations.measure_scaling(config, per_rank_batch=True)) as steps:
            async for step in steps:
                if isinstance(step, CalibrationProgress) and (step.what, step.phase) == ("3 ranks", "measuring"):
                    break
            await asyncio.to_thread(wait_until, lambda: bool(benches(cluster.nodes[2])), 120)
        kept = engine.calibrations.latest_scaling(config)
    assert kept is not None and kept.per_rank_batch and not kept.complete
    assert [point.batch for point in kept.points] == [1, 2]
    for node in cluster.nodes:
        wait_until(partial(is_idle, node), within_s=60)
        assert_nothing_left(node)


@pytest.mark.slow
async def test_a_node_that_is_not_there_takes_its_numbers_of_ranks_with_it(
    isolated_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLIGHTDECK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(isolated_cluster.ssh_config))
    config = demo_on(isolated_cluster, tmp_path / "home", iters=4)
    config = select_nodes(config, {node.name for node in isolated_cluster.nodes[:3]})
    config = config.model_copy(update={"calibration": CalibrationConfig(seconds=0.3)})
    isolated_cluster.nodes[2].stop_sshd()
    async with Engine(tmp_path / "home") as engine:
        scaling, _ = await measured(engine, config)
    one, two, three = scaling.points
    assert one.examples_per_s and two.examples_per_s
    assert three.problem is not None and three.problem.startswith(isolated_cluster.nodes[2].name)
