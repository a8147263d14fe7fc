"""A curve thinned out for a plot keeps its extremes; of a report only numbers are taken."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from engine.run.metrics import MetricsTrial, decimate, figures
from engine.security.sanitise import plain

heights = st.floats(-1e9, 1e9)
curves = st.lists(st.tuples(st.integers(0, 10_000), heights), max_size=300).map(
    lambda points: sorted(dict(points).items())
)


@given(curves, st.integers(1, 40))
def test_extremes_are_kept_in_order_and_columns_hold_at_most_two(points: list[tuple[int, float]], width: int) -> None:
    kept = decimate(points, width)
    assert len(kept) <= 2 * width
    assert kept == [point for point in points if point in set(kept)]
    if points:
        assert min(y for _, y in kept) == min(y for _, y in points)
        assert max(y for _, y in kept) == max(y for _, y in points)


@given(curves, st.integers(1, 40))
def test_what_is_thinned_out_stays_as_it_is(points: list[tuple[int, float]], width: int) -> None:
    kept = decimate(points, width)
    assert decimate(kept, width) == kept


def test_few_points_are_all_kept_and_what_is_no_number_is_left_out() -> None:
    assert decimate([(1, 2.0), (2, float("nan")), (3, float("inf")), (4, 1.0)], 2) == [(1, 2.0), (4, 1.0)]
    assert decimate([(1, 2.0)], 0) == []


def test_points_over_one_another_become_two() -> None:
    assert decimate([(5, float(y)) for y in (3, 1, 4, 1, 5, 9, 2)], 2) == [(5, 1.0), (5, 9.0)]


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=8))
def test_figures_are_finite_numbers_whatever_is_reported(report: dict[str, object]) -> None:
    found = figures(report, {"at"})
    json.dumps(found, allow_nan=False)
    assert all(name == plain(name, 100) for name in found)
    assert all(type(value) in (int, float) and math.isfinite(value) for value in found.values() if value is not None)


def test_figures_keep_what_is_a_number_as_it_is() -> None:
    report = {"iteration": 10, "train_loss": 1.5, "kind": "=cmd|' /C calc'!A1", "val_loss": math.inf, "tokens": 10**400}
    assert figures(report, ()) == {"iteration": 10, "train_loss": 1.5, "val_loss": None, "tokens": None}


def test_figures_are_bounded_in_number() -> None:
    assert len(figures({f"loss{number}": 1.0 for number in range(10_000)}, ())) == 200


def test_a_last_line_without_an_end_is_not_called_unread() -> None:
    trial = MetricsTrial([b"step 10 loss 2.5\n", b"step 20 loss 2.4"], None)
    assert ([each["iteration"] for each in trial.reports], trial.unread) == ([10, 20], [])
