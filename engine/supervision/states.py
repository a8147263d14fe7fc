"""Which state of a run may follow which."""

from __future__ import annotations

from collections.abc import Mapping

from engine.models import ENDED, RunState

_UNSUCCESSFUL = ENDED - {RunState.SUCCEEDED}

FOLLOWERS: Mapping[RunState, frozenset[RunState]] = {
    RunState.PLANNED: frozenset({RunState.PREFLIGHT, RunState.FINISHING}) | _UNSUCCESSFUL,
    RunState.PREFLIGHT: frozenset({RunState.LAUNCHING, RunState.FINISHING}) | _UNSUCCESSFUL,
    RunState.LAUNCHING: frozenset({RunState.RUNNING, RunState.RECOVERING, RunState.FINISHING}) | _UNSUCCESSFUL,
    RunState.RUNNING: frozenset({RunState.RECOVERING, RunState.FINISHING}),
    RunState.RECOVERING: frozenset({RunState.LAUNCHING, RunState.FINISHING}),
    RunState.FINISHING: ENDED,
    **{state: frozenset() for state in ENDED},
}
"""Success is judged after the ranks have been seen to be gone, so it follows FINISHING alone."""


def may_follow(current: RunState, to: RunState) -> bool:
    return to in FOLLOWERS[current]


def follow(current: RunState, to: RunState) -> RunState:
    """`to`, when it may follow `current`. Raises ValueError."""
    if not may_follow(current, to):
        raise ValueError(f"a run that is {current} does not become {to}")
    return to
