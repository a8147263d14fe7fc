"""coordinator_chunking and the data: how many examples, and whether they may be trained on."""

from __future__ import annotations

from engine.planning.document import ChunkingPart, DataPart, DataQualityPart, Disabled
from engine.planning.notes import Notes, Source
from engine.planning.situation import Situation
from engine.worker.chunks import chunk_plan, progress_text

_KEY = "coordinator_chunking"


def chunking(now: Situation, notes: Notes) -> ChunkingPart | Disabled:
    """A dataset of a chunk or more is streamed."""
    if not now.settings:
        return _off("the job runs a command of its own, which reads its own data", notes)
    if not now.job.chunking:
        notes.warn(_KEY, "switched off by [job] chunking: the whole dataset is held in memory")
        return _off("switched off by [job] chunking", notes)
    size = now.inputs.examples
    if size is None:
        notes.warn(_KEY, f"dataset_size is not known: {now.inputs.examples_from}")
        return _off(f"dataset_size is not known: {now.inputs.examples_from}", notes)
    try:
        found = chunk_plan(size, now.job.chunk_size)
    except ValueError as error:
        notes.refuse(_KEY, str(error))
        return _off(str(error), notes)
    if not found.enabled:
        return _off(f"{size:,} examples are fewer than a chunk of {found.chunk_size:,}", notes)
    notes.why(
        _KEY,
        Source.FACT,
        f"{size:,} examples ({now.inputs.examples_from}) in chunks of {found.chunk_size:,}: "
        f"ceil makes {found.num_chunks}, streamed by offset",
    )
    return ChunkingPart(
        dataset_size=size,
        chunk_size=found.chunk_size,
        num_chunks=found.num_chunks,
        progress=progress_text(1, found.num_chunks),
    )


def data(now: Situation) -> DataPart:
    return DataPart(examples=now.inputs.examples, source=now.inputs.examples_from or "not looked for")


def quality(now: Situation, notes: Notes) -> DataQualityPart | Disabled:
    """What the optional report says; it may warn or block."""
    report = now.inputs.report
    if report is None:
        reason = "no data_quality_report in [job]"
        if now.inputs.report_problem is not None:
            reason = now.inputs.report_problem
            notes.warn("data_quality", reason)
        return Disabled(reason=reason)
    if report.blocks:
        notes.refuse("data_quality", report.blocks)
    if report.warns:
        notes.warn("data_quality", report.warns)
    return DataQualityPart(
        overall_score=report.ifd_score.overall_score,
        quality_tier=report.ifd_score.quality_tier,
        total_examples=report.ifd_score.total_examples,
        dpo_metrics=report.dpo_metrics,
        rlvr_verifiability=report.rlvr_verifiability,
        poisoning_detected=report.poisoning_detected,
        overall_ready=report.overall_ready,
        recommendations=report.recommendations,
    )


def _off(reason: str, notes: Notes) -> Disabled:
    notes.why(_KEY, Source.RULE, f"off: {reason}")
    return Disabled(reason=reason)
