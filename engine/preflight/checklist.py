"""Runs the checks: all at once, each within its time limit, each after those that it needs; cancellable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime

from engine.errors import FlightDeckError, InputError
from engine.models import CheckResult, CheckStatus, PreflightReport
from engine.preflight.check import Check, verdict
from engine.preflight.registry import CHECKS, NOT_YET
from engine.preflight.scene import Scene
from engine.security.audit import audit_log
from engine.security.identifiers import shown

OVERRIDDEN = "overridden"
"""The reason of a check that was left out by name."""

OnResult = Callable[[CheckResult], None]
Audit = Callable[[str, str, dict[str, object]], object]


def check_names(skip: Iterable[str], checks: Mapping[str, Check] = CHECKS) -> list[str]:
    """The names to skip, each once. Raises InputError for one that is no check of this release."""
    names = list(dict.fromkeys(skip))
    for name in names:
        if name in checks:
            continue
        why = f"it is not checked in this release ({NOT_YET[name]})" if name in NOT_YET else "there is no such check"
        raise InputError(f"cannot skip {shown(name)}", why=why, todo=f"checks: {', '.join(checks)}")
    return names


async def run_checks(
    scene: Scene,
    *,
    skip: Iterable[str] = (),
    on_result: OnResult,
    checks: Mapping[str, Check] = CHECKS,
    audit: Audit = audit_log,
) -> PreflightReport:
    """Run every check; `on_result` hears each as RUNNING, once or more, and again when it ends, in the event
    loop's thread.

    `skip` adds to the configuration's own list. A check that breaks or is late is a failure of that check alone;
    cancelling ends what the checks started. Raises InputError when a name in `skip` is no check.
    """
    overridden = check_names([*scene.config.preflight.skip, *skip], checks)
    scene.progress = lambda name, words: on_result(verdict(name, CheckStatus.RUNNING, words))
    ended: dict[str, asyncio.Future[CheckResult]] = {
        name: asyncio.get_running_loop().create_future() for name in checks
    }

    async def settle(check: Check) -> None:
        result = await _answer(scene, check, overridden, ended, on_result)
        ended[check.name].set_result(result)
        on_result(result)

    async with asyncio.TaskGroup() as tasks:
        for check in checks.values():
            tasks.create_task(settle(check), name=f"check {check.name}")
    results = [ended[name].result() for name in checks]
    report = PreflightReport(
        checks=results, overall_status=overall(results), overridden=overridden, finished_at=datetime.now(UTC)
    )
    _tell_audit(audit, report, [check.name for check in checks.values() if check.not_applicable(scene.config)])
    return report


def overall(results: Iterable[CheckResult]) -> CheckStatus:
    """FAIL when any failed, else WARN when any warned, else PASS."""
    seen = {result.status for result in results}
    return next((status for status in (CheckStatus.FAIL, CheckStatus.WARN) if status in seen), CheckStatus.PASS)


def first_failure(report: PreflightReport) -> CheckResult | None:
    return next((result for result in report.checks if result.status is CheckStatus.FAIL), None)


async def _answer(
    scene: Scene,
    check: Check,
    overridden: list[str],
    ended: Mapping[str, asyncio.Future[CheckResult]],
    on_result: OnResult,
) -> CheckResult:
    if check.name in overridden:
        return verdict(check.name, CheckStatus.SKIP, OVERRIDDEN)
    why_not = check.not_applicable(scene.config) or check.switched_off(scene.config)
    if why_not:
        return verdict(check.name, CheckStatus.SKIP, why_not)
    for needed in check.needs:
        if (await asyncio.shield(ended[needed])).status is CheckStatus.FAIL:
            return verdict(check.name, CheckStatus.SKIP, f"not run: {needed} failed")
    await asyncio.gather(*(asyncio.shield(ended[earlier]) for earlier in check.after if earlier in ended))
    on_result(verdict(check.name, CheckStatus.RUNNING, check.title))
    began = time.monotonic()
    try:
        async with asyncio.timeout(check.time_limit_s):
            result = await check.look(scene)
    except TimeoutError:
        result = verdict(check.name, CheckStatus.FAIL, f"no answer within {check.time_limit_s:.0f} s")
    except FlightDeckError as error:
        result = verdict(check.name, CheckStatus.FAIL, str(error))
    except Exception as error:  # a check that breaks must not take the others, or the supervisor, with it
        result = verdict(check.name, CheckStatus.FAIL, f"the check itself broke: {type(error).__name__}: {error}")
    return result.model_copy(update={"name": check.name, "duration_s": round(time.monotonic() - began, 3)})


def _tell_audit(audit: Audit, report: PreflightReport, not_applicable: Collection[str]) -> None:
    """What blocks a launch, and what a launch is let through in spite of."""
    for name in report.overridden:
        audit("preflight_override", OVERRIDDEN, {"check": name})
    for result in report.checks:
        context: dict[str, object] = {"check": result.name, "summary": result.summary}
        if result.status is CheckStatus.FAIL:
            audit("preflight_failure", "fail", context)
        elif result.status is CheckStatus.WARN:
            audit("preflight_warning", "warn", context)
        elif result.status is CheckStatus.SKIP and result.name not in (*report.overridden, *not_applicable):
            audit("preflight_warning", "skip", context)
