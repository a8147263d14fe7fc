"""How long an abort takes until it is proved: `uv run python -m tests.bench.abort [--rounds N]`.

Four nodes of the test cluster, with the graces that a configuration has by default. Measured are the seconds from the
request until the run's record says `aborted`, which it does when no node has a process of the run any more: of a
training, which finishes its step and saves its state; and of ranks that ignore INT, TERM and HUP and have children that
left their session, which are killed. Exits 1 when a target is missed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from engine.config.models import RecoveryConfig
from engine.models import RunState
from tests.bench.figures import Figure, measure
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import ClusterRun, demo_on, ring_config, start_on
from tests.faults.local_runs import DEAF, DOUBLE_FORK, ring
from tests.faults.test_training import await_iteration

PROVED_S, UP_S = 5.0, 5.0
NODES = 4


def training(cluster: Cluster, home: Path) -> ClusterRun:
    run = start_on(cluster, home, demo_on(cluster, home, iters=5000, recovery=RecoveryConfig()))
    await_iteration(run, 3)
    return run


def deaf(cluster: Cluster, home: Path) -> ClusterRun:
    run = start_on(cluster, home, ring_config(cluster, script=DEAF + DOUBLE_FORK + ring(), recovery=RecoveryConfig()))
    run.everybody_steps()
    return run


def seconds(begin: Callable[[], ClusterRun], rounds: int) -> list[float]:
    """From the request to the proof, once each round. Raises RuntimeError for a run that ended otherwise."""
    took = []
    for _ in range(rounds):
        run = begin()
        took.append(run.abort())
        if run.record.state is not RunState.ABORTED or run.record.unconfirmed:
            raise RuntimeError(f"{run.record.state}: {run.record.cause}\n{run.troubles()}")
    return took


def figures(rounds: int, home: Path) -> Iterator[Figure]:
    begun = time.monotonic()
    with Cluster(NODES) as cluster:
        up = time.monotonic() - begun
        yield Figure(f"{NODES} nodes of the test cluster are up", f"{up:.1f} s", f"<= {UP_S:g} s", up <= UP_S)
        os.environ["FLIGHTDECK_SSH_CONFIG"] = str(cluster.ssh_config)
        os.environ["FLIGHTDECK_HOME"] = str(home)
        yield _spread("an abort of a training, its state saved", seconds(lambda: training(cluster, home), rounds))
        yield _spread("  of ranks that are deaf to it", seconds(lambda: deaf(cluster, home), rounds))


def _spread(name: str, took: list[float]) -> Figure:
    value = f"median {median(took):.2f} s, slowest {max(took):.2f} s"
    return Figure(name, value, f"<= {PROVED_S:g} s", max(took) <= PROVED_S)


def main() -> int:
    return measure("An abort until it is proved, measured.", figures, "--rounds", 5)


if __name__ == "__main__":
    sys.exit(main())
