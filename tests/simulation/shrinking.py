"""Makes a history that fails smaller: fewer faults, nodes and iterations, as long as it still fails the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.scenario import Scenario, without_fault


def kind_of(violation: str) -> str:
    """The violation without its numbers and names."""
    return re.sub(r"\bn?\d+(\.\d+)?\b", "#", violation.partition(": ")[2] or violation)[:60]


def shrink(scenario: Scenario, violation_of: Callable[[Scenario], str | None], limit: int = 400) -> Scenario:
    """`violation_of` simulates a scenario; at most `limit` times."""
    violation = violation_of(scenario)
    assert violation is not None
    wanted, tries = kind_of(violation), 0
    smaller = True
    while smaller and tries < limit:
        smaller = False
        for candidate in _smaller(scenario):
            tries += 1
            again = violation_of(candidate)
            if again is not None and kind_of(again) == wanted:
                scenario, smaller = candidate, True
                break
            if tries >= limit:
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    for place in range(len(scenario.faults)):
        yield without_fault(scenario, place)
    if scenario.nodes > 2:
        for nodes in sorted({2, scenario.nodes // 2, scenario.nodes - 1}):
            if 2 <= nodes < scenario.nodes:
                yield replace(scenario, nodes=nodes, min_nodes=min(scenario.min_nodes, nodes))
    if scenario.iterations > 8:
        yield replace(scenario, iterations=scenario.iterations // 2)
    if scenario.recovery:
        yield replace(scenario, recovery=0)
    if scenario.min_nodes:
        yield replace(scenario, min_nodes=0)
    if scenario.seed:
        yield replace(scenario, seed=0)
    for place, fault in enumerate(scenario.faults):
        if fault.at > 6.0 and fault.kind != "head_killed_at_effect":
            earlier = replace(fault, at=round(fault.at / 2, 2))
            faults = (*scenario.faults[:place], earlier, *scenario.faults[place + 1 :])
            yield replace(scenario, faults=tuple(sorted(faults, key=lambda one: one.at)))
