"""The queue as the fold of its journal, and which items may start."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError
from engine.models import RunState
from engine.queue.items import (
    ItemAdded,
    ItemCancelled,
    ItemEnded,
    ItemHeld,
    ItemLaunching,
    ItemMoved,
    ItemReleased,
    ItemStarted,
    Queue,
    QueueEmptied,
    QueueEvent,
    QueueItem,
    fold,
    waits_for,
)  # fmt: skip

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def added(number: int, *nodes: str, **fields: object) -> ItemAdded:
    hosts = {node: f"{node}:" for node in nodes or ("ana",)}
    item = {"id": number, "name": f"job{number}", "hosts": hosts, "added_at": NOW, **fields}
    return ItemAdded(item=QueueItem.model_validate(item))


def queue(*events: QueueEvent) -> Queue:
    return fold(Queue(), events)


def waits(*events: QueueEvent, used: dict[str, str] | None = None, now: datetime = NOW) -> dict[int, str]:
    return waits_for(queue(*events).items, used or {}, now)


def test_an_item_waits_for_what_runs_on_its_nodes_and_for_items_before_it() -> None:
    assert waits(added(1), added(2, "bea"), added(3, "ana", "bea")) == {1: "", 2: "", 3: "item 1 on ana, item 2 on bea"}
    assert waits(added(1), used={"ana:": "run-x"}) == {1: "run-x on ana"}


def test_an_item_overtakes_only_where_no_machine_is_shared() -> None:
    busy = {"ana:": "run-x"}
    assert waits(added(1, "ana", "bea"), added(2, "bea"), added(3, "cyd"), used=busy) == {
        1: "run-x on ana", 2: "item 1 on bea", 3: "",
    }  # fmt: skip


def test_one_that_is_held_or_not_due_yet_is_overtaken() -> None:
    later = NOW + timedelta(hours=1)
    assert waits(added(1), ItemHeld(id=1), added(2)) == {2: ""}
    first = waits(added(1, after=later), added(2))
    assert first[1].startswith("not before ") and first[2] == ""
    assert waits(added(1, after=later), now=later) == {1: ""}


def test_two_nodes_of_one_machine_are_one() -> None:
    two = added(1, hosts={"a0": "ana:", "a1": "ana:"})
    assert waits(two, used={"ana:": "run-x"}) == {1: "run-x on a0"}


def test_items_are_moved_among_those_that_have_not_started() -> None:
    events: list[QueueEvent] = [
        added(1),
        ItemLaunching(id=1, run="r1"),
        ItemStarted(id=1),
        added(2),
        added(3),
        added(4),
    ]
    assert [item.id for item in queue(*events, ItemMoved(id=4, place=1)).items] == [1, 4, 2, 3]
    assert [item.id for item in queue(*events, ItemMoved(id=2, place=99)).items] == [1, 3, 4, 2]


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ([], ItemHeld(id=7)),
        ([ItemLaunching(id=1, run="r1")], ItemCancelled(id=1)),
        ([ItemLaunching(id=1, run="r1"), ItemStarted(id=1)], ItemMoved(id=1, place=1)),
        ([ItemCancelled(id=1)], ItemLaunching(id=1, run="r1")),
        ([ItemLaunching(id=1, run="r1"), ItemEnded(id=1, outcome=RunState.FAILED)], ItemLaunching(id=1, run="r2")),
    ],
)
def test_what_may_not_come_is_refused_and_changes_nothing(before: list[QueueEvent], event: QueueEvent) -> None:
    now = queue(added(1), *before)
    with pytest.raises(InputError, match="item"):
        now.check(event)
    assert fold(now, [event]) == now


def test_a_queue_that_is_filled_again_is_told_empty_again() -> None:
    ended: list[QueueEvent] = [
        added(1),
        ItemLaunching(id=1, run="r1"),
        ItemStarted(id=1),
        ItemEnded(id=1, outcome=RunState.SUCCEEDED),
        QueueEmptied(),
    ]
    assert Queue().told_empty and not queue(*ended[:-1]).told_empty and queue(*ended).told_empty
    assert not queue(*ended, added(2)).told_empty
    assert not queue(added(1), ItemHeld(id=1), QueueEmptied(), ItemReleased(id=1)).told_empty


EVENTS = st.lists(
    st.one_of(
        st.builds(ItemLaunching, id=st.integers(1, 4), run=st.just("r")),
        *(
            st.builds(kind, id=st.integers(1, 4))
            for kind in (ItemHeld, ItemReleased, ItemCancelled, ItemStarted, ItemEnded)
        ),
        st.builds(ItemMoved, id=st.integers(1, 4), place=st.integers(-1, 6)),
    ),
    max_size=30,
)


@given(EVENTS)
def test_no_events_lose_an_item_or_start_two_on_one_machine(events: list[QueueEvent]) -> None:
    added_ones = [added(1, "ana"), added(2, "bea"), added(3, "ana", "bea"), added(4, "cyd")]
    made = queue(*added_ones, *events)
    assert sorted(item.id for item in made.items) == [1, 2, 3, 4]
    ready = [item for item in made.items if waits_for(made.items, {}, NOW).get(item.id) == ""]
    machines = [host for item in ready for host in item.hosts.values()]
    assert len(machines) == len(set(machines))
