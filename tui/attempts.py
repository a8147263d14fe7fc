"""What is said of a run's attempts, on the command line and in the run pane."""

from __future__ import annotations

from engine.events import AttemptStatus, RunSnapshot
from tui.formatting import plural

_SOURCES = {
    "rescue": "the state that its survivors saved",
    "checkpoint": "the checkpoint",
    "adapter": "the adapters",
}


def how_it_went(attempt: AttemptStatus) -> str:
    """How an attempt began and, when it failed, how it ended: one line."""
    parts = [attempt.why] if attempt.why else []
    if attempt.source in _SOURCES:
        parts.append(f"from {_SOURCES[attempt.source]} of iteration {attempt.resumed_at}")
    elif attempt.source is not None:
        parts.append("from the beginning: no state was found")
    if attempt.recovery_s is not None:
        parts += [f"{plural(attempt.repeated or 0, 'step')} repeated", f"{attempt.recovery_s:.1f} s"]
    if attempt.reason is not None:
        reached = f" at iteration {attempt.reached}" if attempt.reached else ""
        parts.append(f"{attempt.reason.value}{_place(attempt)}{reached}")
    return ", ".join(parts) if parts else "as planned"


def members(attempt: AttemptStatus, before: AttemptStatus | None) -> str | None:
    """Which rank was on which node, for an attempt in which that is another than in the one before."""
    if before is None or attempt.members == before.members:
        return None
    ranks = ", ".join(f"rank {rank} on {node}" for rank, node in attempt.members)
    gone = [node for _, node in before.members if node not in [name for _, name in attempt.members]]
    return ranks + (f"; without {', '.join(gone)}" if gone else "")


def recovered(snapshot: RunSnapshot) -> str | None:
    """ "recovered from rank 1's death at iteration 37, 1 step repeated, 8.2 s" of the last attempt, or what is going on
    before the next; None of a first."""
    if snapshot.recovery is not None:
        return snapshot.recovery
    last = snapshot.attempts[-1] if snapshot.attempts else None
    if last is None or last.why is None:
        return None
    if last.recovery_s is None:
        return last.why
    told = last.why.replace("recovers", "recovered", 1)
    return f"{told}, {plural(last.repeated or 0, 'step')} repeated, {last.recovery_s:.1f} s"


def _place(attempt: AttemptStatus) -> str:
    if attempt.rank is None:
        return f" on {attempt.host}" if attempt.host else ""
    return f" of rank {attempt.rank}" + (f" on {attempt.host}" if attempt.host else "")
