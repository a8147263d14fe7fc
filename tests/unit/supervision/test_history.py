"""What a run's configuration says of restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.runs.plan_file import Plan
from engine.supervision.history import policy_of
from tests.unit.watch.run_maker import START, MadeRun


def plan(home: Path, strategy: str, min_nodes: int | None) -> Plan:
    config = MadeRun(home, ranks=3).plan.config
    job = config.job.model_copy(update={"strategy": strategy})
    recovery = config.recovery.model_copy(update={"min_nodes": min_nodes})
    return Plan.of(config.model_copy(update={"job": job, "recovery": recovery}), run_id="run", created_at=START)


@pytest.mark.parametrize(
    ("strategy", "min_nodes", "needed"),
    [("data", None, 3), ("data", 1, 1), ("sharded", 1, 1), ("pipeline", 1, 2), ("pipeline", None, 3), ("data", 9, 3)],
)
def test_a_restart_needs_all_nodes_or_as_many_as_are_asked_for_and_a_pipeline_two(
    tmp_path: Path, strategy: str, min_nodes: int | None, needed: int
) -> None:
    assert policy_of(plan(tmp_path, strategy, min_nodes)).needed == needed
