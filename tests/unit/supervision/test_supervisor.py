"""What a supervisor does with a preflight that would leave a node out."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engine.models import CheckResult, CheckStatus, PreflightReport, Reason, RunState
from engine.runs.plan_file import read_plan, write_plan
from engine.supervision import supervisor
from engine.supervision.logbook import Logbook
from engine.supervision.supervisor import Supervisor
from tests.unit.watch.run_maker import MadeRun


async def test_a_run_of_which_each_node_has_a_part_is_not_taken_up_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def differs(*_: Any) -> PreflightReport:
        stale = CheckResult(
            name="worker_consistency", status=CheckStatus.WARN, summary="node1: train.py is stale", excludes=("node1",)
        )
        return PreflightReport(checks=[stale], overall_status=CheckStatus.WARN, finished_at=datetime.now(UTC))

    monkeypatch.setattr(supervisor, "check", differs)
    run = MadeRun(tmp_path).attempt().state("preflight", "launching", "running", "finishing", "failed").close()
    job = run.plan.config.job.model_copy(update={"strategy": "sharded"})
    plan = run.plan.model_copy(update={"config": run.plan.config.model_copy(update={"job": job})})
    write_plan(run.directory.plan, plan)
    logbook = Logbook(run.directory.journal, lambda _record: None, lambda: datetime.now(UTC))
    supervisor.reopen(logbook)
    await Supervisor(run.directory, plan, logbook, tmp_path / "node").see_through(adopt=False)
    record = logbook.record
    logbook.close()
    assert record is not None and (record.state, record.reason) == (RunState.FAILED, Reason.PREFLIGHT_FAILED)
    assert record.cause is not None and "cannot go on without a node" in record.cause and "node1" in record.cause
    assert read_plan(run.directory.plan) == plan
