"""What the plan says of a launch, for the checks: each node's need of memory and its limit, and why it is refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from engine.planning.document import Disabled, RankMemory, TrainingPlan
from engine.planning.plan import make_plan
from engine.preflight.scene import Scene
from engine.preflight.survey import surveyed

_GB = 1e9


@dataclass(frozen=True)
class Need:
    """Of one node's rank, against what its node has."""

    needed_bytes: int | None = None
    """MLX's peak and the reserve of the process: what is judged."""
    limit_bytes: int | None = None
    fits: bool | None = None
    """None when either is not known."""
    words: str = ""
    """Where both come from, or why they are not known."""
    wanted: bool = True
    """The job is one whose memory can be told."""

    @property
    def share(self) -> float | None:
        return self.needed_bytes / self.limit_bytes if self.needed_bytes is not None and self.limit_bytes else None

    def told(self) -> str:
        if self.needed_bytes is None or self.limit_bytes is None:
            return f"memory not compared: {self.words}"
        return f"needs {self.needed_bytes / _GB:,.1f} of {self.limit_bytes / _GB:,.1f} GB ({self.words})"


async def plan_of(scene: Scene) -> TrainingPlan:
    """The plan of what would be launched, without a count of the examples; made once for all checks."""

    async def make() -> TrainingPlan:
        return await asyncio.to_thread(make_plan, await surveyed(scene))

    return await scene.shared("plan", make)


async def needs(scene: Scene) -> dict[str, Need]:
    """Node name → its memory, in the configuration's order."""
    plan = await plan_of(scene)
    if isinstance(plan.memory, Disabled):
        unknown = Need(words=plan.memory.reason, wanted=scene.config.job.command is None)
        return {node.name: unknown for node in scene.config.nodes}
    ranks = {rank.node: need_of(rank) for rank in plan.memory.ranks}
    left_out = Need(words="the plan leaves this node out")
    return {node.name: ranks.get(node.name, left_out) for node in scene.config.nodes}


def need_of(rank: RankMemory) -> Need:
    """With the reserve, as the plan compares it."""
    if rank.needed_bytes is None:
        return Need(limit_bytes=rank.limit_bytes, words="what it needs is not known")
    if rank.limit_bytes is None:
        return Need(rank.needed_bytes, words=f"what the node may use is not known ({rank.limit_from or 'not probed'})")
    reserve = f", {rank.reserve_bytes / _GB:,.1f} GB of it in reserve" if rank.reserve_bytes else ""
    words = f"by {rank.source or 'the plan'}{reserve}, limit by {rank.limit_from or 'the node'}"
    return Need(rank.needed_bytes, rank.limit_bytes, rank.fits, words)
