"""Preparation of an attempt: preflight, with its report and the training plan for the frontends, and what is found out
on the nodes to plan the attempt."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checks.context import CheckContext
from engine.checks.model_files import NAME as COPIES
from engine.checks.placement import hub_names, placed
from engine.checks.plan_inputs import launch_decisions, shared_plan
from engine.checks.runner import plan_with_results, planned_checks, run_checks
from engine.cluster.transport.fleet import Fleet
from engine.errors import FlightDeckError, LaunchError, StateError
from engine.launch.hostfile import fresh_ports
from engine.models import CheckResult, CheckStatus, NodeFacts, PreflightReport, Reason, RunState
from engine.plan.decisions import LaunchDecisions
from engine.plan.document import VERSION
from engine.protocol.attempt import write_atomic
from engine.run import events
from engine.run.attempt import new_attempt
from engine.run.effects import PlanAttempt, RunPreflight
from engine.run.history import RunHistory
from engine.run.observation import Checked
from engine.run.run_context import RunContext
from engine.run.run_plan import RunPlan, write_plan
from engine.security.audit import audit_log
from engine.snapshots import CopyProgress
from engine.store.layout import RunDir
from engine.store.store import Store

_SHOWN_EVERY_S = 1.0
MakeAttempt = Callable[[RunHistory], events.Attempt]


@dataclass
class Preparation:
    run: RunContext
    checks: CheckContext | None = None
    """With the facts that preflight has collected, until an attempt is planned with them."""

    async def check(self, request: RunPreflight) -> Checked:
        run, plan, excluded = self.run, self.run.plan, request.excluded
        await self.close()
        if excluded:
            _write(run.run_dir.training_plan, _no_plan(f"it is made again without {', '.join(excluded)}"))
            ranks, why = len(plan.nodes), [*excluded.values()]
            details = {"run": plan.run_id, "excluded": list(excluded), "ranks": ranks, "why": why}
            audit_log("replan", "excluded", details, home=run.run_dir.home)
        try:
            await self._place(plan)
            self.checks = preflight_context(run.plan, run.fleet)
            return Checked(await run_preflight(run.run_dir, run.plan, self.checks))
        except FlightDeckError as error:
            return Checked(error=str(error))

    async def _place(self, plan: RunPlan) -> None:
        """Bring the model and the data that the job names onto its nodes, and keep their paths in the run's plan: from
        then on nothing else is looked for. Raises TransferRefused, LaunchError, NodeUnreachable, StateError."""
        run, running, shown_at = self.run, dict[str, CopyProgress](), 0.0
        if not (hub_names(plan.config) or plan.config.data.push):
            return
        facts = list[NodeFacts]()
        with contextlib.suppress(StateError):
            facts = Store(run.run_dir.home).last_facts(plan.config.cluster.name)

        def show(step: CopyProgress) -> None:
            nonlocal shown_at
            running[step.node] = step
            if time.monotonic() - shown_at > _SHOWN_EVERY_S:
                shown_at = time.monotonic()
                rows = "; ".join(f"{one.node}: {one.text}" for one in running.values() if one.path is None)
                shown = CheckResult(name=COPIES, status=CheckStatus.RUNNING, summary=rows)
                report = PreflightReport(checks=[shown], overall_status=CheckStatus.RUNNING, overridden=list(plan.skip))
                _write(run.run_dir.preflight, report.model_dump_json(indent=1))

        config = await placed(plan.config, run.fleet, facts, show)
        if config != plan.config:
            paths = {node.name: {"model": node.model, "data": node.data} for node in config.nodes}
            whole = run.whole_plan.config
            nodes = tuple(node.model_copy(update=paths.get(node.name, {})) for node in whole.nodes)
            run.whole_plan = run.whole_plan.model_copy(update={"config": whole.model_copy(update={"nodes": nodes})})
            write_plan(run.run_dir.plan, run.whole_plan)

    async def place(self, request: PlanAttempt) -> tuple[MakeAttempt, tuple[events.Event, ...]]:
        """Where an attempt can run now: what makes it, at the end of the head's files, and what was decided anew for
        it. Raises FlightDeckError."""
        run, plan = self.run, self.run.plan_on(request.members)
        recorded, last = run.history.decisions_for(plan.nodes), request.placement
        preflight, self.checks = self.checks, None
        async with preflight or preflight_context(plan, run.fleet) as checks:
            if recorded is not None and last is not None:
                decisions, layouts = recorded, last.layouts
            else:
                decisions, layouts = await asyncio.gather(self._decide(plan, checks), checks.layouts())
        wanted = plan.config.cluster.starting_port
        port = await fresh_ports(run.fleet, plan.config.nodes, decisions.network, wanted)
        new = (events.LaunchDecided(decisions=decisions),) if decisions != recorded else ()
        return functools.partial(new_attempt, run.run_dir, plan, layouts=layouts, starting_port=port), new

    async def _decide(self, plan: RunPlan, checks: CheckContext) -> LaunchDecisions:
        """As recorded for the nodes of `plan`, with the addresses that they have now; else by a plan, with the settings
        of the run. Raises LaunchError when there can be none."""
        history = self.run.history
        if (recorded := history.decisions_for(plan.nodes)) is not None:
            return recorded.model_copy(update={"network": await checks.network_plan()})
        if history.attempts and not history.decisions:
            why, todo = "the decisions of its launch are missing there", "launch it anew"
            raise LaunchError("the run cannot be continued as launched", where="journal.jsonl", why=why, todo=todo)
        made = await launch_decisions(checks)
        return made.model_copy(update={"settings": history.decisions[0].settings}) if history.decisions else made

    async def close(self) -> None:
        """Cancel what the checks still do."""
        checks, self.checks = self.checks, None
        if checks is not None:
            await checks.close()


def preflight_context(plan: RunPlan, fleet: Fleet) -> CheckContext:
    planned = planned_checks(plan.config, plan.skip)
    return CheckContext(plan.config, fleet, division=plan.division, calibration=plan.calibration, planned=planned)


async def run_preflight(run_dir: RunDir, plan: RunPlan, context: CheckContext) -> PreflightReport:
    """Run the checks that `plan` does not skip, and write the training plan of what passes them, for people and other
    programs. When it is cancelled, the report shows that; what the checks started is gone when this returns or
    raises."""
    results: dict[str, CheckResult] = {}

    def write(checks: Iterable[CheckResult], status: CheckStatus) -> None:
        report = PreflightReport(checks=list(checks), overall_status=status, overridden=list(plan.skip))
        _write(run_dir.preflight, report.model_dump_json(indent=1))

    def keep(result: CheckResult) -> None:
        results[result.name] = result
        write(results.values(), CheckStatus.RUNNING)

    audit = functools.partial(audit_log, home=run_dir.home)
    try:
        report = await run_checks(context, skip=plan.skip, on_result=keep, audit=audit)
    except asyncio.CancelledError:
        write(map(_cut_short, results.values()), CheckStatus.SKIP)
        raise
    _write(run_dir.preflight, report.model_dump_json(indent=1))
    training_plan = _no_plan("preflight has failed")
    if report.overall_status is not CheckStatus.FAIL:
        try:
            training_plan = _json(plan_with_results(await shared_plan(context), report).document())
        except LaunchError as error:
            training_plan = _no_plan(str(error))
    _write(run_dir.training_plan, training_plan)
    return report


def _cut_short(result: CheckResult) -> CheckResult:
    unfinished = {"status": CheckStatus.SKIP, "summary": "not finished: the run was aborted"}
    return result.model_copy(update=unfinished) if result.status is CheckStatus.RUNNING else result


def _no_plan(reason: str) -> str:
    return _json({"version": VERSION, "enabled": False, "reason": reason})


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def _write(path: Path, text: str) -> None:
    """For the frontends; a full disk must not end the run."""
    with contextlib.suppress(OSError):
        write_atomic(path, text)


def excluded_nodes(report: PreflightReport) -> dict[str, str]:
    """Nodes that the launch leaves out → why."""
    return {node: f"{result.name}: {result.summary}" for result in report.checks for node in result.excludes}


def preflight_verdict(failed: CheckResult) -> events.Verdict:
    rank, node = failed.blames if failed.blames is not None else (None, None)
    cause = "; its fix ".join(filter(None, (f"{failed.name}: {failed.summary}", failed.fix_effect)))
    return events.Verdict(RunState.FAILED, Reason.PREFLIGHT_FAILED, cause, rank, node, fix=failed.fix_command)
