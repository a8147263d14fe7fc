"""The training plan of a scene: surveyed, then made."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import replace

from engine.models import NodeFacts, PreflightReport, PreRdmaSync, WorkerConsistency
from engine.planning.document import CheckPart, TrainingPlan
from engine.planning.inputs import Parallelism, PlanInputs
from engine.planning.plan import make_plan
from engine.preflight import consistency, sync
from engine.preflight.registry import CHECKS, NOT_YET
from engine.preflight.scene import Scene
from engine.preflight.survey import Past, counted, survey
from engine.store.store import Store


async def planned(
    scene: Scene, store: Store, facts: Iterable[NodeFacts], *, strategy: Parallelism | None = None
) -> TrainingPlan:
    """The plan of what the scene's configuration would launch now, given what its nodes have just said. Those that do
    not answer make it no less a plan."""
    past = await asyncio.to_thread(Past.of, store, scene.config.cluster.name)
    inputs = await survey(scene, {fact.node: fact for fact in facts}, past, strategy=strategy)
    return await asyncio.to_thread(plan_with_checks, await counted(scene, inputs))


def plan_with_checks(inputs: PlanInputs, skip: Collection[str] = ()) -> TrainingPlan:
    """The plan with its list of the checks; `skip` are overridden beside those that the configuration names."""
    skipped = {*inputs.config.preflight.skip, *skip}
    checks = tuple(
        CheckPart(name=check.name, what=check.title, overridden=check.name in skipped) for check in CHECKS.values()
    )
    return make_plan(replace(inputs, checks=checks, checks_not_yet=NOT_YET))


def with_results(plan: TrainingPlan, report: PreflightReport) -> TrainingPlan:
    """The plan of a launch whose checks have ended: what came of the sync and of the comparison, in place of what is
    to be done. Of one that was planned and found nothing out, why."""
    results = {result.name: result for result in report.checks}
    synced, compared = plan.pre_rdma_sync, plan.worker_consistency
    if synced.enabled and (result := results.get(sync.NAME)) is not None:
        detail = result.detail
        synced = detail if isinstance(detail, PreRdmaSync) else synced.model_copy(update={"reason": result.summary})
    if compared.enabled and (result := results.get(consistency.NAME)) is not None:
        detail = result.detail
        known = dict(detail) if isinstance(detail, WorkerConsistency) else {"reason": result.summary}
        compared = compared.model_copy(update=known)
    return plan.model_copy(update={"pre_rdma_sync": synced, "worker_consistency": compared})
