"""The training plan: its arithmetic is closed for any cluster and job, what is not known is null with its reason, and
what cannot be launched is refused with a way out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checks import consistency, sync
from engine.checks.check import verdict
from engine.checks.context import CheckContext
from engine.checks.runner import plan_with_results, run_checks
from engine.cluster.transport.fleet import Fleet
from engine.config.models import CalibrationConfig, CheckpointConfig, ConsistencyConfig, JobConfig, PreflightConfig
from engine.errors import ENABLE_RDMA, size_text
from engine.launch.hostfile import write_hostfile
from engine.measurements import Calibration, LinkMeasure, MemoryProbe, NodeMeasure
from engine.models import CheckResult, CheckStatus, NodeFacts, NvidiaGpu, PreflightReport, PreRdmaSync
from engine.plan.checkpoints import state_every
from engine.plan.context import PlanInputs
from engine.plan.data_report import DataReport
from engine.plan.document import (
    FIRST_SECTIONS,
    CalibrationSection,
    ChosenSettings,
    ChunkingSection,
    Disabled,
    MemorySection,
    PlannedCheck,
    Source,
    TrainingPlan,
)
from engine.plan.explain import explained, summary
from engine.plan.network import NetworkPlan
from engine.plan.planner import make_plan
from engine.protocol.job import Strategy
from engine.protocol.partition import chunk_plan
from tests.unit.cluster.macs import mesh, ring
from tests.unit.plan.clusters import (
    LLAMA_70B,
    NOW,
    QWEN3_4B,
    QWEN3_32B,
    calibration,
    inputs,
    mac,
    plan_inputs,
    ultra_and_max,
)
from tests.unit.plan.test_against_mlx import addressed

SECTIONS = {
    "strategy": {"approach", "total_gpus", "nodes", "gpus_per_node", "parallelism", "layer_split", "world_size"},
    "batch_configuration": {
        *("per_gpu_batch_size", "total_batch_size", "gradient_accumulation_steps", "learning_rate", "warmup_epochs"),
        *("micro_batch", "learning_rate_rule", "base_learning_rate", "warmup_steps"),
    },
    "distributed_config": {"mlx_launch_command", "gradient_sync", "unified_memory", "mlx_env_vars"},
    "rdma_config": {"enabled", "platform", "backend", "expected_speedup", "env_vars", "setup"},
    "checkpoint_strategy": {
        *("approach", "async", "compression", "storage", "frequency", "retention", "expected_recovery_time"),
    },
    "performance_targets": {"throughput", "gpu_utilization", "checkpoint_overhead"},
    "pre_rdma_sync": {"sync_script", "validation_checks", "block_on_failure", "sync_status", "sync_output"},
    "hardware_calibration": {"workload_distribution", "macos_qos_api", "calibration_notes"},
}


FULL: dict[str, Any] = {"fine_tune_type": "full", "batch_size": 8}


def names(plan: TrainingPlan, kind: str) -> list[str]:
    return [each.name for each in getattr(plan, kind)]


def refusal(plan: TrainingPlan, name: str) -> str:
    return next(each.text for each in plan.refusals if each.name == name)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plan_inputs())
def test_the_arithmetic_is_closed(drawn: PlanInputs) -> None:
    plan = make_plan(drawn)
    batch, ranks, job = plan.batch_configuration, plan.strategy.world_size, drawn.config.job.mlx_lm
    assert plan.strategy.total_gpus == ranks == len(drawn.config.nodes)
    assert batch.per_gpu_batch_size is not None and batch.gradient_accumulation_steps is not None
    assert batch.per_gpu_batch_size * ranks * batch.gradient_accumulation_steps == pytest.approx(batch.total_batch_size)
    assert batch.total_batch_size is not None
    batch_size = job.get("batch_size", batch.total_batch_size // batch.gradient_accumulation_steps)
    refused = "strategy" in names(plan, "refusals")
    assert refused == (ranks == 1 and drawn.config.job.strategy in ("pipeline", "local"))
    if drawn.config.job.strategy == "pipeline":
        assert batch.micro_batch is None, "every stage sees all of it"
        assert 1 <= (plan.strategy.pipeline_micro_batches or 0) <= batch_size
    elif batch.micro_batch is None:
        assert "batch_size" in names(plan, "refusals") and batch_size < ranks
    else:
        assert sum(batch.micro_batch.values()) == batch_size and min(batch.micro_batch.values()) >= 1
    if (chosen := batch.suggested) is not None:
        assert chosen.per_gpu_batch_size * ranks * chosen.gradient_accumulation_steps == chosen.total_batch_size
        assert batch.largest_per_gpu_batch_size is None or chosen.per_gpu_batch_size <= batch.largest_per_gpu_batch_size
    assert sum(plan.hardware_calibration.workload_distribution.values()) == pytest.approx(1)
    if isinstance(chunks := plan.coordinator_chunking, ChunkingSection):
        cut = chunk_plan(chunks.dataset_size, chunks.chunk_size)
        covered = [cut.bounds(chunk) for chunk in range(cut.num_chunks)]
        assert len(covered) == chunks.num_chunks and covered[0][0] == 0 and covered[-1][1] == drawn.examples


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plan_inputs())
def test_a_pipelines_split_covers_all_layers_and_the_weaker_never_has_more(drawn: PlanInputs) -> None:
    job = drawn.config.job.model_copy(update={"strategy": "pipeline"})
    plan = make_plan(replace(drawn, config=drawn.config.model_copy(update={"job": job})))
    if plan.strategy.layer_split is None:
        assert drawn.model is None or "layer_split" in names(plan, "refusals")
        return
    assert isinstance(plan.memory, MemorySection)
    ranges = [tuple(map(int, part.split("-"))) for part in plan.strategy.layer_split.split(",")]
    assert [layer for start, end in ranges for layer in range(start, end)] == list(range(plan.memory.layers))
    sizes = [(rank.limit_bytes or 0, end - start) for rank, (start, end) in zip(plan.memory.ranks, ranges, strict=True)]
    assert all(less <= more for weak, less in sizes for strong, more in sizes if weak < strong)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plan_inputs())
def test_whatever_is_null_has_its_reason_and_the_document_can_be_read_again(drawn: PlanInputs) -> None:
    plan = make_plan(drawn)
    document = plan.document()
    assert TrainingPlan.model_validate(document) == plan
    unknown = {reason.key for reason in plan.reasons if reason.source is Source.UNKNOWN}
    for section, key in (
        ("performance_targets", "throughput"),
        ("rdma_config", "expected_speedup"),
        ("checkpoint_strategy", "expected_recovery_time"),
        ("distributed_config", "mlx_launch_command"),
        ("batch_configuration", "largest_per_gpu_batch_size"),
    ):
        assert (document[section][key] is None) == (f"{section}.{key}" in unknown), key
    assert all(text for _, text in summary(plan))
    assert {section for section, _ in explained(plan)} >= {"strategy", "batch_configuration"}


@pytest.mark.parametrize(("examples", "text"), [(1, "1 example, "), (1_000, "1,000 examples, "), (None, "not known: ")])
def test_a_summary_counts_the_examples(examples: int | None, text: str) -> None:
    plan = make_plan(inputs(ultra_and_max()))
    counted = plan.model_copy(update={"data": plan.data.model_copy(update={"examples": examples})})
    assert dict(summary(counted))["data"].startswith(text)


def test_the_document_has_the_keys_that_others_read() -> None:
    document = make_plan(inputs(ultra_and_max())).document()
    assert document["version"] == "2.0.0"
    for section, keys in SECTIONS.items():
        assert keys <= document[section].keys(), section
    assert isinstance(document["verification_steps"], list)
    assert {"worker_consistency", "coordinator_chunking", "pre_flight_checklist"} <= document.keys()


def test_the_sections_of_preflight_have_the_keys_that_others_read() -> None:
    checks = (
        PlannedCheck(name="hardware_layer", what="hardware", overridden=False),
        PlannedCheck(name="ports", what="ports", overridden=True),
    )
    plan = make_plan(inputs(ultra_and_max(), settings={"batch_size": 8}, checks=checks, examples=150_000))
    document = plan.document()
    compared = document["worker_consistency"]
    keys = ("consistency_threshold", "is_consistent", "script_hash", "byzantine_detection")
    assert [compared[key] for key in keys] == [0.95, None, None, True] and "tokenizer" in compared["validation_checks"]
    chunks = document["coordinator_chunking"]
    assert "gc.collect()" in chunks["memory_management"]
    assert chunks["progress_reporting"] == "Processing chunk 1/3 (33% complete)"
    checklist = document["pre_flight_checklist"]
    assert (checklist["block_on_failure"], checklist["overall_status"]) == (True, "pending")
    assert checklist["validation_layers"] == ["hardware_layer"]
    assert document["rdma_config"]["network"] == plan.document("v1")["rdma_config"]["network"] == "TCP"
    report = PreflightReport(
        checks=[
            verdict("hardware_layer", CheckStatus.FAIL, "no GPU"),
            verdict("ports", CheckStatus.SKIP, "overridden"),
        ],
        overall_status=CheckStatus.FAIL,
        finished_at=NOW,
    )
    after = plan_with_results(plan, report).document()["pre_flight_checklist"]
    assert after["overall_status"] == "fail"
    assert [(check["status"], check["summary"]) for check in after["checks"]] == [
        ("fail", "no GPU"),
        ("skip", "overridden"),
    ]


def test_a_recovery_takes_as_long_as_the_newest_ones_have_taken() -> None:
    measured = make_plan(inputs(ultra_and_max(), recoveries_s=(9.0, 30.0, 12.0, 11.0, 10.0, 500.0)))
    assert measured.checkpoint_strategy.expected_recovery_time == 11.0
    unknown = make_plan(inputs(ultra_and_max()))
    assert unknown.checkpoint_strategy.expected_recovery_time is None


def test_the_largest_batch_agrees_with_a_measured_peak() -> None:
    """The estimate names another batch than what is measured to fit."""
    taken = calibration({}, **PROBED)
    for batch, fits in ((8, True), (400, True), (800, False)):
        plan = make_plan(inputs(ultra_and_max(), settings={"batch_size": batch}, calibration=taken))
        assert isinstance(plan.memory, MemorySection)
        largest = plan.batch_configuration.largest_per_gpu_batch_size
        assert largest is not None and all(rank.source == "calibration" for rank in plan.memory.ranks)
        assert (batch // 2 <= largest) == fits == all(rank.fits for rank in plan.memory.ranks)


def test_the_advice_on_sizes_agrees_with_the_verdict_on_that_mac() -> None:
    """A Mac of 128 GB has 2^37 bytes: what fits three quarters of them is not called too small beside the verdict."""
    for batch in range(1, 80):
        plan = make_plan(inputs([mac("max", 0, "Apple M4 Max", 128)], settings=FULL | {"batch_size": batch}))
        (sizes,) = (each.text for each in plan.advice if each.name == "sizes")
        too_small = "128 GB: too small" in sizes
        assert too_small == ("memory" in names(plan, "refusals")), batch
    # Three quarters of its 137,438,953,472 bytes, in the unit in which it is sold, in every sentence.
    (refused,) = (each.text for each in plan.refusals if each.name == "memory")
    assert re.search(r"max needs [\d.]+ GB of 96 GB", refused) and re.search(
        r"128 GB: too small \([\d.]+ GB of 96 GB\)", sizes
    )


@pytest.mark.parametrize("given", [{}, {"batch_size": 8}, {"batch_size": 6, "grad_accumulation_steps": 3}])
def test_a_suggestion_is_made_whatever_the_job_names(given: dict[str, int]) -> None:
    plan = make_plan(inputs(ultra_and_max(), settings={"iters": 1000, **given}))
    suggested = plan.batch_configuration.suggested
    assert suggested is not None and suggested.warmup_steps is not None
    keys = tomllib.loads(suggested.job_keys)
    assert keys["batch_size"] * keys["grad_accumulation_steps"] == suggested.total_batch_size
    assert (
        keys["learning_rate"] == suggested.learning_rate == pytest.approx(1e-5 * suggested.total_batch_size**0.5, 0.05)
    )
    assert keys["lr_schedule"]["warmup"] == suggested.warmup_steps
    if given:
        assert suggested.total_batch_size >= given["batch_size"] * given.get("grad_accumulation_steps", 1)
    applied = make_plan(inputs(ultra_and_max(), settings={"iters": 1000, **keys})).batch_configuration
    assert (applied.total_batch_size, applied.warmup_steps) == (suggested.total_batch_size, suggested.warmup_steps)
    assert applied.learning_rate == suggested.learning_rate
    assert applied.suggested is not None and "lr_schedule" not in applied.suggested.job_keys, "the job's own stays"


def test_no_more_examples_are_suggested_for_a_batch_than_there_are() -> None:
    suggested = make_plan(inputs(ultra_and_max(), examples=7)).batch_configuration.suggested
    assert suggested is not None and tomllib.loads(suggested.job_keys)["batch_size"] == 6
    assert make_plan(inputs(ultra_and_max(), examples=1)).batch_configuration.suggested is None


def test_the_older_document_has_the_first_seven_sections_alone() -> None:
    assert tuple(make_plan(inputs(ultra_and_max())).document("v1")) == FIRST_SECTIONS


def test_the_known_split_over_an_ultra_and_a_max() -> None:
    plan = make_plan(inputs(ultra_and_max()[::-1], settings={"fine_tune_type": "full"}, strategy="pipeline"))
    assert plan.strategy.layer_split == "0-8,8-36"
    assert plan.distributed_config.mlx_launch_command is None


def test_a_pipelines_layers_are_the_jobs_where_it_says_them() -> None:
    config = inputs(ultra_and_max(), settings={"fine_tune_type": "full"}, strategy="pipeline")
    job = config.config.job.model_copy(update={"layer_split": "0-20,20-36"})
    plan = make_plan(replace(config, config=config.config.model_copy(update={"job": job})))
    assert plan.strategy.layer_split == "0-20,20-36"
    assert isinstance(plan.memory, MemorySection)
    first, last = plan.memory.ranks
    assert first.activations_bytes and last.activations_bytes and first.activations_bytes > last.activations_bytes
    job = job.model_copy(update={"layer_split": "0-20,20-32"})
    plan = make_plan(replace(config, config=config.config.model_copy(update={"job": job})))
    assert "ends at layer 32, and the model has 36" in refusal(plan, "layer_split")


def test_a_sharded_layer_keeps_its_input_alone_as_with_gradient_checkpointing() -> None:
    full = {"fine_tune_type": "full", "batch_size": 8}
    sharded = make_plan(inputs(ultra_and_max(), settings=full, strategy="sharded")).memory
    checkpointed = make_plan(inputs(ultra_and_max(), settings={**full, "grad_checkpoint": True})).memory
    assert isinstance(sharded, MemorySection) and isinstance(checkpointed, MemorySection)
    for here, there in zip(sharded.ranks, checkpointed.ranks, strict=True):
        assert here.activations_bytes == there.activations_bytes
        assert here.weights_bytes is not None and there.weights_bytes is not None
        assert here.weights_bytes < 0.6 * there.weights_bytes


def test_clipping_and_the_wire_are_in_the_estimate() -> None:
    for changes in ({"max_grad_norm": 1.0}, {"wire": "int8"}):
        nodes = ultra_and_max() if "wire" in changes else ultra_and_max()[:1]
        without, found = (
            make_plan(inputs(nodes, settings={"fine_tune_type": "full", **more})).memory for more in ({}, changes)
        )
        assert isinstance(without, MemorySection) and isinstance(found, MemorySection)
        kept = [rank.gradients_bytes + rank.optimizer_bytes for rank in (without.ranks[0], found.ranks[0])]
        assert kept[1] == kept[0] + 2 * without.trainable_parameters


def test_a_model_type_that_cannot_be_partitioned_is_refused() -> None:
    for strategy, refused in (("data", False), ("local", False), ("sharded", True), ("pipeline", True)):
        plan = make_plan(inputs(ultra_and_max(), model={**QWEN3_32B, "model_type": "gemma2"}, strategy=strategy))
        assert ("strategy" in names(plan, "refusals")) == refused
    assert "does not support model_type gemma2" in refusal(plan, "strategy")


def test_a_model_type_is_refused_in_printable_words() -> None:
    model = {**QWEN3_32B, "model_type": "\ud800\x1b[2J" + "x" * 1000}
    refused = refusal(make_plan(inputs(ultra_and_max(), model=model, strategy="sharded")), "strategy")
    assert refused.encode() and refused.isprintable() and len(refused) < 300


def test_an_m4_max_takes_at_most_eight_layers_in_full_fine_tuning() -> None:
    two = [mac("a", 0, "Apple M4 Max", 128), mac("b", 1, "Apple M4 Max", 128)]
    plan = make_plan(inputs(two, settings={"fine_tune_type": "full"}, strategy="pipeline"))
    assert "20 of 36 layers are left over" in refusal(plan, "layer_split")
    lora = make_plan(inputs(two, strategy="pipeline"))
    assert lora.strategy.layer_split == "0-18,18-36"


def test_a_model_that_fits_nowhere_is_refused_with_the_way_out_and_its_override() -> None:
    plan = make_plan(inputs(ultra_and_max(), settings={"fine_tune_type": "full"}, model=LLAMA_70B))
    assert plan.refused and "it fits on no node" in refusal(plan, "memory")
    assert plan.batch_configuration.suggested is None
    assert "it fits with ultra alone (" in refusal(plan, "memory")
    assert 'strategy = "sharded" over 2 nodes like ultra (' in refusal(plan, "memory")
    assert all(each.override == "flightdeck launch --skip hardware_layer" for each in plan.refusals)


def test_where_it_fits_on_one_node_only_the_other_is_named() -> None:
    settings = {"fine_tune_type": "full", "grad_checkpoint": True, "batch_size": 2, "max_seq_length": 512}
    plan = make_plan(inputs(ultra_and_max(), settings=settings, model=QWEN3_32B))
    assert isinstance(plan.memory, MemorySection)
    assert plan.memory.ranks[1].fits is False and "max needs" in refusal(plan, "memory")


def test_nothing_fits_a_node_whose_gpu_may_use_no_memory() -> None:
    ultra, _ = ultra_and_max()
    plan = make_plan(inputs([ultra, mac("none", 1, "Apple M4 Max", 128, gpu_limit_bytes=0)]))
    assert plan.batch_configuration.largest_per_gpu_batch_size == 0 and "memory" in names(plan, "refusals")


def validating(plan: TrainingPlan) -> dict[str, bool]:
    return {node.node: node.validates for node in plan.nodes}


def with_validate(drawn: PlanInputs, **named: bool) -> PlanInputs:
    nodes = tuple(node.model_copy(update={"validates": named.get(node.name)}) for node in drawn.config.nodes)
    return replace(drawn, config=drawn.config.model_copy(update={"nodes": nodes}))


def test_an_m4_max_is_kept_out_of_the_validation_of_4b_in_full_fine_tuning() -> None:
    """hw.memsize of an M4 Max with 128 GB is 137,438,953,472."""
    drawn = inputs(ultra_and_max(), settings=FULL)
    assert drawn.facts["max"].memory_total_bytes == 137_438_953_472
    plan = make_plan(drawn)
    assert validating(plan) == {"ultra": True, "max": False}
    advice = next(each for each in plan.advice if each.name == "gpu_watchdog_validation")
    assert advice.disputed and "max: an M4 Max" in advice.text and "disputed" in advice.text
    assert "It is kept out of validation" in advice.text and "Turn validation off" not in advice.text
    assert "validate = true overrides" in next(each.reason for each in plan.reasons if each.key == "nodes")


@pytest.mark.parametrize(
    ("settings", "more", "named", "expected"),
    [
        ({}, {}, {}, {"ultra": True, "max": True}),
        (FULL, {"model": QWEN3_4B | {"num_hidden_layers": 12}}, {}, {"ultra": True, "max": True}),
        (FULL, {}, {"max": True}, {"ultra": True, "max": True}),
        (FULL, {}, {"ultra": False}, {"ultra": False, "max": True}),
        ({}, {}, {"ultra": False}, {"ultra": False, "max": True}),
        (FULL | {"val_batches": 0}, {}, {}, {"ultra": True, "max": True}),
        (FULL | {"val_batches": 0, "test": True}, {}, {}, {"ultra": True, "max": False}),
        (FULL, {"strategy": "sharded"}, {}, {"ultra": True, "max": True}),
        (FULL, {"strategy": "local"}, {}, {"ultra": True, "max": False}),
    ],
    ids=["lora", "1.5B", "overridden", "nobody else", "by hand", "none", "test", "sharded", "local"],
)
def test_who_validates(
    settings: dict[str, Any], more: dict[str, Any], named: dict[str, bool], expected: dict[str, bool]
) -> None:
    plan = make_plan(with_validate(inputs(ultra_and_max(), settings=settings, **more), **named))
    assert validating(plan) == expected
    if settings.get("val_batches") == 0 and "test" not in settings:
        assert "gpu_watchdog_validation" not in names(plan, "advice"), "there is none to turn off"


def test_on_one_machine_alone_nobody_can_validate_in_its_place() -> None:
    plan = make_plan(inputs([mac("max", 0, "Apple M4 Max", 128)], settings=FULL))
    assert validating(plan) == {"max": True}
    advice = next(each for each in plan.advice if each.name == "gpu_watchdog_validation")
    assert "Turn validation off (val_batches = 0). " in advice.text


def test_training_7b_on_an_m4_max_is_advised_against() -> None:
    large = QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12_288}
    plan = make_plan(inputs(ultra_and_max(), settings=FULL, model=large))
    assert {"gpu_watchdog_training", "gpu_watchdog_validation"} <= set(names(plan, "advice"))


@pytest.mark.parametrize(("value", "warned"), [("1", True), ("0", False), (None, False)])
def test_mlxs_fast_synchronisation_is_the_jobs_choice_with_a_warning(value: str | None, *, warned: bool) -> None:
    env = {"A": "b"} | ({} if value is None else {"MLX_METAL_FAST_SYNCH": value})
    plan = make_plan(inputs(ultra_and_max(), job={"env": env}))
    assert plan.rdma_config.env_vars == ({} if value is None else {"MLX_METAL_FAST_SYNCH": value})
    assert any("deadlock the GPU" in each.text for each in plan.warnings) == warned
    assert any("MLX_METAL_FAST_SYNCH=1 is not set" in step for step in plan.rdma_config.setup) != warned


def test_what_is_chosen_is_in_the_document_with_its_reason() -> None:
    small = inputs([mac("one", 0, "Apple M4 Max", 64)], settings={"fine_tune_type": "full", "batch_size": 1})
    plan = make_plan(small)
    assert isinstance(plan.settings, ChosenSettings) and not plan.refused
    chosen = plan.document()["settings"]
    assert (chosen["optimizer_precision"], chosen["moments"]) == ("kahan", "bfloat16") and chosen["grad_checkpoint"] > 0
    rows = dict(dict(explained(plan))["settings"])
    assert "the next more precise would need" in rows["optimizer_precision = kahan"]
    assert "as few layers are recomputed" in rows[f"grad_checkpoint = {chosen['grad_checkpoint']}"]
    fixed = make_plan(replace(small, config=small.config.model_copy(update={"job": job_with(small, **chosen)})))
    assert fixed.settings == plan.settings and fixed.memory == plan.memory
    assert dict(dict(explained(fixed))["settings"])["moments = bfloat16"] == "the job sets it (configuration)"


def job_with(plan: PlanInputs, **settings: Any) -> JobConfig:
    job = plan.config.job
    return job.model_copy(update={"mlx_lm": {**job.mlx_lm, **settings}, "given": (*job.given, *settings)})


def test_the_advice_on_sizes_is_what_the_estimate_says_of_one_mac() -> None:
    settings = {"fine_tune_type": "full", "batch_size": 2}
    plan = make_plan(inputs(ultra_and_max(), settings=settings, model=QWEN3_32B))
    advice = next(each.text for each in plan.advice if each.name == "sizes")
    assert "64 GB: too small (" in advice and "128 GB: too small (" in advice
    assert "512 GB: optimizer_precision kahan, moments bfloat16" in advice
    assert "ultra alone" in refusal(plan, "memory")


def test_the_advice_on_sizes_is_the_same_whatever_the_strategy() -> None:
    settings = {"fine_tune_type": "full", "batch_size": 4}
    texts = set()
    for strategy in ("data", "sharded", "pipeline"):
        plan = make_plan(inputs(ultra_and_max(), settings=settings, model=QWEN3_32B, strategy=strategy))
        texts.add(next(each.text for each in plan.advice if each.name == "sizes"))
    assert len(texts) == 1


def test_the_summary_names_settings_that_were_chosen_to_fit() -> None:
    settings = {"fine_tune_type": "full", "batch_size": 2}
    texts = [
        dict(summary(make_plan(inputs(ultra_and_max()[:1], settings=settings, model=model))))["memory"]
        for model in (QWEN3_4B, QWEN3_32B)
    ]
    assert "optimizer_precision" not in texts[0]
    assert "; with optimizer_precision kahan, moments bfloat16, " in texts[1] and " layers recomputed" in texts[1]


def over(bytes_per_s: float, **more: Any) -> Calibration:
    """Two equal nodes with a link of that speed, and 4 thousand million gradients of 16 bits."""
    link = LinkMeasure(nodes=("ultra", "max"), latency_s=1e-3, bandwidth_bytes_per_s=bytes_per_s)
    measured: dict[str, Any] = {"all_ranks": link, "gradient_bytes": 16 * 10**9, "element_bytes": 2, **more}
    return calibration({"ultra": 1.0, "max": 1.0}, **measured)


def local_inputs(**more: Any) -> PlanInputs:
    given: dict[str, Any] = {"settings": FULL, "strategy": "local", "job": {"strategy": "local"}, **more}
    return inputs(ultra_and_max(), **given)


def test_local_says_what_it_is_and_what_it_costs() -> None:
    plan = make_plan(
        local_inputs(settings={**FULL, "local_steps": 32, "save_every": 50, "val_batches": 0}, calibration=over(1e8))
    )
    section, reasons = plan.strategy, {reason.key: reason for reason in plan.reasons}
    assert isinstance(plan.memory, MemorySection)
    trained = plan.memory.trainable_parameters
    assert (section.local_steps, section.averaging_bytes) == (32, -(-trained * 9 // 16))
    assert "another algorithm" in section.approach and not plan.refused
    assert reasons["strategy.local_steps"].source is Source.USER
    # In 1000 iterations 31 for local_steps, and 20 for saves, of which that after 800 is the same.
    assert "one for 20 updates in the mean" in reasons["strategy.local_steps"].reason
    costs = f"{size_text(trained * 9 / 16 / 20)} for each update, where a rank sends {size_text(2 * trained)} with"
    assert costs in reasons["strategy.averaging_bytes"].reason
    # 2.25 GB in one direction after the other, on a link that takes 10 ns for each byte less its latency.
    assert section.averaging_s == pytest.approx(2 * 4 * 9 / 16 * (10 - 1e6 / 2**22), rel=1e-3)
    step = plan.performance_targets.step_s
    assert section.averaging_s is not None and step == pytest.approx(4 + section.averaging_s / 20 + 1e-3)
    assert f"the weights averaged at least every 32 updates ({size_text(trained * 9 / 16)} each way)" in str(
        summary(plan)
    )
    assert plan.worker_consistency.while_training == Disabled(
        reason="local: the ranks' weights differ between averagings"
    )
    approach = reasons["checkpoint_strategy.approach"].reason
    assert "any of them is enough to resume" in approach and "stores its own state" in str(
        plan.checkpoint_strategy.storage
    )
    assert plan.rdma_config.backend == "ring" and "RDMA is of no use" in plan.rdma_config.reason
    assert plan.rdma_config.setup == () and "rdma_config" not in names(plan, "warnings")
    assert plan.distributed_config.mlx_launch_command is None
    assert plan.distributed_config.launch_notes == ("no command: stock mlx-lm does not train strategy local",)


def test_other_strategies_average_nothing_and_one_node_cannot() -> None:
    data = make_plan(inputs(ultra_and_max(), settings=FULL, calibration=over(1e8))).strategy
    assert (data.local_steps, data.averaging_bytes, data.averaging_s) == (None, None, None)
    alone = make_plan(inputs(ultra_and_max()[:1], strategy="local"))
    assert "at least two nodes" in refusal(alone, "strategy")
    unknown = make_plan(local_inputs(model=None))
    assert (unknown.strategy.averaging_bytes, unknown.strategy.averaging_s) == (None, None)
    unexplained = {reason.key for reason in unknown.reasons if reason.source is Source.UNKNOWN}
    assert {"strategy.averaging_bytes", "strategy.averaging_s"} <= unexplained


@pytest.mark.parametrize("wire", ["auto", "int8"])
def test_local_is_advised_where_the_exchange_takes_longer_than_the_computation(wire: str) -> None:
    settings = {**FULL, "wire": wire}
    plan = make_plan(inputs(ultra_and_max(), settings=settings, calibration=over(1e8)))
    text = next(each.text for each in plan.advice if each.name == "local")
    data, local, alone = (float(seconds) for seconds in re.findall(r"([0-9.]+) s(?= with | on )", text))
    assert data == pytest.approx(plan.performance_targets.step_s, abs=0.01) and alone == 8
    assert ('"local" and wire = "auto"' in text) == (wire == "int8") and "another algorithm" in text
    chosen = make_plan(local_inputs(calibration=over(1e8)))
    assert local == pytest.approx(chosen.performance_targets.step_s, abs=0.01) and local < data
    assert not {"local", "wire"} & set(names(chosen, "advice"))


@pytest.mark.parametrize(
    ("taken", "strategy", "named"),
    [
        (over(1e10), "data", ""),
        (over(1e10), "local", "local_gains_nothing"),
        (over(2e6), "local", "local_gains_nothing"),
        (over(1e8, connected_as=("data",)), "data", ""),
        (over(1e8, connected_as=("data",)), "local", ""),
        (over(1e8, connected_as=("local",)), "data", ""),
        (over(1e8, connected_as=("local",)), "local", ""),
        (None, "local", ""),
    ],
    ids=[
        "fast data",
        "fast local",
        "slower than one node",
        "RDMA data",
        "RDMA local",
        "TCP data",
        "TCP local",
        "not calibrated",
    ],
)
def test_local_is_not_advised_where_it_gains_nothing(taken: Calibration | None, strategy: Strategy, named: str) -> None:
    plan = make_plan(local_inputs(strategy=strategy, job={"strategy": strategy}, calibration=taken))
    assert {name for name in names(plan, "advice") if name.startswith("local")} == ({named} if named else set())


def test_int8_is_advised_where_the_links_decide() -> None:
    settings: dict[str, Any] = {"fine_tune_type": "full", "batch_size": 8}
    slow = LinkMeasure(nodes=("ultra", "max"), latency_s=1e-3, bandwidth_bytes_per_s=1e8)
    measured: dict[str, Any] = {"all_ranks": slow, "gradient_bytes": 16 * 10**9, "element_bytes": 2}
    speeds = {"ultra": 3.0, "max": 1.0}
    plan = make_plan(inputs(ultra_and_max(), settings=settings, calibration=calibration(speeds, **measured)))
    text = next(each.text for each in plan.advice if each.name == "wire")
    steps = {wire: float(seconds) for wire, seconds in re.findall(r'"(float32|auto|int8)" ([0-9.]+) s', text)}
    assert steps["int8"] < steps["auto"] < steps["float32"] and "2 bytes more per trained parameter" in text
    assert plan.performance_targets.step_s == pytest.approx(steps["auto"], abs=0.01)
    for other in ({"calibration": calibration(speeds)}, {"settings": {**settings, "wire": "int8"}}):
        given: dict[str, Any] = {"settings": settings, "calibration": calibration(speeds, **measured), **other}
        assert "wire" not in names(make_plan(inputs(ultra_and_max(), **given)), "advice")


def test_int8_is_not_advised_to_eight_ranks_which_would_send_no_less() -> None:
    for ranks, advised in ((7, True), (8, False)):
        nodes = [mac(f"n{rank}", rank, "Apple M3 Ultra", 512) for rank in range(ranks)]
        slow = LinkMeasure(nodes=tuple(node.node for node in nodes), latency_s=1e-3, bandwidth_bytes_per_s=1e8)
        taken = calibration({node.node: 1.0 for node in nodes}, all_ranks=slow, gradient_bytes=16 * 10**9)
        settings = {"fine_tune_type": "full", "batch_size": 8}
        plan = make_plan(inputs(nodes, settings=settings, calibration=taken))
        assert plan.performance_targets.step_s is not None
        assert ("wire" in names(plan, "advice")) is advised


def test_adam_in_the_parameters_own_type_is_advised_against() -> None:
    plan = make_plan(inputs(ultra_and_max(), settings={"optimizer_precision": "parameter"}))
    assert "adam_in_16_bits" in names(plan, "advice")


def test_measured_nodes_share_by_what_they_do_and_the_throughput_follows() -> None:
    plan = make_plan(
        inputs(ultra_and_max(), settings={"batch_size": 8}, calibration=calibration({"ultra": 3, "max": 1}))
    )
    assert plan.batch_configuration.micro_batch == {"ultra": 6, "max": 2}
    assert isinstance(plan.hardware_calibration, CalibrationSection)
    section = plan.hardware_calibration.model_dump()
    assert section["measured_performance"] == {"ultra": 3, "max": 1}
    assert section["measured_details"]["max"] == {"spread": 0.02, "tokens_per_s": None, "problem": None}
    assert plan.performance_targets.throughput == pytest.approx(4, rel=0.05)
    assert "hardware_calibration" in names(plan, "warnings"), "they vary by half"


@pytest.mark.parametrize("strategy", ["sharded", "pipeline"])
def test_a_calibration_of_one_strategy_predicts_no_other(strategy: Strategy) -> None:
    taken = calibration({"ultra": 3, "max": 1})
    plan = make_plan(inputs(ultra_and_max(), settings={"batch_size": 8}, calibration=taken, strategy=strategy))
    assert plan.performance_targets.throughput is None


def test_nodes_of_like_speed_share_equally() -> None:
    plan = make_plan(inputs(ultra_and_max(), calibration=calibration({"ultra": 0.85, "max": 0.84})))
    assert plan.hardware_calibration.workload_distribution == {"ultra": 0.5, "max": 0.5}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "hardware calibration missing, assuming equal performance"),
        ({"config": {"calibration": CalibrationConfig(enabled=False)}}, "[calibration] enabled = false"),
    ],
)
def test_without_a_calibration_nothing_is_guessed(more: dict[str, Any], reason: str) -> None:
    plan = make_plan(inputs(ultra_and_max(), **more))
    assert isinstance(plan.hardware_calibration, Disabled) and plan.hardware_calibration.reason == reason
    assert plan.performance_targets.throughput is None
    assert "hardware_calibration" in names(plan, "warnings")


def test_an_old_calibration_is_not_used_with_a_warning() -> None:
    taken = calibration({"ultra": 3, "max": 1}, age=timedelta(days=40))
    plan = make_plan(inputs(ultra_and_max(), settings={"batch_size": 8}, calibration=taken))
    assert plan.batch_configuration.micro_batch == {"ultra": 4, "max": 4}
    assert plan.performance_targets.throughput is None
    assert any("40 days old" in warning.text for warning in plan.warnings)


PROBED: dict[str, Any] = {
    "nodes": tuple(
        NodeMeasure(
            node=name,
            host=f"{name}.local",
            examples_per_s=2.0,
            probes=tuple(MemoryProbe(batch=batch, peak_bytes=7 * 10**9 + batch * 10**9) for batch in (1, 2)),
        )
        for name in ("ultra", "max")
    )
}


@pytest.mark.parametrize(
    ("age", "config", "source", "reason"),
    [
        (timedelta(hours=1), {}, "calibration", "two probe steps"),
        (timedelta(days=40), {}, "estimate", "calibration not used: the calibration is 40 days old"),
        (
            timedelta(hours=1),
            {"calibration": CalibrationConfig(enabled=False)},
            "estimate",
            "calibration not used: [calibration] enabled = false",
        ),
    ],
    ids=["usable", "old", "switched off"],
)
def test_memory_and_links_come_from_a_usable_calibration(
    age: timedelta, config: dict[str, Any], source: str, reason: str
) -> None:
    taken = calibration({}, age=age, **PROBED)
    plan = make_plan(inputs(ultra_and_max(), settings={"batch_size": 8}, config=config, calibration=taken))
    assert isinstance(plan.memory, MemorySection)
    assert {rank.source for rank in plan.memory.ranks} == {source}
    assert reason in next(each.reason for each in plan.reasons if each.key == "memory.ultra")
    assert (plan.rdma_config.latency_s is not None) == (source == "calibration")


def test_probe_steps_with_other_settings_say_nothing_of_the_peak() -> None:
    other = ChosenSettings(grad_checkpoint=True).model_dump()
    plan = make_plan(
        inputs(ultra_and_max(), settings={"batch_size": 8}, calibration=calibration({}, settings=other, **PROBED))
    )
    assert isinstance(plan.memory, MemorySection)
    assert {rank.source for rank in plan.memory.ranks} == {"estimate"}


def test_parts_that_are_switched_off_warn_by_name() -> None:
    config = {
        "preflight": PreflightConfig(sync=False, consistency=False),
        "consistency": ConsistencyConfig(enabled=False),
    }
    plan = make_plan(inputs(ultra_and_max(), config=config, job={"chunking": False}))
    document = plan.document()
    for part in ("pre_rdma_sync", "worker_consistency", "coordinator_chunking"):
        assert document[part]["enabled"] is False and document[part]["reason"], part
    assert {"pre_rdma_sync", "worker_consistency", "consistency", "coordinator_chunking"} <= set(
        names(plan, "warnings")
    )


def test_one_node_needs_neither_comparison_nor_rdma() -> None:
    plan = make_plan(inputs(ultra_and_max()[:1]))
    assert not plan.worker_consistency.enabled and not plan.rdma_config.enabled
    assert plan.rdma_config.backend == "none"


HERE = {"ssh": "127.0.0.1"}


@pytest.mark.parametrize(
    ("nodes", "preflight", "job"),
    [
        ([{}, {}], {}, {}),
        ([HERE, HERE], {}, {}),
        ([HERE], {}, {}),
        ([HERE, {}], {"skip": ("pre_rdma_sync", "worker_consistency")}, {}),
        ([HERE, HERE], {"sync": False, "consistency": False}, {}),
        ([{}, {}], {"sync": False, "consistency": False}, {"command": ("python", "train.py")}),
    ],
    ids=["two nodes", "this machine twice", "this machine", "left out", "switched off here", "switched off"],
)
async def test_the_plan_predicts_what_preflight_syncs_and_compares(
    tmp_path: Path, nodes: list[dict[str, str]], preflight: dict[str, Any], job: dict[str, Any]
) -> None:
    asked = inputs(ultra_and_max()[: len(nodes)], config={"preflight": PreflightConfig(**preflight)}, job=job)
    changed = tuple(node.model_copy(update=new) for node, new in zip(asked.config.nodes, nodes, strict=True))
    config = asked.config.model_copy(update={"nodes": changed})
    plan = make_plan(replace(asked, config=config))

    async def passes(_: CheckContext) -> CheckResult:
        return verdict("checked", CheckStatus.PASS, "")

    checks = {check.name: replace(check, run=passes, needs=(), after=()) for check in (sync.CHECK, consistency.CHECK)}
    context = CheckContext(config, Fleet(tmp_path))
    report = await run_checks(context, on_result=lambda _: None, checks=checks, audit=lambda *_: None)
    await context.close()
    found = [(part.enabled, part.reason) for part in (plan.pre_rdma_sync, plan.worker_consistency)]
    for (enabled, reason), result in zip(found, report.checks, strict=True):
        assert enabled == (result.status is CheckStatus.PASS), result
        assert enabled or reason == ("skipped by name" if config.preflight.skip else result.summary)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (
            CheckResult(
                name="pre_rdma_sync",
                status=CheckStatus.PASS,
                summary="",
                detail=PreRdmaSync(
                    enabled=True,
                    sync_script="s",
                    validation_checks=("1 of 1 trees",),
                    block_on_failure=True,
                    sync_status="success",
                    sync_output=("done",),
                ),
            ),
            {"sync_status": "success", "sync_output": ("done",), "validation_checks": ("1 of 1 trees",)},
        ),
        (
            CheckResult(name="pre_rdma_sync", status=CheckStatus.SKIP, summary="not run: ssh_connectivity failed"),
            {"sync_status": "not_run", "reason": "not run: ssh_connectivity failed"},
        ),
    ],
    ids=["synced", "not run"],
)
def test_a_plan_after_preflight_has_the_result_of_the_sync(result: CheckResult, expected: dict[str, Any]) -> None:
    report = PreflightReport(checks=[result], overall_status=CheckStatus.PASS, finished_at=NOW)
    plan = plan_with_results(make_plan(inputs(ultra_and_max())), report)
    part = plan.pre_rdma_sync.model_dump()
    assert {key: part[key] for key in expected} == expected
    assert TrainingPlan.model_validate(plan.document()) == plan


def test_a_custom_command_compares_its_files_and_the_worker() -> None:
    command = {"command": ("python", "train.py", "--config", "{workdir}/lora.yaml", "out.txt"), "mlx_lm": {}}
    own = make_plan(inputs(ultra_and_max(), job=command, model=None)).worker_consistency.validation_checks
    assert own == ("train.py", "{workdir}/lora.yaml", "node bundle")
    assert "tokenizer" in make_plan(inputs(ultra_and_max())).worker_consistency.validation_checks


@pytest.mark.parametrize(
    ("workdirs", "expected"),
    [
        (("~/job", "~/job"), ("same workdir tree (paths, SHA-256) on all nodes",)),
        (("~", "~"), ("not compared on ultra, max: the workdir is the home directory",)),
        (("~/job", "~"), ("one workdir: nothing to compare", "not compared on max: the workdir is the home directory")),
    ],
)
def test_a_home_directory_is_not_compared(workdirs: tuple[str, ...], expected: tuple[str, ...]) -> None:
    asked = inputs(ultra_and_max())
    nodes = tuple(
        node.model_copy(update={"workdir": workdir}) for node, workdir in zip(asked.config.nodes, workdirs, strict=True)
    )
    plan = make_plan(replace(asked, config=asked.config.model_copy(update={"nodes": nodes})))
    assert plan.pre_rdma_sync.validation_checks == expected


@pytest.mark.parametrize(("examples", "chunks"), [(50_000, 1), (49_999, None), (1, None), (125_000, 3)])
def test_chunking_begins_with_a_whole_chunk(examples: int, chunks: int | None) -> None:
    part = make_plan(inputs(ultra_and_max(), examples=examples)).coordinator_chunking
    assert (part.num_chunks if isinstance(part, ChunkingSection) else None) == chunks


@pytest.mark.parametrize("examples", [0, -100])
def test_a_dataset_without_examples_is_refused(examples: int) -> None:
    assert f"dataset_size = {examples}" in refusal(
        make_plan(inputs(ultra_and_max(), examples=examples)), "coordinator_chunking"
    )


def test_poisoned_data_is_refused_and_data_that_is_not_ready_warns() -> None:
    poisoned = make_plan(inputs(ultra_and_max(), report=DataReport(poisoning_detected=True)))
    assert "poisoning_detected" in refusal(poisoned, "data_quality")
    unready = make_plan(inputs(ultra_and_max(), report=DataReport(overall_ready=False)))
    assert not unready.refused and "data_quality" in names(unready, "warnings")


def test_a_report_that_cannot_be_read_warns() -> None:
    plan = make_plan(inputs(ultra_and_max(), report_problem="/r.json: the data report cannot be read"))
    assert isinstance(plan.data_quality, Disabled) and "data_quality" in names(plan, "warnings")


@pytest.mark.parametrize(
    ("keys", "warned"),
    [({"save_every": 1780, "iters": 20_000}, True), ({"save_every": 900, "iters": 20_000}, False)],
)
def test_saves_too_far_apart_warn(keys: dict[str, int], *, warned: bool) -> None:
    plan = make_plan(inputs(ultra_and_max(), settings=keys))
    assert ("checkpoint_strategy" in names(plan, "warnings")) == warned


COSINE = {"name": "cosine_decay", "arguments": [1e-4, 100]}


@pytest.mark.parametrize(
    ("keys", "schedule", "expected"),
    [
        ({"iters": 50}, COSINE | {"warmup": 60}, "warms up for 60 updates, and the run has 50 updates: the rate never"),
        ({"iters": 50}, COSINE, "cosine_decay in lr_schedule ends after 100 updates, and the run has 50 updates"),
        ({"iters": 105}, COSINE | {"warmup": 10}, "ends after 100 updates after 10 of warm-up"),
        # An incomplete accumulation is an update, too.
        (
            {"iters": 397, "grad_accumulation_steps": 4},
            COSINE | {"warmup": 100},
            "never gets to 0.0001",
        ),
        ({"iters": 399, "grad_accumulation_steps": 4}, COSINE | {"warmup": 1}, "(399 iterations, 4 per update)"),
        ({"iters": 400, "grad_accumulation_steps": 4}, COSINE, None),
        ({"iters": 110}, COSINE | {"warmup": 10}, None),
        ({"epochs": 3, "batch_size": 8, "grad_accumulation_steps": 2}, COSINE | {"warmup": 1875}, "has 1,875 updates"),
        ({"iters": 50}, {"name": "step_decay", "arguments": [1e-4, 0.5, 60]}, "takes its first step after 60 updates"),
        ({"iters": 50}, {"name": "linear_schedule", "arguments": [1e-4, 1e-5, 60]}, "ends after 60 updates"),
        # The one that `plan --apply` writes.
        ({"iters": 50}, {"name": "linear_schedule", "arguments": [1e-4, 1e-4, 50], "warmup": 5}, None),
        ({"iters": 50}, {"name": "exponential_decay", "arguments": [1e-4, 0.9]}, None),
    ],
)
def test_a_schedule_that_the_run_ends_before_warns(
    keys: dict[str, int], schedule: dict[str, Any], expected: str | None
) -> None:
    plan = make_plan(inputs(ultra_and_max(), settings={**keys, "lr_schedule": schedule}))
    found = [warning.text for warning in plan.warnings if warning.name == "lr_schedule"]
    assert [expected in text for text in found] == [True] if expected else found == []


@pytest.mark.parametrize(
    ("keys", "examples", "expected"),
    [
        ({"batch_size": 8}, 7, ["fewer examples (7) than batch_size = 8: nothing can be trained"]),
        ({"batch_size": 8}, 8, []),
        ({"batch_size": 8}, None, []),
        ({"batch_tokens": 4096}, 1, ["fewer examples (1) than ranks (2): in each batch some have none"]),
        ({"batch_tokens": 4096}, 2, []),
    ],
)
def test_data_that_leaves_ranks_without_examples_warns(
    keys: dict[str, int], examples: int | None, expected: list[str]
) -> None:
    plan = make_plan(inputs(ultra_and_max(), settings=keys, examples=examples))
    assert [warning.text for warning in plan.warnings if warning.name == "data"] == expected


def test_epochs_are_iterations_once_the_examples_are_counted() -> None:
    """10,000 examples fill 1,250 batches of 8."""
    asked = inputs(ultra_and_max(), settings={"epochs": 3, "batch_size": 8, "grad_accumulation_steps": 2})
    counted = make_plan(asked)
    assert (counted.batch_configuration.updates, counted.batch_configuration.epochs) == (1875, 3.0)
    assert counted.checkpoint_strategy.suggested_frequency == 187
    uncounted = make_plan(replace(asked, examples=None))
    assert uncounted.batch_configuration.updates is None
    assert uncounted.checkpoint_strategy.suggested_frequency is None
    assert "adapters every 100 iterations, " in dict(summary(uncounted))["saves"]
    reasons = {reason.key: reason.reason for reason in uncounted.reasons}
    assert "needs the number of examples" in reasons["checkpoint_strategy.frequency"]


def test_the_plan_shows_no_credentials_of_a_destination() -> None:
    config = {"checkpoint": CheckpointConfig(destination="s3://key:s3cr3t@bucket/runs")}
    plan = make_plan(inputs(ultra_and_max(), settings={"save_every": 20}, config=config))
    assert plan.checkpoint_strategy.storage == "s3://[redacted]@bucket/runs"


@pytest.mark.parametrize("strategy", ["data", "sharded"])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_plan_names_what_a_run_continues_from(strategy: str, *, enabled: bool) -> None:
    """Replicas hold the whole state; a partitioned state needs a checkpoint."""
    checkpoint = CheckpointConfig(enabled=enabled, every=7, keep=5, compression="gzip", destination="/mnt/nas")
    settings = {"save_every": 20, "grad_accumulation_steps": 2}
    config = {"checkpoint": checkpoint}
    plan = make_plan(inputs(ultra_and_max(), settings=settings, config=config, strategy=strategy))
    part = plan.checkpoint_strategy
    assert (part.async_, part.compression, part.storage) == (enabled, "gzip", "/mnt/nas")
    assert (part.retention, part.frequency, part.expected_recovery_time) == ("last_5_checkpoints", 20, None)
    reasons = {reason.key: reason.reason for reason in plan.reasons}
    last = "the run continues from the last periodic checkpoint" in reasons["checkpoint_strategy.approach"]
    assert last is (strategy == "sharded")
    assert ("the training state every 7 updates" in reasons["checkpoint_strategy.frequency"]) is enabled
    warned = "a lost rank costs all steps" in str([each.text for each in plan.warnings])
    assert warned is (strategy == "sharded" and not enabled)


@pytest.mark.parametrize(
    ("checkpoint", "settings", "updates"),
    [
        ({}, {}, 100),
        ({}, {"save_every": 20, "grad_accumulation_steps": 3}, 6),
        ({}, {"save_every": 2, "grad_accumulation_steps": 3}, 1),
        ({"every": 9}, {"save_every": 20}, 9),
        ({"every": 9, "enabled": False}, {}, 0),
    ],
)
def test_how_often_the_state_is_kept(checkpoint: dict[str, Any], settings: dict[str, int], updates: int) -> None:
    config = {"checkpoint": CheckpointConfig(**checkpoint)}
    assert state_every(inputs(ultra_and_max(), settings=settings, config=config).config) == updates


def test_an_unreachable_node_is_planned_with_its_last_facts() -> None:
    facts = ultra_and_max()
    seen = {fact.node: fact for fact in facts} | {
        "max": facts[1].model_copy(update={"probed_at": NOW - timedelta(hours=3)})
    }
    plan = make_plan(inputs(facts, facts=seen, problems={"max": "no route to host"}))
    assert plan.nodes[1].problem == "no route to host" and plan.nodes[1].facts_age_s == 3 * 3600
    assert "3 hours ago" in next(warning.text for warning in plan.warnings if warning.name == "nodes")
    assert not plan.refused


def test_a_node_that_nobody_has_seen_leaves_only_its_own_part_open() -> None:
    facts: list[NodeFacts] = ultra_and_max()
    plan = make_plan(
        inputs(
            facts, facts={"ultra": facts[0]}, problems={"max": "down"}, network=None, network_problem="max: no address"
        )
    )
    assert isinstance(plan.memory, MemorySection)
    assert [rank.fits for rank in plan.memory.ranks] == [True, None]
    assert not plan.refused and plan.distributed_config.mlx_launch_command is None


def test_a_custom_command_has_no_batch() -> None:
    plan = make_plan(inputs(ultra_and_max(), job={"command": ("python", "train.py"), "mlx_lm": {}}, model=None))
    assert plan.batch_configuration.total_batch_size is None and isinstance(plan.memory, Disabled)
    assert isinstance(plan.coordinator_chunking, Disabled) and not plan.refused


def test_an_unknown_model_type_is_planned_without_memory() -> None:
    plan = make_plan(inputs(ultra_and_max(), model={"model_type": "of tomorrow"}))
    assert isinstance(plan.memory, Disabled) and "memory" in names(plan, "warnings") and not plan.refused


def test_cuda_nodes_get_nccls_variables() -> None:
    h100 = NvidiaGpu(name="NVIDIA H100")
    nodes = [
        mac(f"n{rank}", rank, "EPYC", 80, system="Linux", backends=("nccl",), gpu_limit_bytes=None, gpus=(h100,))
        for rank in range(2)
    ]
    plan = make_plan(inputs(nodes))
    assert (plan.rdma_config.platform, plan.rdma_config.backend) == ("cuda", "nccl")
    assert plan.rdma_config.env_vars == {"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO"}
    own = make_plan(inputs(nodes, rank_environment={"NCCL_DEBUG": "WARN"}))
    assert own.rdma_config.env_vars["NCCL_DEBUG"] == "WARN", "the job's own, as it is set"
    assert all(any(tool in step for step in plan.verification_steps) for tool in ("ibstat", "nvidia-smi"))
    assert plan.distributed_config.unified_memory is False


def test_macs_that_are_cabled_talk_over_rdma_and_the_speed_up_is_the_measured_one() -> None:
    macs = mesh(2)
    measured = calibration(dict.fromkeys(macs.names, 2.0))
    plan = make_plan(inputs(addressed(macs).facts(), settings={"batch_size": 8}, calibration=measured))
    assert (plan.rdma_config.enabled, plan.rdma_config.backend) == (True, "jaccl")
    assert plan.rdma_config.expected_speedup == pytest.approx(2, rel=0.05)
    assert any("ibv_devices" in step for step in plan.verification_steps)
    assert plan.rdma_config.latency_s == 5e-5


def test_macs_without_rdma_fall_back_with_the_obstacles() -> None:
    facts = [fact.model_copy(update={"rdma_enabled": False}) for fact in addressed(mesh(2)).facts()]
    plan = make_plan(inputs(facts))
    assert (plan.rdma_config.enabled, plan.rdma_config.backend) == (False, "ring")
    assert plan.rdma_config.expected_speedup is None
    assert any(step.startswith(f"once per Mac: {ENABLE_RDMA}") for step in plan.rdma_config.setup)
    assert any("RDMA is disabled" in warning.text for warning in plan.warnings)


_ASK_MLX = """
import json, sys
from mlx._distributed_utils.common import Hostfile
for path in sys.argv[1:]:
    print(json.dumps([[host.ssh_hostname, host.ips, host.rdma] for host in Hostfile.from_file(path).hosts]))
"""


def test_mlx_reads_the_hostfiles_as_intended(tmp_path: Path) -> None:
    cabled = st.one_of(st.integers(2, 4).map(mesh), st.integers(3, 8).map(ring))
    nodes = st.one_of(cabled.map(lambda macs: addressed(macs).facts()), st.just(ultra_and_max()))
    meant: list[tuple[Path, NetworkPlan]] = []

    @settings(max_examples=25, database=None)
    @given(nodes)
    def write(facts: list[NodeFacts]) -> None:
        network = inputs(facts).network
        assert network is not None
        path = tmp_path / f"{len(meant)}.json"
        write_hostfile(path, network)
        meant.append((path, network))

    write()
    # One process for all: MLX takes longer to import than to read them.
    argv = [sys.executable, "-c", _ASK_MLX, *(str(path) for path, _ in meant)]
    read = subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout.splitlines()
    for output, (_, network) in zip(read, meant, strict=True):
        hosts = [[host.ssh, host.ips, host.rdma or ()] for host in network.hosts]
        assert json.loads(output) == json.loads(json.dumps(hosts))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_largest_batch_of_a_pipeline_is_one_that_the_plan_accepts(stages: int) -> None:
    macs = [mac(f"n{rank}", rank, "Apple M3 Ultra", 96) for rank in range(stages)]
    # All that would else be chosen by the memory that a batch leaves.
    keys = {"grad_checkpoint": True, "optimizer_precision": "kahan", "moments": "8bit", "sequence_tiling": 0}

    def asked(batch: int) -> TrainingPlan:
        return make_plan(inputs(macs, job={"strategy": "pipeline"}, settings=FULL | keys | {"batch_size": batch}))

    largest = asked(stages).batch_configuration.largest_per_gpu_batch_size
    assert largest
    assert "memory" not in names(asked(largest * stages), "refusals")
    assert "memory" in names(asked((largest + 1) * stages), "refusals")


def test_a_mac_of_up_to_32_gb_lets_its_gpu_use_two_thirds() -> None:
    for size, limit in ((16, 2 / 3), (32, 2 / 3), (36, 0.75)):
        air = mac("air", 0, "Apple M4", size).model_copy(update={"gpu_limit_bytes": None})
        memory = make_plan(inputs([air])).memory
        assert isinstance(memory, MemorySection)
        (rank,) = memory.ranks
        assert rank.limit_bytes == int(size * 2**30 * limit)
        assert rank.limit_from.startswith(f"{limit:.0%} of memory")


def test_pytorch_gets_no_advice_on_rdma() -> None:
    assert make_plan(inputs(ultra_and_max(), job={"framework": "torch"})).rdma_config.setup == ()
