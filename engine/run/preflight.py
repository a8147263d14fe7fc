"""A run's preflight: runs its checks, writes preflight.json and the training plan meanwhile, and turns a failed check
into the run's verdict."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.checks import sync
from engine.checks.context import CheckContext
from engine.checks.plan_inputs import needs_example_count, shared_plan_inputs, with_example_count
from engine.checks.runner import plan_with_checks, plan_with_results, run_checks
from engine.cluster.transport.fleet import Fleet
from engine.models import CheckResult, CheckStatus, PreflightReport, Reason, RunState
from engine.plan.document import VERSION, TrainingPlan
from engine.protocol.attempt import write_atomic
from engine.run.events import Verdict
from engine.run.run_plan import RunPlan
from engine.security.audit import audit_log
from engine.store.layout import RunDir

_PLAN_S = 2.0
"""For the training plan, once the checks have ended: a launch does not wait for it."""
_UNCOUNTED = "not counted by the time the checks had ended"


async def run_preflight(run_dir: RunDir, plan: RunPlan, context: CheckContext) -> PreflightReport:
    """Run the checks that `plan` does not skip. When it is cancelled, the report shows that; what the checks started is
    gone when this returns or raises."""
    results: dict[str, CheckResult] = {}
    synced = asyncio.Event()

    def keep(result: CheckResult) -> None:
        results[result.name] = result
        if result.name == sync.NAME and result.status is not CheckStatus.RUNNING:
            synced.set()
        _write_report(run_dir, results.values(), CheckStatus.RUNNING, plan.skip)

    audit = functools.partial(audit_log, home=run_dir.home)
    document = _TrainingPlan(run_dir)
    planning = asyncio.create_task(_write_training_plan(document, plan, context, synced), name="training plan")
    try:
        report = await run_checks(context, skip=plan.skip, on_result=keep, audit=audit)
        await asyncio.wait([planning], timeout=_PLAN_S)
    except asyncio.CancelledError:
        _write_report(run_dir, map(_cut_short, results.values()), CheckStatus.SKIP, plan.skip)
        raise
    finally:
        planning.cancel()
        await asyncio.gather(planning, return_exceptions=True)
    _write(run_dir.preflight, report.model_dump_json(indent=1))
    if document.plan is not None:
        document.put(plan_with_results(document.plan, report))
    return report


@dataclass
class _TrainingPlan:
    """training_plan.json of one preflight."""

    run_dir: RunDir
    plan: TrainingPlan | None = None

    def put(self, plan: TrainingPlan) -> None:
        self.plan = plan
        _write_document(self.run_dir, plan.document())


async def _write_training_plan(
    document: _TrainingPlan, plan: RunPlan, context: CheckContext, synced: asyncio.Event
) -> None:
    """training_plan.json while the checks run, from what these have collected: first without a count of the examples,
    which may take longer than all checks, then with it. The launch does not depend on it: whatever prevents it is
    written in its place."""
    _no_training_plan(document.run_dir, "it was not made by the time the checks had ended")
    try:
        # The model and the data may only come with the sync.
        await synced.wait()
        inputs = await shared_plan_inputs(context)
        if needs_example_count(inputs):
            uncounted = replace(inputs, examples_source=_UNCOUNTED)
            document.put(await asyncio.to_thread(plan_with_checks, uncounted, plan.skip))
        document.put(await asyncio.to_thread(plan_with_checks, await with_example_count(context, inputs), plan.skip))
    except Exception as error:
        document.plan = None
        _no_training_plan(document.run_dir, f"{type(error).__name__}: {error}")


def _no_training_plan(run_dir: RunDir, reason: str) -> None:
    _write_document(run_dir, {"version": VERSION, "enabled": False, "reason": reason})


def _write_document(run_dir: RunDir, document: Mapping[str, Any]) -> None:
    _write(run_dir.training_plan, json.dumps(document, indent=1) + "\n")


def preflight_context(plan: RunPlan, fleet: Fleet) -> CheckContext:
    return CheckContext(plan.config, fleet, division=plan.division, calibration=plan.calibration)


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
