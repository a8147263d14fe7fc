"""Scaling: real iterations of the job over 1, 2, … of its ranks, one number of ranks after another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from engine.calibration.calibrate import GROUP_S, nodes_too_small
from engine.calibration.group import time_steps
from engine.checks.context import CheckContext
from engine.checks.plan_inputs import shared_plan, shared_plan_inputs
from engine.config.models import Config, select_nodes
from engine.errors import FlightDeckError, InputError, plural
from engine.measurements import CalibrationProgress, Scaling, ScalingPoint
from engine.plan.memory.choice import is_open, resolved
from engine.protocol.measurements import STEP_PARTS, GroupStepReport

QUICK_GROUP_S = 5.0
_SHARED = "some ranks share a machine: they divide what it can do, and the speed-up is less than of machines"
_EVERY_RANK = 8
"""Up to so many ranks every number is measured; of more, four between a number and its double."""


def rank_counts(ranks: int) -> list[int]:
    """The numbers of ranks that are measured, ascending, from 1 to `ranks`."""
    counts = list(range(1, min(ranks, _EVERY_RANK) + 1))
    while counts[-1] < ranks:
        counts.append(min(ranks, counts[-1] + max(1, 1 << (counts[-1].bit_length() - 3))))
    return counts


def batch_of(whole: int, ranks: int, of: int, *, per_rank: bool) -> int:
    """Sequences of an iteration over `ranks` of the job's `of` ranks: the whole batch, or as many of them for each."""
    return ranks * max(1, round(whole / of)) if per_rank else whole


async def measure_scaling(
    context: CheckContext,
    scaling: Scaling,
    *,
    shares: Mapping[str, float],
    report: Callable[[CalibrationProgress | Scaling], None],
) -> None:
    """Report `scaling` with every point so far after each. `shares`: relative, by node, as a launch divides the batch.
    A number of ranks that cannot be measured is "not measured", with the reason. The plan's settings and backend for
    all ranks ("auto" in the configuration) are those of each number of ranks, so that nothing else changes between
    them; but one rank of MLX exchanges nothing, and has its own backend. Cancelled, it ends what it has started. Raises
    InputError for a job with a command of its own, and what `shared_plan` does."""
    config = context.config
    if config.job.kind.own_model is not None:
        raise InputError("no scaling is measured", why=config.job.kind.own_model)
    if is_open(config):
        config = resolved(config, (await shared_plan(context)).settings)
    scaling, alone = scaling.model_copy(update={"strategy": config.job.strategy}), config
    with contextlib.suppress(FlightDeckError):
        backend = (await context.network_plan()).backend
        scaling = scaling.model_copy(update={"backend": backend})
        cluster = config.cluster.model_copy(update={"backend": backend})
        config = config.model_copy(update={"cluster": cluster})
    seconds = QUICK_GROUP_S if scaling.quick else min(config.calibration.seconds, GROUP_S)
    counts, whole = rank_counts(len(config.nodes)), int(config.job.mlx_lm["batch_size"])
    for ranks in counts:
        batch = batch_of(whole, ranks, len(config.nodes), per_rank=scaling.per_rank_batch)
        # A part of a ring is none.
        unconnected = (ranks == 1 and config.job.framework == "mlx") or (
            config.cluster.backend == "jaccl-ring" and ranks < len(config.nodes)
        )
        whole_plan = alone if unconnected else config
        part, what = _first_ranks(whole_plan, ranks, batch, shares), plural(ranks, "rank")
        report(CalibrationProgress(what, "measuring", seconds=seconds))
        point = await _measure(context, part, seconds)
        points = (*scaling.points, point)
        now, complete = datetime.now(UTC), ranks == counts[-1]
        scaling = scaling.model_copy(update={"points": points, "taken_at": now, "complete": complete})
        phase = "not measured" if point.problem else "measured"
        report(CalibrationProgress(what, phase, examples_per_s=point.examples_per_s, note=point.problem or ""))
        report(scaling)


def new_scaling(config: Config, fingerprint: str, *, quick: bool, per_rank_batch: bool) -> Scaling:
    """Without any point."""
    hosts, job, notes = [node.ssh for node in config.nodes], config.job, list[str]()
    if len(set(hosts)) < len(hosts):
        notes.append(_SHARED)
    whole = int(job.mlx_lm.get("batch_size") or 0)
    if per_rank_batch and whole != (all_ranks := batch_of(whole, len(hosts), len(hosts), per_rank=True)):
        notes.append(f"the job's batch of {whole} cannot be divided equally: all ranks together take {all_ranks}")
    return Scaling(
        cluster=config.cluster.name,
        job=job.name,
        fingerprint=fingerprint,
        taken_at=datetime.now(UTC),
        strategy=job.strategy,
        framework=job.framework,
        quick=quick,
        per_rank_batch=per_rank_batch,
        nodes=tuple(node.name for node in config.nodes),
        notes=tuple(notes),
    )


def is_worth_keeping(scaling: Scaling) -> bool:
    """It may replace an earlier one: an interrupted one, too, which tells of two numbers of ranks."""
    return len(scaling.measured) >= (1 if scaling.complete else 2)


def _first_ranks(config: Config, ranks: int, batch: int, shares: Mapping[str, float]) -> Config:
    part = select_nodes(config, [node.name for node in config.nodes[:ranks]])
    nodes = tuple(node.model_copy(update={"share": shares.get(node.name)}) for node in part.nodes)
    job = part.job.model_copy(update={"mlx_lm": {**part.job.mlx_lm, "batch_size": batch}})
    return part.model_copy(update={"nodes": nodes, "job": job})


async def _measure(context: CheckContext, config: Config, seconds: float) -> ScalingPoint:
    point = ScalingPoint(ranks=len(config.nodes), batch=int(config.job.mlx_lm["batch_size"]))
    if point.batch < point.ranks:
        return point.model_copy(update={"problem": f"a batch of {point.batch} is too small for {point.ranks} ranks"})
    try:
        async with CheckContext(config, context.fleet) as subset:
            inputs = replace(await shared_plan_inputs(subset), config=config)
            too_large = await asyncio.to_thread(nodes_too_small, inputs)
            return scaling_point(point, list((await time_steps(subset, config, seconds, too_large)).values()))
    except (FlightDeckError, OSError) as error:
        return point.model_copy(update={"problem": str(error)})


def scaling_point(asked: ScalingPoint, reports: list[GroupStepReport]) -> ScalingPoint:
    """`asked` with what each rank has reported: an iteration has ended when its slowest rank has."""
    step_s = max(report.step_s or 0.0 for report in reports)

    def mean(part: str) -> float:
        return sum(getattr(report, part) or 0.0 for report in reports) / len(reports)

    return asked.model_copy(
        update={
            "steps": min(report.steps for report in reports),
            "step_s": step_s,
            "examples_per_s": asked.batch / step_s,
            "tokens_per_s": mean("tokens") / step_s,
            "peak_bytes": max(report.peak_bytes or 0 for report in reports) or None,
            **{part: mean(part) for part in STEP_PARTS},
        }
    )
