"""A node whose files differ is left out of a launch when the configuration says so, and the others run without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config.models import Config
from engine.models import CheckStatus, PreflightReport, RunState
from engine.run.run_plan import read_plan
from engine.run.watch import RunWatch
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import ring_config, start_on
from tests.faults.local_runs import ring


def differing(nodes: Cluster, third: str, *, exclude: bool) -> Config:
    """A script on four nodes, another one on the third."""
    config = ring_config(nodes)
    for node in nodes.nodes:
        text = ring("pass") + ("\nprint('stale')\n" if node.name == third else "")
        node.write(f"{config.nodes[0].workdir}/train.py", text)
    job = config.job.model_copy(update={"command": ("python", "train.py")})
    settings = config.preflight.model_copy(update={"sync": False, "exclude_divergent": exclude})
    return config.model_copy(update={"job": job, "preflight": settings})


@pytest.mark.slow
async def test_a_divergent_node_is_left_out_and_the_plan_is_made_again(nodes: Cluster, home: Path) -> None:
    third = nodes.nodes[2].name
    run = start_on(nodes, home, differing(nodes, third, exclude=True), skip=())
    watch = RunWatch(run.dir)
    run.wait(lambda: watch.poll().record.state in (RunState.RUNNING, RunState.FAILED), 90)
    snapshot = watch.poll()
    assert snapshot.record.state is RunState.RUNNING, (snapshot.record, snapshot.checks)
    assert (snapshot.record.excluded, snapshot.record.world_size) == ([third], 3)
    names = [node.name for node in nodes.nodes if node.name != third]
    assert [rank.node for rank in snapshot.ranks] == names
    # What was launched stays as it was: the journal has who is left out.
    assert list(read_plan(run.dir.plan).nodes) == [node.name for node in nodes.nodes]
    assert [node["node"] for node in json.loads(run.dir.training_plan.read_bytes())["nodes"]] == names
    assert nodes[third].processes(run.nonce) == []
    report = PreflightReport.model_validate_json(run.dir.preflight.read_bytes())
    assert report.overall_status is not CheckStatus.FAIL
    audit = [json.loads(line) for line in (home / "audit.jsonl").read_text().splitlines()]
    assert [entry["context"]["excluded"] for entry in audit if entry["event_type"] == "replan"] == [[third]]


@pytest.mark.slow
async def test_without_leave_it_blocks_and_names_the_node(nodes: Cluster, home: Path) -> None:
    third = nodes.nodes[2].name
    run = start_on(nodes, home, differing(nodes, third, exclude=False), skip=())
    watch = RunWatch(run.dir)
    run.wait(lambda: watch.poll().record.state.ended, 90)
    record = watch.poll().record
    assert (record.state, record.host) == (RunState.FAILED, third)
    assert record.cause is not None and record.cause.startswith(f"worker_consistency: {third}: train.py is ")
    assert "0.75 against 0.95" in record.cause
