"""A run's preflight: its checks on its own scene, told in preflight.json as they go, and what a failed one means."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.errors import StateError
from engine.models import CheckResult, CheckStatus, PreflightReport, Reason, RunState
from engine.planning.document import VERSION
from engine.preflight.checklist import run_checks
from engine.preflight.planned import planned
from engine.preflight.scene import Scene
from engine.runs.layout import RunDir
from engine.runs.plan_file import Plan, write_plan
from engine.security.audit import audit_log
from engine.store.store import Store
from engine.supervision.culprit import Verdict
from engine.worker.wire import write_atomic

_PLAN_S = 2.0
"""For the training plan, once the checks have ended: a launch does not wait for it."""


async def check(run_dir: RunDir, plan: Plan, scene: Scene, home: Path) -> PreflightReport:
    """Run the checks that `plan` does not skip. Cancelled, it says so in the report; what the checks had started is
    gone when this returns or raises."""
    results: dict[str, CheckResult] = {}

    def keep(result: CheckResult) -> None:
        results[result.name] = result
        _write(run_dir, _report(results.values(), CheckStatus.RUNNING, plan.skip))

    audit = functools.partial(audit_log, home=home)
    planning = asyncio.create_task(_write_training_plan(run_dir, scene, home), name="training plan")
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
    return report


async def _write_training_plan(run_dir: RunDir, scene: Scene, home: Path) -> None:
    """training_plan.json while the checks run. It tells of the launch and is no part of it: whatever stands in its way
    is written in its place."""
    document: dict[str, Any] = {"version": VERSION, "enabled": False}
    try:
        facts = (await scene.facts()).values()
        document = (await planned(scene, Store(home), facts)).document()
    except asyncio.CancelledError:
        document["reason"] = "it was not made by the time the checks had ended"
        raise
    except Exception as error:
        document["reason"] = f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(OSError):
            write_atomic(run_dir.training_plan, json.dumps(document, indent=1) + "\n")


def excluded(report: PreflightReport) -> dict[str, str]:
    """Nodes that the launch is to leave out → why."""
    return {node: f"{result.name}: {result.summary}" for result in report.checks for node in result.excludes}


def replan(run_dir: RunDir, plan: Plan, left_out: Mapping[str, str], home: Path) -> Plan:
    """The plan without these nodes, written in place of the run's. Raises StateError."""
    made = plan.without(left_out)
    try:
        write_plan(run_dir.plan, made)
    except OSError as error:
        why = error.strerror or str(error)
        raise StateError("the plan could not be made again", where=str(run_dir.plan), why=why) from error
    context = {"run": plan.run_id, "excluded": list(left_out), "ranks": len(made.ranks), "why": [*left_out.values()]}
    audit_log("replan", "excluded", context, home=home)
    return made


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
