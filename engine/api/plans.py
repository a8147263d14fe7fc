"""Training plans: what would be launched, on which nodes, and why."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from engine.api.session import Session
from engine.checks.context import CheckContext
from engine.checks.runner import make_training_plan
from engine.config.models import Config, Strategy
from engine.errors import StateError
from engine.models import NodeFacts
from engine.plan.document import TrainingPlan


class PlansApi:
    """A configuration's plan, made again each time."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def make(
        self, config: Config, *, strategy: Strategy | None = None, facts: Sequence[NodeFacts] | None = None
    ) -> TrainingPlan:
        """Plan the configuration's job, with `strategy` in place of its own. Without `facts` the nodes are probed. For
        a node that does not answer its last facts are used."""
        context = CheckContext(config, self._session.fleet(config))
        try:
            seen = list(facts) if facts is not None else list((await context.facts()).values())
            plan = await make_training_plan(context, self._session.store, seen, strategy=strategy)
        finally:
            await context.close()
        # A state that cannot be written is no reason to withhold the plan.
        with contextlib.suppress(StateError):
            await asyncio.to_thread(self._session.store.put_facts, config.cluster.name, seen)
        return plan
