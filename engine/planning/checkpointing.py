"""How often to save, so that little is lost and little is waited for."""

from __future__ import annotations

from engine.config.mlx_lm_keys import DEFAULTS
from engine.config.models import FlightConfig

MOST = 1000
"""Iterations between two saves, at most: 1,780 were lost twice with more."""
MOST_FULL = 500
"""In full fine-tuning, where what is lost took longer."""
SAVES = 20
"""In a run, at least."""


def save_every(iterations: int, *, full: bool) -> int:
    """Iterations between two saves: min(1000, iterations / 20), at most 500 in full fine-tuning, at least 1. Raises
    ValueError for a number of iterations that is not above 0."""
    if iterations <= 0:
        raise ValueError(f"iterations must be above 0: {iterations}")
    return max(1, min(most(full=full), iterations // SAVES))


def state_every(config: FlightConfig) -> int:
    """Optimizer updates from one checkpoint of the state to the next, as the trainer is told; 0: none. Where
    [checkpoint] names no number, as often as the job saves its adapters (iterations, of which an update takes
    grad_accumulation_steps)."""
    if not config.checkpoint.enabled or config.job.command is not None:
        return 0
    if config.checkpoint.every is not None:
        return config.checkpoint.every
    settings = {**DEFAULTS, **config.job.mlx_lm}
    return max(1, int(settings["save_every"]) // int(settings["grad_accumulation_steps"]))


def most(*, full: bool) -> int:
    """The most iterations between two saves."""
    return MOST_FULL if full else MOST
