"""Real iterations of all ranks together. A calibration has them for the strategies of which no node can make a step
alone (sharded, pipeline): each rank's computation, and the iteration that follows from it, the exchange and the stages'
waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pydantic import TypeAdapter

from engine.checks.context import CheckContext
from engine.checks.gradient import GroupOutcome, GroupProgram, is_consequence, run_group
from engine.checks.plan_inputs import shared_plan
from engine.cluster.staging import HostLayout
from engine.config.models import Config
from engine.errors import FlightDeckError, LaunchError
from engine.failures.explanation import explained
from engine.launch.rank_environment import common_environment, rank_spec, trainer_job
from engine.measurements import CalibrationProgress, GroupMeasure
from engine.plan.network import NetworkPlan
from engine.protocol.attempt import AttemptSpec
from engine.protocol.job import Framework
from engine.protocol.measurements import GROUP_LIMIT_S, GroupStepReport
from engine.security.sanitise import plain

_BENCHES: Mapping[Framework, str] = {"mlx": "engine.trainer.group_bench", "torch": "engine.torch_trainer.bench"}
"""The programs that time iterations: equal arguments, equal results."""
TOGETHER = "all ranks' steps"
_REPORT = TypeAdapter(GroupStepReport)


async def measure_group(
    context: CheckContext,
    config: Config,
    seconds: float,
    on_progress: Callable[[CalibrationProgress], None],
    too_large: Mapping[str, str],
) -> GroupMeasure | None:
    """Measure for about `seconds` with the job of `config`, in which nothing is "auto"; a problem instead where that
    failed, or the parts are `too_large` for nodes, by name. None for one node, and where its own step says it all."""
    job = config.job
    if job.strategy not in ("sharded", "pipeline") or len(config.nodes) < 2:
        return None
    on_progress(CalibrationProgress(TOGETHER, "measuring", seconds=seconds))
    measure = GroupMeasure(strategy=job.strategy, batch=int(job.mlx_lm["batch_size"]))
    try:
        measure = group_measure(measure, await time_steps(context, config, seconds, too_large))
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


async def time_steps(
    context: CheckContext, config: Config, seconds: float, too_large: Mapping[str, str]
) -> dict[str, GroupStepReport]:
    """Real iterations of the job of `config` on its nodes for about `seconds`: the reports by node. Cancelled, it ends
    them. Raises LaunchError with the first fault, when a rank failed or its part is `too_large`; NodeUnreachable."""
    if too_large:
        node, needed = next(iter(too_large.items()))
        raise LaunchError("not measured", where=node, why=f"its part of the job needs {needed}")
    job = config.job
    split = job.layer_split or (await shared_plan(context)).strategy.layer_split

    def program(network: NetworkPlan, layouts: Sequence[HostLayout]) -> GroupProgram:
        spec = _spec(config, split, network, layouts)
        return GroupProgram(
            _BENCHES[job.framework],
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
            faults.append((is_consequence(why, output), f"rank {rank} on {node.name}: {explained(why, output)}"))
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
