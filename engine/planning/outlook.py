"""What a calibration means for the next launch: shares, micro-batches, and what all ranks will do together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from engine.config.models import FlightConfig
from engine.measured import Calibration, Division
from engine.planning.fingerprint import stale
from engine.planning.prediction import Prediction, prediction
from engine.planning.shares import Shares, shares


@dataclass(frozen=True)
class Outlook:
    """As of one moment."""

    calibration: Calibration | None
    """The newest of this job on these nodes, however old."""
    stale: bool
    """It is older than [calibration] max_age_days."""
    shares: Shares
    """Without what is stale."""
    prediction: Prediction
    micro_batches: Mapping[str, int] | None
    """Node → sequences of a global batch; None where there is no batch (a command), or it is too small."""


def outlook(
    config: FlightConfig, calibration: Calibration | None, now: datetime, division: Division | None = None
) -> Outlook:
    """`division` is the one that a run was made with: it stays, whatever would be made of the calibration now. Raises
    ValueError when no node has any throughput."""
    divided = Shares.of(division) if division is not None else shares(config, calibration, now=now)
    if calibration is not None and calibration.stand_in:
        predicted = Prediction(why_not="a stand-in was measured: what the job's own command does is not known")
    else:
        predicted = prediction(config, calibration, divided)
    if division is not None and division.why_not is not None:
        predicted = predicted.withheld(division.why_not)
    return Outlook(
        calibration,
        calibration is not None and stale(config, calibration, now),
        divided,
        predicted,
        _micro_batches(config, divided),
    )


def division_of(found: Outlook) -> Division:
    """What a run that is made now is told of it."""
    told = found.prediction
    return Division(
        source=found.shares.source,
        reason=found.shares.reason,
        parts=dict(found.shares.parts),
        left_out=found.shares.left_out,
        warnings=found.shares.warnings,
        examples_per_s=told.examples_per_s,
        tokens_per_s=told.tokens_per_s,
        compute_s=dict(told.compute_s),
        speed_up=told.speed_up,
        efficiency=told.efficiency,
        why_not=told.why_not,
    )


def _micro_batches(config: FlightConfig, divided: Shares) -> dict[str, int] | None:
    batch = config.job.mlx_lm.get("batch_size")
    if config.job.command is not None or not isinstance(batch, int) or batch < len(divided.parts):
        return None
    return divided.micro_batches(batch)
