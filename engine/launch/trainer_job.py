"""The job as the trainer is told it."""

from __future__ import annotations

from typing import Any

from engine.config.models import FlightConfig


def trainer_job(config: FlightConfig, layer_split: str | None = None) -> dict[str, Any] | None:
    """mlx-lm's keys with [job]'s own; None for a job with a command of its own. Paths are as written. `layer_split` is
    a pipeline's, where the job names none."""
    job = config.job
    if job.command is not None:
        return None
    named = {
        "model": job.model,
        "data": job.data,
        "fine_tune_type": job.fine_tune_type,
        "strategy": job.strategy,
        "layer_split": job.layer_split or layer_split,
    }
    ours = {"chunking": job.chunking, "chunk_size": job.chunk_size}
    return {**job.mlx_lm, **ours, **{key: value for key, value in named.items() if value is not None}}
