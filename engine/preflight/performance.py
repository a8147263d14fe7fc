"""performance_layer: the calibration is there and fresh, and what it predicts is good enough to begin.

It has measured this job on these nodes as they are now, or it counts as missing: the fingerprint tells. Without one all
nodes are taken to be equal, which is a warning and no failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from engine.config.models import FlightConfig
from engine.errors import StateError
from engine.measured import Calibration, Division
from engine.models import CheckResult, CheckStatus
from engine.planning.fingerprint import age_days, changed, matching, stale
from engine.planning.outlook import Outlook, outlook
from engine.planning.prediction import step_s
from engine.planning.shares import MISSING
from engine.preflight import connectivity, sync, versions
from engine.preflight.check import Check, Findings
from engine.preflight.fixes import ours
from engine.preflight.need import Need, needs
from engine.preflight.notes import NodeNotes
from engine.preflight.scene import Scene
from engine.store.store import Store
from engine.worker.shares import share_counts

NAME = "performance_layer"
LATENCY_S = 0.5
"""Of one small all_sum: preflight.md."""
MEMORY_SHARE = 0.90
"""Of the node's limit: what is measured grows a little with the longest sequences, and macOS wants some itself."""
SLOW_WARNS, SLOW_FAILS = 0.10, 0.20
"""A node's part of a step over the time that the plan assumes for all, less 1: everybody waits for the slowest."""
_LIMIT_S = 60.0
_MEND_LINKS = "a person must look at the cables and the network between them"


def _off(config: FlightConfig) -> str | None:
    return None if config.calibration.enabled else "switched off: [calibration] enabled = false"


async def look(scene: Scene) -> CheckResult:
    needed, facts = await asyncio.gather(needs(scene), scene.facts())
    calibration, missing = None, MISSING
    try:
        calibration = await _calibrated(scene)
    except StateError as error:
        missing = f"{MISSING}: {error}"
    otherwise = changed(scene.config, facts.values(), calibration) if calibration is not None else ()
    measured = Measured(calibration, scene.division, otherwise, missing)
    return judge(scene.config, measured, needed, datetime.now(UTC))


async def _calibrated(scene: Scene) -> Calibration | None:
    """What the launch that is checked was made with; else the newest of this job on these nodes as they are now.
    Raises StateError."""
    if not scene.config.calibration.enabled:
        return None
    if scene.division is not None:
        return scene.calibration
    known = await asyncio.to_thread(Store(scene.fleet.home).calibrations, scene.config.cluster.name)
    return matching(scene.config, (await scene.facts()).values(), known)


@dataclass(frozen=True)
class Measured:
    """What is judged."""

    calibration: Calibration | None
    division: Division | None = None
    """Of the launch that is checked."""
    changed: tuple[str, ...] = ()
    """Nodes that are not what they were when they were measured."""
    missing: str = MISSING
    """Why there is no calibration."""


def judge(config: FlightConfig, measured: Measured, needed: Mapping[str, Need], now: datetime) -> CheckResult:
    """The verdict over what was measured; `needed` is each node's memory, which is judged without it, too."""
    again = ours(config, "calibrate")
    taken = measured.calibration
    together = NodeNotes()
    seen: Outlook | None = None
    if taken is None:
        together.warn(measured.missing, again)
    else:
        try:
            seen = outlook(config, taken, now, measured.division)
        except ValueError as error:
            together.fault(str(error), again)
    if taken is not None and seen is not None:
        _together(config, measured, seen, together)
    slower = _slower(taken, seen) if taken is not None and seen is not None else {}
    found = Findings(NAME, config)
    for node in config.nodes:
        notes = NodeNotes()
        if taken is not None and seen is not None:
            _age(config, taken, now, notes, again)
            if node.name in measured.changed:
                notes.warn("it is not what was measured: another chip, python, mlx, mlx-lm or address", again)
            _throughput(taken, node.name, notes, again)
            _links(taken, node.name, notes)
            _pace(slower.get(node.name), seen, notes, again)
        _memory(needed[node.name], notes)
        notes.tell(found, node)
    passed = _passed(seen, age_days(taken, now)) if taken is not None and seen is not None else ""
    return _over_all(found.verdict(passed), together)


def _over_all(result: CheckResult, together: NodeNotes) -> CheckResult:
    """The nodes' verdict, and what is to be said of all of them together."""
    told = [*together.faults, *together.warnings]
    if not told:
        return result
    failed = bool(together.faults) or result.status is CheckStatus.FAIL
    fixes = together.fixes if failed else together.cures
    if result.status is (CheckStatus.FAIL if failed else CheckStatus.WARN) and result.fix_command is not None:
        fixes = [*fixes, result.fix_command]
    summary = "; ".join([*told, *([] if result.status is CheckStatus.PASS else [result.summary])])
    return result.model_copy(
        update={
            "status": CheckStatus.FAIL if failed else CheckStatus.WARN,
            "summary": summary,
            "fix_command": " && ".join(dict.fromkeys(fixes)) or None,
        }
    )


def _together(config: FlightConfig, measured: Measured, seen: Outlook, notes: NodeNotes) -> None:
    assert measured.calibration is not None
    again = ours(config, "calibrate")
    for name in seen.shares.left_out:
        notes.warn(f"{name} finished nothing while it was measured: it counts as offline and is left out", again)
    why_not = seen.prediction.why_not
    if why_not is not None:
        # Of a stand-in, of fewer nodes or of too small a batch another calibration would say no more.
        excluded = measured.division is not None and bool(measured.division.excluded)
        vain = measured.calibration.stand_in or excluded or seen.micro_batches is None
        notes.warn(f"no throughput is predicted: {why_not}", None if vain else again)
    latency_s = everyone.latency_s if (everyone := measured.calibration.everyone) is not None else None
    if latency_s is not None and latency_s >= LATENCY_S:
        words = f"an all_sum over all ranks takes {latency_s * 1e3:,.0f} ms, the limit is {LATENCY_S * 1e3:.0f}"
        notes.fault(f"{words}: {_MEND_LINKS}, then `{again}` measures them anew")


def _age(config: FlightConfig, calibration: Calibration, now: datetime, notes: NodeNotes, again: str) -> None:
    if stale(config, calibration, now):
        age, limit = age_days(calibration, now), config.calibration.max_age_days
        notes.warn(f"the calibration is {age:.0f} days old, the limit is {limit:g}", again)


def _throughput(calibration: Calibration, node: str, notes: NodeNotes, again: str) -> None:
    measure = calibration.of(node)
    speed = measure.examples_per_s if measure is not None else None
    if speed is None:
        why = measure.problem if measure is not None else "it was not there"
        notes.warn(f"its throughput was not measured: {why or 'no reason is known'}", again)
    elif speed == 0:
        notes.seen.append("finished nothing while it was measured")
    else:
        notes.seen.append(f"{speed:.3g} examples/s")


def _links(calibration: Calibration, node: str, notes: NodeNotes) -> None:
    """Told on the first of the two nodes."""
    for link in calibration.links:
        if link.nodes and link.nodes[0] == node and link.latency_s is not None and link.latency_s >= LATENCY_S:
            others = " and ".join(link.nodes[1:])
            notes.fault(f"an all_sum with {others} takes {link.latency_s * 1e3:,.0f} ms: {_MEND_LINKS}")


def _slower(calibration: Calibration, seen: Outlook) -> dict[str, float]:
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
    balanced = max(step_s(measure, count) for measure, count in zip(measures, share_counts(batch, speeds), strict=True))
    return {name: seconds / balanced - 1 for name, seconds in compute.items()}


def _pace(slower: float | None, seen: Outlook, notes: NodeNotes, again: str) -> None:
    if slower is None or slower <= SLOW_WARNS:
        return
    words = f"its part of a step takes {slower:.0%} longer than the plan assumes"
    if seen.shares.source == "equal" and not seen.stale:
        # By our own rule, which found too little evidence for anything else: the plan has reckoned with it.
        notes.warn(
            f"its part of a step takes {slower:.0%} longer than the mean speeds would allow; the shares are equal"
        )
    elif slower <= SLOW_FAILS:
        notes.warn(words, again if seen.stale else None)
    elif seen.shares.source == "fixed":
        notes.fault(f"{words}: take `share` out of its [[node]]")
    else:
        notes.fault(f"{words}: calibrate anew", again)


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
    after=(sync.NAME,),
    switched_off=_off,
)
