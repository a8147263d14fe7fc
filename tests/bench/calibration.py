"""What calibration says of two unequal nodes, beside what they then do: `uv run python -m tests.bench.calibration`.

Two nodes of the test cluster, each held to a core of its own; one of the cores is shared with two programs that only
count. The truth is measured in the same run, by real training: each node alone, then both with the calibrated shares,
and with equal ones. Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import (
    CalibrationConfig,
    ClusterConfig,
    FlightConfig,
    JobConfig,
    NodeConfig,
    PreflightConfig,
)
from engine.config.subset import only
from engine.measured import Calibration
from engine.models import RunState
from engine.preflight.registry import CHECKS
from engine.runs.json_lines import JsonLinesTail
from engine.runs.layout import RunDir
from engine.session import Engine
from tests.bench.logs import Figure, machine, report
from tests.cluster import sshd
from tests.cluster.cluster import Cluster
from tests.cluster.command import command
from tests.cluster.flight import DATA, JOB, MODEL, install_demo
from tests.cluster.node import Node

BATCH = 16
SPINNERS = 2
SHARE_LIMIT, SPEED_UP_LIMIT = 0.10, 0.20
_WARM_UP = 3
_RUN_LIMIT_S = 600.0
_SPIN = "while True: pass"
_NO_END = 1_000_000


@dataclass(frozen=True)
class Trained:
    """What a real run did."""

    examples_per_s: float
    """Of all ranks, by the clock."""
    compute_per_example_s: dict[str, float]
    """Node → seconds that its rank computed for one of its examples."""


@contextlib.contextmanager
def spinning(core: int, count: int, nice: int) -> Iterator[None]:
    """Programs that only count, on one core."""
    argv = ["nice", "-n", str(nice), "taskset", "-c", str(core), sys.executable, "-c", _SPIN]
    # Sessions of their own: Linux divides a core by session before it divides by process.
    spinners = [subprocess.Popen(argv, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def pinned(node: Node, core: int, nice: int) -> NodeConfig:
    """The node, all of its pythons held to one core."""
    python = node.python.replace("~", "$HOME", 1)
    held = f'#!/bin/sh\nexec taskset -c {core} "{python}" "$@"\n'
    node.write("~/pinned/python", held, mode=0o755)
    # What its sshd starts inherits it.
    command(*node.inside(), "sh", "-c", f'renice -n {nice} -p "$(cat {sshd.PID_FILE})"')
    return NodeConfig(name=node.name, ssh=node.ssh, ips=(node.ip,), python="~/pinned/python", workdir="~")


def configuration(nodes: tuple[NodeConfig, ...], seconds: float, iters: int) -> FlightConfig:
    keys = {**JOB, "batch_size": BATCH, "iters": iters, "val_batches": 0, "save_every": _NO_END}
    keys = {name: value for name, value in keys.items() if name not in ("name", "fine_tune_type")}
    job = JobConfig(
        name="bench",
        model=MODEL,
        data=DATA,
        fine_tune_type="full",
        mlx_lm=with_defaults({**keys, "adapter_path": "~/adapters"}),
    )
    return FlightConfig(
        cluster=ClusterConfig(name="bench", backend="ring"),
        nodes=tuple(node.model_copy(update={"model": MODEL, "data": DATA}) for node in nodes),
        job=job,
        preflight=PreflightConfig(all_sum_s=1.0),
        calibration=CalibrationConfig(seconds=seconds),
    )


async def calibrated(engine: Engine, config: FlightConfig) -> Calibration:
    async for step in engine.calibrate(config):
        if isinstance(step, Calibration):
            return step
    raise AssertionError("the calibration has ended without a result")


async def trained(engine: Engine, config: FlightConfig) -> Trained:
    """Launch, without preflight, and await the end."""
    record = await engine.launch(config, skip=list(CHECKS))
    deadline = time.monotonic() + _RUN_LIMIT_S
    while not (record := engine.record(record.id)).state.ended:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{record.id} has not ended within {_RUN_LIMIT_S:g} s")
        await asyncio.sleep(0.5)
    if record.state is not RunState.SUCCEEDED:
        raise AssertionError(f"{record.id}: {record.cause}")
    run = engine.find(record.id)
    plan = engine.watch(record.id).poll().division
    assert plan is not None
    batches = {node.name: BATCH * plan.parts[node.name] for node in config.nodes}
    return Trained(*_steps(run, config, batches))


def _steps(run: RunDir, config: FlightConfig, batches: dict[str, float]) -> tuple[float, dict[str, float]]:
    compute, speed = {}, 0.0
    for rank, node in enumerate(config.nodes):
        steps = [event for event in JsonLinesTail(run.events(rank)).objects() if event.get("event") == "step"]
        measured = steps[_WARM_UP:]
        compute[node.name] = sum(map(_compute_s, measured)) / len(measured) / round(batches[node.name])
        passed_s = measured[-1]["t"] - steps[_WARM_UP - 1]["t"]
        speed = BATCH * len(measured) / passed_s
    return speed, compute


def _compute_s(event: dict[str, Any]) -> float:
    return float(event["data_s"] + event["compute_s"] + event["update_s"])


async def measured(seconds: float, iters: int, nice: int, folder: Path) -> list[Figure]:
    with Cluster(2) as cluster:
        os.environ["FLIGHTDECK_SSH_CONFIG"] = str(cluster.ssh_config)
        os.environ["FLIGHTDECK_HOME"] = str(folder / "home")
        install_demo(cluster, folder / "home")
        config = configuration(
            tuple(pinned(node, core, nice) for core, node in enumerate(cluster.nodes)), seconds, iters
        )
        engine = Engine(folder / "home")
        try:
            with spinning(1, SPINNERS, nice):
                return await _compare(engine, config)
        finally:
            await engine.close()


async def _compare(engine: Engine, config: FlightConfig) -> list[Figure]:
    fast, slow = (node.name for node in config.nodes)
    taken = await calibrated(engine, config)
    found = engine.outlook(config, taken)
    alone = {node: await trained(engine, only(config, {node})) for node in (fast, slow)}
    both = await trained(engine, config)
    fixed = tuple(node.model_copy(update={"share": 1.0}) for node in config.nodes)
    equal = await trained(engine, config.model_copy(update={"nodes": fixed}))
    truth = alone[slow].examples_per_s / sum(one.examples_per_s for one in alone.values())
    share = found.shares.parts[slow]
    off = share / truth - 1
    told = found.prediction
    assert told.speed_up is not None and told.examples_per_s is not None
    speed_up = both.examples_per_s / max(one.examples_per_s for one in alone.values())
    missed = told.speed_up / speed_up - 1
    spreads = ", ".join(f"{measure.examples_per_s:.1f} ±{measure.spread or 0:.0%}" for measure in taken.nodes)
    really = ", ".join(f"{one.examples_per_s:.1f}" for one in alone.values())
    once = alone[slow].examples_per_s / alone[fast].examples_per_s
    return [
        Figure("measured by calibrate, examples/s", spreads),
        Figure("each node alone in a real run, examples/s", really),
        Figure("the slowed node beside the other, really", f"{once:.0%}"),
        Figure("its share: calibrated", f"{share:.1%} ({found.shares.source})"),
        Figure("its share: by what it does alone", f"{truth:.1%}"),
        Figure("calibrated beside true share", f"{off:+.1%}", f"within {SHARE_LIMIT:.0%}", abs(off) <= SHARE_LIMIT),
        Figure("speed-up over the faster node alone: predicted", f"{told.speed_up:.2f}"),
        Figure("speed-up over the faster node alone: measured", f"{speed_up:.2f}"),
        Figure(
            "predicted beside measured speed-up", f"{missed:+.1%}", f"within {SPEED_UP_LIMIT:.0%}",
            abs(missed) <= SPEED_UP_LIMIT,
        ),
        Figure("calibrated over equal shares, throughput", f"{both.examples_per_s / equal.examples_per_s:.2f} times"),
    ]  # fmt: skip


def main() -> int:
    options = argparse.ArgumentParser(description="Calibration beside what is then done.")
    options.add_argument("--seconds", type=float, default=30.0, help="of measuring per node")
    options.add_argument("--iters", type=int, default=15, help="of each real run")
    options.add_argument("--nice", type=int, default=0, help="of all that is measured, where others work too")
    chosen = options.parse_args()
    print(machine())
    with TemporaryDirectory() as directory:
        return report(asyncio.run(measured(chosen.seconds, chosen.iters, chosen.nice, Path(directory))))


if __name__ == "__main__":
    sys.exit(main())
