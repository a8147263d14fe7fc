"""The arithmetic of a rank's memory: what is divided, what grows, and what was measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan.memory.estimate import largest_batch
from engine.plan.memory.shape import ModelShape
from engine.plan.torch.memory import TorchWorkload, torch_estimate, torch_estimates
from tests.unit.plan.clusters import LLAMA_70B, QWEN3_4B
from tests.unit.plan.torch.boxes import TINY

LARGE = ModelShape.from_config(LLAMA_70B)
PARTITIONING: list[dict[str, Any]] = [
    {"strategy": "fsdp", "sharding": "full"},
    {"strategy": "fsdp", "sharding": "grad_op"},
    *({"strategy": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)),
]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[ModelShape, TorchWorkload]:
    config = TINY | {
        "num_hidden_layers": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(100, 200_000)),
        "intermediate_size": draw(st.sampled_from([512, 1376, 8192])),
    }
    workload = TorchWorkload(
        fine_tune_type=draw(st.sampled_from(["full", "lora", "dora"])),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        grad_checkpoint=draw(st.booleans()),
        batch=draw(st.integers(1, 64)),
        sequence=draw(st.integers(1, 4096)),
        world_size=draw(st.integers(1, 64)),
        accumulation=draw(st.integers(1, 4)),
        moments=draw(st.integers(0, 2)),
        on_gpu=draw(st.booleans()),
    )
    return ModelShape.from_config(config), workload


@given(jobs(), st.sampled_from(PARTITIONING), st.integers(1, 64))
@settings(deadline=None)
def test_more_ranks_never_need_more(job: tuple[ModelShape, TorchWorkload], how: dict[str, Any], more: int) -> None:
    shape, workload = job
    # With one rank DDP has no buckets; what is partitioned shrinks.
    few, many = (
        replace(workload, **how, world_size=ranks) for ranks in (workload.world_size, workload.world_size + more)
    )
    assert torch_estimate(shape, many).needed_bytes <= torch_estimate(shape, few).needed_bytes


@given(jobs(), st.sampled_from([{"strategy": "ddp"}, *PARTITIONING]))
@settings(deadline=None)
def test_a_larger_batch_never_needs_less(job: tuple[ModelShape, TorchWorkload], how: dict[str, Any]) -> None:
    shape, workload = job
    needs = [torch_estimate(shape, replace(workload, **how, batch=batch)).needed_bytes for batch in (1, 2, 3, 8, 64)]
    assert all(one < two for one, two in pairwise(needs) if one != two) and needs == sorted(needs)


@given(jobs())
@settings(deadline=None)
def test_of_full_fine_tuning_ddp_needs_the_most_and_full_sharding_the_least(
    job: tuple[ModelShape, TorchWorkload],
) -> None:
    shape, workload = job
    workload = replace(
        workload, fine_tune_type="full", moments=2, world_size=max(2, workload.world_size), precision="fp32"
    )
    ddp = torch_estimate(shape, replace(workload, strategy="ddp")).weights_bytes
    sharded = [torch_estimate(shape, replace(workload, **how)) for how in PARTITIONING[:2]]
    assert sharded[0].needed_bytes <= sharded[1].needed_bytes
    assert sharded[0].weights_bytes * workload.world_size >= ddp > sharded[0].weights_bytes


def test_a_large_model_shrinks_from_ddp_over_grad_op_to_full() -> None:
    asked = TorchWorkload(fine_tune_type="full", precision="bf16", world_size=16)
    needs = [
        torch_estimate(LARGE, replace(asked, **how)).needed_bytes for how in ({}, PARTITIONING[1], PARTITIONING[0])
    ]
    assert needs == sorted(needs, reverse=True) and needs[0] > 3 * needs[2]


def test_the_state_of_full_fine_tuning_is_16_bytes_for_each_trained_parameter_and_4_for_a_frozen_one() -> None:
    found = torch_estimate(LARGE, TorchWorkload(fine_tune_type="full", world_size=1))
    frozen = LARGE.total_parameters - found.trainable_parameters
    state = found.weights_bytes + found.gradients_bytes + found.optimizer_bytes
    assert state == 16 * found.trainable_parameters + 4 * frozen
    # Nothing is exchanged, and the optimizer works in place.
    assert (found.communication_bytes, found.update_bytes) == (0, 0)
    zero = torch_estimate(
        LARGE, TorchWorkload(strategy="deepspeed", zero_stage=3, precision="bf16", fine_tune_type="full", world_size=8)
    )
    assert zero.optimizer_bytes == pytest.approx(12 * found.trainable_parameters / 8, rel=1e-6)
    assert zero.weights_bytes == pytest.approx(2 * LARGE.total_parameters / 8, rel=1e-6)


def test_what_is_offloaded_moves_to_the_machine_but_not_on_a_cpu() -> None:
    asked = TorchWorkload(strategy="fsdp", precision="bf16", fine_tune_type="full", world_size=8)
    whole, offloaded = (torch_estimate(LARGE, replace(asked, offload=offload)) for offload in ("none", "cpu"))
    state = whole.weights_bytes + whole.gradients_bytes + whole.optimizer_bytes
    assert offloaded.offloaded_bytes == state + whole.update_bytes
    # At the gradient of the loss, which is the peak here, there are no gradients of parameters yet.
    assert whole.needed_bytes - offloaded.needed_bytes == whole.weights_bytes + whole.optimizer_bytes
    on_cpu = replace(asked, on_gpu=False)
    assert torch_estimate(LARGE, on_cpu) == torch_estimate(LARGE, replace(on_cpu, offload="cpu"))
    nvme = TorchWorkload(
        strategy="deepspeed", zero_stage=3, offload="nvme", precision="bf16", fine_tune_type="full", world_size=8
    )
    assert torch_estimate(LARGE, nvme).host_bytes == whole.gradients_bytes // 2


@pytest.mark.parametrize(
    ("stage", "accumulation", "elements"),
    # Masters, their gradients, two moments and the update in float32; a 16-bit buffer of the updated weights; with
    # accumulation a 16-bit one of the gradients; of ZeRO-3 16-bit weights and gradients.
    [(1, 1, 22), (2, 1, 22), (2, 4, 24), (3, 1, 24), (3, 4, 24)],
)
def test_what_deepspeed_offloads_for_each_trained_parameter(stage: int, accumulation: int, elements: int) -> None:
    asked = TorchWorkload(
        strategy="deepspeed",
        zero_stage=stage,
        offload="cpu",
        precision="bf16",
        fine_tune_type="full",
        world_size=8,
        accumulation=accumulation,
    )
    found = torch_estimate(LARGE, asked)
    frozen = (LARGE.total_parameters - found.trainable_parameters) * 2 if stage == 3 else 0
    assert found.offloaded_bytes == pytest.approx((elements * found.trainable_parameters + frozen) / 8, rel=1e-6)


def test_with_accumulation_zero_1_has_whole_gradients_on_the_gpu() -> None:
    asked = TorchWorkload(strategy="deepspeed", zero_stage=1, precision="bf16", fine_tune_type="full", world_size=8)
    one, four = (torch_estimate(LARGE, replace(asked, accumulation=steps)) for steps in (1, 4))
    stage_2 = torch_estimate(LARGE, replace(asked, zero_stage=2, accumulation=4))
    # Instead of the rank's part of them.
    assert four.peak_bytes - stage_2.peak_bytes == pytest.approx(2 * four.trainable_parameters * 7 / 8, rel=1e-3)
    assert four.peak_bytes > one.peak_bytes
    offloaded = torch_estimate(LARGE, replace(asked, accumulation=4, offload="cpu"))
    assert offloaded.peak_bytes > 2 * LARGE.total_parameters + 2 * four.trainable_parameters


@pytest.mark.parametrize(
    ("how", "more", "each"),
    [
        # The file is bfloat16.
        (PARTITIONING[0], {"fine_tune_type": "full"}, 4),
        (PARTITIONING[3], {"fine_tune_type": "full"}, 4),
        ({"strategy": "ddp"}, {"fine_tune_type": "full"}, 4),
        (PARTITIONING[0], {"precision": "fp16"}, 2),
        # Pages of the file, which all ranks share; and partitions.
        (PARTITIONING[0], {"precision": "bf16"}, 0),
        (PARTITIONING[4], {"fine_tune_type": "full"}, 0),
    ],
)
def test_each_rank_loads_the_whole_model_into_its_machines_memory(
    how: dict[str, Any], more: dict[str, Any], each: int
) -> None:
    found = torch_estimate(LARGE, TorchWorkload(world_size=8, **how, **more))
    assert found.host_bytes == found.loaded_bytes == pytest.approx(each * LARGE.total_parameters, rel=0.01)
    on_cpu = torch_estimate(LARGE, TorchWorkload(world_size=1024, sequence=16, on_gpu=False, **how, **more))
    assert on_cpu.host_bytes == 0 and on_cpu.peak_bytes >= each * LARGE.total_parameters


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    shape, asked = ModelShape.from_config(QWEN3_4B), TorchWorkload(precision="bf16", world_size=8)
    limit = 40 * 2**30
    most = largest_batch(torch_estimates(shape, asked), limit)
    assert most > 0
    assert torch_estimate(shape, replace(asked, batch=most)).needed_bytes <= limit
    assert torch_estimate(shape, replace(asked, batch=most + 1)).needed_bytes > limit


DDP: dict[str, Any] = {"strategy": "ddp"}
FULL, _, _, ZERO_2, ZERO_3 = PARTITIONING
BF16, LORA = {"precision": "bf16"}, {"fine_tune_type": "lora"}
SIZES = {"34 M": (512, 8, 1376, 8192, 8), "110 M": (768, 12, 2048, 16_384, 12), "239 M": (1024, 16, 2816, 16_384, 16)}
"""Llama's hidden size, layers, inner size, vocabulary and heads."""


@pytest.mark.parametrize(
    ("size", "how", "more", "megabytes"),
    [
        ("34 M", DDP, {}, 1081),
        ("34 M", FULL, {}, 874),
        ("34 M", ZERO_2, {}, 1096),
        ("34 M", ZERO_3, {}, 1306),
        ("34 M", DDP, BF16, 1172),
        ("34 M", FULL, BF16, 837),
        ("34 M", ZERO_2, BF16, 921),
        ("34 M", ZERO_3, BF16, 1053),
        ("34 M", DDP, LORA, 799),
        ("34 M", FULL, LORA, 766),
        ("34 M", ZERO_2, LORA, 841),
        ("34 M", ZERO_3, LORA, 1001),
        ("110 M", DDP, {}, 2597),
        ("110 M", FULL, {}, 1651),
        ("110 M", ZERO_2, {}, 2469),
        ("110 M", ZERO_3, {}, 2776),
        ("110 M", DDP, BF16, 2493),
        ("110 M", FULL, BF16, 1560),
        ("110 M", ZERO_2, BF16, 1809),
        ("110 M", ZERO_3, BF16, 2034),
        ("239 M", DDP, {}, 4676),
        ("239 M", FULL, {}, 2770),
        ("239 M", ZERO_2, {}, 5115),
        ("239 M", ZERO_3, {}, 5150),
        ("34 M", DDP, {"grad_checkpoint": True}, 1094),
        ("34 M", FULL, {"grad_checkpoint": True}, 762),
        ("34 M", ZERO_2, {"grad_checkpoint": True}, 1080),
        ("34 M", ZERO_3, {"grad_checkpoint": True}, 1165),
    ],
)
def test_the_estimate_is_what_was_measured_once(
    size: str, how: dict[str, Any], more: dict[str, Any], megabytes: int
) -> None:
    """Peak RSS of two ranks over gloo, 2 × 256 tokens each, as tests.bench.torch_memory measured it with torch 2.13,
    transformers 5.23 and DeepSpeed 0.19."""
    hidden, layers, inner, words, heads = SIZES[size]
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "vocab_size": words,
        "num_attention_heads": heads,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    asked = TorchWorkload(fine_tune_type="full", batch=2, sequence=256, world_size=2, on_gpu=False)
    found = torch_estimate(ModelShape.from_config(config), replace(asked, **how, **more))
    assert found.needed_bytes / 1e6 == pytest.approx(megabytes, rel=0.10)


@pytest.mark.parametrize(
    ("packed", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": None}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8.5),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.25),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 8.25),
    ],
)
def test_a_base_that_stays_packed_is_counted_packed(packed: dict[str, Any], bits: float) -> None:
    shape = ModelShape.from_config(LLAMA_70B | {"quantization_config": packed})
    workload = TorchWorkload(precision="bf16")
    adapters = 4 * torch_estimate(LARGE, workload).trainable_parameters
    inner = sum(matrix.weights for layer in LARGE.architecture.layers for matrix in layer.matrices)
    ends = LARGE.total_parameters - inner
    assert torch_estimate(shape, workload).weights_bytes == pytest.approx(inner * bits / 8 + ends * 2 + adapters)
