"""A supervisor whose preflight would exclude a node, and supervisors that adopt what was never going."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.transport.fleet import Fleet
from engine.models import CheckResult, CheckStatus, PreflightReport, Reason, RunRecord, RunState
from engine.node.processes import boot_id
from engine.protocol.attempt import AttemptSpec, ExitRecord, Identity, NodeFiles, write_atomic
from engine.run import preparation, supervisor
from engine.run.attempt import attempt_spec, new_attempt
from engine.run.events import StateChanged, SupervisorStarted
from engine.run.journal import RunRecorder, read_journal
from engine.run.run_context import RunContext
from engine.run.run_plan import read_plan, write_plan
from engine.run.supervisor import supervise
from tests.unit.launch.host_layouts import local_layout
from tests.unit.run.run_maker import MadeRun, made_decisions


async def test_a_run_of_which_each_node_has_a_part_is_not_taken_up_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def differs(*_: Any) -> PreflightReport:
        stale = CheckResult(
            name="worker_consistency", status=CheckStatus.WARN, summary="node1: train.py is stale", excludes=("node1",)
        )
        return PreflightReport(checks=[stale], overall_status=CheckStatus.WARN, finished_at=datetime.now(UTC))

    monkeypatch.setattr(preparation, "run_preflight", differs)
    run = MadeRun(tmp_path).attempt().state("preflight", "launching", "running", "finishing", "failed").close()
    job = run.plan.config.job.model_copy(update={"strategy": "sharded"})
    plan = run.plan.model_copy(update={"config": run.plan.config.model_copy(update={"job": job})})
    write_plan(run.directory.plan, plan)
    recorder = RunRecorder(run.directory.journal, plan, lambda _record: None)
    supervisor.reopen(recorder)
    await supervise(RunContext(run.directory, plan, recorder, Fleet(tmp_path), tmp_path / "node"), adopt=False)
    record = recorder.history.record
    recorder.close()
    assert (record.state, record.reason) == (RunState.FAILED, Reason.PREFLIGHT_FAILED)
    assert record.cause is not None and "cannot go on without a node" in record.cause and "node1" in record.cause
    assert read_plan(run.directory.plan) == plan


@pytest.mark.parametrize("accept", [False, True])
def test_other_data_is_accepted_in_the_life_that_was_told_so(tmp_path: Path, accept: bool) -> None:
    run = MadeRun(tmp_path).state("preflight", "failed").close()
    recorder = RunRecorder(run.directory.journal, run.plan, lambda _record: None)
    supervisor.reopen(recorder, accept_changed_data=accept)
    attempt = new_attempt(run.directory, run.plan, recorder.history, layouts=[], starting_port=20_000)
    assert attempt.accept_changed_data is accept
    layouts = [local_layout(tmp_path, 2)]
    attempt = attempt.model_copy(update={"layouts": tuple(layouts)})
    spec = attempt_spec(run.plan, attempt, made_decisions(run.plan), {})
    assert AttemptSpec.from_json(spec.to_json()).accept_changed_data is accept
    recorder.append(StateChanged(state=RunState.FAILED))
    supervisor.reopen(recorder)
    assert not recorder.history.reopened.accept_changed_data
    recorder.close()


async def adopted(run: MadeRun) -> RunRecord:
    """The run after a supervisor has adopted it."""
    recorder = RunRecorder(run.close().directory.journal, run.plan, lambda _record: None)
    await supervise(RunContext(run.directory, run.plan, recorder, Fleet(run.home), run.home / "node"), adopt=True)
    recorder.close()
    return recorder.history.record


async def test_secrets_stay_while_the_end_of_a_rank_may_become_known(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).state("preflight", "launching").attempt().state("running")
    run.state("finishing", "completed", reason="completed", unconfirmed=("node0",)).close()
    run.directory.secrets.write_text("{}")
    recorder = RunRecorder(run.directory.journal, run.plan, lambda _record: None)
    await supervise(RunContext(run.directory, run.plan, recorder, Fleet(tmp_path), tmp_path / "node"), adopt=True)
    assert run.directory.secrets.exists(), "what an adopter finds out of it has to be redacted"
    recorder.append(StateChanged(state=RunState.FAILED))
    await supervise(RunContext(run.directory, run.plan, recorder, Fleet(tmp_path), tmp_path / "node"), adopt=True)
    recorder.close()
    assert not run.directory.secrets.exists()


@pytest.mark.parametrize("state", ["launching", "recovering"])
async def test_an_adopted_launch_that_never_got_going_has_no_failure_to_restart_from(
    tmp_path: Path, state: str
) -> None:
    run = MadeRun(tmp_path).state("preflight", "launching").attempt().state(state)
    record = await adopted(run)
    assert (record.state, record.reason, record.attempts) == (RunState.FAILED, Reason.SUPERVISOR_LOST, 1)
    assert record.cause == "its supervisor was lost in the middle of the launch"
    kinds = {type(event).__name__ for event in read_journal(run.directory.journal)}
    assert not kinds & {"Note", "AttemptFailed", "RestartPlanned", "RestartRefused"}


async def test_a_completed_local_run_succeeds_by_its_rank_0_also_when_it_was_adopted(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, strategy="local").state("preflight", "launching").attempt()
    run.state("running", "finishing", "completed", reason="completed", unconfirmed=("node0",))
    files = NodeFiles.for_attempt(tmp_path / "node", run.id, 1)
    files.directory.mkdir(parents=True)
    files.events(0).write_text('{"event": "step", "iteration": 1}\n{"event": "end", "completed": true}\n')
    for rank in (0, 1):
        identity = Identity(rank, run.id, 1, "n.1", "another boot", 1, "", 1, 1, "", 1.0)
        write_atomic(files.identity(rank), json.dumps(asdict(identity)))
        write_atomic(files.exit(rank), json.dumps(asdict(ExitRecord(rank, 1, rank, None, 0.0, 0))))
    record = await adopted(run)
    assert (record.state, record.unconfirmed) == (RunState.SUCCEEDED, [])
    assert record.cause == "rank 1 on node1 did not complete: the others went on without it"


async def test_a_restart_of_the_machine_is_remembered_by_the_supervisors_that_follow(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).append(SupervisorStarted(pid=1, start="1", boot_id="another boot"))
    run.state("preflight", "launching").attempt().state("running")
    run.append(SupervisorStarted(pid=1, start="1", boot_id=boot_id(), adopted=True))
    record = await adopted(run)
    assert (record.state, record.reason) == (RunState.LOST, Reason.SUPERVISOR_LOST)
    assert record.cause == "the machine was restarted while the run was going"
