"""A run's preflight: runs its checks, writes preflight.json and the training plan, and turns a failed check into the
run's verdict."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.checks.context import CheckContext
from engine.checks.plan_inputs import shared_plan
from engine.checks.runner import plan_with_results, planned_checks, run_checks
from engine.cluster.transport.fleet import Fleet
from engine.errors import LaunchError
from engine.models import CheckResult, CheckStatus, PreflightReport, Reason, RunState
from engine.plan.document import VERSION
from engine.protocol.attempt import write_atomic
from engine.run.events import Verdict
from engine.run.run_plan import RunPlan
from engine.security.audit import audit_log
from engine.store.layout import RunDir


async def run_preflight(run_dir: RunDir, plan: RunPlan, context: CheckContext) -> PreflightReport:
    """Run the checks that `plan` does not skip, and write the training plan of what passes them, for people and other
    programs. When it is cancelled, the report shows that; what the checks started is gone when this returns or
    raises."""
    results: dict[str, CheckResult] = {}

    def keep(result: CheckResult) -> None:
        results[result.name] = result
        _write_report(run_dir, results.values(), CheckStatus.RUNNING, plan.skip)

    audit = functools.partial(audit_log, home=run_dir.home)
    try:
        report = await run_checks(context, skip=plan.skip, on_result=keep, audit=audit)
    except asyncio.CancelledError:
        _write_report(run_dir, map(_cut_short, results.values()), CheckStatus.SKIP, plan.skip)
        raise
    _write(run_dir.preflight, report.model_dump_json(indent=1))
    if report.overall_status is CheckStatus.FAIL:
        _no_training_plan(run_dir, "preflight has failed")
        return report
    try:
        _write_document(run_dir, plan_with_results(await shared_plan(context), report).document())
    except LaunchError as error:
        _no_training_plan(run_dir, str(error))
    return report


def _no_training_plan(run_dir: RunDir, reason: str) -> None:
    _write_document(run_dir, {"version": VERSION, "enabled": False, "reason": reason})


def _write_document(run_dir: RunDir, document: Mapping[str, Any]) -> None:
    _write(run_dir.training_plan, json.dumps(document, indent=1) + "\n")


def preflight_context(plan: RunPlan, fleet: Fleet) -> CheckContext:
    planned = planned_checks(plan.config, plan.skip)
    return CheckContext(plan.config, fleet, division=plan.division, calibration=plan.calibration, planned=planned)


def excluded_nodes(report: PreflightReport) -> dict[str, str]:
    """Nodes that the launch leaves out → why."""
    return {node: f"{result.name}: {result.summary}" for result in report.checks for node in result.excludes}


def replan(run_dir: RunDir, plan: RunPlan, excluded: Mapping[str, str]) -> RunPlan:
    """The plan without these nodes. Raises InputError when none is left."""
    made = plan.without(excluded)
    _no_training_plan(run_dir, f"it is made again without {', '.join(excluded)}")
    details = {"run": plan.run_id, "excluded": list(excluded), "ranks": len(made.nodes), "why": [*excluded.values()]}
    audit_log("replan", "excluded", details, home=run_dir.home)
    return made


def preflight_verdict(failed: CheckResult) -> Verdict:
    rank, node = failed.blames if failed.blames is not None else (None, None)
    cause = "; its fix ".join(filter(None, (f"{failed.name}: {failed.summary}", failed.fix_effect)))
    return Verdict(RunState.FAILED, Reason.PREFLIGHT_FAILED, cause, rank, node, fix=failed.fix_command)


def _write_report(run_dir: RunDir, checks: Iterable[CheckResult], status: CheckStatus, skip: tuple[str, ...]) -> None:
    report = PreflightReport(checks=list(checks), overall_status=status, overridden=list(skip))
    _write(run_dir.preflight, report.model_dump_json(indent=1))


def _cut_short(result: CheckResult) -> CheckResult:
    unfinished = {"status": CheckStatus.SKIP, "summary": "not finished: the run was aborted"}
    return result.model_copy(update=unfinished) if result.status is CheckStatus.RUNNING else result


def _write(path: Path, text: str) -> None:
    """For the frontends; a full disk must not end the run."""
    with contextlib.suppress(OSError):
        write_atomic(path, text)
