"""Makes the training plan from PlanInputs, section by section, and collects the rationale. The short sections are made
here: performance_targets, hardware_calibration, coordinator_chunking, data, data_quality, nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final

from engine.errors import spans
from engine.plan import document
from engine.plan.advice import advice_section, without_validation
from engine.plan.batch import batch_section
from engine.plan.checkpoints import checkpoint_section
from engine.plan.context import PlanContext, PlanInputs, make_context
from engine.plan.distributed import distributed_section, rdma_section, verification_steps
from engine.plan.fingerprint import age_days
from engine.plan.memory.fit import MemoryFit, memory_fit
from engine.plan.obstacles import refuse_obstacles
from engine.plan.preflight import consistency_section, sync_section
from engine.plan.shares import MISSING
from engine.plan.strategy import strategy_section
from engine.plan.torch.fit import TorchFit, torch_fit
from engine.plan.torch.section import torch_section
from engine.protocol.job import AUTO, Framework
from engine.protocol.partition import chunk_plan, progress_text

_PREDICTED = {
    "data": "the slowest node's measured step at its micro-batch, and the part of the exchange that nothing hides",
    "local": "the slowest node's measured step at its micro-batch, and its part of the messages and of an averaging",
}
_FREES = {"mlx": "gc.collect() and mx.clear_cache()", "torch": "gc.collect()"}
FITS: Final[Mapping[Framework, Callable[[PlanContext], MemoryFit]]] = {
    "mlx": memory_fit,
    "torch": torch_fit,
}
_QOS = "pthread_set_qos_class_self_np(QOS_CLASS_USER_INTERACTIVE)"


def performance_section(context: PlanContext) -> document.PerformanceSection:
    predicted = context.throughput
    source = document.Source.CALIBRATION
    reason = _PREDICTED.get(context.strategy, "real iterations of all ranks together, measured by calibrate")
    if predicted.examples_per_s is None:
        source, reason = document.Source.UNKNOWN, predicted.why_not or "not predicted"
    context.explain("performance_targets.throughput", source, reason)
    for target in ("gpu_utilization", "checkpoint_overhead"):
        context.explain(f"performance_targets.{target}", document.Source.RULE, "a target, not a measurement")
    iterations = context.iterations
    return document.PerformanceSection(
        throughput=predicted.examples_per_s,
        tokens_per_second=predicted.tokens_per_s,
        step_s=predicted.step_s,
        speed_up=predicted.speed_up,
        efficiency=predicted.efficiency,
        duration_s=predicted.step_s * iterations if predicted.step_s is not None and iterations is not None else None,
    )


def calibration_section(context: PlanContext) -> document.CalibrationSection | document.NoCalibrationSection:
    calibration, shares = context.calibration, dict(context.shares.parts)
    qos = _QOS if context.platform == "apple" else "not on macOS"
    context.explain("hardware_calibration.workload_distribution", context.shares_source, context.shares.reason)
    if calibration is None or not context.config.calibration.enabled:
        unmeasured = context.job.kind.framework.unmeasured
        hints = ["flightdeck calibrate measures the job's step on every node, and the links"] * (unmeasured is None)
        return document.NoCalibrationSection(
            reason=unmeasured or (MISSING if context.config.calibration.enabled else "[calibration] enabled = false"),
            workload_distribution=shares,
            macos_qos_api=qos,
            calibration_notes=tuple(dict.fromkeys((*context.shares.warnings, *hints))),
        )
    notes = [*calibration.notes, *context.shares.warnings]
    if calibration.synthetic_model:
        notes.append("measured with a synthetic model, since the job runs a custom command")
    if calibration.quick:
        notes.append("quick calibration: 10 s per node")
    return document.CalibrationSection(
        measured_performance={measure.node: measure.examples_per_s for measure in calibration.nodes},
        measured_details={measure.node: document.MeasuredNode(**dict(measure)) for measure in calibration.nodes},
        workload_distribution=shares,
        macos_qos_api=qos,
        calibration_notes=tuple(dict.fromkeys(notes)),
        taken_at=calibration.taken_at,
        age_days=age_days(calibration, context.now),
    )


_KEY = "coordinator_chunking"


def chunking_section(context: PlanContext) -> document.ChunkingSection | document.Disabled:
    """Datasets of one chunk or more are streamed."""
    if not context.settings:
        return _off("the job runs a custom command, which reads its own data", context)
    if not context.job.chunking:
        context.warn(_KEY, "[job] chunking = false: the whole dataset is kept in memory")
        return _off("[job] chunking = false", context)
    size = context.examples
    if size is None:
        why = f"dataset_size is not known: {context.examples_source}"
        context.warn(_KEY, why)
        return _off(why, context)
    try:
        chunking = chunk_plan(size, context.job.chunk_size)
    except ValueError as error:
        context.refuse(_KEY, str(error))
        return _off(str(error), context)
    if not chunking.enabled:
        return _off(f"{size:,} examples are fewer than one chunk of {chunking.chunk_size:,}", context)
    chunks = f"{chunking.num_chunks} chunks of {chunking.chunk_size:,}, streamed by offset"
    context.explain(_KEY, document.Source.FACT, f"{size:,} examples ({context.examples_source}): {chunks}")
    return document.ChunkingSection(
        dataset_size=size,
        chunk_size=chunking.chunk_size,
        num_chunks=chunking.num_chunks,
        memory_management=f"{_FREES[context.job.framework]} after each chunk",
        progress_reporting=progress_text(1, chunking.num_chunks),
    )


def data_quality_section(context: PlanContext) -> document.DataQualitySection | document.Disabled:
    report, problem = context.report, context.report_problem
    if report is None:
        if problem is not None:
            context.warn("data_quality", problem)
        return document.Disabled(reason=problem or "[job] data_quality_report is not set")
    if report.blocks:
        context.refuse("data_quality", report.blocks)
    if report.warns:
        context.warn("data_quality", report.warns)
    return document.DataQualitySection(**dict(report.ifd_score), **dict(report))


def _off(reason: str, rationale: document.Rationale) -> document.Disabled:
    rationale.explain(_KEY, document.Source.RULE, f"off: {reason}")
    return document.Disabled(reason=reason)


def make_plan(inputs: PlanInputs) -> document.TrainingPlan:
    """Reasons against a launch are in `refusals`; nothing is raised for them."""
    context = make_context(inputs)
    _warn_unreachable(context)
    if unused := context.job.unused:
        context.warn("job", f'with framework = "{context.job.framework}" these keys are unused: {", ".join(unused)}')
    refuse_obstacles(context)
    needed = FITS[context.job.framework](context)
    if isinstance(needed, TorchFit):
        # The other sections are about the strategy that was chosen; "auto" is the script's own.
        scripts_own = isinstance(needed.settings, document.Disabled)
        context = replace(context, strategy=AUTO if scripts_own else needed.chosen.strategy)
    not_validating = without_validation(context, needed)
    return document.TrainingPlan(
        strategy=strategy_section(context, needed.split, needed.trained),
        batch_configuration=batch_section(context, needed.largest_batch),
        distributed_config=distributed_section(context),
        rdma_config=rdma_section(context),
        checkpoint_strategy=checkpoint_section(context),
        performance_targets=performance_section(context),
        verification_steps=verification_steps(context),
        pre_rdma_sync=sync_section(context),
        hardware_calibration=calibration_section(context),
        worker_consistency=consistency_section(context),
        coordinator_chunking=chunking_section(context),
        pre_flight_checklist=document.ChecklistSection(
            validation_layers=tuple(check.name for check in inputs.checks if not check.overridden), checks=inputs.checks
        ),
        cluster=inputs.config.cluster.name,
        job=inputs.config.job.name,
        made_at=inputs.now,
        nodes=_nodes(context, not_validating),
        settings=needed.settings,
        memory=needed.section,
        torch=torch_section(context, needed) if isinstance(needed, TorchFit) else document.NOT_TORCH,
        data=document.DataSection(examples=inputs.examples, source=inputs.examples_source or "not counted"),
        data_quality=data_quality_section(context),
        advice=tuple(advice_section(context, needed)),
        warnings=tuple(dict.fromkeys(context.warnings)),
        refusals=tuple(dict.fromkeys(context.refusals)),
        reasons=tuple(context.reasons),
    )


def _warn_unreachable(context: PlanContext) -> None:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, why in context.problems.items():
        seen, facts = context.facts.get(name), "facts are unknown"
        if seen is not None:
            facts = f"facts from {_ago((context.now - seen.probed_at).total_seconds())} are used"
        by_reason.setdefault((why, facts), []).append(name)
    for (why, facts), names in by_reason.items():
        does, its = ("does", "its") if len(names) == 1 else ("do", "their")
        context.warn("nodes", f"{spans(names)} {does} not respond ({why}): {its} {facts}")


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} seconds ago"


def _nodes(context: PlanContext, not_validating: Collection[str]) -> tuple[document.PlannedNode, ...]:
    return tuple(
        document.PlannedNode(
            rank=rank,
            node=node.name,
            host=node.ssh,
            chip=(seen.gpus[0].name if seen.mlx_device == "CUDA" and seen.gpus else seen.chip) if seen else None,
            memory_bytes=seen.memory_total_bytes if seen else None,
            share=context.shares.parts.get(node.name),
            validates=node.name not in not_validating,
            facts_age_s=max(0.0, (context.now - seen.probed_at).total_seconds()) if seen else None,
            problem=context.problems.get(node.name),
        )
        for rank, (node, seen) in enumerate((node, context.facts.get(node.name)) for node in context.config.nodes)
    )
