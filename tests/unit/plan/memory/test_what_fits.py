"""What fits which Macs, by the estimate, from the public configurations of the models: full fine-tuning of one sequence
of 2,048 tokens, with three quarters of a Mac's memory for its GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.plan.document import ChosenSettings, TrainingPlan
from engine.plan.memory.choice import choose, with_settings
from engine.plan.memory.estimate import RankWorkload, estimate
from engine.plan.memory.fit import WORKING_SET
from engine.plan.memory.shape import ModelShape
from engine.plan.planner import make_plan
from engine.protocol.job import AUTO
from engine.protocol.task import Task, TaskKind
from tests.unit.plan.clusters import LLAMA_70B, QWEN3_4B, QWEN3_32B, inputs, mac

_UNTIED: dict[str, Any] = {**QWEN3_4B, "tie_word_embeddings": False}
MODELS = {
    "4B": ModelShape.from_config(QWEN3_4B),
    "8B": ModelShape.from_config({**_UNTIED, "hidden_size": 4_096, "intermediate_size": 12_288}),
    "14B": ModelShape.from_config(
        {
            **_UNTIED,
            "hidden_size": 5_120,
            "num_hidden_layers": 40,
            "intermediate_size": 17_408,
            "num_attention_heads": 40,
        }
    ),
    "32B": ModelShape.from_config(QWEN3_32B),
    "70B": ModelShape.from_config(LLAMA_70B),
}
PARAMETERS = {"4B": 4.02e9, "8B": 8.19e9, "14B": 14.77e9, "32B": 32.76e9, "70B": 70.55e9}
ALONE = RankWorkload(fine_tune_type="full", sequence=2_048)
OPEN = dict.fromkeys(ChosenSettings.model_fields, AUTO)
STOCK = ChosenSettings(optimizer_precision="parameter", grad_checkpoint=True)
"""mlx-lm's own step, as small as it gets."""
GB = 10**9


def limit(size_gb: int) -> int:
    return int(size_gb * GB * WORKING_SET)


def needs(model: str, settings: ChosenSettings, workload: RankWorkload = ALONE) -> float:
    return estimate(MODELS[model], with_settings(workload, settings)).needed_bytes / GB


@pytest.mark.parametrize("model", MODELS)
def test_the_shapes_are_the_published_ones(model: str) -> None:
    assert MODELS[model].total_parameters == pytest.approx(PARAMETERS[model], rel=0.002)


@pytest.mark.parametrize(
    ("model", "size_gb", "precision"),
    [
        ("4B", 64, "kahan"),
        ("4B", 128, "float32"),
        ("4B", 512, "float32"),
        ("8B", 64, "stochastic"),
        ("8B", 128, "kahan"),
        ("8B", 512, "float32"),
        ("14B", 64, None),
        ("14B", 128, "stochastic"),
        ("14B", 512, "float32"),
        ("32B", 64, None),
        ("32B", 128, None),
        ("32B", 512, "kahan"),
        ("70B", 64, None),
        ("70B", 128, None),
        ("70B", 512, "stochastic"),
    ],
)
def test_one_mac(model: str, size_gb: int, precision: str | None) -> None:
    found = choose(MODELS[model], [ALONE], [limit(size_gb)], OPEN)
    assert found.fits is (precision is not None), found
    assert precision is None or found.settings.optimizer_precision == precision, found


@pytest.mark.parametrize(
    ("model", "size_gb", "precision"),
    [
        ("14B", 64, None),
        ("14B", 128, "kahan"),
        ("32B", 64, None),
        ("32B", 128, None),
        ("32B", 512, "float32"),
        ("70B", 128, None),
        ("70B", 512, "stochastic"),
    ],
)
def test_sharded_over_two_macs(model: str, size_gb: int, precision: str | None) -> None:
    ranks = [replace(ALONE, strategy="sharded", world_size=2)] * 2
    found = choose(MODELS[model], ranks, [limit(size_gb)] * 2, OPEN)
    assert found.fits is (precision is not None), found
    assert precision is None or found.settings.optimizer_precision == precision, found


@pytest.mark.parametrize(("model", "most_gb"), [("32B", 384), ("14B", 200), ("4B", 48)])
def test_with_checkpointing_a_model_needs_no_more_than_users_have(model: str, most_gb: int) -> None:
    assert choose(MODELS[model], [ALONE], [most_gb * GB], {**OPEN, "grad_checkpoint": True}).fits


@pytest.mark.parametrize("size_gb", [64, 128, 512])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_refused_does_not_fit_mlx_lm_either(model: str, size_gb: int) -> None:
    if not choose(MODELS[model], [ALONE], [limit(size_gb)], OPEN).fits:
        assert needs(model, STOCK) * GB > limit(size_gb)


def plan_of(model: dict[str, Any], macs_gb: tuple[int, ...], task: TaskKind | None) -> TrainingPlan:
    """On Macs with so much memory: a full fine-tuning of 8 sequences with plain AdamW, or a task on its result."""
    keys = {"fine_tune_type": "full", "optimizer": "adamw", "batch_size": 8, "grad_checkpoint": True}
    nodes = [mac(f"mac{rank}", rank, "Apple M4 Max", size) for rank, size in enumerate(macs_gb)]
    job = {"task": Task(task, "run") if task is not None else None}
    return make_plan(inputs(nodes, settings=keys, model=model, job=job))


def refusals(plan: TrainingPlan) -> list[str]:
    return [refusal.text for refusal in plan.refusals]


@pytest.mark.parametrize("task", ["evaluate", "fuse", "generate", "serve"])
def test_a_task_on_a_full_fine_tuning_needs_the_weights_and_no_optimizer(task: TaskKind) -> None:
    assert refusals(plan_of(QWEN3_4B, (24,), None)) and not refusals(plan_of(QWEN3_4B, (24,), task))
    assert refusals(plan_of(QWEN3_32B, (64,), task)), "65 GB of weights"


def test_a_model_is_divided_by_the_memory_of_those_that_generate_with_it() -> None:
    assert refusals(plan_of(LLAMA_70B, (128,), "generate"))
    assert not refusals(plan_of(LLAMA_70B, (128, 96, 36), "generate")), "141 GB of weights on 96, 72 and 27"
