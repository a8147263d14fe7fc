"""The training plan of a scene: surveyed, then made."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from engine.models import NodeFacts
from engine.planning.document import CheckPart, TrainingPlan
from engine.planning.inputs import Parallelism
from engine.planning.plan import make_plan
from engine.preflight.registry import CHECKS, NOT_YET
from engine.preflight.scene import Scene
from engine.preflight.survey import Past, survey
from engine.store.store import Store


async def planned(
    scene: Scene, store: Store, facts: Iterable[NodeFacts], *, strategy: Parallelism | None = None
) -> TrainingPlan:
    """The plan of what the scene's configuration would launch now, given what its nodes have just said. Those that do
    not answer make it no less a plan."""
    skipped = scene.config.preflight.skip
    checks = [
        CheckPart(name=check.name, what=check.title, overridden=check.name in skipped) for check in CHECKS.values()
    ]
    past = await asyncio.to_thread(Past.of, store, scene.config.cluster.name)
    fresh = {fact.node: fact for fact in facts}
    inputs = await survey(scene, fresh, past, strategy=strategy, checks=checks, checks_not_yet=NOT_YET)
    return await asyncio.to_thread(make_plan, inputs)
