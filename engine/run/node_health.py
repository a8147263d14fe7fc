"""Which nodes answer, since when the others do not, and when that has lasted too long; each change is one event. This
machine has no condition, but its agent may be silent, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from engine.config.models import Config
from engine.node.attempt_watch import MAX_UNANSWERED_HEARTBEATS
from engine.run.events import NodeConditionChanged
from engine.run.observation import HostView

UNREACHABLE_S = 15.0
_MARGIN_S = 2.0
"""For the keeper's own part in an ending."""
Condition = Literal["connected", "unreachable", "lost"]


def lost_after_s(config: Config) -> float | None:
    """How long a node may be silent until the lease has surely ended its ranks; None when the lease lets them go on."""
    recovery = config.recovery
    if recovery.on_lease_expiry != "end":
        return None
    grace_s = config.job.kind.grace_s(recovery.stop_grace_s, recovery.save_grace_s)
    return recovery.lease_s + MAX_UNANSWERED_HEARTBEATS + grace_s + recovery.term_grace_s + _MARGIN_S


@dataclass(frozen=True)
class HostHealth:
    condition: Condition | None = None
    """As last recorded."""
    silent_s: float = 0.0
    """When it was last seen."""


def recorded_health(host: HostView, recorded: Sequence[NodeConditionChanged]) -> HostHealth:
    """By what an earlier supervisor recorded in this attempt: whether it is lost is for this one to find out."""
    newest = next((event for event in reversed(recorded) if event.node in host.names), None)
    if newest is None:
        return HostHealth()
    return HostHealth("connected" if newest.condition == "connected" else "unreachable")


def next_health(
    host: HostView, health: HostHealth, lost_after_s: float | None, at: datetime
) -> tuple[HostHealth, list[NodeConditionChanged]]:
    """The host's health after it was seen once more, at wall-clock time `at`, and what has changed."""
    back_after_s = health.silent_s if host.silent_s < health.silent_s else 0.0
    seen = replace(health, silent_s=host.silent_s) if host.silent_s != health.silent_s else health
    if host.local:
        return seen, []
    changes: list[tuple[Condition, dict[str, Any]]] = []
    if host.silent_s < UNREACHABLE_S:
        if health.condition is None and host.answered and host.boot_id is not None:
            changes = [("connected", {"boot_id": host.boot_id, "memory_kills": host.memory_kills})]
        elif health.condition in ("unreachable", "lost") and host.answered:
            changes = [("connected", {"silent_s": round(back_after_s, 1)})]
    else:
        away = {"since": at - timedelta(seconds=host.silent_s), "why": host.problem or "no answer"}
        if health.condition not in ("unreachable", "lost"):
            changes.append(("unreachable", away))
        if health.condition != "lost" and lost_after_s is not None and host.silent_s > lost_after_s:
            changes.append(("lost", away))
    if not changes:
        return seen, []
    recorded = [
        NodeConditionChanged(node=name, condition=condition, **how) for condition, how in changes for name in host.names
    ]
    return replace(seen, condition=changes[-1][0]), recorded
