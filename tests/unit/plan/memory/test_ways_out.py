"""Each way out of a refusal is one with which the job fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.plan.document import ChosenSettings, WayOut
from engine.plan.memory.choice import choose, with_settings
from engine.plan.memory.estimate import RankWorkload, estimate
from engine.plan.memory.shape import ModelShape
from engine.plan.memory.ways_out import RankPlace, describe_ways, ways_out
from engine.protocol.job import AUTO
from tests.unit.plan.clusters import LLAMA_70B, QWEN3_4B

GB = 10**9
SHAPE = ModelShape.from_config(QWEN3_4B)
FULL = RankWorkload(fine_tune_type="full", batch=4)
OPEN = dict.fromkeys(ChosenSettings.model_fields, AUTO)
FIXED = ChosenSettings().model_dump()


def mac(size_gb: int, node: str = "one") -> RankPlace:
    return RankPlace(node, size_gb * GB * 3 // 4, 1, size_gb * GB)


def ways(
    *places: RankPlace,
    requested: dict[str, Any],
    shape: ModelShape = SHAPE,
    workload: RankWorkload = FULL,
    splittable: bool = True,
) -> dict[str, float]:
    """Change → GB."""
    ranks = [replace(workload, world_size=len(places))] * len(places)
    choice = choose(shape, ranks, [place.limit_bytes for place in places], requested)
    assert not choice.fits or places[0].measured > 1
    asked = [with_settings(rank, choice.settings) for rank in ranks]
    found = ways_out(shape, asked, places, requested, splittable=splittable)
    return {way.change: way.needed_bytes / GB for way in found}


def test_settings_that_the_job_fixes_are_named_with_the_values_that_fit() -> None:
    found = ways(mac(128), requested=FIXED)
    (change,) = (each for each in found if each.startswith("grad_checkpoint"))
    count = int(change.removeprefix("grad_checkpoint = "))
    settings = ChosenSettings(grad_checkpoint=count)
    assert found[change] == estimate(SHAPE, with_settings(FULL, settings)).needed_bytes / GB <= 96
    fewer = settings.model_copy(update={"grad_checkpoint": count - 1})
    assert estimate(SHAPE, with_settings(FULL, fewer)).needed_bytes > 0.9 * 96 * GB


def test_where_no_setting_helps_alone_they_are_freed_together() -> None:
    one = replace(FULL, batch=2)
    found = ways(mac(64), requested=FIXED, workload=one)
    assert any(
        change.startswith("optimizer_precision = ")
        and " and moments = " in change
        and " and grad_checkpoint = " in change
        for change in found
    )
    assert not any(change.startswith("grad_checkpoint") for change in found)


def test_fewer_sequences_keep_the_batch_by_accumulation() -> None:
    found = ways(mac(128), requested=FIXED)
    (change,) = (each for each in found if each.startswith("batch_size"))
    assert change == "batch_size = 1 and grad_accumulation_steps = 4"
    accumulated = estimate(SHAPE, replace(FULL, batch=1, accumulation=4))
    assert found[change] == accumulated.needed_bytes / GB


def test_fewer_sequences_of_an_iteration_need_more_iterations_for_as_many_updates() -> None:
    found = ways(mac(128), requested={**FIXED, "iters": 1000})
    (change,) = (each for each in found if each.startswith("batch_size"))
    assert change == "batch_size = 1 and grad_accumulation_steps = 4 and iters = 4000"


def test_unequal_shares_are_divided_as_the_plan_divides_them() -> None:
    ranks = [replace(FULL, world_size=2, batch=batch) for batch in (7, 1)]
    limits = [estimate(SHAPE, replace(ranks[0], batch=2, accumulation=4)).needed_bytes] * 2
    places = [RankPlace(name, limit, 1, None) for name, limit in zip("ab", limits, strict=True)]
    found = ways_out(SHAPE, ranks, places, {**FIXED, "iters": 10}, splittable=False)
    (change,) = (way.change for way in found if way.change.startswith("batch_size"))
    assert change == "batch_size = 2 and grad_accumulation_steps = 4 and iters = 40"


def test_a_measured_peak_scales_what_the_estimate_says_of_other_settings() -> None:
    needed = estimate(SHAPE, with_settings(FULL, ChosenSettings())).needed_bytes
    place = RankPlace("one", needed + GB, 1, 2 * needed, 1.25)
    found = ways(place, requested=FIXED)
    assert "" not in found and "grad_checkpoint = false" not in found
    (change,) = (each for each in found if each.startswith("iogpu"))
    assert change == f"iogpu.wired_limit_mb={-(-needed * 5 // 4 // 2**20)} on one"
    assert found[change] == pytest.approx(1.25 * needed / GB)
    assert all(size <= (needed + GB) / GB for way, size in found.items() if not way.startswith("iogpu"))


def test_a_limit_is_raised_only_as_far_as_the_memory_goes() -> None:
    needed = estimate(SHAPE, with_settings(FULL, ChosenSettings())).needed_bytes
    place = RankPlace("one", needed - GB, 1, needed + 9 * GB)
    (change,) = (each for each in ways(place, requested=FIXED) if each.startswith("iogpu"))
    assert change == f"iogpu.wired_limit_mb={-(-needed // 2**20)} on one"
    full = replace(place, total_bytes=needed + 8 * GB)
    elsewhere = replace(place, total_bytes=None)
    for other in (full, elsewhere):
        assert not any(change.startswith("iogpu") for change in ways(other, requested=FIXED))


def test_sharding_is_over_the_jobs_own_nodes_where_they_suffice() -> None:
    few = replace(FULL, batch=1)
    found = ways(mac(80, "a"), mac(80, "b"), requested={**FIXED, "grad_checkpoint": AUTO}, workload=few)
    assert 'strategy = "sharded" over a, b' in found
    assert not any("sharded" in change for change in ways(mac(64), requested=FIXED, splittable=False))


def test_of_local_nodes_one_alone_is_data_and_several_stay_local() -> None:
    local = replace(FULL, batch=1, strategy="local")
    found = ways(mac(512, "a"), mac(24, "b"), requested=FIXED, workload=local)
    assert 'a alone and strategy = "data"' in found
    found = ways(mac(512, "a"), mac(512, "b"), mac(24, "c"), requested=FIXED, workload=local)
    assert "a and b alone" in found
    few = ways(mac(80, "a"), mac(80, "b"), requested={**FIXED, "grad_checkpoint": AUTO}, workload=local)
    assert 'strategy = "sharded" over a, b' in few


def test_a_model_too_large_for_every_setting_needs_more_nodes() -> None:
    shape = ModelShape.from_config(LLAMA_70B)
    found = ways(mac(128), requested=OPEN, shape=shape, workload=replace(FULL, batch=1))
    (change,) = found
    assert change.startswith('strategy = "sharded" and batch_size = ') and change.endswith(" nodes like one")
    assert found[change] <= 96


def test_sharding_names_what_else_the_job_must_say_for_it() -> None:
    shape = ModelShape.from_config(LLAMA_70B)
    found = ways(mac(128), requested=OPEN, shape=shape, workload=replace(FULL, batch=1, wire="int8"))
    (change,) = found
    settings, _, ranks = change.removesuffix(" nodes like one").partition(" over ")
    assert settings == f'strategy = "sharded" and wire = "auto" and batch_size = {ranks}'


@pytest.mark.parametrize(("in_flight", "fits"), [(1, False), (2, True)])
def test_a_pipelines_first_stage_has_a_micro_batch_of_each_stage_in_flight(in_flight: int, fits: bool) -> None:
    lora = RankWorkload(fine_tune_type="lora", num_layers=-1, sequence=256, strategy="pipeline", world_size=2)
    stages = [replace(lora, batch=batch, layers=layers) for batch, layers in ((8, (0, 18)), (4, (18, 36)))]
    smallest = ChosenSettings(moments="8bit", grad_checkpoint=True)
    limit = estimate(SHAPE, with_settings(replace(stages[0], batch=in_flight), smallest)).needed_bytes
    places = [RankPlace("a", limit, 1, None), RankPlace("b", 64 * GB, 1, None)]
    asked = [with_settings(stage, ChosenSettings()) for stage in stages]
    found = ways_out(SHAPE, asked, places, FIXED, splittable=False)
    assert [way.change.endswith("batch_size = 2") for way in found] == [True] * fits


def test_where_nothing_helps_alone_the_combination_is_named() -> None:
    found = ways(mac(40), requested=FIXED, workload=replace(FULL, batch=8, sequence=16_384), splittable=False)
    assert any("fine_tune_type" not in change for change in found)
    assert all(needed <= 30 for needed in found.values())


def test_where_only_more_nodes_help_alone_the_combination_is_named_before_them() -> None:
    lora = RankWorkload(fine_tune_type="lora", num_layers=16, batch=16, sequence=4_096)
    few, more = ways(mac(16), requested=OPEN, workload=lora)
    assert few == "batch_size = 1" and more.endswith(" nodes like one")


def test_the_description_names_each_way_with_its_size() -> None:
    assert describe_ways(()) == "no change of its settings lets it fit these nodes"
    two = (WayOut(change="a = 1", needed_bytes=2**30), WayOut(change="b = 2", needed_bytes=3 * 2**29))
    assert describe_ways(two) == "it fits with a = 1 (1 GB), or b = 2 (1.5 GB)"


@pytest.mark.parametrize("size_gb", [16, 36, 64, 128])
@pytest.mark.parametrize("requested", [FIXED, OPEN])
def test_every_way_fits(size_gb: int, requested: dict[str, Any]) -> None:
    places = (mac(size_gb, "a"), mac(size_gb, "b"))
    choice = choose(SHAPE, [replace(FULL, world_size=2)] * 2, [place.limit_bytes for place in places], requested)
    if choice.fits:
        return
    for change, needed in ways(*places, requested=requested).items():
        most = size_gb - 2**33 / GB if change.startswith("iogpu") else size_gb * 0.75
        assert needed <= most, change
