"""Which nodes answer, since when the others do not, and when that has lasted too long; each change once in the
journal, as a NodeConditionChanged. This machine has no condition, but its agent may be silent, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from engine.cluster.host_connection import HostConnection
from engine.config.models import Config
from engine.node.attempt_watch import MAX_UNANSWERED_HEARTBEATS
from engine.run.events import NodeConditionChanged
from engine.run.ranks import HostConnections

UNREACHABLE_S = 15.0
_MARGIN_S = 2.0
"""For the keeper's own part in an ending."""


def lost_after_s(config: Config) -> float | None:
    """How long a node may be silent until the lease has surely ended its ranks; None when the lease lets them go on."""
    recovery = config.recovery
    if recovery.on_lease_expiry != "end":
        return None
    # A command gets no cooperative stop; our trainer may be in the middle of saving.
    grace_s = 0.0 if config.job.command is not None else max(recovery.stop_grace_s, recovery.save_grace_s)
    return recovery.lease_s + MAX_UNANSWERED_HEARTBEATS + grace_s + recovery.term_grace_s + _MARGIN_S


@dataclass
class _Host:
    connection: HostConnection
    condition: Literal["connected", "unreachable", "lost"] | None = None
    """As last recorded."""
    silent_s: float = 0.0
    longest_silence_s: float = 0.0


class NodeHealth:
    def __init__(
        self,
        connections: HostConnections,
        record: Callable[[NodeConditionChanged], object],
        lost_after_s: float | None,
        before: Sequence[NodeConditionChanged] = (),
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`before`: what an earlier supervisor recorded in this attempt."""
        self._record = record
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._hosts = [_Host(connection) for connection in connections]
        for event in before:
            for host in self._hosts:
                if event.node in host.connection.names:
                    # Whether it is lost is for this supervisor to find out.
                    host.condition = "connected" if event.condition == "connected" else "unreachable"

    def poll(self) -> list[int]:
        """Record what has changed; the ranks whose node is lost."""
        for host in self._hosts:
            self._update(host)
        return [rank for host in self._hosts if host.condition == "lost" for rank in host.connection.ranks]

    def silence_s(self, connection: HostConnection) -> float:
        """The longest time for which a node was away, so far."""
        return max((host.longest_silence_s for host in self._hosts if host.connection is connection), default=0.0)

    def _update(self, host: _Host) -> None:
        state = host.connection.state
        back_after_s = host.silent_s if state.silent_s < host.silent_s else 0.0
        host.silent_s = state.silent_s
        host.longest_silence_s = max(host.longest_silence_s, state.silent_s)
        if host.connection.local:
            return
        if state.silent_s < UNREACHABLE_S:
            facts = host.connection.facts
            if host.condition is None and state.answered and facts is not None:
                self._enter(host, "connected", boot_id=facts.boot_id, memory_kills=facts.memory_kills)
            elif host.condition in ("unreachable", "lost") and state.answered:
                self._enter(host, "connected", silent_s=round(back_after_s, 1))
            return
        away = {"since": self._clock() - timedelta(seconds=state.silent_s), "why": state.problem or "no answer"}
        if host.condition not in ("unreachable", "lost"):
            self._enter(host, "unreachable", **away)
        limit_s = self._lost_after_s
        if host.condition == "unreachable" and limit_s is not None and state.silent_s > limit_s:
            self._enter(host, "lost", **away)

    def _enter(self, host: _Host, condition: Literal["connected", "unreachable", "lost"], **how: Any) -> None:
        host.condition = condition
        for name in host.connection.names:
            self._record(NodeConditionChanged(node=name, condition=condition, **how))
