"""The items of a queue, how they change, and which of them may start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from engine.errors import InputError
from engine.models import FrozenModel, Reason, RunRecord, RunState

ItemState = Literal["waiting", "held", "launching", "started", "ended", "cancelled"]
_OPEN: Final = ("waiting", "launching", "started")


class QueueItem(FrozenModel):
    id: int
    name: str
    """The job's."""
    hosts: dict[str, str]
    """Node → its machine, as host_key has it."""
    file: str | None = None
    """The configuration's file."""
    after: datetime | None = None
    """Not before this time."""
    budget_s: float | None = None
    stop_on_failure: bool = False
    """When it fails, what waits is held."""
    skip: tuple[str, ...] = ()
    added_at: datetime
    state: ItemState = "waiting"
    run: str | None = None
    """Its id, chosen before the run is made."""
    outcome: RunState | None = None
    reason: Reason | None = None
    why: str = ""
    """Why it is held, or how it ended otherwise than its run."""

    @property
    def open(self) -> bool:
        return self.state in _OPEN

    @property
    def failed(self) -> bool:
        return self.outcome in (RunState.FAILED, RunState.LOST)


_CHANGES: Final[dict[str, tuple[ItemState, tuple[ItemState, ...]]]] = {
    "held": ("held", ("waiting",)),
    "released": ("waiting", ("held",)),
    "cancelled": ("cancelled", ("waiting", "held")),
    # Before anything of the run is made: whoever comes next makes no other.
    "launching": ("launching", ("waiting", "launching")),
    "started": ("started", ("launching",)),
    "ended": ("ended", ("waiting", "launching", "started")),
}
"""Each change of an item: the state that it has then, and those in which that may come."""
_MOVABLE: Final = ("waiting", "held")
_ENDED_KEPT: Final = 200


class Queue(FrozenModel):
    items: tuple[QueueItem, ...] = ()
    """In their order."""
    told_empty: bool = True
    """Recorded before that is told, so that it is told once."""

    def item(self, number: int) -> QueueItem:
        """Raises InputError."""
        item = next((item for item in self.items if item.id == number), None)
        if item is None:
            raise InputError(f"the queue has no item {number}", todo="see `flightdeck queue`")
        return item

    def added(self, item: QueueItem) -> Queue:
        """With another one at its end; the oldest of those that have ended are left out."""
        ended = [item.id for item in self.items if item.state in ("ended", "cancelled")][:-_ENDED_KEPT]
        return Queue(items=(*(item for item in self.items if item.id not in ended), item), told_empty=False)

    def changed(self, number: int, change: str, **fields: Any) -> Queue:
        """With an item to which one of _CHANGES has happened. Raises InputError where that may not come."""
        item, (state, before) = self.item(number), _CHANGES[change]
        _check(item, change, before)
        changed = item.model_copy(update={"state": state, "why": "", **fields})
        items = [changed if item.id == number else item for item in self.items]
        if changed.failed and changed.stop_on_failure:
            # In the same step, so that no death of the queue's process comes in between.
            held = {"state": "held", "why": f"item {number} ({item.name}) failed"}
            items = [item.model_copy(update=held) if item.state == "waiting" else item for item in items]
        return Queue(items=tuple(items), told_empty=self.told_empty and change != "released")

    def moved(self, number: int, place: int) -> Queue:
        """With an item at this place, from 1, among those that have not started. Raises InputError."""
        item = self.item(number)
        _check(item, "moved", _MOVABLE)
        others = [item for item in self.items if item.state not in _MOVABLE]
        movable = [one for one in self.items if one.state in _MOVABLE and one != item]
        movable.insert(max(0, place - 1), item)
        return Queue(items=(*others, *movable), told_empty=self.told_empty)


def _check(item: QueueItem, change: str, before: Sequence[str]) -> None:
    if item.state not in before:
        why = f"it is {item.state}" + (f" as {item.run}" if item.run else "")
        todo = f"flightdeck abort {item.run}" if item.state in ("launching", "started") else ""
        raise InputError(f"item {item.id} ({item.name}) cannot be {change}", why=why, todo=todo)


def waits_for(items: Sequence[QueueItem], used: Mapping[str, str], now: datetime) -> dict[int, str]:
    """Item → what it waits for, "" for one that may start now, of those that wait. `used`: machine → what runs there.
    An item overtakes another one only where no machine is shared, or the other one is held or waits for its time."""
    taken, waiting = dict(used), dict[int, str]()
    for item in items:
        if item.state != "waiting":
            continue
        if item.after is not None and now < item.after:
            waiting[item.id] = f"not before {item.after.astimezone():%Y-%m-%d %H:%M}"
            continue
        by = dict[str, str]()
        for node, host in item.hosts.items():
            if host in taken:
                by.setdefault(taken[host], node)
        waiting[item.id] = ", ".join(f"{what} on {node}" for what, node in by.items())
        taken.update({host: taken.get(host, f"item {item.id}") for host in item.hosts.values()})
    return waiting


@dataclass(frozen=True)
class QueueSnapshot:
    items: tuple[QueueItem, ...]
    waits: Mapping[int, str]
    """Item → what it waits for."""
    direct: tuple[RunRecord, ...] = ()
    """The runs that go on and were not started by the queue."""
    attended: bool = False
    """A process has the items started."""
