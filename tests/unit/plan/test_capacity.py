"""The longest sequence and the largest batch that fit: the plan accepts them, and refuses the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.config.mlx_lm_keys import with_defaults
from engine.errors import InputError
from engine.plan.capacity import Capacity, capacities
from engine.plan.context import PlanInputs
from engine.plan.document import ChosenTorchSettings
from engine.plan.planner import make_plan
from tests.unit.plan.clusters import LLAMA_70B, QWEN3_4B, QWEN3_32B, inputs, mac
from tests.unit.plan.torch.boxes import box, torch_inputs

SHALLOW = QWEN3_32B | {"num_hidden_layers": 8}
FOUR_BITS = {"quantization": {"bits": 4, "group_size": 64}}


def alone(gb: int, model: dict[str, Any], **more: Any) -> PlanInputs:
    return inputs([mac("max", 0, "Apple M4 Max", gb, mlx="0.32.4")], model=model, **more)


def longest(asked: PlanInputs) -> list[Capacity]:
    return capacities(asked, longest=True, largest_batch=False).longest or []


def largest_batch(asked: PlanInputs) -> list[Capacity]:
    return capacities(asked, longest=False, largest_batch=True).largest_batch or []


def planned(asked: PlanInputs, row: Capacity, **settings: Any) -> bool:
    """The plan of the job with these settings has no refusal."""
    kind = row.method.removeprefix("q")
    keys = with_defaults({"fine_tune_type": kind, "batch_size": len(asked.config.nodes), **settings})
    job = asked.config.job.model_copy(update={"fine_tune_type": kind, "mlx_lm": keys})
    model = {**(asked.model or {}), **(FOUR_BITS if row.weights == "4 bits" else {})}
    config = asked.config.model_copy(update={"job": job})
    return not make_plan(replace(asked, config=config, model=model, seeks_ways_out=False)).refusals


def test_the_plan_accepts_what_fits_and_refuses_the_next() -> None:
    asked = alone(192, LLAMA_70B)
    sequences = longest(asked)
    assert [row.method for row in sequences] == ["lora", "dora", "full", "qlora"]
    for row in sequences:
        assert row.amount is not None and not row.amount % 32
        assert not planned(asked, row, max_seq_length=row.amount + 32)
        assert not row.amount or planned(asked, row, max_seq_length=row.amount)
    for row in largest_batch(asked):
        assert row.amount is not None
        assert not planned(asked, row, batch_size=row.amount + 1)
        assert not row.amount or planned(asked, row, batch_size=row.amount)
    fitting = [row.method for row in sequences if row.amount]
    assert fitting == ["lora", "dora", "qlora"]


def test_no_sequence_is_longer_than_the_model_is_made_for() -> None:
    for model in (QWEN3_4B, {**QWEN3_4B, "max_position_embeddings": None, "text_config": QWEN3_4B}):
        report = capacities(alone(512, model), longest=True, largest_batch=False)
        assert report.made_for == 40_960 and report.largest_batch is None
        assert report.longest is not None and {row.amount for row in report.longest} == {40_960}


def test_each_node_is_asked_as_if_the_others_were_like_it_and_like_ones_once() -> None:
    small, large = mac("a", 0, "Apple M4 Max", 64, mlx="0.32.4"), mac("b", 1, "Apple M3 Ultra", 512, mlx="0.32.4")
    three = inputs([small, large, mac("c", 2, "Apple M4 Max", 64, mlx="0.32.4")], model=SHALLOW)
    rows = {(row.nodes, row.method): row for row in largest_batch(three)}
    assert {nodes for nodes, _ in rows} == {("a", "c"), ("b",)}
    few, many = (rows[nodes, "qlora"].amount or 0 for nodes in (("a", "c"), ("b",)))
    assert 0 < few < many
    alike = inputs([mac(name, rank, "Apple M3 Ultra", 512, mlx="0.32.4") for rank, name in enumerate("def")])
    assert many == next(row.amount for row in largest_batch(replace(alike, model=SHALLOW)) if row.method == "qlora")


def test_quantized_weights_have_adapters_alone_and_the_reason_is_told() -> None:
    qlora, qdora, full = longest(alone(64, {**QWEN3_4B, **FOUR_BITS}))
    assert (qlora.method, qdora.method, full.method) == ("qlora", "qdora", "full")
    assert qlora.amount and qdora.amount and qlora.weights == "4 bits"
    assert full.amount is None and "MLX has no gradients for quantized weights" in full.why_not


def test_a_node_that_was_never_probed_has_no_figure_but_a_reason() -> None:
    asked = replace(alone(64, QWEN3_4B), facts={})
    assert {(row.amount, row.why_not) for row in longest(asked)} == {(None, "the node was never probed")}


def test_what_the_job_sets_is_kept() -> None:
    free, bound, by_tokens = (
        largest_batch(alone(64, SHALLOW, settings=settings))
        for settings in ({}, {"num_layers": 8, "grad_checkpoint": False}, {"batch_tokens": 4096})
    )
    assert by_tokens == free
    assert 0 < (bound[0].amount or 0) < (free[0].amount or 0)
    assert [getattr(row.settings, "grad_checkpoint", None) for row in bound] == [False] * 4


def test_a_pytorch_job_is_asked_by_its_own_estimate() -> None:
    lora, _, full = largest_batch(torch_inputs(box("gpus", 2, "NVIDIA A100-SXM4-80GB"), model=SHALLOW))
    assert lora.nodes == ("gpus.0", "gpus.1") and lora.amount and full.amount
    assert isinstance(lora.settings, ChosenTorchSettings) and lora.memory is not None
    assert lora.memory.limit_from == "the GPU's memory"


def test_an_unknown_kind_of_model_is_refused() -> None:
    with pytest.raises(InputError, match="model_type = 'unheard' is not supported by the memory estimate"):
        longest(alone(64, {"model_type": "unheard"}))
