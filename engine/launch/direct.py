"""The ranks started over our own connections, with the environment that mlx.launch would have given them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StartFailure:
    """A rank that did not start."""

    rank: int
    code: int | None
    """Its start.sh's exit code, negative for a signal; None when that is not known."""
    words: str
    """What was said last about it, one line; "" when nothing was."""
