"""The command line of the simulation."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from collections import Counter

from tests.simulation.plants import PLANTS, planted
from tests.simulation.scenario import Scenario, draw
from tests.simulation.shrinking import shrink
from tests.simulation.simulate import simulate, virtual_engine, written


def first_violation(histories: int, seed: int, begin: int = 0) -> tuple[int, Scenario] | None:
    """The number of the first history that fails, and the history. Within `virtual_engine`."""
    for number in range(begin, begin + histories):
        scenario = draw(seed, number)
        if simulate(scenario).violation is not None:
            return number, scenario
    return None


def _violation_of(scenario: Scenario) -> str | None:
    return simulate(scenario).violation


def _print_history(scenario: Scenario, plant: str | None) -> None:
    outcome = simulate(scenario)
    print(written(outcome.log))
    print(f"\n{outcome.violation or f'no violation: {outcome.state}'}")
    planted_as = f" --plant {plant}" if plant else ""
    print(f"python -m tests.simulation{planted_as} --replay {shlex.quote(scenario.to_json())}")


def _search(options: argparse.Namespace) -> int:
    began, states, steps = time.process_time(), Counter[str](), 0
    for number in range(options.begin, options.begin + options.histories):
        scenario = draw(options.seed, number)
        outcome = simulate(scenario)
        states[outcome.state] += 1
        steps += outcome.steps
        if outcome.violation is not None:
            print(f"history {number} of seed {options.seed}: {outcome.violation}; made smaller:\n")
            _print_history(shrink(scenario, _violation_of), options.plant)
            return 1
    seconds = time.process_time() - began
    ends = ", ".join(f"{count} {state}" for state, count in states.most_common())
    print(f"{options.histories} histories, {steps} steps, {seconds:.1f} s of CPU: no violation; {ends}")
    return 0


def _search_plants(options: argparse.Namespace) -> int:
    missed = 0
    for plant in PLANTS:
        begin = 0
        while True:
            with planted(plant):
                found = first_violation(options.histories - begin, options.seed, begin)
                violation = simulate(found[1]).violation if found is not None else None
            if found is None or simulate(found[1]).violation is None:
                break
            # It fails without the bug, too.
            begin = found[0] + 1
        missed += found is None
        where = f"found by history {found[0]}: {violation}" if found is not None else "NOT FOUND"
        print(f"{plant}: {where}", flush=True)
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--begin", type=int, default=0, help="number of the first history")
    parser.add_argument("--replay", metavar="JSON", help="simulate this history, and print it")
    parser.add_argument("--plant", choices=PLANTS, help="with this bug")
    parser.add_argument("--plants", action="store_true", help="search with each bug, one after the other")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        stack.enter_context(virtual_engine())
        if options.plant:
            stack.enter_context(planted(options.plant))
        if options.replay:
            _print_history(Scenario.from_json(options.replay), options.plant)
        else:
            sys.exit(_search_plants(options) if options.plants else _search(options))
