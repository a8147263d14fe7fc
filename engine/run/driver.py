"""The supervisor's loop: a run is observed, one step is made, and what follows is performed, from the launch to the
proof that nothing of it is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.run.effects import Effect
from engine.run.observation import Observation
from engine.run.state import Phase, State
from engine.run.step import step

TICK_S = 0.1


class Environment(Protocol):
    """The run as it is on its nodes, or as it is simulated."""

    async def observe(self) -> Observation: ...

    async def perform(self, effects: Sequence[Effect]) -> None: ...

    async def await_news(self, limit_s: float) -> None:
        """Until something has happened that a step may follow from, but no longer than `limit_s`."""


async def drive(state: State, run: Environment) -> State:
    """Take the run from `state` to its end, and to the proof of that."""
    while state.phase is not Phase.OVER:
        state, effects = step(state, await run.observe())
        await run.perform(effects)
        await run.await_news(TICK_S)
    return state
