"""The settings of a PyTorch job that it leaves to the plan, and the memory that each rank needs with them."""

from __future__ import annotations

from engine.plan.context import PlanContext
from engine.plan.document import ChosenTorchSettings, Disabled, Rationale, Source
from engine.plan.memory.fit import MemoryFit
from engine.protocol.job import AUTO


def torch_fit(context: PlanContext, rationale: Rationale) -> MemoryFit:
    """Choose what is "auto"."""
    job = context.job
    asked = {"strategy": job.strategy, **{key: job.mlx_lm.get(key, AUTO) for key in ChosenTorchSettings.model_fields}}
    asked["strategy"] = job.strategy
    settings = ChosenTorchSettings.model_validate({key: value for key, value in asked.items() if value != AUTO})
    reason = "the memory of a PyTorch job is not estimated yet"
    rationale.explain("memory", Source.UNKNOWN, reason)
    return MemoryFit(Disabled(reason=reason), settings)
