"""How often to save, so that little is lost and little is waited for."""

from __future__ import annotations

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


def most(*, full: bool) -> int:
    """The most iterations between two saves."""
    return MOST_FULL if full else MOST
