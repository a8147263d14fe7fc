"""What calibration says of two unequal nodes, beside what they then do: `uv run python -m tests.bench.calibration`.

Two nodes of the test cluster, each held to a core of its own; one of the cores is shared with two programs that only
count. The truth is measured in the same run, by real training: each node alone, then both with the calibrated shares,
and with equal ones. All of that in several rounds, every other one backwards, and each figure is the median of them:
what else comes and goes on the machine, and what it loses as it warms up, then falls on all figures alike.

Both cores are busy whenever one of them is measured, as they are in a calibration: cores may be two halves of one, or
share its clock, which nodes that are machines of their own do not. Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.api import Engine
from engine.checks.runner import CHECKS
from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import (
    CalibrationConfig,
    ClusterConfig,
    Config,
    JobConfig,
    NodeConfig,
    PreflightConfig,
    select_nodes,
)
from engine.measurements import Calibration, NodeMeasure
from engine.models import RunState
from engine.run.json_lines import LineTail
from tests.bench.figures import Figure, machine, report
from tests.cluster import sshd
from tests.cluster.cluster import Cluster
from tests.cluster.command import command
from tests.cluster.demo_job import DATA, JOB, MODEL, install_demo
from tests.cluster.node import Node

BATCH = 16
FAST_CORE, SLOW_CORE = 0, 1
SPINNERS = 2
SHARE_LIMIT, SPEED_UP_LIMIT = 0.10, 0.20
_WARM_UP = 3
_RUN_LIMIT_S = 600.0
_SPIN = "while True: pass"
_NO_END = 1_000_000


@dataclass(frozen=True)
class Round:
    """What was said and done in one round."""

    calibration: Calibration
    share: float
    """The slowed node's, by the calibration."""
    source: str
    speed_up: float
    """Predicted, over the faster node alone."""
    fast: float
    """Alone in a real run, examples/s."""
    slow: float
    """Likewise."""
    both: float
    """With the calibrated shares."""
    equal: float
    """With equal ones."""


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


def configuration(nodes: tuple[NodeConfig, ...], seconds: float, iters: int) -> Config:
    keys = {**JOB, "batch_size": BATCH, "iters": iters, "val_batches": 0, "save_every": _NO_END}
    keys = {name: value for name, value in keys.items() if name not in ("name", "fine_tune_type")}
    job = JobConfig(
        name="bench",
        model=MODEL,
        data=DATA,
        fine_tune_type="full",
        mlx_lm=with_defaults({**keys, "adapter_path": "~/adapters"}),
    )
    return Config(
        cluster=ClusterConfig(name="bench", backend="ring"),
        nodes=tuple(node.model_copy(update={"model": MODEL, "data": DATA}) for node in nodes),
        job=job,
        preflight=PreflightConfig(all_sum_s=1.0),
        calibration=CalibrationConfig(seconds=seconds),
    )


async def calibrated(engine: Engine, config: Config) -> Calibration:
    # To its very end: until then the nodes are its own.
    steps = [step async for step in engine.calibrations.measure(config)]
    taken = steps[-1]
    assert isinstance(taken, Calibration)
    return taken


async def trained(engine: Engine, config: Config) -> float:
    """Launch, without preflight, and await the end: examples/s of all ranks, by the clock."""
    record = await engine.launches.launch(config, skip=list(CHECKS))
    deadline = time.monotonic() + _RUN_LIMIT_S
    while not (record := engine.runs.record(record.id)).state.ended:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{record.id} has not ended within {_RUN_LIMIT_S:g} s")
        await asyncio.sleep(0.5)
    if record.state is not RunState.SUCCEEDED:
        raise AssertionError(f"{record.id}: {record.cause}")
    events = LineTail(engine.runs.find(record.id).events(0)).objects()
    ends = [float(event["t"]) for event in events if event.get("event") == "step"][_WARM_UP - 1 :]
    return BATCH * (len(ends) - 1) / (ends[-1] - ends[0])


async def measured(chosen: argparse.Namespace, folder: Path) -> list[Figure]:
    with Cluster(2) as cluster:
        os.environ["FLIGHTDECK_SSH_CONFIG"] = str(cluster.ssh_config)
        os.environ["FLIGHTDECK_HOME"] = str(folder / "home")
        install_demo(cluster, folder / "home")
        nodes = tuple(pinned(node, core, chosen.nice) for core, node in enumerate(cluster.nodes))
        config = configuration(nodes, chosen.seconds, chosen.iters)
        async with Engine(folder / "home") as engine:
            with spinning(SLOW_CORE, SPINNERS, chosen.nice):
                # Files come into the cache, and clocks to where they stay.
                await trained(engine, configuration(nodes, chosen.seconds, _WARM_UP + 1))
                return figures([await one_round(engine, config, number, chosen) for number in range(chosen.rounds)])


async def one_round(engine: Engine, config: Config, number: int, chosen: argparse.Namespace) -> Round:
    """A calibration, and the four real runs: in turn, or backwards."""
    fast, slow = (node.name for node in config.nodes)
    taken = await calibrated(engine, config)
    found = engine.calibrations.predict(config, taken)
    assert found.throughput.speed_up is not None, found.throughput.why_not
    fixed = tuple(node.model_copy(update={"share": 1.0}) for node in config.nodes)
    runs = {
        "fast": select_nodes(config, {fast}),
        "slow": select_nodes(config, {slow}),
        "both": config,
        "equal": config.model_copy(update={"nodes": fixed}),
    }
    speeds: dict[str, float] = {}
    for name in list(runs)[:: -1 if number % 2 else 1]:
        with spinning(FAST_CORE, 1, chosen.nice) if name == "slow" else contextlib.nullcontext():
            speeds[name] = await trained(engine, runs[name])
    done = Round(taken, found.shares.parts[slow], found.shares.source, found.throughput.speed_up, **speeds)
    print(
        f"round {number + 1}: share {done.share:.1%} ({done.source}) of {done.slow / (done.fast + done.slow):.1%}, "
        f"speed-up {done.speed_up:.2f} of {done.both / done.fast:.2f}, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return done


def figures(rounds: list[Round]) -> list[Figure]:
    """The medians over the rounds, against the limits."""

    def median(of: Callable[[Round], float]) -> float:
        return statistics.median(map(of, rounds))

    output = ", ".join(
        _speed_text([done.calibration.nodes[rank] for done in rounds]) for rank in (FAST_CORE, SLOW_CORE)
    )
    fast, slow, both, equal = (median(attrgetter(name)) for name in ("fast", "slow", "both", "equal"))
    share, truth = median(lambda done: done.share), slow / (fast + slow)
    predicted, speed_up = median(lambda done: done.speed_up), both / fast
    off, missed = share / truth - 1, predicted / speed_up - 1
    sources = ", ".join(sorted({done.source for done in rounds}))
    return [
        Figure("measured by calibrate, examples/s", output),
        Figure("each node alone in a real run, examples/s", f"{fast:.1f}, {slow:.1f}"),
        Figure("the slowed node beside the other, really", f"{slow / fast:.0%}"),
        Figure("its share: calibrated", f"{share:.1%} ({sources})"),
        Figure("its share: by what it does alone", f"{truth:.1%}"),
        Figure("calibrated beside true share", f"{off:+.1%}", f"within {SHARE_LIMIT:.0%}", abs(off) <= SHARE_LIMIT),
        Figure("speed-up over the faster node alone: predicted", f"{predicted:.2f}"),
        Figure("speed-up over the faster node alone: measured", f"{speed_up:.2f}"),
        Figure(
            "predicted beside measured speed-up", f"{missed:+.1%}", f"within {SPEED_UP_LIMIT:.0%}",
            abs(missed) <= SPEED_UP_LIMIT,
        ),
        Figure("calibrated over equal shares, throughput", f"{both / equal:.2f} times"),
    ]  # fmt: skip


def _speed_text(measures: list[NodeMeasure]) -> str:
    speed = statistics.median(measure.examples_per_s or 0.0 for measure in measures)
    return f"{speed:.1f} ±{statistics.median(measure.spread or 0.0 for measure in measures):.0%}"


def main() -> int:
    options = argparse.ArgumentParser(description="Calibration beside what is then done.")
    options.add_argument("--rounds", type=int, default=5, help="of calibrating and training")
    options.add_argument("--seconds", type=float, default=20.0, help="of measuring per node")
    options.add_argument("--iters", type=int, default=15, help="of each real run")
    options.add_argument("--nice", type=int, default=0, help="of all that is measured, where others work too")
    chosen = options.parse_args()
    print(machine())
    with TemporaryDirectory() as directory:
        return report(asyncio.run(measured(chosen, Path(directory))))


if __name__ == "__main__":
    sys.exit(main())
