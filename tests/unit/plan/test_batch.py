"""The arithmetic of one update: it is closed for every batch, and gives the figures that are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan.batch import suggest_batch, warmup_steps
from engine.plan.checkpoints import save_every
from engine.protocol.job import scaled_rate, scaling_rule

counts = st.integers(1, 512)


def test_the_linear_rule_grows_with_the_batch() -> None:
    assert scaled_rate(512, "linear") == pytest.approx(0.008)


def test_the_root_rule_grows_with_the_batchs_root() -> None:
    assert scaled_rate(8, "sqrt") == pytest.approx(2.8e-5, rel=0.02)


@pytest.mark.parametrize(
    ("optimizer", "rule"), [("adam", "sqrt"), ("AdamW", "sqrt"), ("muon", "sqrt"), ("sgd", "linear")]
)
def test_the_optimizer_decides_the_rule(optimizer: str, rule: str) -> None:
    assert scaling_rule(optimizer) == rule


@given(counts, st.integers(1, 64), st.one_of(st.none(), counts), counts)
def test_a_suggestion_is_closed_and_fits(ranks: int, start: int, fits: int | None, target: int) -> None:
    per_rank, steps = suggest_batch(ranks=ranks, start=start, fits=fits, target=target)
    total = per_rank * ranks * steps
    assert 1 <= per_rank <= start and (fits is None or per_rank <= fits)
    assert target <= total < target + per_rank * ranks


@given(st.integers(1, 10**6), st.one_of(st.none(), st.floats(0.01, 1e6)))
def test_warm_up_takes_a_twentieth_to_a_tenth_of_the_updates(updates: int, per_epoch: float | None) -> None:
    steps = warmup_steps(updates, per_epoch)
    assert steps >= 1 and updates * 0.05 <= steps < updates * 0.10 + 1


@pytest.mark.parametrize(
    ("iterations", "full", "every"),
    [(1000, False, 50), (100_000, False, 1000), (100_000, True, 500), (1, False, 1), (10_000, True, 500)],
)
def test_saves_are_a_twentieth_apart_and_never_above_the_limit(*, iterations: int, full: bool, every: int) -> None:
    assert save_every(iterations, full=full) == every


@given(st.integers(1, 10**9), st.booleans())
def test_no_run_can_lose_more_than_the_limit(iterations: int, full: bool) -> None:
    assert 1 <= save_every(iterations, full=full) <= (500 if full else 1000)
