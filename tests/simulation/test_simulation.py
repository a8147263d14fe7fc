"""Histories that nobody has written: drawn runs under drawn faults, and bugs that must be found in them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest

from tests.simulation.command import first_violation
from tests.simulation.plants import PLANTS, planted
from tests.simulation.scenario import Scenario
from tests.simulation.shrinking import shrink
from tests.simulation.simulate import simulate, virtual_engine

SEED = 1
PARTS, HISTORIES = 10, 100
"""Seven seconds of a core. CI has 5,000 histories, beside its check of the types (.ci/run)."""


@pytest.fixture(autouse=True)
def virtual() -> Iterator[None]:
    with virtual_engine():
        yield


@pytest.mark.parametrize("part", range(PARTS))
def test_no_history_violates_an_invariant(part: int) -> None:
    begin = part * HISTORIES
    if (failed := first_violation(HISTORIES, SEED, begin)) is None:
        return
    smaller = shrink(failed[1], lambda scenario: simulate(scenario).violation, limit=100)
    replay = f"python -m tests.simulation --replay {shlex.quote(smaller.to_json())}"
    pytest.fail(f"history {failed[0]}: {simulate(smaller).violation}\n{replay}")


FOUND_BY = {
    "lease_not_checked": (
        '{"kind":"elastic","iterations":10,"period_s":3.0,"recovery":5,"faults":[["head_stopped",7.16,1,400.0]]}'
    ),
    "fence_skipped": (
        '{"seed":419614707,"kind":"elastic","local":false,"iterations":7,"every":10'
        ',"faults":[["rank_killed",3.41,3,30.0]]}'
    ),
    "stale_heartbeat_taken": (
        '{"kind":"elastic","iterations":200,"min_nodes":1,"recovery":5,"faults":[["cut_from",8.0,1,0.0]]}'
    ),
    "mirror_offset_reset": (
        '{"kind":"shared","iterations":5,"period_s":3.0,"every":3,"faults":[["head_killed_at_effect",15,2,30.0]]}'
    ),
    "fold_ignores_event": (
        '{"kind":"command","local":false,"iterations":6,"period_s":3.0,"every":0,"faults":[["cut_from",3.15,4,70.0]]}'
    ),
    "restart_before_proof": (
        '{"seed":774079506,"kind":"local","iterations":5,"every":0'
        ',"faults":[["isolated",3.48,1,70.0],["out_of_memory",4.81,0,45.0]]}'
    ),
    "adoption_forgets_abort": (
        '{"kind":"torch","local":false,"iterations":8,"every":10'
        ',"faults":[["head_sleeps",4.11,1,2.0],["power",4.47,0,18.0],["abort",8.68,0,2.0],["head_killed",9.05,0,18.0]]}'
    ),
    "two_supervisors": (
        '{"kind":"torch","local":false,"iterations":5,"period_s":3.0,"faults":[["second_head",5.71,1,2.0]]}'
    ),
    "checkpoint_before_manifest": (
        '{"seed":318988380,"kind":"elastic","iterations":8,"period_s":1.0,"every":3,"recovery":7'
        ',"faults":[["all_ranks_killed",10.96,7,70.0]]}'
    ),
    "exit_record_ignored": '{"kind":"elastic","local":false,"iterations":5}',
    "sleep_not_counted": (
        '{"kind":"local","iterations":400,"recovery":5,"faults":[["cut",8.0,1,0.0],["node_sleeps",9.0,1,60.0]]}'
    ),
    "survivor_preferred": (
        '{"kind":"direct","local":false,"period_s":1.0,"every":10'
        ',"faults":[["rank_killed",13.02,2,7.0],["all_ranks_killed",31.22,0,12.0]]}'
    ),
    "elastic_loss_counted_twice": (
        '{"kind":"elastic","iterations":15,"period_s":3.0,"min_nodes":1,"recovery":7,"faults":[["outage",5.43,0,45.0]]}'
    ),
    "hang_after_last_step": (
        '{"kind":"local","local":false,"iterations":6,"every":3,"recovery":1,"faults":[["rank_lingers",3.97,3,12.0]]}'
    ),
    "verdict_by_launcher": (
        '{"kind":"elastic","local":false,"iterations":7,"every":10,"faults":[["rank_killed",6.25,0,70.0]]}'
    ),
}
"""Planted bug → a small history that finds it, as `python -m tests.simulation --plant` prints one."""


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found(plant: str) -> None:
    scenario = Scenario.from_json(FOUND_BY[plant])
    assert simulate(scenario).violation is None
    with planted(plant):
        assert simulate(scenario).violation is not None
