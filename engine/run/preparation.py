"""Preparation of an attempt: preflight, and what is found out on its nodes to plan it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from engine.checks.context import CheckContext
from engine.checks.plan_inputs import launch_decisions
from engine.cluster.staging import HostLayout
from engine.errors import FlightDeckError, LaunchError
from engine.launch.hostfile import fresh_ports
from engine.plan.decisions import LaunchDecisions
from engine.run import events
from engine.run.attempt import new_attempt
from engine.run.effects import PlanAttempt, RunPreflight
from engine.run.observation import Checked
from engine.run.preflight import preflight_context, replan, run_preflight
from engine.run.run_context import RunContext
from engine.run.run_plan import RunPlan


@dataclass(frozen=True)
class Placement:
    """Where an attempt can run now, and what was decided anew for it."""

    plan: RunPlan
    layouts: Sequence[HostLayout]
    starting_port: int
    decided: tuple[events.Event, ...] = ()

    def attempt(self, run: RunContext) -> events.Attempt:
        """It begins at the end of the head's files."""
        return new_attempt(run.run_dir, self.plan, run.history, layouts=self.layouts, starting_port=self.starting_port)


@dataclass
class Preparation:
    run: RunContext
    checks: CheckContext | None = None
    """With the facts that preflight has collected, until an attempt is planned with them."""

    async def check(self, request: RunPreflight) -> Checked:
        run, plan = self.run, self.run.plan
        await self.close()
        if request.excluded:
            replan(run.run_dir, plan, request.excluded)
        self.checks = preflight_context(plan, run.fleet)
        try:
            return Checked(await run_preflight(run.run_dir, plan, self.checks))
        except FlightDeckError as error:
            return Checked(error=str(error))

    async def place(self, request: PlanAttempt) -> Placement:
        """Raises FlightDeckError."""
        run, plan = self.run, self.run.plan_on(request.members)
        recorded, last = run.history.decisions_for(plan.nodes), request.placement
        async with self._checks_of(plan) as checks:
            if recorded is not None and last is not None:
                decisions, layouts = recorded, last.layouts
            else:
                decisions, layouts = await asyncio.gather(self._decide(plan, checks), checks.layouts())
        wanted = plan.config.cluster.starting_port
        port = await fresh_ports(run.fleet, plan.config.nodes, decisions.network, wanted)
        new = (events.LaunchDecided(decisions=decisions),) if decisions != recorded else ()
        return Placement(plan, layouts, port, new)

    def _checks_of(self, plan: RunPlan) -> CheckContext:
        preflight, self.checks = self.checks, None
        return preflight or preflight_context(plan, self.run.fleet)

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
