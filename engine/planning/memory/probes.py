"""The peak of another batch, from what calibration measured of this job on this node."""

from __future__ import annotations

from collections.abc import Sequence

from engine.measured import MemoryProbe

_GROWS = 0.001
"""Less growth per sequence, as a share of the peak, is the optimizer's step being the peak at both batches: what the
activations of a larger batch need cannot be seen then."""


def peak_from_probes(probes: Sequence[MemoryProbe], batch: int, *, before_bytes: int | None = None) -> int | None:
    """The peak at `batch` sequences, bytes: each sequence adds the same to what does not depend on the batch.

    With `before_bytes`, the state that is there when the activations come (MemoryEstimate.before_bytes), the line goes
    from there at batch 0 through the largest batch probed, and never below the smallest peak: at the first batch or two
    of a full fine-tuning the peak may be the optimizer's step, which is no point of the activations' line. Without it,
    the line goes through the smallest and the largest batch; None beyond them where the peak did not grow. None with
    fewer than two different batches.
    """
    ordered = sorted(probes, key=lambda probe: probe.batch)
    if len({probe.batch for probe in ordered}) < 2:
        return None
    low, high = ordered[0], ordered[-1]
    if before_bytes is not None:
        slope = max(0.0, (high.peak_bytes - before_bytes) / high.batch)
        return max(low.peak_bytes, round(high.peak_bytes + slope * (batch - high.batch)))
    slope = (high.peak_bytes - low.peak_bytes) / (high.batch - low.batch)
    if slope < _GROWS * low.peak_bytes:
        return low.peak_bytes if batch <= low.batch else None
    return max(0, round(low.peak_bytes + slope * (batch - low.batch)))
