"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models import Reason, RunState


@dataclass(frozen=True)
class Verdict:
    """How the run ended, as its record says it."""

    state: RunState
    reason: Reason
    cause: str | None = None
    rank: int | None = None
    host: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    fix: str | None = None
    signature: str | None = None
    """Id of the known failure text that the cause is from."""
