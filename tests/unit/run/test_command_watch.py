"""A command that reports nothing: what its ranks print and what their processes do tell a hang from work, and one group
from many."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.models import RecoveryConfig
from engine.run.command_watch import APART_S, CommandWatch
from engine.run.events import Hang

HANG_S, STALL_S = 20.0, 40.0


class Watched:
    """Ranks that print one line each time, ten looks a second."""

    def __init__(self, ranks: int = 2, *, waits_busily: bool = False, stall_s: float = STALL_S) -> None:
        limits = RecoveryConfig(hang_s=HANG_S, stall_s=stall_s)
        self.watch = CommandWatch(ranks, limits, waits_busily=waits_busily)
        self.now = 1000.0
        self.printed = dict.fromkeys(range(ranks), 0)
        self.running = list(range(ranks))

    def report(self, rank: int, **event: Any) -> None:
        self.watch.ranks[rank].take(event)

    def states(self, *states: str) -> None:
        for rank, state in enumerate(states):
            self.report(rank, event="processes", state=state)

    def wait(
        self, seconds: float, *printing: int, every_s: float = 2.0, stepped: bool = False, repeats: bool = True
    ) -> Hang | None:
        """What is found meanwhile; keepers repeat what they see."""
        for tick in range(1, round(10 * seconds) + 1):
            self.now += 0.1
            if tick % round(10 * every_s) == 0:
                self.printed.update({rank: self.printed[rank] + 80 for rank in printing})
            if repeats and tick % 100 == 0:
                self.states(*(self.watch.ranks[rank].state for rank in self.printed))
            self.watch.observe(self.now, self.printed, stepped=stepped)
            if (found := self.watch.hang(self.running, 0)) is not None:
                return found
        return None


def test_a_stopped_rank_is_a_hang_of_its_own_after_hang_s() -> None:
    watched = Watched()
    assert watched.wait(30.0, 0) is None
    watched.states("idle", "stopped")
    assert watched.wait(HANG_S - 0.5) is None
    found = watched.wait(1.0)
    assert found is not None and (found.doing, found.rank, found.limit_s) == ("stopped", 1, HANG_S)


def test_one_that_goes_on_in_time_is_none() -> None:
    watched = Watched()
    watched.states("idle", "stopped")
    assert watched.wait(HANG_S - 1) is None
    watched.states("busy", "busy")
    assert watched.wait(10 * STALL_S) is None, "and what works may be silent for as long as it likes"


@pytest.mark.parametrize("states", [("busy", "busy"), ("idle", "idle"), ("busy", "idle"), ("idle", "busy")])
def test_that_rank_0_alone_prints_is_no_hang_of_the_others(states: tuple[str, str]) -> None:
    watched = Watched()
    watched.states(*states)
    assert watched.wait(5 * STALL_S, 0) is None


def test_who_has_printed_at_the_start_alone_does_not_hang_beside_one_that_prints() -> None:
    watched = Watched()
    assert watched.wait(7.9, 0, 1) is None
    watched.states("busy", "idle")
    assert watched.wait(5 * STALL_S, 0) is None


def test_a_rank_that_printed_again_and_again_and_is_silent_beside_others_is_named() -> None:
    watched = Watched(3)
    assert watched.wait(60.0, 0, 1, 2) is None
    watched.states("busy", "idle", "busy")
    assert watched.wait(STALL_S - 2, 0, 2) is None
    found = watched.wait(4.0, 0, 2)
    assert found is not None and (found.doing, found.rank) == ("idle", 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_that_wait_for_what_rank_0_alone_prepares_and_prints_do_not_hang(ranks: int) -> None:
    watched = Watched(ranks)
    assert watched.wait(60.0, *range(ranks)) is None
    watched.states("busy", *["idle"] * (ranks - 1))
    assert watched.wait(5 * STALL_S, 0) is None


def test_a_group_in_which_nobody_prints_or_works_hangs() -> None:
    watched = Watched()
    assert watched.wait(30.0, 0) is None
    watched.states("idle", "idle")
    assert watched.wait(STALL_S - 2) is None
    found = watched.wait(4.0)
    assert found is not None and (found.rank, found.limit_s) == (None, STALL_S)


def test_a_group_that_prints_rarely_has_five_times_its_longest_silence() -> None:
    watched = Watched()
    assert watched.wait(300.0, 0, every_s=30.0) is None
    watched.states("idle", "idle")
    assert watched.wait(4.9 * 30.0) is None
    assert watched.wait(5.0) is not None


def test_what_printed_at_its_start_alone_may_wait_for_as_long_as_it_likes() -> None:
    watched = Watched()
    assert watched.wait(2.0, 0) is None
    watched.states("idle", "idle")
    assert watched.wait(20 * STALL_S) is None


@pytest.mark.parametrize(
    ("ranks", "idle", "waits_busily", "named"),
    [(2, 0, False, 0), (2, 1, False, None), (2, 1, True, 1), (3, 1, False, 1), (3, 0, False, 0)],
)
def test_one_without_work_is_named_unless_it_may_be_waiting_for_rank_0(
    ranks: int, idle: int, waits_busily: bool, named: int | None
) -> None:
    watched = Watched(ranks, waits_busily=waits_busily)
    assert watched.wait(30.0, 0) is None
    watched.report(idle, event="processes", state="idle")
    found = watched.wait(3 * STALL_S)
    assert (found.rank if found is not None else None) == named


def test_time_in_which_a_node_does_not_answer_does_not_count() -> None:
    watched = Watched()
    assert watched.wait(30.0, 0) is None
    watched.states("idle", "idle")
    for _ in range(20):
        watched.now += 30.0
        watched.watch.observe(watched.now, {}, stepped=False)
        assert watched.watch.hang(watched.running, 0) is None


def test_what_a_keeper_has_not_repeated_is_not_known_any_more() -> None:
    for repeats in (True, False):
        watched = Watched(stall_s=300.0)
        assert watched.wait(30.0, 0) is None
        watched.states("idle", "idle")
        found = watched.wait(400.0, repeats=repeats)
        assert (found is not None) == repeats, "on a full disk no keeper can say that it works again"


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=200))
def test_whoever_prints_and_works_does_not_hang(moments: list[tuple[int, bool]]) -> None:
    watched = Watched(4)
    for rank, prints in moments:
        assert watched.wait(1.0, *([rank] if prints else []), every_s=1.0) is None


def apart(*own: int | None, joined: bool | None = False) -> Watched:
    watched = Watched(len(own))
    for rank, number in enumerate(own):
        if number is not None:
            watched.report(rank, event="group", own_rank=number)
        if rank and joined is not None:
            watched.report(rank, event="group", joined=joined)
    return watched


@pytest.mark.parametrize(
    ("own", "joined", "found"),
    [
        ((0, 0), False, (0, 1)),
        ((0, 0), None, (0, 1)),
        ((0, 0), True, ()),
        ((0, 1), False, ()),
        ((0, 8, 16), False, ()),
        ((0, None), False, ()),
        ((None, None), False, ()),
        ((0, 0, 1), False, (0, 1)),
    ],
)
def test_ranks_that_are_the_same_rank_of_groups_of_their_own_train_apart(
    own: tuple[int | None, ...], joined: bool | None, found: tuple[int, ...]
) -> None:
    watched = apart(*own, joined=joined)
    watched.wait(APART_S + 1.0)
    assert watched.watch.apart == found
    assert (watched.watch.alarm() is not None) == bool(found)


def test_it_is_stopped_with_its_first_step_or_when_it_goes_on_for_long() -> None:
    watched = apart(0, 0)
    watched.wait(STALL_S - 1.0)
    assert watched.watch.trains_apart(stepped=True) and not watched.watch.trains_apart(stepped=False)
    watched.report(1, event="group", joined=True)
    watched.wait(2.0)
    assert not watched.watch.trains_apart(stepped=True), "it has only prepared something by itself"
    later = apart(0, 0)
    later.wait(STALL_S + 1.0)
    assert later.watch.trains_apart(stepped=False)


@pytest.mark.parametrize(
    ("joined", "stepped", "own", "alarmed"),
    [
        (False, True, None, True),
        (False, False, None, False),
        (None, True, None, False),
        (True, True, None, False),
        (False, True, 1, False),
    ],
)
def test_steps_of_ranks_that_never_met_are_an_alarm(
    joined: bool | None, stepped: bool, own: int | None, alarmed: bool
) -> None:
    watched = apart(None, own, joined=joined)
    watched.wait(APART_S + 1.0, 0, stepped=stepped)
    message = watched.watch.alarm()
    assert (message is not None) == alarmed
    assert message is None or "no rank has connected to another" in message


@pytest.mark.parametrize("event", [{"state": 1}, {"state": "asleep"}, {"joined": "yes"}, {"own_rank": "0"}, {}])
def test_what_no_keeper_writes_changes_nothing(event: dict[str, Any]) -> None:
    watched = Watched()
    watched.report(0, **event)
    assert watched.watch.ranks == Watched().watch.ranks
