"""A supervisor and a preflight that would exclude a node."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engine.models import CheckResult, CheckStatus, PreflightReport, Reason, RunState
from engine.run import supervisor
from engine.run.recorder import RunRecorder
from engine.run.run_plan import read_plan, write_plan
from engine.run.supervisor import Supervisor
from tests.unit.run.run_maker import MadeRun


async def test_a_run_of_which_each_node_has_a_part_is_not_taken_up_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def differs(*_: Any) -> PreflightReport:
        stale = CheckResult(
            name="worker_consistency", status=CheckStatus.WARN, summary="node1: train.py is stale", excludes=("node1",)
        )
        return PreflightReport(checks=[stale], overall_status=CheckStatus.WARN, finished_at=datetime.now(UTC))

    monkeypatch.setattr(supervisor, "run_preflight", differs)
    run = MadeRun(tmp_path).attempt().state("preflight", "launching", "running", "finishing", "failed").close()
    job = run.plan.config.job.model_copy(update={"strategy": "sharded"})
    plan = run.plan.model_copy(update={"config": run.plan.config.model_copy(update={"job": job})})
    write_plan(run.directory.plan, plan)
    recorder = RunRecorder(run.directory.journal, lambda _record: None, lambda: datetime.now(UTC))
    supervisor.reopen(recorder)
    await Supervisor(run.directory, plan, recorder, tmp_path / "node").supervise(adopt=False)
    record = recorder.record
    recorder.close()
    assert record is not None and (record.state, record.reason) == (RunState.FAILED, Reason.PREFLIGHT_FAILED)
    assert record.cause is not None and "cannot go on without a node" in record.cause and "node1" in record.cause
    assert read_plan(run.directory.plan) == plan
