"""A supervisor that is killed between any two of its effects, and followed by another one, changes no run's end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.models import RunState
from engine.run import events
from tests.simulation.scenario import RUN_KINDS, Fault, Scenario
from tests.simulation.simulate import Outcome, simulate, virtual_engine

EFFECTS = 64
"""All that a run of three nodes has, and some of its restart."""


@pytest.fixture(autouse=True)
def virtual() -> Iterator[None]:
    with virtual_engine():
        yield


def nothing_ran(outcome: Outcome) -> bool:
    """The first supervisor was killed before a rank had started: nothing is launched by surprise."""
    return not any(isinstance(what, events.RankLaunched) for _, what in outcome.log)


FAULTS = {
    "none": (),
    "a rank is killed": (Fault("rank_killed", 9.0, 1),),
    "a rank is killed, and its node is cut off": (Fault("rank_killed", 9.0, 1), Fault("cut", 9.05, 1, 30.0)),
    "a node restarts while another is cut off": (Fault("power", 8.0, 2, 20.0), Fault("cut", 9.0, 1, 8.0)),
    "preflight excludes a node, and a rank is killed": (Fault("unfit", 0.0, 2), Fault("rank_killed", 9.0, 1)),
}


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("kind", RUN_KINDS)
def test_the_end_is_the_same(kind: str, faults: str) -> None:
    undisturbed = Scenario(kind=kind, nodes=3, iterations=30, recovery=7, faults=FAULTS[faults])
    end = simulate(undisturbed)
    assert end.violation is None
    for effect in range(1, EFFECTS, 1 + len(FAULTS[faults])):
        killed = Fault("head_killed_at_effect", effect, 0, 0.5)
        outcome = simulate(Scenario(**{**vars(undisturbed), "faults": (*FAULTS[faults], killed)}))
        assert outcome.violation is None, f"killed before effect {effect}"
        expected = RunState.FAILED if nothing_ran(outcome) else end.state
        assert outcome.state is expected, f"killed before effect {effect}"
