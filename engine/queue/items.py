"""The items of a queue as a pure fold over the events of its journal, and which of them may start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter

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


class _Event(FrozenModel):
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class ItemAdded(_Event):
    event: Literal["added"] = "added"
    item: QueueItem


class _OfItem(_Event):
    id: int


class ItemMoved(_OfItem):
    event: Literal["moved"] = "moved"
    place: int
    """From 1, among those that have not started."""


class ItemHeld(_OfItem):
    event: Literal["held"] = "held"
    why: str = ""


class ItemReleased(_OfItem):
    event: Literal["released"] = "released"


class ItemCancelled(_OfItem):
    event: Literal["cancelled"] = "cancelled"


class ItemLaunching(_OfItem):
    """Before anything of the run is made: whoever comes next makes no other."""

    event: Literal["launching"] = "launching"
    run: str


class ItemStarted(_OfItem):
    event: Literal["started"] = "started"


class ItemEnded(_OfItem):
    event: Literal["ended"] = "ended"
    outcome: RunState | None = None
    reason: Reason | None = None
    why: str = ""


class QueueEmptied(_Event):
    """Nothing waits or runs any more. Recorded before that is told, so that it is told once."""

    event: Literal["emptied"] = "emptied"


QueueEvent = (
    ItemAdded | ItemMoved | ItemHeld | ItemReleased | ItemCancelled
    | ItemLaunching | ItemStarted | ItemEnded | QueueEmptied
)  # fmt: skip
EVENT: Final[TypeAdapter[QueueEvent]] = TypeAdapter(Annotated[QueueEvent, Field(discriminator="event")])
_BEFORE: Final[dict[type[_Event], tuple[ItemState, ...]]] = {
    ItemMoved: ("waiting", "held"),
    ItemHeld: ("waiting",),
    ItemReleased: ("held",),
    ItemCancelled: ("waiting", "held"),
    ItemLaunching: ("waiting", "launching"),
    ItemStarted: ("launching",),
    ItemEnded: ("waiting", "launching", "started"),
}
"""The states of an item in which each may come."""


@dataclass(frozen=True)
class Queue:
    items: tuple[QueueItem, ...] = ()
    """In their order."""
    told_empty: bool = True

    def item(self, number: int) -> QueueItem:
        """Raises InputError."""
        item = next((item for item in self.items if item.id == number), None)
        if item is None:
            raise InputError(f"the queue has no item {number}", todo="see `flightdeck queue`")
        return item

    def check(self, event: QueueEvent) -> None:
        """Raises InputError for one that may not come now."""
        if isinstance(event, _OfItem) and (item := self.item(event.id)).state not in _BEFORE[type(event)]:
            why = f"it is {item.state}" + (f" as {item.run}" if item.run else "")
            todo = f"flightdeck abort {item.run}" if item.state in ("launching", "started") else ""
            raise InputError(f"item {item.id} ({item.name}) is not {event.event}", why=why, todo=todo)


def fold(queue: Queue, events: Iterable[QueueEvent]) -> Queue:
    """One that may not come where it stands, as in a damaged journal, changes nothing."""
    for event in events:
        try:
            queue.check(event)
        except InputError:
            continue
        queue = _advance(queue, event)
    return queue


def _advance(queue: Queue, event: QueueEvent) -> Queue:
    match event:
        case ItemAdded():
            return Queue((*queue.items, event.item), told_empty=False)
        case QueueEmptied():
            return Queue(queue.items, told_empty=True)
        case ItemMoved():
            return Queue(_moved(queue, event), queue.told_empty)
        case ItemHeld():
            changes: dict[str, Any] = {"state": "held", "why": event.why}
        case ItemReleased():
            changes = {"state": "waiting", "why": ""}
        case ItemLaunching():
            changes = {"state": "launching", "run": event.run}
        case ItemEnded():
            changes = event.model_dump(include={"outcome", "reason", "why"}) | {"state": "ended"}
        case _:
            changes = {"state": event.event}
    items = [item.model_copy(update=changes) if item.id == event.id else item for item in queue.items]
    if isinstance(event, ItemEnded):
        items = _held_after(next(item for item in items if item.id == event.id), items)
    return Queue(tuple(items), queue.told_empty and not isinstance(event, ItemReleased))


def _held_after(ended: QueueItem, items: list[QueueItem]) -> list[QueueItem]:
    """With the event itself, so that no death of the queue's process comes in between."""
    if not (ended.failed and ended.stop_on_failure):
        return items
    held = {"state": "held", "why": f"item {ended.id} ({ended.name}) failed"}
    return [item.model_copy(update=held) if item.state == "waiting" else item for item in items]


def _moved(queue: Queue, event: ItemMoved) -> tuple[QueueItem, ...]:
    movable = [item for item in queue.items if item.state in _BEFORE[ItemMoved]]
    others = [item for item in queue.items if item not in movable]
    (item,) = (item for item in movable if item.id == event.id)
    movable.remove(item)
    movable.insert(max(0, event.place - 1), item)
    return (*others, *movable)


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
