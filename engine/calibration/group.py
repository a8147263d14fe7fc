"""Real iterations of all ranks together. A calibration has them for the strategies of which no node can make a step
alone (sharded, pipeline): each rank's computation, and the iteration that follows from it, the exchange and the stages'
waiting. Scaling has those of 1, 2, … of the job's ranks, one number of ranks after another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from pydantic import TypeAdapter

from engine.checks.context import CheckContext
from engine.checks.gradient import GroupOutcome, GroupProgram, is_consequence, run_group
from engine.checks.plan_inputs import shared_plan, shared_plan_inputs
from engine.cluster.staging import HostLayout
from engine.config.mlx_lm_keys import full_sequences
from engine.config.models import Config, select_nodes
from engine.errors import FlightDeckError, InputError, LaunchError, memory_text, plural
from engine.failures.explanation import explained
from engine.launch.rank_environment import common_environment, rank_spec, trainer_job
from engine.measurements import CalibrationProgress, GroupMeasure, Scaling, ScalingPoint
from engine.plan.context import PlanInputs, make_context
from engine.plan.document import MemorySection
from engine.plan.memory.choice import is_open, resolved
from engine.plan.network import NetworkPlan
from engine.plan.planner import FITS
from engine.protocol.attempt import AttemptSpec
from engine.protocol.measurements import GROUP_LIMIT_S, STEP_PARTS, GroupStepReport
from engine.security.sanitise import plain

GROUP_S = 20.0
"""At most, for the steps of all ranks together."""
QUICK_GROUP_S = 5.0
_SHARED = "some ranks share a machine: they divide what it can do, and the speed-up is less than of machines"
_EVERY_RANK = 8
"""Up to so many ranks every number is measured; of more, four between a number and its double."""
TOGETHER = "all ranks' steps"
_REPORT = TypeAdapter(GroupStepReport)


async def measure_group(
    context: CheckContext,
    config: Config,
    seconds: float,
    on_progress: Callable[[CalibrationProgress], None],
) -> GroupMeasure | None:
    """Measure for about `seconds` with the job of `config`, in which nothing is "auto"; a problem instead where that
    failed. None for one node, and where its own step says it all."""
    job = config.job
    if job.strategy not in ("sharded", "pipeline") or len(config.nodes) < 2:
        return None
    batch = full_sequences(job.mlx_lm, len(config.nodes))
    config = _of_sequences(config, batch)
    on_progress(CalibrationProgress(TOGETHER, "measuring", seconds=seconds))
    measure = GroupMeasure(strategy=job.strategy, batch=batch)
    try:
        measure = group_measure(measure, await time_steps(context, config, seconds))
    except (FlightDeckError, OSError) as error:
        measure = measure.model_copy(update={"problem": str(error)})
    on_progress(
        CalibrationProgress(TOGETHER, "not measured" if measure.problem else "measured", note=measure.problem or "")
    )
    return measure


def group_measure(asked: GroupMeasure, reports: Mapping[str, GroupStepReport]) -> GroupMeasure:
    """`asked` with what the ranks have reported, by node: an iteration has ended when its slowest rank has."""
    step_s = max(report.step_s or 0.0 for report in reports.values())
    tokens = max(report.tokens or 0.0 for report in reports.values())
    values = {
        "steps": min(report.steps for report in reports.values()),
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "compute_s": {
            name: max(0.0, (report.step_s or 0.0) - (report.communicate_s or 0.0)) for name, report in reports.items()
        },
        "peak_bytes": {name: report.peak_bytes or 0 for name, report in reports.items()},
    }
    return GroupMeasure.model_validate({**dict(asked), **values})


async def time_steps(context: CheckContext, config: Config, seconds: float) -> dict[str, GroupStepReport]:
    """Real iterations of the job of `config` on its nodes for about `seconds`: the reports by node. Cancelled, it ends
    them. Raises LaunchError with the first fault, when a rank failed or its part does not fit; NodeUnreachable."""
    inputs = replace(await shared_plan_inputs(context), config=config)
    for node, needed in (await asyncio.to_thread(nodes_too_small, inputs)).items():
        raise LaunchError("not measured", where=node, why=f"its part of the job needs {needed}")
    job = config.job
    split = job.layer_split or (await shared_plan(context)).strategy.layer_split

    def program(network: NetworkPlan, layouts: Sequence[HostLayout]) -> GroupProgram:
        spec = _spec(config, split, network, layouts)
        return GroupProgram(
            "engine.training.group_bench",
            ["{folder}/spec.json", "--seconds", str(seconds)],
            GROUP_LIMIT_S + 5 * seconds + 60,
            common_environment(network, job.env),
            {"spec.json": spec.to_json()},
        )

    return reports_of(config, await run_group(context, program, _REPORT))


def reports_of(config: Config, outcome: GroupOutcome[GroupStepReport]) -> dict[str, GroupStepReport]:
    """By node. Raises LaunchError with the first fault: of ranks that lost a peer, one has another."""
    faults, reports = [], dict[str, GroupStepReport]()
    for rank, node in enumerate(config.nodes):
        report = outcome.results[rank]
        if report is None or report.error is not None or not report.step_s:
            output = outcome.outputs[rank]
            error = report.error if report is not None else None
            why = plain(error or (output[-1].strip() if output else "wrote no result"), 200)
            # A rank that has reported nothing may have been ended for another's fault.
            order = (is_consequence(why, output), error is None)
            faults.append((order, f"rank {rank} on {node.name}: {explained(why, output)}"))
        else:
            reports[node.name] = report
    if faults:
        raise LaunchError(min(faults, key=lambda fault: fault[0])[1])
    return reports


def _spec(config: Config, split: str | None, network: NetworkPlan, layouts: Sequence[HostLayout]) -> AttemptSpec:
    ranks = [
        rank_spec(config, rank, layout, config.nodes[rank].share or 1.0) for layout in layouts for rank in layout.ranks
    ]
    return AttemptSpec(
        run_id="calibration",
        attempt=1,
        nonce="",
        backend=network.backend,
        world_size=len(config.nodes),
        ranks=sorted(ranks, key=lambda rank: rank.rank),
        job=trainer_job(config, split),
        trainer=config.job.kind.framework.trainer,
        replica_check_every=0,
    )


def nodes_too_small(inputs: PlanInputs) -> dict[str, str]:
    """The nodes that the job does not fit by the estimate, each with why: loading it could bring the machine down."""
    context = make_context(replace(inputs, calibration=None))
    section = FITS[context.job.framework](context).section
    return {
        rank.node: f"{memory_text(rank.needed_bytes)} by the estimate, of {memory_text(rank.limit_bytes)}"
        for rank in (section.ranks if isinstance(section, MemorySection) else ())
        if rank.fits is False and rank.limit_bytes is not None
    }


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
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"backend": backend})})
    seconds = QUICK_GROUP_S if scaling.quick else min(config.calibration.seconds, GROUP_S)
    counts, whole = rank_counts(len(config.nodes)), full_sequences(config.job.mlx_lm, len(config.nodes))
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
    whole = full_sequences(job.mlx_lm, len(hosts))
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
    return _of_sequences(part.model_copy(update={"nodes": nodes}), batch)


def _of_sequences(config: Config, batch: int) -> Config:
    settings = {**config.job.mlx_lm, "batch_size": batch, "batch_tokens": None}
    return config.model_copy(update={"job": config.job.model_copy(update={"mlx_lm": settings})})


async def _measure(context: CheckContext, config: Config, seconds: float) -> ScalingPoint:
    point = ScalingPoint(ranks=len(config.nodes), batch=int(config.job.mlx_lm["batch_size"]))
    if point.batch < point.ranks:
        return point.model_copy(update={"problem": f"a batch of {point.batch} is too small for {point.ranks} ranks"})
    try:
        async with CheckContext(config, context.fleet) as subset:
            return scaling_point(point, list((await time_steps(subset, config, seconds)).values()))
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
