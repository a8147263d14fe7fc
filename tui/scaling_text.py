"""A scaling in words, for the command and the pane: its table, what it is of, and where a rank more stops paying."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from engine.errors import plural
from tui.formatting import NOT_MEASURED, latency, memory, rate, throughput

if TYPE_CHECKING:
    from engine.api import Scaling, ScalingPoint

HEADERS = (
    *("ranks", "batch", "throughput", "tokens", "speed-up", "efficiency", "step"),
    *("data", "fwd+bwd", "exchange", "update", "peak"),
)
COLUMNS = (
    *("ranks", "nodes", "batch", "steps", "step_s", "examples_per_s", "tokens_per_s", "speed_up", "efficiency", "gain"),
    *("data_s", "compute_s", "communicate_s", "update_s", "peak_bytes", "problem"),
)
"""Fields of `figures`, in the order of the CSV."""


def row(scaling: Scaling, point: ScalingPoint) -> list[str]:
    """The cells of HEADERS."""
    speed_up, efficiency = scaling.speed_up(point), scaling.efficiency(point)
    return [
        str(point.ranks),
        str(point.batch),
        throughput(point.examples_per_s),
        rate(point.tokens_per_s),
        f"{speed_up:.2f}" if speed_up is not None else NOT_MEASURED,
        f"{efficiency:.0%}" if efficiency is not None else NOT_MEASURED,
        *map(latency, (point.step_s, point.data_s, point.compute_s, point.communicate_s, point.update_s or None)),
        memory(point.peak_bytes),
    ]


def figures(scaling: Scaling) -> list[dict[str, Any]]:
    """Each number of ranks with its measurement and all that follows from it."""
    points = scaling.measured
    before = {later.ranks: point for point, later in pairwise(points)}
    return [
        point.model_dump()
        | {
            "nodes": list(scaling.nodes[: point.ranks]),
            "speed_up": scaling.speed_up(point),
            "efficiency": scaling.efficiency(point),
            "gain": scaling.gain(point, before[point.ranks]) if point.ranks in before else None,
        }
        for point in scaling.points
    ]


def subject(scaling: Scaling) -> str:
    """Its kind and size: "strong scaling, strategy data, ring: a batch of 8 over 1 to 4 ranks"."""
    last = scaling.points[-1] if scaling.points else None
    ranks = f"1 to {plural(last.ranks, 'rank')}" if last is not None and last.ranks > 1 else "1 rank"
    batch = last.batch if last is not None else 0
    kind, what = "strong", f"a batch of {batch} over {ranks}"
    if scaling.per_rank_batch:
        kind, what = "weak", f"each rank's part of the batch kept, over {ranks}"
    backend = f", {scaling.backend}" if scaling.backend is not None else ""
    how = f"{kind} scaling, strategy {scaling.strategy}{backend}: {what}"
    if not scaling.complete:
        how += f" of {len(scaling.nodes)}, interrupted"
    return f"{how}, quick" if scaling.quick else how


def verdict(scaling: Scaling) -> str:
    """Where a rank more stops paying."""
    points, stops = scaling.measured, scaling.stops_paying
    if len(points) < 2:
        return "it takes two numbers of ranks to tell what a rank more brings"
    if stops is None:
        return f"it pays up to {plural(points[-1].ranks, 'rank')}, the most that were measured"
    return f"it stops paying at {plural(stops, 'rank')}: from there a rank more brings less than half of its own rate"


def remarks(scaling: Scaling) -> list[str]:
    """Remarks without which the table would be misread."""
    points = scaling.measured
    notes = list(scaling.notes)
    if points and (fewest := points[0].ranks) > 1:
        notes.append(f"fewer than {fewest} ranks were not measured: speed-up counts those as {fewest}")
    return notes


def problems(scaling: Scaling) -> list[tuple[str, str]]:
    """(numbers of ranks, why they were not measured), each reason once."""
    by_reason: dict[str, list[str]] = {}
    for point in scaling.points:
        if point.problem:
            by_reason.setdefault(point.problem, []).append(str(point.ranks))
    return [(f"{', '.join(ranks)} rank{'s' * (ranks != ['1'])}", why) for why, ranks in by_reason.items()]
