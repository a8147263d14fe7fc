"""Recovery from the death of a rank, measured: `uv run python -m tests.bench.recovery [--seeds N]`.

Four ranks train the demo's model on the test cluster, with nothing saved on the way. One of them is killed (-9) at a
random step. Measured on the head's clock are the seconds from the kill until its supervisor has noticed, and until the
first step of the next attempt; p50 and p99 over the seeds. The losses are compared with those of an undisturbed run,
bit for bit. Exits 1 when a target is missed.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from engine.config.models import RecoveryConfig
from engine.models import RunState
from engine.run.events import AttemptFailed, AttemptPlanned, AttemptResumed, Event, RankExited, StateChanged
from tests.bench.figures import Figure, measure
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import ClusterRun, start_on
from tests.faults.test_cluster_recovery import ITERATIONS, training
from tests.faults.test_recovery import losses
from tests.faults.test_training import await_iteration

NOTICED_S, RECOVERED_S = 2.0, 15.0
LIMIT_S = 300.0


STAGES = ("noticed", "fenced", "prepared", "running", "recovered")


def killed(cluster: Cluster, home: Path, seed: int) -> tuple[ClusterRun, dict[str, float]]:
    """A run of which a rank was killed; seconds from that until each of STAGES."""
    moment = random.Random(seed)
    run = start_on(cluster, home, training(cluster, home, RecoveryConfig()))
    await_iteration(run, moment.randint(2, ITERATIONS - 5))
    rank = moment.randint(0, 3)
    pid = run.identity(rank).trainer_pid
    at = time.time()
    run.kill(rank, pid)
    record = run.ended(within_s=LIMIT_S)
    if record.state is not RunState.SUCCEEDED:
        raise RuntimeError(f"seed {seed}: {record.state}: {record.cause}")
    running = [event for event in run.events_of(StateChanged) if event.state is RunState.RUNNING]
    events: dict[str, Event] = {
        "noticed": next(event for event in run.events_of(RankExited) if event.rank == rank),
        "fenced": run.events_of(AttemptFailed)[0],
        "prepared": run.events_of(AttemptPlanned)[1],
        "running": running[1],
        "recovered": run.events_of(AttemptResumed)[0],
    }
    return run, {stage: events[stage].at.timestamp() - at for stage in STAGES}


def figures(seeds: int, home: Path) -> Iterator[Figure]:
    with Cluster(4) as cluster:
        os.environ["FLIGHTDECK_SSH_CONFIG"] = str(cluster.ssh_config)
        os.environ["FLIGHTDECK_HOME"] = str(home)
        calm = start_on(cluster, home, training(cluster, home, RecoveryConfig()))
        calm.ended(within_s=LIMIT_S)
        undisturbed = losses(calm)
        seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
        repeated, exact = [], 0
        for seed in range(seeds):
            run, took = killed(cluster, home, seed)
            for stage in STAGES:
                seconds[stage].append(took[stage])
            repeated.append(len(set(losses(run, 1)) & set(losses(run, 2))))
            exact += losses(run) == undisturbed
        yield _spread("from the kill until it is noticed", seconds["noticed"], NOTICED_S)
        yield _spread("  until nothing of the attempt is left", seconds["fenced"])
        yield _spread("  until the next one is prepared", seconds["prepared"])
        yield _spread("  until its ranks have started", seconds["running"])
        yield _spread("from the kill to the first new step", seconds["recovered"], RECOVERED_S)
        yield Figure("steps repeated, at most", str(max(repeated)), "<= 1", max(repeated) <= 1)
        yield Figure("runs with bitwise equal losses", f"{exact} of {seeds}", f"{seeds}", exact == seeds)


def _spread(name: str, seconds: list[float], limit_s: float | None = None) -> Figure:
    ordered = sorted(seconds)
    middle, last = ordered[(len(ordered) - 1) // 2], ordered[(99 * len(ordered) - 1) // 100]
    target = f"<= {limit_s:g} s" if limit_s is not None else ""
    return Figure(name, f"p50 {middle:.2f} s, p99 {last:.2f} s", target, limit_s is None or last <= limit_s)


def main() -> int:
    return measure("Recovery from a rank's death, measured.", figures, "--seeds", 10)


if __name__ == "__main__":
    sys.exit(main())
