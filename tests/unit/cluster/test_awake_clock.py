"""The head's clock for waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.awake_clock import GAP_S, AwakeClock


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.floats(0, 1000), max_size=50))
def test_only_time_awake_passes(steps: list[float]) -> None:
    time = Time()
    clock = AwakeClock(time)
    for step in steps:
        time.now += step
        clock()
    assert clock() == pytest.approx(sum(step for step in steps if step <= GAP_S), abs=1e-6)
    assert clock() + clock.slept_s == pytest.approx(sum(steps), abs=1e-6)


def test_sleeps_that_are_hardly_interrupted_are_one() -> None:
    time = Time()
    clock = AwakeClock(time)
    for slept_s, awake_s, one_s in ((300, 4, 300), (40, 16, 340), (50, 0, 50)):
        time.now += slept_s
        clock()
        assert clock.sleep_s == one_s
        for _ in range(awake_s // 4):
            time.now += 4
            clock()
    assert clock.slept_s == 390


def test_soon_after_a_sleep_a_silence_may_be_the_sleeps_own() -> None:
    time = Time()
    clock = AwakeClock(time)
    assert clock.silence_s(40.0) == 40.0
    time.now += 300
    assert clock.silence_s(301.0) == 0.0
    for _ in range(5):
        time.now += 2
        assert clock.silence_s(0.5) == 0.5
    assert clock.silence_s(311.0) == 10.0
    for _ in range(3):
        time.now += 2
        clock()
    assert clock.silence_s(317.0) == 317.0, "a lease of a node that stays away is over"
