"""performance_layer: a recent calibration of the job, the speed that it predicts, and the memory that it measured.

A calibration counts only if its fingerprint matches. Without one all nodes are assumed equal, with a warning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from engine.checks import connectivity, sync, versions
from engine.checks.check import Check, Findings, NodeFindings
from engine.checks.context import CheckContext
from engine.checks.fixes import Fix, flightdeck_command
from engine.checks.plan_inputs import (
    MemoryNeed,
    cluster_history,
    describe_memory,
    memory_needs,
    memory_share,
    shared_plan_inputs,
)
from engine.config.models import Config
from engine.errors import plural
from engine.measurements import Calibration, Division
from engine.models import CheckResult
from engine.plan.fingerprint import age_days, changed_nodes, is_stale
from engine.plan.memory.choice import COMFORTABLE
from engine.plan.prediction import Prediction, predict, step_s
from engine.plan.shares import MISSING
from engine.protocol.partition import share_counts

NAME = "performance_layer"
LATENCY_S = 0.5
"""Limit of one small all_sum: each step waits for at least one."""
SLOW_WARNS, SLOW_FAILS = 0.10, 0.20
"""A node's step time over the one the plan assumes, minus 1: all ranks wait for the slowest."""
_LIMIT_S = 60.0
_FIX_LINKS = "check the cables and the network between them"


@dataclass(frozen=True)
class CalibrationStatus:
    """The calibration that counts for a launch."""

    calibration: Calibration | None
    division: Division | None = None
    """The launch's, where one is being checked."""
    changed: tuple[str, ...] = ()
    """Nodes that have changed since they were measured."""
    missing: str = MISSING
    """Why there is no calibration."""


async def run(context: CheckContext) -> CheckResult:
    calibration, problem = (await shared_plan_inputs(context)).calibration, (await cluster_history(context)).problem
    facts = (await context.facts()).values()
    changed = changed_nodes(context.config, facts, calibration) if calibration is not None else ()
    missing = f"{MISSING}: {problem}" if problem is not None else MISSING
    status = CalibrationStatus(calibration, context.division, changed, missing)
    return evaluate(context.config, status, await memory_needs(context), datetime.now(UTC))


def evaluate(config: Config, status: CalibrationStatus, needed: Mapping[str, MemoryNeed], now: datetime) -> CheckResult:
    """`needed` is each node's memory, which is checked without a calibration too."""
    findings = Findings(NAME, config)
    passed = config.job.kind.framework.unmeasured or _check_calibration(config, status, now, findings)
    for node in config.nodes:
        _check_memory(needed[node.name], findings.on(node))
    return findings.verdict(passed)


def _check_calibration(config: Config, status: CalibrationStatus, now: datetime, findings: Findings) -> str:
    """The check's summary where it passes."""
    fix = Fix(flightdeck_command(config, "calibrate"), "measures; a newer calibration replaces the last one")
    if (calibration := status.calibration) is None:
        findings.overall.warn(status.missing, fix)
        return ""
    try:
        predicted = predict(config, calibration, now, status.division)
    except ValueError as error:
        findings.overall.fault(str(error), fix)
        return ""
    _check_overall(calibration, status.division, predicted, findings.overall, fix)
    # What a rank of a partitioned strategy computes is no share of a node's own step.
    slowness = {} if config.job.kind.strategy.partitioned else _slowness(calibration, predicted)
    stale = is_stale(config, calibration, now)
    for node in config.nodes:
        name, on_node = node.name, findings.on(node)
        if stale:
            age, limit = age_days(calibration, now), config.calibration.max_age_days
            on_node.warn(f"the calibration is {age:.0f} days old, the limit is {limit:g}", fix)
        if name in status.changed:
            on_node.warn("it has changed since it was measured: chip, python, mlx, mlx-lm or address", fix)
        _check_throughput(calibration, name, on_node, fix)
        _check_links(calibration, name, on_node)
        _check_pace(slowness.get(name, 0.0), predicted, on_node, fix)
    return _passed(predicted, age_days(calibration, now))


def _check_overall(
    calibration: Calibration, division: Division | None, predicted: Prediction, findings: NodeFindings, fix: Fix
) -> None:
    for name in predicted.shares.left_out:
        findings.warn(f"{name} completed no step during calibration: it counts as offline and is left out", fix)
    if (why_not := predicted.throughput.why_not) is not None:
        excluded = division is not None and bool(division.excluded)
        # With a synthetic model, fewer nodes or too small a batch another calibration would predict no more.
        useless = calibration.synthetic_model or excluded or predicted.micro_batches is None
        findings.warn(f"no throughput is predicted: {why_not}", None if useless else fix)
    latency_s = calibration.all_ranks.latency_s if calibration.all_ranks is not None else None
    if latency_s is not None and latency_s >= LATENCY_S:
        message = f"an all_sum over all ranks takes {latency_s * 1e3:,.0f} ms, the limit is {LATENCY_S * 1e3:.0f}"
        findings.fault(f"{message}: {_FIX_LINKS}, then measure again with `{fix.command}`")


def _check_throughput(calibration: Calibration, node: str, findings: NodeFindings, fix: Fix) -> None:
    measure = calibration.measure_of(node)
    speed = measure.examples_per_s if measure is not None else None
    if speed is None:
        why = measure.problem if measure is not None else "it was not in the cluster"
        findings.warn(f"its throughput was not measured: {why or 'the reason is not known'}", fix)
    elif speed == 0:
        findings.passed.append("completed no step during calibration")
    else:
        findings.passed.append(f"{speed:.3g} examples/s")


def _check_links(calibration: Calibration, node: str, findings: NodeFindings) -> None:
    """Reported on the first node of a link."""
    for link in calibration.links:
        if link.nodes and link.nodes[0] == node and link.latency_s is not None and link.latency_s >= LATENCY_S:
            others = " and ".join(link.nodes[1:])
            findings.fault(f"an all_sum with {others} takes {link.latency_s * 1e3:,.0f} ms: {_FIX_LINKS}")


def _slowness(calibration: Calibration, predicted: Prediction) -> dict[str, float]:
    """Node → its step time over the slowest node's when the same batch is divided by the measured speeds, minus 1.
    Micro-batches are whole sequences in both, so rounding does not count as slowness."""
    compute = predicted.throughput.compute_s
    if len(compute) < 2 or predicted.micro_batches is None:
        return {}
    measures = [measure for name in compute if (measure := calibration.measure_of(name)) is not None]
    speeds = [measure.examples_per_s for measure in measures if measure.examples_per_s]
    if len(speeds) != len(compute):
        return {}
    batch = sum(predicted.micro_batches.values())
    balanced = max(step_s(measure, count) for measure, count in zip(measures, share_counts(batch, speeds), strict=True))
    return {name: seconds / balanced - 1 for name, seconds in compute.items()}


def _check_pace(slowness: float, predicted: Prediction, findings: NodeFindings, fix: Fix) -> None:
    if slowness <= SLOW_WARNS:
        return
    message = f"its part of a step takes {slowness:.0%} longer than"
    if predicted.shares.source == "equal" and not predicted.stale:
        # The plan chose equal shares because the measured speeds are too uncertain for others.
        findings.warn(f"{message} the mean speeds would allow; the shares are equal")
    elif slowness <= SLOW_FAILS:
        findings.warn(f"{message} the plan assumes", fix if predicted.stale else None)
    elif predicted.shares.source == "fixed":
        findings.fault(f"{message} the plan assumes: take `share` out of its [[node]]")
    else:
        findings.fault(f"{message} the plan assumes: calibrate again", fix)


def _check_memory(need: MemoryNeed, findings: NodeFindings) -> None:
    share = memory_share(need)
    # Only more than the limit is refused, by hardware_layer.
    if share is not None and share > COMFORTABLE:
        findings.warn(f"{describe_memory(need)}: {share:.0%}, and above {COMFORTABLE:.0%} it may not be enough")
    else:
        findings.passed.append(describe_memory(need))


def _passed(predicted: Prediction, age_days: float) -> str:
    throughput, speed_up = predicted.throughput.examples_per_s, predicted.throughput.speed_up
    rate = f"{throughput:.3g} examples/s" if throughput is not None else "not predicted"
    gain = f", speed-up {speed_up:.2f}" if speed_up is not None else ""
    age = plural(round(age_days), "day") if age_days >= 1 else f"{age_days * 24:.0f} h"
    return f"{rate} predicted{gain}, calibrated {age} ago"


CHECK = Check(
    NAME, "calibration, predicted throughput, latency, memory, the slowest node", run, time_limit_s=_LIMIT_S,
    label="throughput", needs=(connectivity.NAME, versions.NAME), after=(sync.NAME,),
    switched_off=lambda config: None if config.calibration.enabled else "switched off: [calibration] enabled = false",
)  # fmt: skip
