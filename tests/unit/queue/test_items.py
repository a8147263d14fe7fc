"""How the items of a queue change, and which may start."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError
from engine.models import RunState
from engine.queue.items import Queue, QueueItem, waits_for

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def item(number: int, *nodes: str, **fields: object) -> QueueItem:
    hosts = {node: f"{node}:" for node in nodes or ("ana",)}
    return QueueItem.model_validate({"id": number, "name": f"job{number}", "hosts": hosts, "added_at": NOW, **fields})


def queue(*items: QueueItem) -> Queue:
    made = Queue()
    for one in items:
        made = made.added(one)
    return made


def waits(made: Queue, used: dict[str, str] | None = None, now: datetime = NOW) -> dict[int, str]:
    return waits_for(made.items, used or {}, now)


def test_an_item_waits_for_what_runs_on_its_nodes_and_for_items_before_it() -> None:
    three = queue(item(1), item(2, "bea"), item(3, "ana", "bea"))
    assert waits(three) == {1: "", 2: "", 3: "item 1 on ana, item 2 on bea"}
    assert waits(queue(item(1)), {"ana:": "run-x"}) == {1: "run-x on ana"}


def test_an_item_overtakes_only_where_no_machine_is_shared() -> None:
    three = queue(item(1, "ana", "bea"), item(2, "bea"), item(3, "cyd"))
    assert waits(three, {"ana:": "run-x"}) == {1: "run-x on ana", 2: "item 1 on bea", 3: ""}


def test_one_that_is_held_or_not_due_yet_is_overtaken() -> None:
    later = NOW + timedelta(hours=1)
    assert waits(queue(item(1)).changed(1, "held").added(item(2))) == {2: ""}
    first = waits(queue(item(1, after=later), item(2)))
    assert first[1].startswith("not before ") and first[2] == ""
    assert waits(queue(item(1, after=later)), now=later) == {1: ""}


def test_two_nodes_of_one_machine_are_one() -> None:
    two = queue(item(1, hosts={"a0": "ana:", "a1": "ana:"}))
    assert waits(two, {"ana:": "run-x"}) == {1: "run-x on a0"}


def test_items_are_moved_among_those_that_have_not_started() -> None:
    four = queue(*map(item, (1, 2, 3, 4))).changed(1, "launching", run="r1").changed(1, "started")
    assert [one.id for one in four.moved(4, 1).items] == [1, 4, 2, 3]
    assert [one.id for one in four.moved(2, 99).items] == [1, 3, 4, 2]
    with pytest.raises(InputError, match="it is started as r1"):
        four.moved(1, 2)


@pytest.mark.parametrize(
    ("before", "change"),
    [
        (["cancelled"], "launching"),
        (["launching"], "cancelled"),
        (["launching", "started"], "held"),
        (["launching", "ended"], "launching"),
        ([], "released"),
        ([], "started"),
    ],
)
def test_what_may_not_come_is_refused(before: list[str], change: str) -> None:
    now = queue(item(1))
    for one in before:
        now = now.changed(1, one)
    with pytest.raises(InputError, match=f"cannot be {change}"):
        now.changed(1, change)
    with pytest.raises(InputError, match="no item 7"):
        now.changed(7, change)


def test_a_failure_holds_what_waits_where_that_is_wished() -> None:
    failing = queue(item(1, stop_on_failure=True), item(2), item(3)).changed(3, "cancelled").changed(1, "launching")
    states = [one.state for one in failing.changed(1, "ended", outcome=RunState.FAILED).items]
    assert states == ["ended", "held", "cancelled"]
    assert [one.state for one in failing.changed(1, "ended", outcome=RunState.ABORTED).items][1] == "waiting"


def test_a_queue_that_is_filled_again_is_told_empty_again() -> None:
    empty = queue(item(1)).changed(1, "cancelled").model_copy(update={"told_empty": True})
    assert Queue().told_empty and not queue(item(1)).told_empty
    assert not empty.added(item(2)).told_empty
    held = queue(item(1)).changed(1, "held").model_copy(update={"told_empty": True})
    assert not held.changed(1, "released").told_empty


def test_of_those_that_have_ended_only_the_newest_are_kept() -> None:
    made = queue(item(1))
    for number in range(2, 400):
        made = made.added(item(number)).changed(number, "cancelled")
    assert made.items[0].id == 1 and made.items[-1].id == 399 and len(made.items) < 210


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["launching", "held", "released", "cancelled", "started", "ended", "moved"]),
        st.integers(1, 5),
        st.integers(-1, 6),
    ),
    max_size=30,
)


@given(STEPS)
def test_no_changes_lose_an_item_or_start_two_on_one_machine(steps: list[tuple[str, int, int]]) -> None:
    made = queue(item(1, "ana"), item(2, "bea"), item(3, "ana", "bea"), item(4, "cyd"))
    for change, number, place in steps:
        with contextlib.suppress(InputError):
            made = made.moved(number, place) if change == "moved" else made.changed(number, change)
    assert sorted(one.id for one in made.items) == [1, 2, 3, 4]
    ready = [one for one in made.items if waits(made).get(one.id) == ""]
    machines = [host for one in ready for host in one.hosts.values()]
    assert len(machines) == len(set(machines))
