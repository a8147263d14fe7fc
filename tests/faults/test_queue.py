"""A queue over two sets of nodes, whatever is killed meanwhile: order kept, none twice, each told once."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import uuid
from collections import Counter
from pathlib import Path

import pytest

from engine.api import Engine
from engine.checks.runner import CHECKS
from engine.config.models import ClusterConfig, Config, JobConfig, NotifyConfig
from engine.models import RunRecord
from engine.node import processes
from engine.queue.items import QueueItem
from engine.queue.queue_files import QueueFiles
from engine.run.watch import newest_supervisor
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import nodes_of
from tests.tui.commands import shell
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

_RANK = """
import pathlib, time
for step in range(80):
    print("step", step, flush=True)
    time.sleep(0.1)
raise SystemExit({code})
"""
_TELL = 'echo "$FLIGHTDECK_EVENT $FLIGHTDECK_RUN" >> "$0"'


def job(cluster: Cluster, name: str, nodes: tuple[str, ...], written: Path) -> Config:
    """A command of eight seconds; the one called "failing" fails."""
    workdir = f"~/work/{uuid.uuid4().hex[:8]}"
    for node in nodes:
        cluster[node].write(f"{workdir}/.kept", "")
    script = _RANK.format(code=3 if name.startswith("failing") else 0)
    return Config(
        cluster=ClusterConfig(launcher="direct"),
        nodes=nodes_of(cluster, workdir, nodes),
        job=JobConfig(name=name, command=("python", "-c", script)),
        notify=NotifyConfig(command=("/bin/sh", "-c", _TELL, str(written))),
    )


def records(home: Path) -> list[RunRecord]:
    """Oldest first."""
    return sorted(Engine(home).runs.all(), key=lambda record: record.created_at)


def kill_all(home: Path) -> None:
    """As a restart of the head does: everything that a command of this home has started here."""
    while left := processes.with_variables({"FLIGHTDECK_HOME": str(home)}):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def running(home: Path) -> list[RunRecord]:
    return [record for record in records(home) if record.state == "running"]


def items(home: Path) -> tuple[QueueItem, ...]:
    return QueueFiles(home).read().items


def test_six_runs_over_two_sets_of_nodes(nodes: Cluster, home: Path, tmp_path: Path) -> None:
    written = tmp_path / "written"
    left, right = (tuple(node.name for node in nodes.nodes[place : place + 2]) for place in (0, 2))
    names = {"l1": left, "r1": right, "failing": left, "l3": left, "r2": right, "r3": right}
    try:
        Engine(home).queue.add([job(nodes, name, where, written) for name, where in names.items()], skip=tuple(CHECKS))
        wait_until(lambda: {run.name for run in running(home)} == {"l1", "r1"}, 120.0)
        supervisor = newest_supervisor(Engine(home).runs.directory(records(home)[0].id))
        assert supervisor is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        wait_until(lambda: any(run.name == "failing" for run in running(home)), 180.0)
        kill_all(home)
        assert shell(home, "queue").code == 0
        wait_until(lambda: not any(item.open for item in items(home)), 400.0)
        wait_until(lambda: written.read_text().count("\n") == len(names) + 1, 120.0)
        runs = records(home)
        assert [item.name for item in items(home)] == list(names)
        ends = {name: "failed" if name == "failing" else "succeeded" for name in names}
        assert {run.name: run.state.value for run in runs} == ends, [(run.name, run.cause) for run in runs]
        for where in (left, right):
            in_turn = [run for run in runs if names[run.name] == where]
            assert [run.name for run in in_turn] == [name for name, place in names.items() if place == where]
            for one, other in itertools.pairwise(in_turn):
                assert one.ended_at is not None and one.ended_at <= other.created_at
        lines = written.read_text().splitlines()
        expected = [f"{'failure' if run.name == 'failing' else 'end'} {run.id}" for run in runs]
        assert Counter(line for line in lines if not line.startswith("queue_empty")) == Counter(expected)
        assert sum(line.startswith("queue_empty") for line in lines) == 1
    finally:
        kill_all(home)
