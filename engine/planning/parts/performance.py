"""performance_targets and hardware_calibration: what was measured, and what follows from it."""

from __future__ import annotations

from engine.planning.document import CalibrationPart, MeasuredNode, NoCalibrationPart, PerformancePart
from engine.planning.fingerprint import age_days
from engine.planning.notes import Notes, Source
from engine.planning.shares import MISSING
from engine.planning.situation import Situation

_QOS = "pthread_set_qos_class_self_np(QOS_CLASS_USER_INTERACTIVE)"


def performance(now: Situation, notes: Notes) -> PerformancePart:
    """Null without a calibration: nothing is guessed."""
    found = now.predicted
    key = "performance_targets.throughput"
    if found.examples_per_s is None:
        notes.why(key, Source.UNKNOWN, found.why_not or "not predicted")
    else:
        text = "each node's measured step at its micro-batch, the slowest of them, and the measured all_sum"
        notes.why(key, Source.CALIBRATION, text)
    iterations = int(now.settings["iters"]) if now.settings else None
    return PerformancePart(
        throughput=found.examples_per_s,
        tokens_per_second=found.tokens_per_s,
        step_s=found.step_s,
        speed_up=found.speed_up,
        efficiency=found.efficiency,
        duration_s=found.step_s * iterations if found.step_s is not None and iterations is not None else None,
    )


def calibration(now: Situation, notes: Notes) -> CalibrationPart | NoCalibrationPart:
    """The measured nodes, and each one's share of the work."""
    inputs, taken, shares = now.inputs, now.inputs.calibration, dict(now.divided.parts)
    qos = _QOS if now.platform == "apple" else "not on macOS"
    notes.why(
        "hardware_calibration.workload_distribution",
        {"fixed": Source.USER, "calibrated": Source.CALIBRATION, "equal": Source.RULE}[now.divided.source],
        now.divided.reason,
    )
    if taken is None or not inputs.config.calibration.enabled:
        reason = MISSING if inputs.config.calibration.enabled else "switched off by [calibration] enabled"
        told = (*now.divided.warnings, "flightdeck calibrate measures the job's own step on every node, and the links")
        return NoCalibrationPart(
            reason=reason, workload_distribution=shares, macos_qos_api=qos, calibration_notes=tuple(dict.fromkeys(told))
        )
    told = (*taken.notes, *now.divided.warnings)
    if taken.stand_in:
        told = (*told, "of a stand-in: the job has a command of its own")
    if taken.quick:
        told = (*told, "a quick calibration: 10 s per node")
    return CalibrationPart(
        measured_performance={
            measure.node: MeasuredNode(
                examples_per_s=measure.examples_per_s,
                spread=measure.spread,
                tokens_per_s=measure.tokens_per_s,
                problem=measure.problem,
            )
            for measure in taken.nodes
        },
        workload_distribution=shares,
        macos_qos_api=qos,
        calibration_notes=tuple(dict.fromkeys(told)),
        taken_at=taken.taken_at,
        age_days=age_days(taken, inputs.now),
    )
