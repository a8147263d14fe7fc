"""The strategy by what fits, and the precision by the generation of the GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from engine.job.traits import TORCH
from engine.models import NvidiaGpu
from engine.plan.document import ChosenTorchSettings, Disabled, MemorySection, NoCalibrationSection, TrainingPlan
from engine.plan.torch.strategy import choose_precision, generation_of
from engine.protocol.task import Task
from tests.unit.plan.clusters import LLAMA_70B, QWEN3_4B, QWEN3_32B
from tests.unit.plan.torch.boxes import FULL, TINY, box, infiniband, plan, section

A100 = "NVIDIA A100-SXM4-80GB"


def chosen(made: TrainingPlan) -> ChosenTorchSettings:
    assert isinstance(made.settings, ChosenTorchSettings)
    return made.settings


def reason(made: TrainingPlan, key: str) -> str:
    return next(each.reason for each in made.reasons if each.key == key)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16"),
        ("NVIDIA GH200 480GB", "bf16"),
        ("NVIDIA B200", "bf16"),
        ("NVIDIA A100-SXM4-80GB", "bf16"),
        ("NVIDIA A10G", "bf16"),
        ("NVIDIA RTX A6000", "bf16"),
        ("NVIDIA RTX 6000 Ada Generation", "bf16"),
        ("NVIDIA GeForce RTX 3090", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA GeForce RTX 5090", "bf16"),
        ("NVIDIA L4", "bf16"),
        ("NVIDIA L40S", "bf16"),
        ("Tesla V100-SXM2-32GB", "fp16"),
        ("Tesla P100-PCIE-16GB", "fp16"),
        ("Tesla T4", "fp16"),
        ("Quadro RTX 6000", "fp16"),
        ("NVIDIA GeForce RTX 2080 Ti", "fp16"),
        ("NVIDIA GeForce GTX 1080 Ti", "fp32"),
        ("Tesla K80", "fp32"),
        ("a GPU of tomorrow", "fp32"),
    ],
)
def test_the_precision_is_that_of_the_gpus_generation(name: str, precision: str) -> None:
    assert choose_precision([NvidiaGpu(name=name)], on_gpu=True)[0] == precision


@pytest.mark.parametrize(
    ("capability", "precision"),
    [
        ("12.1", "bf16"),
        ("8.0", "bf16"),
        ("7.5", "fp16"),
        ("6.0", "fp16"),
        ("6.1", "fp32"),
        ("5.2", "fp32"),
        ("", "fp32"),
    ],
)
def test_of_a_gpu_that_the_table_lacks_the_compute_capability_counts(capability: str, precision: str) -> None:
    gpu = NvidiaGpu(name="a GPU of tomorrow", compute_capability=capability or None)
    found, reason = choose_precision([gpu], on_gpu=True)
    assert found == precision
    assert ("compute capability" in reason) == bool(capability)


def test_the_oldest_gpu_decides_and_the_cpu_computes_in_float32() -> None:
    found, reason = choose_precision([NvidiaGpu(name="NVIDIA H100 80GB HBM3"), NvidiaGpu(name="Tesla T4")], on_gpu=True)
    assert (found, reason[:8]) == ("fp16", "Tesla T4")
    assert choose_precision([None, NvidiaGpu(name="NVIDIA L4")], on_gpu=True)[0] == "fp32"
    assert choose_precision([], on_gpu=False)[0] == "fp32"
    assert generation_of(NvidiaGpu(name="Apple M4")) is None


@pytest.mark.parametrize(
    ("nodes", "settings", "model", "expected"),
    [
        # Two ranks on one machine, and on two, without a GPU.
        (box("127.0.0.1", 2), FULL, TINY, ("ddp", "none", "fp32")),
        (box("a", 1) + box("b", 1, number=2), FULL, TINY, ("ddp", "none", "fp32")),
        # Adapters fit whole; 4 × 10⁹ parameters with their gradients and moments do not.
        (box("h", 8, "NVIDIA H100 80GB HBM3"), {"batch_size": 16}, QWEN3_4B, ("ddp", "none", "bf16")),
        (box("h", 8, "NVIDIA H100 80GB HBM3"), FULL, QWEN3_4B, ("fsdp grad_op", "none", "bf16")),
        (box("h", 8, "NVIDIA H100 80GB HBM3"), FULL, QWEN3_32B, ("fsdp full", "none", "bf16")),
        (infiniband("a", 8, A100, 1) + infiniband("b", 8, A100, 2), FULL, LLAMA_70B, ("deepspeed 3", "cpu", "bf16")),
        (box("v", 4, "Tesla V100-SXM2-32GB", 32), FULL, QWEN3_4B, ("fsdp full", "cpu", "fp16")),
        (box("l", 1, "NVIDIA L4", 24), FULL, TINY, ("ddp", "none", "bf16")),
    ],
)  # fmt: skip
def test_what_fits_is_chosen(nodes: Any, settings: Any, model: Any, expected: tuple[str, str, str]) -> None:
    made = plan(nodes, settings, model=model)
    own = chosen(made)
    how = {"fsdp": f"fsdp {own.sharding}", "deepspeed": f"deepspeed {own.zero_stage}"}.get(own.strategy, own.strategy)
    assert (how, own.offload, own.precision) == expected
    assert not made.refused
    assert made.strategy.parallelism == own.strategy
    assert isinstance(made.memory, MemorySection) and all(rank.fits for rank in made.memory.ranks)
    listed = section(made).candidates
    assert [each.chosen for each in listed].count(True) == 1
    assert next(each for each in listed if each.chosen).needed_bytes == max(r.needed_bytes for r in made.memory.ranks)


def test_the_reason_names_what_does_not_fit() -> None:
    made = plan(box("h", 8, "NVIDIA H100 80GB HBM3"), FULL, model=QWEN3_4B)
    assert reason(made, "settings.strategy").startswith("FSDP grad_op fits")
    assert "DDP needs" in reason(made, "settings.strategy")
    assert "Hopper" in reason(made, "settings.precision")


def test_what_the_job_sets_is_kept() -> None:
    made = plan(
        box("h", 8, "NVIDIA H100 80GB HBM3"),
        {**FULL, "precision": "fp32", "zero_stage": 3},
        model=TINY,
        job={"strategy": "deepspeed"},
    )
    assert (chosen(made).strategy, chosen(made).zero_stage, chosen(made).precision) == ("deepspeed", 3, "fp32")
    assert reason(made, "settings.zero_stage") == "the job sets it"
    made = plan(box("h", 8, "NVIDIA H100 80GB HBM3"), {**FULL, "zero_stage": 3}, model=TINY)
    assert chosen(made).strategy == "ddp"


def test_settings_that_do_not_go_together_are_refused() -> None:
    made = plan(box("h", 2, "NVIDIA L4", 24), {"offload": "cpu"}, model=TINY, job={"strategy": "ddp"})
    assert [each.name for each in made.refusals] == ["strategy"]
    assert "ddp offloads nothing" in made.refusals[0].text


@pytest.mark.parametrize(
    ("settings", "strategy", "refused"),
    [
        ({"offload": "cpu"}, "fsdp", "strategy = fsdp, offload = cpu do not go together"),
        ({"precision": "fp16"}, "ddp", "precision = fp16 needs a GPU"),
        ({"offload": "cpu"}, "auto", ""),
    ],
)
def test_what_needs_a_gpu_is_refused_on_the_cpu(settings: dict[str, str], strategy: str, refused: str) -> None:
    made = plan(box("127.0.0.1", 2), {**FULL, **settings}, model=TINY, job={"strategy": strategy})
    assert [refused in issue.text for issue in made.refusals] == ([True] if refused else [])
    if not refused:
        assert section(made).strategy == "deepspeed"


def test_a_job_that_does_not_fit_is_refused_with_ways_out() -> None:
    nodes = box("h", 2, "NVIDIA H100 80GB HBM3")
    made = plan(nodes, FULL, model=QWEN3_4B, job={"strategy": "ddp"})
    assert [each.name for each in made.refusals] == ["memory"]
    assert isinstance(made.memory, MemorySection)
    ways = [way.change for way in made.memory.ways_out]
    assert ways and all(way.needed_bytes <= 80 * 2**30 for way in made.memory.ways_out)
    assert ways[0].startswith('strategy = "fsdp"') and 'fine_tune_type = "lora"' in ways
    huge = plan(box("l", 1, "NVIDIA L4", 24), FULL, model=QWEN3_32B)
    assert "ranks like l.0" in huge.refusals[-1].text


def test_fewer_sequences_of_any_batch_need_more_iterations_for_as_many_updates() -> None:
    made = plan(box("l", 2, "NVIDIA L4", 24), {**FULL, "batch_size": 7, "max_seq_length": 4096}, model=QWEN3_4B)
    assert isinstance(made.memory, MemorySection)
    changes = [way.change for way in made.memory.ways_out]
    assert "batch_size = 3 and grad_accumulation_steps = 3 and iters = 3000" in changes


def test_a_machine_that_cannot_load_the_model_on_every_rank_is_refused() -> None:
    nodes = box("h", 8, "NVIDIA H200", 141, memory_total_bytes=512 * 2**30)
    made = plan(nodes, FULL, model=QWEN3_32B, job={"strategy": "fsdp"})
    assert [each.name for each in made.refusals] == ["memory"]
    assert "h.0 needs 122.0 GB of 64 GB of its machine's memory to load the model" in made.refusals[0].text
    assert 'strategy = "deepspeed"' in made.refusals[0].text
    # ZeRO-3 divides it meanwhile.
    made = plan(nodes, FULL, model=QWEN3_32B)
    assert (chosen(made).strategy, chosen(made).zero_stage) == ("deepspeed", 3) and not made.refused


def test_the_memory_of_a_part_of_a_gpu_is_not_known() -> None:
    nodes = box("h", 2, "NVIDIA H100 80GB HBM3")
    parts = tuple(gpu.model_copy(update={"mig": True}) for gpu in nodes[0].gpus)
    made = plan([node.model_copy(update={"gpus": parts}) for node in nodes], FULL, model=TINY)
    assert isinstance(made.memory, MemorySection) and [rank.limit_bytes for rank in made.memory.ranks] == [None, None]
    assert "MIG" in made.memory.ranks[0].limit_from


def test_more_ranks_share_the_batch_that_the_job_has() -> None:
    settings = {**FULL, "batch_size": 64}
    made = plan(box("h", 2, "NVIDIA H100 80GB HBM3"), settings, model=QWEN3_32B)
    assert isinstance(made.memory, MemorySection)
    way = next(way for way in made.memory.ways_out if way.change == "8 ranks like h.0")
    # A machine with so much memory for each of its ranks.
    made = plan(box("h", 8, "NVIDIA H100 80GB HBM3", memory_total_bytes=2**42), settings, model=QWEN3_32B)
    assert isinstance(made.memory, MemorySection)
    assert {rank.needed_bytes for rank in made.memory.ranks} == {way.needed_bytes}


def test_without_facts_the_size_decides_and_it_is_said() -> None:
    made = plan(
        box("a", 1) + box("b", 1, number=2), FULL, model=QWEN3_4B, facts={}, network=None, network_problem="unknown"
    )
    assert chosen(made).strategy == "fsdp"
    assert "is not known" in reason(made, "settings.strategy")
    assert any(each.name == "memory" for each in made.warnings)
    made = plan(box("a", 1), FULL, model=None, model_source="not read")
    assert isinstance(made.memory, Disabled) and chosen(made).strategy == "ddp"


def test_the_plan_of_a_torch_job_has_no_words_of_mlx() -> None:
    made = plan(box("h", 8, "NVIDIA H100 80GB HBM3"), FULL, model=QWEN3_4B)
    text = " ".join((made.strategy.approach, *made.verification_steps, made.distributed_config.gradient_sync))
    assert "mlx" not in text.lower() and "nvidia-smi" in text
    assert made.hardware_calibration.macos_qos_api == "not on macOS"
    assert not {"sizes", "sharded_on_ring", "wire"} & {advice.name for advice in made.advice}
    assert made.distributed_config.mlx_launch_command is None


def test_weights_that_mlx_has_quantized_are_refused() -> None:
    packed = QWEN3_4B | {"quantization": {"bits": 4, "group_size": 64}}
    made = plan(box("h", 8, "NVIDIA H100 80GB HBM3"), {"batch_size": 8}, model=packed)
    assert [each.name for each in made.refusals] == ["model"]


def test_shares_are_equal_and_nobody_is_sent_to_calibrate() -> None:
    made = plan(box("a", 2, A100))
    found = made.hardware_calibration
    assert isinstance(found, NoCalibrationSection) and found.reason == TORCH.unmeasured
    assert (found.workload_distribution, found.calibration_notes) == ({"a.0": 0.5, "a.1": 0.5}, ())
    assert reason(made, "hardware_calibration.workload_distribution") == TORCH.unmeasured


def test_keys_of_the_other_framework_are_warned_of() -> None:
    made = plan(box("a", 2, A100), job={"unused": ("moments", "wire")})
    text = 'with framework = "torch" these keys are unused: moments, wire'
    assert text in [warning.text for warning in made.warnings]
    assert not [warning for warning in plan(box("a", 2, A100)).warnings if warning.name == "job"]


def test_a_command_with_a_precision_of_its_own_is_planned_with_it() -> None:
    command = ("accelerate", "launch", "--mixed_precision", "bf16", "train.py")
    keys = {"strategy": "deepspeed", "command": command, "model": None, "data": None}
    mlx_lm = {"precision": "auto", "zero_stage": 2}
    made = plan(box("v", 2, "Tesla V100-SXM2-32GB", 32), mlx_lm, model=None, job=keys)
    assert chosen(made).precision == "bf16"
    assert '"bf16": {' in section(made).files["ds_config.json"]


def test_what_a_machine_lacks_to_load_a_model_is_in_the_reason() -> None:
    small = box("h", 8, "NVIDIA H100 80GB HBM3", memory_total_bytes=64 * 2**30)
    made = plan(small, FULL, model=QWEN3_4B)
    assert "of the machine's memory" in reason(made, "settings.strategy")


def test_an_unknown_machine_may_have_a_gpu_for_fp16() -> None:
    made = plan(box("a", 2), {**FULL, "precision": "fp16"}, model=TINY, facts={})
    assert [issue.name for issue in made.refusals if issue.name == "precision"] == []


def test_a_task_is_not_refused_for_the_memory_of_a_training() -> None:
    job: dict[str, Any] = {"strategy": "ddp"}
    training = plan(box("one", 1, A100), FULL, model=LLAMA_70B, job=job)
    assert "memory" in [refusal.name for refusal in training.refusals]
    task = plan(box("one", 1, A100), FULL, model=LLAMA_70B, job={**job, "task": Task("evaluate", "run")})
    assert task.refusals == () and isinstance(task.memory, Disabled)
    assert "each rank sees itself whether it has room" in task.memory.reason
