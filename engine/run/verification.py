"""Verifies a training that has started, line by line, from the reports of its ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from engine.config.models import Config
from engine.errors import plural, size_text
from engine.run.metrics import MetricsSeries
from engine.run.run_plan import RunPlan
from engine.snapshots import RankReport, Verification

PREDICTION_SHARE: Final = 0.8
"""The share of the predicted throughput that is good enough: predictions are good to a fifth."""
GPU_USE: Final = 0.8
OVERHEAD: Final = 0.05
"""The share of the time that saves and checkpoints may hold the training up."""
_JUDGED_AFTER_S: Final = 60.0
GPU: Final = "GPU use"
NOT_MEASURED: Final = "not measured"
_ENDS: Final = 5
"""Reports at each end of the loss curve that are averaged: one alone goes up and down."""


def verify(
    plan: RunPlan, backend: str, ranks: Sequence[RankReport], series: MetricsSeries, checkpoint: int | None
) -> tuple[Verification, ...]:
    """`backend`: as planned; `ranks`: the reports of the current attempt, in rank order; `checkpoint`: iteration of the
    newest one."""
    return (
        _backend(ranks, backend),
        _throughput(series.tokens_per_second.last, plan.division.tokens_per_s if plan.division is not None else None),
        _gpu(ranks),
        _loss(series.train.points),
        _replicas(ranks, plan.config),
        _checkpoint(ranks, checkpoint),
        _overhead(ranks),
    )


def gpu_line(uses: Mapping[str, float | None]) -> Verification:
    """`uses`: node → GPU use from 0 to 1, None where it is not measured; empty where nothing measures it."""
    measured = {node: use for node, use in uses.items() if use is not None}
    if not measured:
        return Verification(GPU, None, NOT_MEASURED)
    text = ", ".join(f"{node} {use:.0%}" for node, use in measured.items())
    if missing := sorted(set(uses) - set(measured)):
        text += f"; not measured on {', '.join(missing)}"
    if any(use <= GPU_USE for use in measured.values()):
        return Verification(GPU, False, f"{text}: not all over {GPU_USE:.0%}")
    return Verification(GPU, True if not missing else None, text)


def _gpu(ranks: Sequence[RankReport]) -> Verification:
    devices = {rank.device for rank in ranks if rank.device is not None}
    if devices and all("cpu" in device.lower() for device in devices):
        return Verification(GPU, None, "the ranks train on the CPU")
    return gpu_line({})


def _backend(ranks: Sequence[RankReport], backend: str) -> Verification:
    reported = [(rank.backend, rank.world_size) for rank in ranks if rank.backend is not None]
    if len(reported) < len(ranks):
        return Verification("backend", None, f"{len(reported)} of {plural(len(ranks), 'rank')} reported theirs")
    wanted = None if backend == "auto" else backend
    wrong = [
        f"rank {number} is in a group of {size} on {name}"
        for number, (name, size) in enumerate(reported)
        if size != len(ranks) or (wanted is not None and name != wanted)
    ]
    if wrong:
        return Verification("backend", False, f"{'; '.join(wrong[:3])}; planned are {len(ranks)} on {backend}")
    devices = sorted({rank.device for rank in ranks if rank.device})
    return Verification("backend", True, f"{reported[0][0]}, {plural(len(ranks), 'rank')}, on {', '.join(devices)}")


def _throughput(measured: float | None, predicted: float | None) -> Verification:
    if measured is None:
        return Verification("throughput", None, "no report yet")
    if predicted is None:
        return Verification("throughput", None, f"{measured:,.0f} tok/s; nothing predicted: not calibrated")
    share = measured / predicted
    good = share >= PREDICTION_SHARE
    return Verification("throughput", good, f"{measured:,.0f} tok/s, {share:.0%} of {predicted:,.0f} predicted")


def _loss(losses: Sequence[tuple[int, float]]) -> Verification:
    if len(losses) < 2:
        return Verification("loss", None, "not two reports yet")
    end = min(_ENDS, len(losses) // 2)
    first, last = (fmean(loss for _, loss in part) for part in (losses[:end], losses[-end:]))
    trend = "falling" if last < first else "not falling"
    return Verification("loss", last < first, f"finite and {trend}: {first:.3f} to {last:.3f}")


def _replicas(ranks: Sequence[RankReport], config: Config) -> Verification:
    if len(ranks) < 2:
        return Verification("replicas", None, "one rank: nothing to compare")
    if (why := config.job.kind.strategy.uncompared) is not None:
        return Verification("replicas", None, f"not compared: {why}")
    if not config.consistency.enabled:
        return Verification("replicas", None, "not compared: [consistency] enabled = false")
    compared = [rank for rank in ranks if rank.replicas_agree is not None]
    if not compared:
        text = f"not compared yet: before the first step, then every {config.consistency.every} updates"
        return Verification("replicas", None, text)
    newest = max(compared, key=lambda rank: rank.compared_at or 0)
    verdict = "equal" if newest.replicas_agree else "NOT equal"
    return Verification("replicas", newest.replicas_agree, f"{verdict} at iteration {newest.compared_at}")


def _checkpoint(ranks: Sequence[RankReport], iteration: int | None) -> Verification:
    size = ranks[0].saved_bytes if ranks else None
    if iteration is None or size is None:
        return Verification("checkpoint", None, "none written yet")
    return Verification("checkpoint", size > 0, f"written at iteration {iteration}, {size_text(size)}")


def _overhead(ranks: Sequence[RankReport]) -> Verification:
    """The plan's performance_targets.checkpoint_overhead."""
    shares = [rank.saving_s / rank.training_s for rank in ranks if rank.training_s]
    trained_s = [rank.training_s for rank in ranks if rank.training_s is not None and rank.saved_bytes is not None]
    if not trained_s or not shares:
        return Verification("saving", None, "nothing saved yet")
    text = f"{max(shares):.1%} of the time so far, of less than {OVERHEAD:.0%}"
    if max(trained_s) < _JUDGED_AFTER_S:
        return Verification("saving", None, f"{text}; not judged in the first {_JUDGED_AFTER_S:.0f} s")
    return Verification("saving", max(shares) < OVERHEAD, text)
