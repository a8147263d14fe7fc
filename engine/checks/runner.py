"""The registry of checks and their runner, and their part of the training plan.

All checks run concurrently, each within its time limit and after the checks it depends on. A new check is a module
with NAME, `run` and CHECK beside this one, and a line in CHECKS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from engine.checks import (
    checkpoint,
    connectivity,
    consistency,
    dataset,
    gradient,
    hardware,
    health,
    hostfile,
    model_files,
    performance,
    ports,
    program,
    sync,
    versions,
    workers,
)
from engine.checks.check import Check, verdict, worst
from engine.checks.context import CheckContext
from engine.checks.obstacles import with_obstacles
from engine.checks.plan_inputs import cluster_history, collect_plan_inputs
from engine.config.models import Config
from engine.errors import FlightDeckError, InputError
from engine.models import OVERRIDDEN, CheckResult, CheckStatus, NodeFacts, PreflightReport
from engine.plan.document import PlannedCheck, TrainingPlan
from engine.plan.planner import make_plan
from engine.security.audit import audit_log
from engine.security.identifiers import safe_repr

CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        connectivity.CHECK, sync.CHECK, versions.CHECK, hostfile.CHECK, ports.CHECK, model_files.CHECK, dataset.CHECK,
        program.CHECK, checkpoint.CHECK, gradient.CHECK, consistency.CHECK, workers.CHECK, hardware.CHECK,
        performance.CHECK, health.CHECK,
    )
}  # fmt: skip

OnResult = Callable[[CheckResult], None]
Audit = Callable[[str, str, dict[str, object]], object]


def check_label(name: str) -> str:
    """One or two words for a screen."""
    return (CHECKS[name].label if name in CHECKS else "") or name.replace("_", " ")


def with_pending(results: Iterable[CheckResult]) -> tuple[CheckResult, ...]:
    """In the order of CHECKS, with those that have not begun."""
    waiting = {name: verdict(name, CheckStatus.PENDING, check.title) for name, check in CHECKS.items()}
    return tuple((waiting | {result.name: result for result in results}).values())


def validate_skip(skip: Iterable[str], checks: Mapping[str, Check] = CHECKS) -> list[str]:
    """The names to skip, each once. Raises InputError for an unknown one."""
    names = list(dict.fromkeys(skip))
    for name in names:
        if name not in checks:
            todo = f"checks: {', '.join(checks)}"
            raise InputError(f"cannot skip {safe_repr(name)}", why="there is no such check", todo=todo)
    return names


async def run_checks(
    context: CheckContext,
    *,
    skip: Iterable[str] = (),
    on_result: OnResult,
    checks: Mapping[str, Check] = CHECKS,
    audit: Audit = audit_log,
) -> PreflightReport:
    """Run every check; `on_result` gets each result as RUNNING, once or more, and again when it ends.

    `skip` adds to the configuration's own list. A check that raises or is late is a failure of that check alone;
    cancelling ends what the checks started. Raises InputError for an unknown name in `skip`."""
    overridden = validate_skip([*context.config.preflight.skip, *skip], checks)
    context.progress = lambda name, message: on_result(verdict(name, CheckStatus.RUNNING, message))
    ended: dict[str, asyncio.Future[CheckResult]] = {
        name: asyncio.get_running_loop().create_future() for name in checks
    }

    async def settle(check: Check) -> None:
        result = await _run_check(context, check, overridden, ended, on_result)
        ended[check.name].set_result(result)
        on_result(result)

    async with asyncio.TaskGroup() as tasks:
        for check in checks.values():
            tasks.create_task(settle(check), name=f"check {check.name}")
    results = [ended[name].result() for name in checks]
    overall = worst(result.status for result in results)
    report = PreflightReport(checks=results, overall_status=overall, overridden=overridden)
    _audit_report(audit, report, [check.name for check in checks.values() if _not_applicable(check, context.config)])
    return report


def _not_applicable(check: Check, config: Config) -> str | None:
    return config.job.kind.needless_checks.get(check.name) or check.not_applicable(config)


async def _run_check(
    context: CheckContext,
    check: Check,
    overridden: list[str],
    ended: Mapping[str, asyncio.Future[CheckResult]],
    on_result: OnResult,
) -> CheckResult:
    if check.name in overridden:
        return verdict(check.name, CheckStatus.SKIP, OVERRIDDEN)
    why_not = _not_applicable(check, context.config) or check.switched_off(context.config)
    if why_not:
        return verdict(check.name, CheckStatus.SKIP, why_not)
    for needed in check.needs:
        if (await asyncio.shield(ended[needed])).status is CheckStatus.FAIL:
            return verdict(check.name, CheckStatus.SKIP, f"not run: {check_label(needed)} failed")
    await asyncio.gather(*(asyncio.shield(ended[earlier]) for earlier in check.after if earlier in ended))
    on_result(verdict(check.name, CheckStatus.RUNNING, check.title))
    started = time.monotonic()
    try:
        async with asyncio.timeout(check.time_limit_s):
            result = await check.run(context)
    except TimeoutError:
        result = verdict(check.name, CheckStatus.FAIL, f"no answer within {check.time_limit_s:.0f} s")
    except FlightDeckError as error:
        result = verdict(check.name, CheckStatus.FAIL, str(error))
    except Exception as error:  # a bug in one check must not end the others, or the supervisor
        result = verdict(check.name, CheckStatus.FAIL, f"the check itself failed: {type(error).__name__}: {error}")
    redact = context.config.job.redactor()
    shown = {"summary": redact(result.summary), "evidence": {on: redact(text) for on, text in result.evidence.items()}}
    return result.model_copy(update={**shown, "name": check.name, "duration_s": round(time.monotonic() - started, 3)})


def _audit_report(audit: Audit, report: PreflightReport, not_applicable: Collection[str]) -> None:
    """Record what blocks a launch, and what it is allowed in spite of."""
    for name in report.overridden:
        audit("preflight_override", OVERRIDDEN, {"check": name})
    for result in report.checks:
        expected = result.status is CheckStatus.SKIP and result.name in (*report.overridden, *not_applicable)
        if result.status is not CheckStatus.PASS and not expected:
            event = "preflight_failure" if result.status is CheckStatus.FAIL else "preflight_warning"
            audit(event, result.status.value, {"check": result.name, "summary": result.summary})


async def make_training_plan(context: CheckContext, facts: Iterable[NodeFacts]) -> TrainingPlan:
    """The plan of what would be launched now; `facts` are those of a probe just made."""
    fresh, history = {fact.node: fact for fact in facts}, await cluster_history(context)
    inputs = await collect_plan_inputs(context, fresh, history)
    inputs = replace(await with_obstacles(context, inputs), checks=planned_checks(context.config))
    return await asyncio.to_thread(make_plan, inputs)


def planned_checks(config: Config, skip: Collection[str] = ()) -> tuple[PlannedCheck, ...]:
    """`skip` adds to the configuration's own list."""
    skipped = {*config.preflight.skip, *skip}
    return tuple(
        PlannedCheck(name=check.name, what=check.title, overridden=check.name in skipped) for check in CHECKS.values()
    )


def plan_with_results(plan: TrainingPlan, report: PreflightReport) -> TrainingPlan:
    """The plan of a launch whose checks have ended, with their results."""
    results = {result.name: result for result in report.checks}
    checklist = plan.pre_flight_checklist
    checks = tuple(
        check.model_copy(update={"status": result.status, "summary": result.summary})
        if (result := results.get(check.name)) is not None
        else check
        for check in checklist.checks
    )
    sections: dict[str, object] = {
        "pre_flight_checklist": checklist.model_copy(update={"overall_status": report.overall_status, "checks": checks})
    }
    for name, section in ((sync.NAME, "pre_rdma_sync"), (consistency.NAME, "worker_consistency")):
        planned = getattr(plan, section)
        if planned.enabled and (result := results.get(name)) is not None:
            updates = {"reason": result.summary} if result.detail is None else dict(result.detail)
            sections[section] = planned.model_copy(update=updates)
    return plan.model_copy(update=sections)
