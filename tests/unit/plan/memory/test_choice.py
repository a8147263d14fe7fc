"""What is "auto" becomes the most precise that fits, with as few recomputed layers as that takes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.plan.document import ChosenSettings
from engine.plan.memory.choice import COMFORTABLE, choose, with_settings
from engine.plan.memory.estimate import RankWorkload, estimate
from engine.plan.memory.shape import ModelShape
from engine.protocol.job import AUTO, MOST_PRECISE_FIRST
from tests.unit.plan.clusters import QWEN3_4B
from tests.unit.plan.memory.tiny import TINY

SHAPE = ModelShape.from_config(QWEN3_4B)
FULL = RankWorkload(fine_tune_type="full")
OPEN = dict.fromkeys(ChosenSettings.model_fields, AUTO)
GB = 10**9


def needed(chosen: ChosenSettings, workload: RankWorkload = FULL) -> int:
    return needed_by(with_settings(workload, chosen), str(chosen.grad_checkpoint))


@cache
def needed_by(workload: RankWorkload, _recomputed: str) -> int:
    """True and 1 are equal, and differ: all layers, and one."""
    return estimate(SHAPE, workload).needed_bytes


IN_ORDER = [
    ChosenSettings(optimizer_precision=precision, moments=moments, grad_checkpoint=count, sequence_tiling=tokens)
    for precision, moments in MOST_PRECISE_FIRST
    for count, tokens in [
        *((count, 0) for count in (False, *range(1, SHAPE.layers), True)),
        *((True, tokens) for tokens in (2048, 1024, 512, 256)),
    ]
]


@given(st.integers(10, 120), st.sampled_from([1, 2]))
def test_the_first_that_fits_is_chosen(limit_gb: int, batch: int) -> None:
    limit, workload = limit_gb * GB, replace(FULL, batch=batch)
    found = choose(SHAPE, [workload], [limit], OPEN)
    for share in (COMFORTABLE, 1):
        fitting = [each for each in IN_ORDER if needed(each, workload) <= int(share * limit)]
        if fitting:
            assert found.fits and found.settings == fitting[0]
            return
    least = min(needed(each, workload) for each in IN_ORDER)
    assert not found.fits and found.needed_bytes == (least,)


@given(st.lists(st.integers(20, 120), min_size=2, max_size=4))
def test_every_rank_fits(limits_gb: list[int]) -> None:
    limits = [limit * GB for limit in limits_gb]
    workloads = [replace(FULL, world_size=len(limits), batch=number % 2 + 1) for number in range(len(limits))]
    found = choose(SHAPE, workloads, limits, OPEN)
    assume(found.fits)
    needs = [needed(found.settings, workload) for workload in workloads]
    assert found.needed_bytes == tuple(needs)
    assert all(need <= limit for need, limit in zip(needs, limits, strict=True))


@pytest.mark.parametrize(
    "given_settings",
    [
        {"optimizer_precision": "parameter"},
        {"moments": "bfloat16"},
        {"grad_checkpoint": False},
        {"grad_checkpoint": 3},
        {"optimizer_precision": "stochastic", "moments": "8bit", "grad_checkpoint": True},
    ],
)
@pytest.mark.parametrize("limit_gb", [5, 30, 500])
def test_what_the_job_sets_stays(given_settings: dict[str, Any], limit_gb: int) -> None:
    chosen = choose(SHAPE, [FULL], [limit_gb * GB], {**OPEN, **given_settings}).settings
    assert given_settings.items() <= dict(chosen).items()
    assert AUTO not in dict(chosen).values()


def test_layers_are_recomputed_before_precision_is_given_up() -> None:
    at_ease = choose(SHAPE, [FULL], [200 * GB], OPEN).settings
    assert at_ease == ChosenSettings()
    tighter = choose(SHAPE, [FULL], [int(needed(at_ease) / COMFORTABLE) - GB], OPEN).settings
    assert (tighter.optimizer_precision, tighter.moments) == ("float32", "float32") and tighter.grad_checkpoint == 2


def test_an_unknown_limit_is_not_considered() -> None:
    assert choose(SHAPE, [FULL], [None], OPEN).settings == ChosenSettings()
    pair = [replace(FULL, world_size=2)] * 2
    assert choose(SHAPE, pair, [None, 60 * GB], OPEN) == choose(SHAPE, pair, [60 * GB, 60 * GB], OPEN)


@pytest.mark.parametrize("kind", ["lora", "float32 weights"])
def test_weights_of_float32_need_no_other_precision(kind: str) -> None:
    shape = ModelShape.from_config(TINY["llama"]) if kind == "float32 weights" else SHAPE
    workload = FULL if kind == "float32 weights" else RankWorkload()
    found = choose(shape, [workload], [1], OPEN)
    assert not found.fits
    assert (found.settings.optimizer_precision, found.settings.moments) == ("float32", "8bit")


def test_adapters_recompute_only_where_memory_demands_it() -> None:
    assert choose(SHAPE, [RankWorkload()], [400 * GB], OPEN).settings == ChosenSettings()
    tight = choose(SHAPE, [RankWorkload(batch=4)], [48 * GB], OPEN)
    assert tight.fits and tight.settings.optimizer_precision == "float32" and tight.settings.grad_checkpoint


def test_sharded_layers_are_recomputed_without_being_asked() -> None:
    sharded = replace(FULL, strategy="sharded", world_size=2)
    assert choose(SHAPE, [sharded] * 2, [48 * GB] * 2, OPEN).settings.grad_checkpoint is False


def test_a_pipelines_stages_share_one_choice() -> None:
    stages = [replace(FULL, strategy="pipeline", world_size=2, layers=part) for part in ((0, 8), (8, 36))]
    found = choose(SHAPE, stages, [30 * GB, 55 * GB], OPEN)
    assert found.fits and found.needed_bytes == tuple(needed(found.settings, stage) for stage in stages)
