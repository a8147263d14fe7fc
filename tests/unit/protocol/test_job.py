"""Bytes of optimizer state, by the forms that a job can choose."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.protocol.job import MOST_PRECISE_FIRST, state_bytes


@pytest.mark.parametrize(
    ("precision", "moments", "element", "expected"),
    [
        ("parameter", "float32", 2, 4),
        ("parameter", "float32", 4, 8),
        ("parameter", "8bit", 2, 2.125),
        ("float32", "float32", 2, 12),
        ("float32", "bfloat16", 2, 8),
        ("float32", "float32", 4, 8),
        ("kahan", "8bit", 2, 4.125),
        ("kahan", "8bit", 4, 2.125),
        ("stochastic", "bfloat16", 2, 4),
    ],
)
def test_adams_state_has_masters_or_compensation_and_two_moments(
    precision: str, moments: str, element: int, expected: float
) -> None:
    assert state_bytes(precision, moments, element) == expected


def test_an_optimizer_without_moments_has_masters_alone() -> None:
    assert state_bytes("float32", "8bit", 2, moments_per_element=0) == 4


def test_each_choice_takes_less_memory_than_the_more_precise_one_before() -> None:
    sizes = [state_bytes(precision, moments, 2) for precision, moments in MOST_PRECISE_FIRST]
    assert all(before > after for before, after in pairwise(sizes))
