"""performance_layer: the calibration is there and fresh, and what it predicts is good enough to begin.

It has measured this job on these nodes as they are now, or it counts as missing: the fingerprint tells. Without one all
nodes are taken to be equal, which is a warning and no failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime

from engine.config.models import FlightConfig
from engine.errors import StateError
from engine.measured import Calibration, LinkMeasure
from engine.models import CheckResult, CheckStatus
from engine.planning.fingerprint import age_days, matching
from engine.planning.outlook import Outlook, outlook
from engine.planning.prediction import step_s
from engine.planning.shares import MISSING, micro_batches
from engine.preflight import connectivity, versions
from engine.preflight.check import Check, Findings, verdict
from engine.preflight.fixes import OURS
from engine.preflight.need import Need, needs
from engine.preflight.notes import NodeNotes
from engine.preflight.scene import Scene
from engine.store.store import Store

NAME = "performance_layer"
CALIBRATE = f"{OURS}calibrate"
LATENCY_S = 0.5
"""Of one small all_sum: preflight.md."""
MEMORY_SHARE = 0.90
"""Of the node's limit: what is measured grows a little with the longest sequences, and macOS wants some itself."""
SLOW_WARNS, SLOW_FAILS = 0.10, 0.20
"""A node's part of a step over the time that the plan assumes for all, less 1: everybody waits for the slowest."""
_LIMIT_S = 60.0


def _off(config: FlightConfig) -> str | None:
    return None if config.calibration.enabled else "switched off: [calibration] enabled = false"


async def look(scene: Scene) -> CheckResult:
    try:
        calibration = await calibrated(scene)
    except StateError as error:
        return verdict(NAME, CheckStatus.WARN, f"{MISSING}: {error}", fix_command=CALIBRATE)
    if calibration is None:
        return verdict(NAME, CheckStatus.WARN, MISSING, fix_command=CALIBRATE)
    return judge(scene.config, calibration, await needs(scene), datetime.now(UTC))


async def calibrated(scene: Scene) -> Calibration | None:
    """The newest of this job on these nodes as they are now; once for all checks. Raises StateError."""
    return await scene.shared(NAME, lambda: _calibrated(scene))


async def _calibrated(scene: Scene) -> Calibration | None:
    if not scene.config.calibration.enabled:
        return None
    store = Store(scene.fleet.home)
    known = await asyncio.to_thread(store.calibrations, scene.config.cluster.name)
    return matching(scene.config, (await scene.facts()).values(), known)


def judge(
    config: FlightConfig,
    calibration: Calibration,
    needed: Mapping[str, Need],
    now: datetime,
) -> CheckResult:
    """The verdict over what was measured; `needed` is each node's memory."""
    age = age_days(calibration, now)
    try:
        seen = outlook(config, calibration, now)
    except ValueError as error:
        return verdict(NAME, CheckStatus.FAIL, str(error), fix_command=CALIBRATE)
    found = Findings(NAME, config)
    advice = [] if seen.prediction.why_not is None else [f"no throughput is predicted: {seen.prediction.why_not}"]
    advice += _latency(calibration.everyone)
    slower = _slower(config, calibration, seen)
    for node in config.nodes:
        notes = NodeNotes()
        if seen.stale:
            notes.warn(f"the calibration is {age:.0f} days old, the limit is {config.calibration.max_age_days:g}")
        _throughput(calibration, node.name, notes)
        _links(calibration, node.name, notes)
        _pace(slower.get(node.name), notes)
        _memory(needed[node.name], notes)
        notes.tell(found, node)
    result = found.verdict(_passed(seen, age), fix_command=CALIBRATE)
    if advice:
        words = "; ".join([*advice, *([] if result.status is CheckStatus.PASS else [result.summary])])
        failed = result.status is CheckStatus.FAIL or bool(_latency(calibration.everyone))
        status = CheckStatus.FAIL if failed else CheckStatus.WARN
        result = result.model_copy(update={"status": status, "summary": words, "fix_command": CALIBRATE})
    return result


def _latency(link: LinkMeasure | None) -> list[str]:
    if link is None or link.latency_s is None or link.latency_s < LATENCY_S:
        return []
    return [f"an all_sum over all ranks takes {link.latency_s * 1e3:,.0f} ms, the limit is {LATENCY_S * 1e3:.0f}"]


def _throughput(calibration: Calibration, node: str, notes: NodeNotes) -> None:
    measure = calibration.of(node)
    speed = measure.examples_per_s if measure is not None else None
    if speed is None:
        why = measure.problem if measure is not None else "it was not there"
        notes.warn(f"its throughput was not measured: {why or 'no reason is known'}")
    elif speed == 0:
        notes.fault("it has finished nothing while it was measured: it counts as offline")
    else:
        notes.seen.append(f"{speed:.3g} examples/s")


def _links(calibration: Calibration, node: str, notes: NodeNotes) -> None:
    """Told on the first of the two nodes."""
    for link in calibration.links:
        if link.nodes and link.nodes[0] == node and link.latency_s is not None and link.latency_s >= LATENCY_S:
            others = " and ".join(link.nodes[1:])
            notes.fault(f"an all_sum with {others} takes {link.latency_s * 1e3:,.0f} ms: look at the link between them")


def _slower(config: FlightConfig, calibration: Calibration, seen: Outlook) -> dict[str, float]:
    """Node → how much longer its part of a step takes than the slowest part takes when the same batch is divided as the
    nodes were measured, as a share. Sequences are whole: what their rounding costs is nobody's fault."""
    compute = seen.prediction.compute_s
    if len(compute) < 2 or seen.micro_batches is None:
        return {}
    measures = [measure for name in compute if (measure := calibration.of(name)) is not None]
    speeds = [measure.examples_per_s for measure in measures if measure.examples_per_s]
    if len(speeds) != len(compute):
        return {}
    batch = sum(seen.micro_batches.values())
    balanced = max(
        step_s(measure, count) for measure, count in zip(measures, micro_batches(batch, speeds), strict=True)
    )
    return {name: seconds / balanced - 1 for name, seconds in compute.items()}


def _pace(slower: float | None, notes: NodeNotes) -> None:
    if slower is None:
        return
    words = f"its part of a step takes {slower:.0%} longer than the plan assumes"
    if slower > SLOW_FAILS:
        notes.fault(f"{words}: take `share` out of its [[node]], or calibrate anew")
    elif slower > SLOW_WARNS:
        notes.warn(words)


def _memory(need: Need, notes: NodeNotes) -> None:
    if need.share is not None and need.share >= MEMORY_SHARE:
        notes.fault(
            f"{need.told()}: {need.share:.0%}, the limit is {MEMORY_SHARE:.0%}: lower batch_size, or set "
            "grad_checkpoint = true"
        )
    else:
        notes.seen.append(need.told())


def _passed(seen: Outlook, age_days: float) -> str:
    predicted = seen.prediction
    known = f"{predicted.examples_per_s:.3g} examples/s" if predicted.examples_per_s is not None else "not predicted"
    gain = f", speed-up {predicted.speed_up:.2f}" if predicted.speed_up is not None else ""
    when = f"{age_days:.0f} days" if age_days >= 1 else f"{age_days * 24:.0f} h"
    return f"{known} predicted{gain}, calibrated {when} ago"


CHECK = Check(
    NAME,
    "calibration, predicted throughput, latency, memory, the slowest node",
    look,
    time_limit_s=_LIMIT_S,
    needs=(connectivity.NAME, versions.NAME),
    switched_off=_off,
)
