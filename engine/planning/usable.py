"""Which calibration a plan may take figures from: one that is wanted, and not too old."""

from __future__ import annotations

from engine.measured import Calibration
from engine.planning.fingerprint import age_days, stale
from engine.planning.inputs import PlanInputs


def usable(inputs: PlanInputs) -> Calibration | None:
    return inputs.calibration if unused(inputs) is None else None


def unused(inputs: PlanInputs) -> str | None:
    """Why a calibration that there is is not used; None where it is, or there is none."""
    taken = inputs.calibration
    if taken is None:
        return None
    if not inputs.config.calibration.enabled:
        return "the calibration is switched off by [calibration] enabled"
    if stale(inputs.config, taken, inputs.now):
        return f"the calibration is {age_days(taken, inputs.now):.0f} days old"
    return None
