"""A run is deleted on its nodes, over ssh: what that frees there, and what stays where a node does not answer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.models import RunState
from engine.run.run_plan import copy_of
from engine.run.watch import supervisor_alive
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import ClusterRun, ring_config, start_on
from tests.tui.commands import Done, flightdeck
from tests.waiting import wait_until

pytestmark = [pytest.mark.busy, pytest.mark.slow]

SIZES = {"ana": 3_000_000, "bea": 5_000_000}


@pytest.fixture
def run(nodes: Cluster, home: Path) -> ClusterRun:
    """A run over two nodes that has ended; each has some megabytes of it, and another run's folder."""
    run = start_on(nodes, home, ring_config(nodes, names=tuple(SIZES)))
    run.everybody_steps()
    run.finish()
    assert run.ended().state is RunState.SUCCEEDED, run.troubles()
    wait_until(lambda: not supervisor_alive(run.dir), 60.0)
    for rank, size in enumerate(SIZES.values()):
        (run.files_of(rank).directory / "weights").write_bytes(os.urandom(size))
        (folder(run, rank).parent / "another" / "attempts").mkdir(parents=True, exist_ok=True)
    return run


def folder(run: ClusterRun, rank: int) -> Path:
    """The run's on the node of a rank, as this machine finds it."""
    return run.nodes[rank].disk.seen_from_head(f"~/.flightdeck/runs/{run.dir.id}")


def delete(home: Path, run: ClusterRun, *options: str) -> tuple[int, dict[str, Any]]:
    """The command's exit code, and what it says of each machine."""
    done = flightdeck(home, "delete", run.dir.id, "--yes", "--json", *options)
    (document,) = json.loads(done.out)
    return done.code, document


def listed(home: Path) -> list[str]:
    return [run["id"] for run in json.loads(flightdeck(home, "runs", "--json").out)]


def on_disk(path: Path) -> int:
    return sum(file.lstat().st_blocks * 512 for file in path.rglob("*") if not file.is_dir())


def test_what_it_frees_is_what_lay_there_and_a_node_that_is_away_keeps_the_run_listed(
    nodes: Cluster, home: Path, run: ClusterRun
) -> None:
    before = [on_disk(folder(run, rank)) for rank in range(2)]
    assert [size > least for size, least in zip(before, SIZES.values(), strict=True)] == [True, True]
    nodes["bea"].cut()
    code, document = delete(home, run)
    ana, bea = document["nodes"]
    assert (code, document["deleted"], listed(home)) == (1, False, [run.dir.id])
    assert (ana["node"], ana["bytes"], ana["problem"]) == ("ana", before[0], None)
    there = f"{nodes['bea'].home}/.flightdeck/runs/{run.dir.id}"
    assert (bea["node"], bea["bytes"], bea["folders"]) == ("bea", None, [there])
    assert "bea" in bea["problem"], bea
    assert [folder(run, rank).exists() for rank in range(2)] == [False, True]
    printed: Done = flightdeck(home, "delete", run.dir.id, "--yes")
    assert f"  bea: stays in {there}: " in printed.out
    assert "the run stays listed while bea cannot be cleaned up; --anyway deletes the rest" in printed.out
    nodes["bea"].heal()
    code, document = delete(home, run)
    assert (code, document["deleted"], [node["bytes"] for node in document["nodes"]]) == (0, True, [0, before[1]])
    assert listed(home) == []
    left = [{path.name for path in folder(run, rank).parent.iterdir()} for rank in range(2)]
    assert all("another" in names and not any(run.dir.id in name for name in names) for names in left), left


def test_a_run_without_a_plan_is_deleted_on_its_nodes_by_its_journal(
    nodes: Cluster, home: Path, run: ClusterRun
) -> None:
    before = [on_disk(folder(run, rank)) for rank in range(2)]
    run.dir.plan.write_text("{")
    copy_of(run.dir.plan).unlink()
    code, document = delete(home, run)
    assert (code, document["deleted"]) == (0, True)
    assert [(node["node"], node["bytes"]) for node in document["nodes"]] == list(zip(SIZES, before, strict=True))
    assert [folder(run, rank).exists() for rank in range(2)] == [False, False]
