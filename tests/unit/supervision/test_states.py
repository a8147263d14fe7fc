"""The order of a run's states."""

from __future__ import annotations

import pytest

from engine.models import ENDED, RunState
from engine.supervision.states import FOLLOWERS, follow


def test_every_state_has_its_followers() -> None:
    assert set(FOLLOWERS) == set(RunState)


def test_a_whole_life() -> None:
    life = [RunState.PLANNED, RunState.PREFLIGHT, RunState.LAUNCHING, RunState.RUNNING, RunState.FINISHING]
    for state, following in zip(life, [*life[1:], RunState.SUCCEEDED], strict=True):
        assert follow(state, following) is following


@pytest.mark.parametrize("end", sorted(ENDED))
def test_an_end_is_final(end: RunState) -> None:
    for state in RunState:
        with pytest.raises(ValueError, match="does not become"):
            follow(end, state)


def test_success_is_judged_after_the_ranks_are_gone() -> None:
    assert [state for state in RunState if RunState.SUCCEEDED in FOLLOWERS[state]] == [RunState.FINISHING]


def test_every_state_leads_to_an_end() -> None:
    for state in RunState:
        reached = {state}
        while more := {follower for each in reached for follower in FOLLOWERS[each]} - reached:
            reached |= more
        assert reached & ENDED
