"""Plans: what a launch would do, and why."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.config.models import FlightConfig
from engine.errors import StateError
from engine.models import NodeFacts
from engine.session.room import Room

if TYPE_CHECKING:
    from engine.planning.document import TrainingPlan
    from engine.planning.inputs import Parallelism


class Plans(Room):
    """Of a configuration, made anew each time."""

    async def plan(
        self, config: FlightConfig, *, strategy: Parallelism | None = None, facts: Sequence[NodeFacts] | None = None
    ) -> TrainingPlan:
        """What would be launched, on what, and why; `strategy` in place of the job's. `facts` are those of a probe just
        made, else there is one. A node that does not answer makes no plan fail: what was last seen of it is used."""
        from engine.preflight.planned import planned
        from engine.preflight.scene import Scene

        scene = Scene(config, self.fleet(config))
        try:
            seen = list(facts) if facts is not None else list((await scene.facts()).values())
            made = await planned(scene, self._store(), seen, strategy=strategy)
        finally:
            await scene.close()
        # A state that cannot be written is no reason to keep back the plan.
        with contextlib.suppress(StateError):
            await asyncio.to_thread(self._store().put_facts, config.cluster.name, seen)
        return made
