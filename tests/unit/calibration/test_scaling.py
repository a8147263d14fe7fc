"""What follows from the throughput over 1, 2, … ranks: speed-up, efficiency, and where a rank more stops paying."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.calibration.group import batch_of, is_worth_keeping, rank_counts, scaling_point
from engine.measurements import PAYS, Scaling, ScalingPoint
from engine.protocol.measurements import GroupStepReport
from tests.unit.calibration.test_throughput import step_report


def scaling(rates: Sequence[float | None], **fields: Any) -> Scaling:
    """`rates`: examples/s over 1, 2, … ranks; None where that was not measured."""
    points = tuple(
        ScalingPoint(ranks=ranks, batch=8, examples_per_s=rate, problem=None if rate else "it does not fit")
        for ranks, rate in enumerate(rates, 1)
    )
    known: dict[str, Any] = {"cluster": "c", "job": "j", "fingerprint": "f", "taken_at": datetime.now(UTC)}
    return Scaling(**{**known, "strategy": "data", "points": points, "complete": True, **fields})


positive = st.floats(0.01, 1e6)
curves = st.lists(positive, min_size=1, max_size=12)


@given(positive, st.integers(1, 64))
def test_ranks_that_cost_each_other_nothing_scale_ideally_and_always_pay(rate: float, ranks: int) -> None:
    found = scaling([rate * count for count in range(1, ranks + 1)])
    for point in found.points:
        assert found.speed_up(point) == pytest.approx(point.ranks) and found.efficiency(point) == pytest.approx(1)
    assert found.stops_paying is None


@given(positive, st.integers(2, 64))
def test_ranks_that_bring_nothing_stop_paying_at_the_second(rate: float, ranks: int) -> None:
    found = scaling([rate] * ranks)
    assert found.stops_paying == 2
    assert found.efficiency(found.points[-1]) == pytest.approx(1 / ranks)


@given(curves, st.floats(0.1, 10))
def test_the_unit_of_a_rate_changes_nothing(rates: list[float], factor: float) -> None:
    one, other = scaling(rates), scaling([rate * factor for rate in rates])
    assert [one.speed_up(p) for p in one.points] == pytest.approx([other.speed_up(p) for p in other.points])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_where_each_rank_brings_less_than_the_one_before_the_first_below_a_half_is_it(gains: list[float]) -> None:
    falling = [1.0, *sorted((gain for gain in gains if abs(gain - PAYS) > 1e-6), reverse=True)]
    found = scaling([sum(falling[:count]) for count in range(1, len(falling) + 1)])
    below = next((ranks for ranks, gain in enumerate(falling, 1) if gain < PAYS), None)
    assert found.stops_paying == below


@given(curves)
def test_from_where_it_stops_paying_no_number_of_ranks_pays_and_before_one_does(rates: list[float]) -> None:
    found = scaling(rates)
    stops = found.stops_paying
    pays = [
        any((found.gain(later, before) or 0) >= PAYS for later in found.points[place:])
        for place, before in enumerate(found.points[:-1], 1)
    ]
    assert pays.index(False) + 2 == stops if stops is not None else all(pays)


def test_a_dip_at_a_number_that_divides_the_batch_badly_is_no_end() -> None:
    """4 sequences: two each on 2 ranks, and still two on one of 3."""
    assert scaling([1.0, 2.0, 2.0, 4.0]).stops_paying is None
    assert scaling([1.0, 2.0, 2.0, 2.2]).stops_paying == 3


def test_without_a_single_rank_the_fewest_that_were_measured_are_the_measure() -> None:
    found = scaling([None, 3.0, 4.5, None, 5.0])
    assert [found.speed_up(point) for point in found.points] == pytest.approx([None, 2.0, 3.0, None, 10 / 3])
    assert found.own_rate == 1.5 and found.stops_paying == 5
    nothing = scaling([None, None])
    assert nothing.own_rate is None and nothing.stops_paying is None and nothing.efficiency(nothing.points[0]) is None


@given(st.integers(1, 1000))
def test_every_number_of_ranks_is_measured_up_to_eight_and_then_ever_fewer(ranks: int) -> None:
    counts = rank_counts(ranks)
    assert counts == sorted(set(counts)) and counts[0] == 1 and counts[-1] == ranks
    assert counts[:8] == list(range(1, min(8, ranks) + 1))
    assert all(later - count <= max(1, count // 4) for count, later in pairwise(counts))


@given(st.integers(1, 64), st.integers(1, 16))
def test_the_batch_of_some_ranks_is_the_jobs_or_their_part_of_it(whole: int, of: int) -> None:
    for ranks in range(1, of + 1):
        assert batch_of(whole, ranks, of, per_rank=False) == whole
        assert batch_of(whole * of, ranks, of, per_rank=True) == whole * ranks


def test_an_iteration_ends_with_its_slowest_rank_and_its_parts_are_the_ranks_mean() -> None:
    reports = [step_report(0, 0.4, 0.1, 2**30), step_report(1, 0.5, 0.3, 2**29)]
    point = scaling_point(ScalingPoint(ranks=2, batch=8), reports)
    assert (point.steps, point.step_s, point.examples_per_s, point.tokens_per_s) == (6, 0.5, 16.0, 200.0)
    assert point.communicate_s == pytest.approx(0.2) and point.peak_bytes == 2**30
    assert scaling_point(ScalingPoint(ranks=1, batch=8), [GroupStepReport(0, 1, 0.5)]).peak_bytes is None


def test_an_interrupted_one_is_kept_where_it_tells_of_two_numbers_of_ranks() -> None:
    assert is_worth_keeping(scaling([1.0])) and not is_worth_keeping(scaling([None]))
    assert not is_worth_keeping(scaling([1.0, None], complete=False))
    assert is_worth_keeping(scaling([1.0, 1.8], complete=False))
