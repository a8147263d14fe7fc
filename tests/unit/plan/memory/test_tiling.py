"""Tiles of a sequence are chosen where a job fits with them alone, and the plan says so, and what attention does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.plan.document import ChosenSettings, MemorySection, TrainingPlan
from engine.plan.explain import explained, summary
from engine.plan.memory.estimate import RankWorkload, estimate
from engine.plan.memory.shape import ModelShape
from engine.plan.planner import make_plan
from tests.unit.plan.clusters import inputs, mac
from tests.unit.plan.memory.test_fused_attention import AUTO_TILES, QWEN3_8B_4BIT
from tests.unit.plan.memory.tiny import TINY

SHAPE = ModelShape.from_config(QWEN3_8B_4BIT)


def planned(version: str, memory_gb: int, settings: dict[str, Any], **model: Any) -> TrainingPlan:
    node = mac("m1", 0, "Apple M1 Max", memory_gb, mlx=version)
    return make_plan(inputs([node], settings=settings, model=QWEN3_8B_4BIT | model))


def chosen(plan: TrainingPlan) -> int:
    assert isinstance(plan.settings, ChosenSettings)
    return plan.settings.sequence_tiling


def reasons(plan: TrainingPlan, section: str) -> str:
    return " ".join(f"{key}: {reason}" for key, reason in dict(explained(plan))[section])


def test_they_are_chosen_where_only_they_let_it_fit_and_the_plan_says_so() -> None:
    plan = planned("0.32.3", 32, AUTO_TILES)
    assert not plan.refusals and chosen(plan) > 0
    assert "in tiles of" in dict(summary(plan))["memory"]
    settings = reasons(plan, "settings")
    assert f"sequence_tiling = {chosen(plan)}" in settings and "the largest that fit: without tiles" in settings
    assert isinstance(plan.memory, MemorySection) and "in tiles of" in plan.memory.assumptions[0]
    assert "attention fused" not in plan.memory.assumptions[0]
    attention = reasons(plan, "memory")
    assert f"computed in tiles of {chosen(plan):,} queries" in attention
    assert "MLX's own gradient from tiles is not used: mlx 0.32.3 is older than 0.32.4" in attention


@pytest.mark.parametrize(("version", "memory_gb"), [("0.32.4", 32), ("0.32.3", 192)])
def test_where_it_fits_without_there_are_none(version: str, memory_gb: int) -> None:
    plan = planned(version, memory_gb, AUTO_TILES)
    assert not plan.refusals and chosen(plan) == 0
    assert "whole sequences fit" in reasons(plan, "settings")
    assert isinstance(plan.memory, MemorySection) and plan.memory.attention is not None
    used = "MLX's own gradient from tiles of the scores is used (Metal)" in plan.memory.attention["m1"]
    assert used is (version == "0.32.4")


def test_where_the_job_has_none_they_are_a_way_out() -> None:
    plan = planned("0.32.3", 32, AUTO_TILES | {"sequence_tiling": 0})
    assert "sequence_tiling = " in " ".join(issue.text + str(issue) for issue in plan.refusals)


def test_on_metal_mlps_alone_are_tiled_and_attention_stays_with_mlx() -> None:
    whole = RankWorkload(fine_tune_type="lora", sequence=32_768, grad_checkpoint=True, fused_attention="metal")
    one, other = (estimate(SHAPE, replace(whole, sequence_tiling=tokens)).peak_bytes for tokens in (0, 512))
    assert other < 0.8 * one
    plan = planned("0.32.4", 32, AUTO_TILES | {"sequence_tiling": 512})
    assert "is used (Metal)" in reasons(plan, "memory")
    assert "the job sets it" in reasons(plan, "settings")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"head_dim": 48}, "heads have 48 elements, not one of 64, 72, 80, 96, 128, 192, 256"),
        ({**TINY["gemma2"]}, "the model changes the scores"),
        ({**TINY["gemma3_text"], "head_dim": 64}, "with a window of 512 tokens: all scores are kept"),
    ],
)
def test_why_mlx_does_not_compute_it_from_tiles_is_said(model: dict[str, Any], why: str) -> None:
    node = mac("m1", 0, "Apple M1 Max", 64, mlx="0.32.4")
    plan = make_plan(inputs([node], settings={"max_seq_length": 2048}, model=QWEN3_8B_4BIT | model))
    assert why in reasons(plan, "memory")


@pytest.mark.parametrize("config", [TINY["llama"], TINY["qwen3_moe"], TINY["phi3"]], ids=["llama", "experts", "phi3"])
@pytest.mark.parametrize("training", ["lora", "full"])
def test_smaller_tiles_need_less_until_the_rest_is_all(config: dict[str, Any], training: Any) -> None:
    shape = ModelShape.from_config(config)
    work = RankWorkload(fine_tune_type=training, sequence=8192, grad_checkpoint=True)
    needs = [estimate(shape, replace(work, sequence_tiling=tokens)).peak_bytes for tokens in (0, 2048, 1024, 512, 256)]
    assert needs == sorted(needs, reverse=True) and needs[-1] < 0.4 * needs[0]
    assert estimate(shape, replace(work, sequence_tiling=8192)).peak_bytes == needs[0]


def test_a_recurrence_has_nothing_to_tile_and_a_job_that_asks_for_it_is_warned() -> None:
    for kind, warned in (("mamba2", True), ("llama", False)):
        node = mac("m1", 0, "Apple M1 Max", 64)
        plan = make_plan(inputs([node], settings={"sequence_tiling": 512}, model=TINY[kind]))
        assert any("sequence_tiling = 512 saves no memory here" in issue.text for issue in plan.warnings) is warned
    shape = ModelShape.from_config(TINY["mamba2"])
    one, other = (
        estimate(shape, RankWorkload(sequence=4096, sequence_tiling=tokens)).peak_bytes for tokens in (0, 256)
    )
    assert one == other
