"""A run's preflight: its checks on its own scene, told in preflight.json as they go, and what a failed one means."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.errors import StateError
from engine.models import CheckResult, CheckStatus, PreflightReport, Reason, RunState
from engine.planning.document import VERSION, TrainingPlan
from engine.preflight import sync
from engine.preflight.checklist import run_checks
from engine.preflight.planned import plan_with_checks, with_results
from engine.preflight.scene import Scene
from engine.preflight.survey import counted, surveyed, to_count
from engine.runs.layout import RunDir
from engine.runs.plan_file import Plan, read_plan, write_plan
from engine.security.audit import audit_log
from engine.supervision.judging.verdict import Verdict
from engine.transport.fleet import Fleet
from engine.worker.wire import write_atomic

_PLAN_S = 2.0
"""For the training plan, once the checks have ended: a launch does not wait for it."""
_UNCOUNTED = "not counted by the time the checks had ended"


async def check(run_dir: RunDir, plan: Plan, scene: Scene, home: Path) -> PreflightReport:
    """Run the checks that `plan` does not skip. Cancelled, it says so in the report; what the checks had started is
    gone when this returns or raises."""
    results: dict[str, CheckResult] = {}

    synced = asyncio.Event()

    def keep(result: CheckResult) -> None:
        results[result.name] = result
        if result.name == sync.NAME and result.status is not CheckStatus.RUNNING:
            synced.set()
        _write(run_dir, _report(results.values(), CheckStatus.RUNNING, plan.skip))

    audit = functools.partial(audit_log, home=home)
    told = _TrainingPlan(run_dir)
    planning = asyncio.create_task(_write_training_plan(told, plan, scene, synced), name="training plan")
    try:
        report = await run_checks(scene, skip=plan.skip, on_result=keep, audit=audit)
        await asyncio.wait([planning], timeout=_PLAN_S)
    except asyncio.CancelledError:
        _write(run_dir, _report(map(_cut_short, results.values()), CheckStatus.SKIP, plan.skip))
        raise
    finally:
        planning.cancel()
        await asyncio.gather(planning, return_exceptions=True)
    _write(run_dir, report)
    if told.made is not None:
        told.put(with_results(told.made, report))
    return report


@dataclass
class _TrainingPlan:
    """training_plan.json of one preflight."""

    run_dir: RunDir
    made: TrainingPlan | None = None

    def put(self, made: TrainingPlan) -> None:
        self.made = made
        _write_document(self.run_dir, made.document())


async def _write_training_plan(told: _TrainingPlan, plan: Plan, scene: Scene, synced: asyncio.Event) -> None:
    """training_plan.json while the checks run, from what the nodes have told them: first without a count of the
    examples, which may take longer than all checks, then with it. It tells of the launch and is no part of it: whatever
    stands in its way is written in its place."""
    _no_training_plan(told.run_dir, "it was not made by the time the checks had ended")
    try:
        # The model and the data may only come with the sync.
        await synced.wait()
        inputs = await surveyed(scene)
        if to_count(inputs):
            uncounted = replace(inputs, examples_from=_UNCOUNTED)
            told.put(await asyncio.to_thread(plan_with_checks, uncounted, plan.skip))
        told.put(await asyncio.to_thread(plan_with_checks, await counted(scene, inputs), plan.skip))
    except Exception as error:
        told.made = None
        _no_training_plan(told.run_dir, f"{type(error).__name__}: {error}")


def _no_training_plan(run_dir: RunDir, reason: str) -> None:
    _write_document(run_dir, {"version": VERSION, "enabled": False, "reason": reason})


def _write_document(run_dir: RunDir, document: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        write_atomic(run_dir.training_plan, json.dumps(document, indent=1) + "\n")


def scene_of(plan: Plan, fleet: Fleet) -> Scene:
    """What the checks of a run look at."""
    return Scene(plan.config, fleet, division=plan.division, calibration=plan.calibration)


def excluded(report: PreflightReport) -> dict[str, str]:
    """Nodes that the launch is to leave out → why."""
    return {node: f"{result.name}: {result.summary}" for result in report.checks for node in result.excludes}


def replan(run_dir: RunDir, plan: Plan, left_out: Mapping[str, str], home: Path) -> Plan:
    """The plan without these nodes, written in place of the run's, of which the first is kept. Raises StateError."""
    made = plan.without(left_out)
    try:
        if not run_dir.whole_plan.exists():
            write_plan(run_dir.whole_plan, plan)
        write_plan(run_dir.plan, made)
    except OSError as error:
        why = error.strerror or str(error)
        raise StateError("the plan could not be made again", where=str(run_dir.plan), why=why) from error
    # That of the others is made by the checks that come now.
    _no_training_plan(run_dir, f"it is made again without {', '.join(left_out)}")
    context = {"run": plan.run_id, "excluded": list(left_out), "ranks": len(made.ranks), "why": [*left_out.values()]}
    audit_log("replan", "excluded", context, home=home)
    return made


def whole_plan(run_dir: RunDir, plan: Plan) -> Plan:
    """`plan`, the run's, as it was before any node was left out: of those, earlier attempts may tell. Raises
    StateError."""
    return read_plan(run_dir.whole_plan) if run_dir.whole_plan.exists() else plan


def verdict_of(failed: CheckResult) -> Verdict:
    """How the run ends by a check that blocks its launch."""
    rank, node = failed.blames if failed.blames is not None else (None, None)
    cause = f"{failed.name}: {failed.summary}"
    return Verdict(RunState.FAILED, Reason.PREFLIGHT_FAILED, cause, rank, node, fix=failed.fix_command)


def _report(checks: Iterable[CheckResult], status: CheckStatus, skip: tuple[str, ...]) -> PreflightReport:
    return PreflightReport(
        checks=list(checks), overall_status=status, overridden=list(skip), finished_at=datetime.now(UTC)
    )


def _cut_short(result: CheckResult) -> CheckResult:
    unfinished = {"status": CheckStatus.SKIP, "summary": "not finished: the run was aborted"}
    return result.model_copy(update=unfinished) if result.status is CheckStatus.RUNNING else result


def _write(run_dir: RunDir, report: PreflightReport) -> None:
    """For those who look; a full disk must not end the run that it tells of."""
    with contextlib.suppress(OSError):
        write_atomic(run_dir.preflight, report.model_dump_json(indent=1))
