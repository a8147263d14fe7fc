"""Shares are equal unless the evidence says otherwise; micro-batches are the trainer's own and sum to the batch."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.measurements import HardwareMetrics
from engine.plan.shares import MISSING, calculate_workload_distribution, divide_batch, noise, variation
from tests.unit.plan.calibrations import TAKEN, calibration, config, measure

SPEEDS = st.lists(st.floats(0.01, 1e4), min_size=1, max_size=9)


def metrics(node: str, throughput: float) -> HardwareMetrics:
    return HardwareMetrics(node, "m", throughput, memory_gb=1.0, latency_ms=1.0, timestamp=datetime.now(UTC))


def test_without_a_calibration_all_are_equal_with_a_warning() -> None:
    found = divide_batch(config(["a", "b", "c", "d"]), None)
    assert found.parts == dict.fromkeys("abcd", 0.25)
    assert (found.source, found.warnings) == ("equal", (MISSING,))


def test_a_calibration_that_is_switched_off_is_ignored_with_a_warning() -> None:
    found = divide_batch(config(["a", "b"], enabled=False), calibration({"a": 1.0, "b": 9.0}))
    assert found.parts == {"a": 0.5, "b": 0.5}
    assert "[calibration] enabled = false" in found.warnings[0]


def test_an_old_calibration_is_not_used_and_its_age_is_shown() -> None:
    deck, taken = config(["a", "b"], max_age_days=30), calibration({"a": 1.0, "b": 9.0})
    assert divide_batch(deck, taken, now=TAKEN + timedelta(days=29)).source == "calibrated"
    found = divide_batch(deck, taken, now=TAKEN + timedelta(days=45))
    assert found.source == "equal" and "45 days old" in found.warnings[0]


def test_a_fixed_share_wins_over_everything() -> None:
    found = divide_batch(config(["a", "b"], fixed={"a": 3.0}), calibration({"a": 1.0, "b": 9.0}))
    assert found.parts == {"a": 0.75, "b": 0.25}
    assert found.source == "fixed"


@pytest.mark.parametrize(
    ("slow", "source", "warned"),
    [(1.0, "equal", False), (0.82, "equal", False), (0.80, "calibrated", False), (0.60, "calibrated", True)],
)
def test_unequal_shares_need_a_variation_above_a_tenth(slow: float, source: str, warned: bool) -> None:
    found = divide_batch(config(["a", "b"]), calibration({"a": 1.0, "b": slow}))
    assert found.variation == pytest.approx((1 - slow) / (1 + slow))
    assert found.source == source
    assert bool(found.warnings) == warned
    if source == "calibrated":
        assert found.parts["b"] == pytest.approx(slow / (1 + slow))


@pytest.mark.parametrize(
    ("spread", "windows", "noise_", "source"),
    [(0.05, 10, 0.032, "calibrated"), (0.5, 16, 0.25, "calibrated"), (0.5, 4, 0.5, "equal")],
)
def test_unequal_shares_need_a_difference_beyond_the_measurements_own_noise(
    spread: float, windows: int, noise_: float, source: str
) -> None:
    nodes = tuple(measure(name, speed, spread=spread, windows=windows) for name, speed in (("a", 1.0), ("b", 0.5)))
    found = divide_batch(config(["a", "b"]), calibration({"a": 1.0, "b": 0.5}, nodes=nodes))
    assert found.source == source
    assert found.noise == pytest.approx(noise_, abs=1e-3)
    assert f"{noise_:.0%}" in found.reason
    expected = "vary by 33%, within their noise of 50%"
    assert any(expected in warning for warning in found.warnings) is (source == "equal")
    assert sum(found.parts.values()) == pytest.approx(1)


def test_noise_is_the_root_mean_square_of_known_spreads() -> None:
    known = [measure(name, 1.0, spread=spread, windows=4) for name, spread in (("a", 0.3), ("b", 0.4))]
    assert noise([*known, None]) == pytest.approx(0.3536, abs=1e-4)
    assert noise([measure("a", 1.0), None]) is None


def test_a_node_that_finished_nothing_is_left_out() -> None:
    found = divide_batch(config(["a", "b", "c"]), calibration({"a": 1.0, "b": 0.0, "c": 3.0}))
    assert found.parts == {"a": 0.25, "c": 0.75}
    assert found.left_out == ("b",)
    assert "b completed no step" in found.warnings[0]


def test_when_none_is_left_that_is_an_error() -> None:
    with pytest.raises(ValueError, match="no node has any throughput"):
        divide_batch(config(["a", "b"]), calibration({"a": 0.0, "b": 0.0}))


def test_one_node_that_was_not_measured_makes_all_equal() -> None:
    found = divide_batch(config(["a", "b"]), calibration({"a": 1.0, "b": None}))
    assert found.parts == {"a": 0.5, "b": 0.5}
    assert found.warnings == ("hardware calibration missing for b, assuming equal performance",)


@given(SPEEDS)
def test_shares_sum_to_one_and_follow_the_throughputs(speeds: list[float]) -> None:
    names = [f"n{number}" for number in range(len(speeds))]
    found = divide_batch(config(names), calibration(dict(zip(names, speeds, strict=True))))
    assert sum(found.parts.values()) == pytest.approx(1)
    if found.source == "calibrated":
        assert variation(speeds) > 0.10
        assert list(found.parts.values()) == pytest.approx([speed / sum(speeds) for speed in speeds])
    else:
        assert set(found.parts.values()) == {1 / len(speeds)}


def test_the_distribution_is_throughput_over_the_sum() -> None:
    assert calculate_workload_distribution([metrics("a", 1.0), metrics("b", 3.0)]) == {"a": 0.25, "b": 0.75}


@given(SPEEDS)
def test_the_distribution_sums_to_one(speeds: list[float]) -> None:
    found = calculate_workload_distribution([metrics(f"n{number}", speed) for number, speed in enumerate(speeds)])
    assert sum(found.values()) == pytest.approx(1)


def test_an_offline_node_is_left_out_of_the_distribution_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert calculate_workload_distribution([metrics("a", 2.0), metrics("b", 0.0)]) == {"a": 1.0}
    assert "node b has no throughput" in caplog.text


@pytest.mark.parametrize(
    ("given_metrics", "why"),
    [
        ([], "no metrics"),
        ([metrics("a", 0.0)], "no node has any throughput"),
        ([metrics("a", 1.0), metrics("a", 2.0)], "duplicate metrics of a node: a"),
    ],
)
def test_a_distribution_that_cannot_be(given_metrics: list[HardwareMetrics], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        calculate_workload_distribution(given_metrics)
