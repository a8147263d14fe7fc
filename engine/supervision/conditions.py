"""Which nodes answer, since when the others do not, and when that has lasted too long; each change once in the journal.

Only nodes with a connection have a condition. `{"event": "node", "node", "condition", …}` with condition

    connected     at first: boot_id, memory_kills (processes killed for want of memory until then); later: silent_s
    unreachable   since (UTC ISO time), why: nothing was heard of it for UNREACHABLE_S
    lost          since, why: its rank's lease has ended it by now
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from engine.config.models import FlightConfig
from engine.supervision.links.base import NodeLink
from engine.supervision.links.links import Links
from engine.worker.agent import UNHEARD_BEATS

UNREACHABLE_S = 15.0
_MARGIN_S = 2.0
"""For the keeper's own part in an ending."""
CONNECTED, UNREACHABLE, LOST = "connected", "unreachable", "lost"

Enter = Callable[..., object]


def lost_after_s(config: FlightConfig) -> float | None:
    """How long a node may be silent until its ranks have surely been ended by their lease; None when that lets them go
    on."""
    recovery = config.recovery
    if recovery.on_lease_expiry != "end":
        return None
    # A command is not asked first; our trainer may be in the middle of saving.
    asked_s = 0.0 if config.job.command is not None else max(recovery.stop_grace_s, recovery.save_grace_s)
    return recovery.lease_s + UNHEARD_BEATS + asked_s + recovery.term_grace_s + _MARGIN_S


@dataclass
class _Condition:
    link: NodeLink
    said: str | None = None
    silent_s: float = 0.0
    longest_s: float = 0.0


class Conditions:
    """Of all links of one attempt."""

    def __init__(
        self,
        links: Links,
        enter: Enter,
        limit_s: float | None,
        before: Sequence[dict[str, Any]] = (),
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`enter` is the journal's; `before` are the attempt's `node` entries by an earlier supervisor."""
        self._enter = enter
        self._limit_s = limit_s
        self._clock = clock
        self._conditions = [_Condition(link) for link in links if not link.local]
        self._memory_kills: dict[str, int | None] = {}
        self._before(before)

    def look(self) -> list[int]:
        """Enter what has changed; the ranks whose node is lost."""
        for condition in self._conditions:
            self._look_at(condition)
        return [rank for condition in self._conditions if condition.said == LOST for rank in condition.link.ranks]

    def silence_s(self, link: NodeLink) -> float:
        """The longest time for which a node was away, so far."""
        return max((each.longest_s for each in self._conditions if each.link is link), default=0.0)

    def memory_kills(self, name: str) -> int | None:
        """Its node's count when the attempt began."""
        return self._memory_kills.get(name)

    def _look_at(self, condition: _Condition) -> None:
        state = condition.link.state
        back_after_s = condition.silent_s if state.silent_s < condition.silent_s else 0.0
        condition.silent_s = state.silent_s
        condition.longest_s = max(condition.longest_s, state.silent_s)
        if state.silent_s < UNREACHABLE_S:
            if state.heard and condition.said != CONNECTED:
                self._say_connected(condition, back_after_s)
            return
        if condition.said not in (UNREACHABLE, LOST):
            self._say_away(condition, UNREACHABLE)
        if condition.said == UNREACHABLE and self._limit_s is not None and state.silent_s > self._limit_s:
            self._say_away(condition, LOST)

    def _say_connected(self, condition: _Condition, back_after_s: float) -> None:
        facts = condition.link.facts
        told: dict[str, Any] = {}
        if condition.said is None and facts is not None:
            told = {"boot_id": facts.boot_id, "memory_kills": facts.memory_kills}
        if condition.said is not None:
            told["silent_s"] = round(back_after_s, 1)
        for name in condition.link.names:
            self._memory_kills.setdefault(name, told.get("memory_kills"))
            self._enter("node", node=name, condition=CONNECTED, **told)
        condition.said = CONNECTED

    def _say_away(self, condition: _Condition, word: str) -> None:
        state = condition.link.state
        since = (self._clock() - timedelta(seconds=state.silent_s)).isoformat()
        for name in condition.link.names:
            self._enter("node", node=name, condition=word, since=since, why=state.problem or "no answer")
        condition.said = word

    def _before(self, entries: Sequence[dict[str, Any]]) -> None:
        for entry in entries:
            name = str(entry.get("node"))
            if "memory_kills" in entry:
                self._memory_kills.setdefault(name, entry["memory_kills"])
            for condition in self._conditions:
                if name in condition.link.names:
                    # Whether it is lost is this supervisor's to find out.
                    condition.said = UNREACHABLE if entry.get("condition") != CONNECTED else CONNECTED
