"""A pipeline's layers as the run's training plan divides them."""

from __future__ import annotations

import contextlib

from pydantic import BaseModel, ValidationError

from engine.runs.layout import RunDir
from engine.runs.plan_file import Plan
from engine.worker.layers import parse_split

_MOST_BYTES = 16 * 2**20


class _Strategy(BaseModel):
    layer_split: str | None = None


class _Document(BaseModel):
    strategy: _Strategy = _Strategy()


def planned_layers(run_dir: RunDir, plan: Plan) -> str | None:
    """Per rank a range, "0-8,8-36". None where the job names its own, for another strategy, and where there is no plan
    for so many ranks: these then divide them by their own memory. Blocking."""
    job = plan.config.job
    if job.strategy != "pipeline" or job.layer_split is not None:
        return None
    with contextlib.suppress(OSError, ValidationError, ValueError):
        with run_dir.training_plan.open("rb") as file:
            written = _Document.model_validate_json(file.read(_MOST_BYTES)).strategy.layer_split
        if written is not None and len(parse_split(written)) == len(plan.ranks):
            return written
    return None
