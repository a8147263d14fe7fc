"""The peak of another batch, from what calibration measured of this job on this node."""

from __future__ import annotations

from collections.abc import Sequence

from engine.measured import MemoryProbe


def peak_from_probes(probes: Sequence[MemoryProbe], batch: int) -> int | None:
    """The peak at `batch` sequences, bytes: activations grow with each sequence by the same, all else does not grow.

    The line goes through the smallest and the largest batch probed. None with fewer than two different batches.
    """
    ordered = sorted(probes, key=lambda probe: probe.batch)
    if len({probe.batch for probe in ordered}) < 2:
        return None
    low, high = ordered[0], ordered[-1]
    slope = max(0.0, (high.peak_bytes - low.peak_bytes) / (high.batch - low.batch))
    return max(0, round(low.peak_bytes + slope * (batch - low.batch)))
