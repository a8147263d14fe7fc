"""The command line of the simulation."""

from __future__ import annotations

import argparse
import contextlib
import gc
import shlex
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from tests.simulation.plants import PLANTS, planted
from tests.simulation.scenario import Scenario, draw
from tests.simulation.shrinking import kind_of, shrink
from tests.simulation.simulate import simulate, virtual_engine, written

_BATCH = 200
_REPORT_S = 30.0
_MOST_SHOWN = 5


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


@dataclass
class Batch:
    """What came of some histories."""

    histories: int = 0
    steps: int = 0
    cpu_s: float = 0.0
    states: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[int, str]] = field(default_factory=list)
    """The number of a history, and what it violates."""

    def add(self, more: Batch) -> None:
        self.histories += more.histories
        self.steps += more.steps
        self.cpu_s += more.cpu_s
        self.states += more.states
        self.violations += more.violations

    def __str__(self) -> str:
        violations = f"{len(self.violations)} violations" if self.violations else "no violation"
        ends = ", ".join(f"{count} {state}" for state, count in self.states.most_common())
        return f"{self.histories} histories, {self.steps} steps, {self.cpu_s:.1f} s of CPU: {violations}; {ends}"


def _begin_worker(plant: str | None) -> None:
    """The worker ends with its process, and what is patched in it, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _patches.enter_context(virtual_engine())
    if plant:
        _patches.enter_context(planted(plant))
    # Each history leaves cycles, few of which are worth an early look.
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


_patches = contextlib.ExitStack()


def _simulate_batch(seed: int, begin: int, count: int) -> Batch:
    began, batch = time.process_time(), Batch()
    for number in range(begin, begin + count):
        outcome = simulate(draw(seed, number))
        batch.histories += 1
        batch.steps += outcome.steps
        batch.states[outcome.state] += 1
        if outcome.violation is not None:
            batch.violations.append((number, outcome.violation))
    batch.cpu_s = time.process_time() - began
    return batch


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _search(options: argparse.Namespace) -> int:
    """All histories, also after a violation. When it is stopped, it tells how far it has come."""
    total, kinds, reported_at = Batch(), Counter[str](), time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    with ProcessPoolExecutor(options.workers, initializer=_begin_worker, initargs=(options.plant,)) as pool:
        end = options.begin + options.histories
        batches = [
            pool.submit(_simulate_batch, options.seed, begin, min(_BATCH, end - begin))
            for begin in range(options.begin, end, _BATCH)
        ]
        try:
            for done in as_completed(batches):
                batch = done.result()
                total.add(batch)
                for number, violation in batch.violations:
                    kinds[kind_of(violation)] += 1
                    if kinds[kind_of(violation)] <= _MOST_SHOWN:
                        print(f"history {number} of seed {options.seed}: {violation}", flush=True)
                if time.monotonic() - reported_at > _REPORT_S:
                    reported_at = time.monotonic()
                    print(total, file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print("stopped; so far:")
        pool.shutdown(cancel_futures=True)
    print(total, flush=True)
    if not total.violations:
        return 0
    print("The first of each kind, made smaller:")
    first = {kind_of(violation): number for number, violation in sorted(total.violations, reverse=True)}
    for number in sorted(first.values())[:_MOST_SHOWN]:
        _print_history(shrink(draw(options.seed, number), _violation_of), options.plant)
    return 1


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
    parser.add_argument("--workers", type=int, default=1, help="processes that simulate at the same time")
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
