"""One round of gradients: finite, alike in size, none far from the others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import validate_gradient_layer


def updates(*norms: float, **first: Any) -> list[dict[str, Any]]:
    found = [{"worker_id": f"w{at}", "gradients": [0.1, -0.2], "gradient_norm": norm} for at, norm in enumerate(norms)]
    found[0] |= first
    return found


def test_gradients_that_are_alike_are_valid() -> None:
    report = validate_gradient_layer(updates(1.0, 1.1, 0.9, 1.05))
    assert report.is_valid and report.numerical_stability
    assert report.gradient_variance == pytest.approx(np.var([1.0, 1.1, 0.9, 1.05]))
    assert report.outlier_workers == report.unstable_workers == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 4])
def test_a_value_that_is_no_number_is_an_instability_also_of_one_worker(bad: float, count: int) -> None:
    for gradients in ([0.1, bad], {"layer": [[0.1], [bad]]}, np.array([[1.0, bad]])):
        report = validate_gradient_layer(updates(*[1.0] * count, gradients=gradients))
        assert (report.unstable_workers, report.numerical_stability, report.is_valid) == (("w0",), False, False)
    if not bad < 0:
        assert validate_gradient_layer(updates(bad, *[1.0] * (count - 1))).unstable_workers == ("w0",)


@pytest.mark.parametrize("wrong", [[], None, "updates", {}, [None], [{"worker_id": "w", "gradient_norm": 1.0}]])
def test_no_updates_are_an_error(wrong: Any) -> None:
    with pytest.raises(ValueError):
        validate_gradient_layer(wrong)


@pytest.mark.parametrize("gradients", [None, [], {}, [[], []], "text", [0.1, "x"], [True]])
def test_an_update_without_gradients_is_an_error(gradients: Any) -> None:
    with pytest.raises(ValueError, match="gradients"):
        validate_gradient_layer(updates(1.0, 1.0, gradients=gradients))


@pytest.mark.parametrize("wrong", [{"gradient_norm": -1.0}, {"worker_id": ""}, {"worker_id": "w1"}])
def test_a_worker_that_cannot_be_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        validate_gradient_layer(updates(1.0, 1.0, **wrong))


@pytest.mark.parametrize(
    ("norms", "apart"),
    [
        ((1.0, 1.0, 10.0), ()),
        ((1.0, 1.0, 10.1), ("w2",)),
        ((1.0, 1.0, 0.1), ()),
        ((1.0, 1.0, 0.09), ("w2",)),
        ((0.0, 0.0, 1.0), ("w2",)),
        ((5.0,), ()),
        ((1.0, 1.0, 1.0, 1.2), ("w3",)),
        ((1.0, 1.1, 0.9, 1.2, 1.0), ()),
        ((1.0, 1.1, 0.9, 1.2, 9.0), ("w4",)),
        ((1.0, 1.0, 1.0, 1.0 + 1e-15), ()),
    ],
)
def test_outliers_are_found_by_a_factor_for_few_workers_and_by_the_mean_deviation_for_more(
    norms: tuple[float, ...], apart: tuple[str, ...]
) -> None:
    assert validate_gradient_layer(updates(*norms), tolerance=1e9).outlier_workers == apart


def test_the_tolerance_is_an_argument_that_counts_and_not_inclusive() -> None:
    spread = updates(1.0, 2.0)
    assert not validate_gradient_layer(spread).is_valid
    assert validate_gradient_layer(spread, tolerance=0.26).is_valid
    assert not validate_gradient_layer(spread, tolerance=0.25).is_valid
    with pytest.raises(ValueError, match="tolerance"):
        validate_gradient_layer(spread, tolerance=-1)


def test_a_variance_that_is_nothing_is_0() -> None:
    assert validate_gradient_layer(updates(1.0, 1.0 + 1e-6)).gradient_variance == 0.0
    assert not validate_gradient_layer(updates(1.0, 1.0), tolerance=0.0).is_valid


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True).map(abs), min_size=1, max_size=12))
def test_whatever_the_norms_the_report_adds_up(norms: list[float]) -> None:
    report = validate_gradient_layer(updates(*norms))
    unstable = {f"w{at}" for at, norm in enumerate(norms) if not math.isfinite(norm)}
    assert set(report.unstable_workers) == unstable
    assert math.isfinite(report.gradient_variance)
    assert not set(report.outlier_workers) & unstable
    expected = not unstable and not report.outlier_workers and report.gradient_variance < 0.1
    assert report.is_valid is expected
