"""What a run's configuration says of restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.models import CheckpointConfig
from engine.runs.plan_file import Plan
from engine.supervision.history import policy_of
from tests.unit.watch.run_maker import START, MadeRun


def plan(home: Path, strategy: str, min_nodes: int | None, destination: str | None) -> Plan:
    config = MadeRun(home, ranks=3).plan.config
    job = config.job.model_copy(update={"strategy": strategy})
    recovery = config.recovery.model_copy(update={"min_nodes": min_nodes})
    changed = {"job": job, "recovery": recovery, "checkpoint": CheckpointConfig(destination=destination)}
    return Plan.of(config.model_copy(update=changed), run_id="run", created_at=START)


@pytest.mark.parametrize(
    ("strategy", "min_nodes", "destination", "needed"),
    [
        ("data", None, None, 3),
        ("data", 1, None, 1),
        ("data", 9, None, 3),
        ("sharded", 1, None, 3),
        ("sharded", 1, "/mnt/nas", 1),
        ("pipeline", 1, None, 3),
        ("pipeline", 1, "/mnt/nas", 2),
        ("pipeline", None, "/mnt/nas", 3),
    ],
)
def test_a_restart_needs_as_many_nodes_as_are_asked_for_and_have_the_state(
    tmp_path: Path, strategy: str, min_nodes: int | None, destination: str | None, needed: int
) -> None:
    assert policy_of(plan(tmp_path, strategy, min_nodes, destination)).needed == needed


def test_before_its_first_step_a_run_has_no_state_and_needs_no_more_nodes_than_are_asked_for(tmp_path: Path) -> None:
    assert policy_of(plan(tmp_path, "sharded", 1, None), begun=False).needed == 1
