"""The arithmetic of one update: it is closed for every batch, and gives the figures that are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan.batch import accumulation_steps, scaled_rate, scaling_rule, suggest_batch, warmup_steps
from engine.plan.checkpoints import save_every

counts = st.integers(1, 512)


def test_the_linear_rule_grows_with_the_batch() -> None:
    assert scaled_rate(0.001, 64, 512, "linear") == pytest.approx(0.008)


def test_the_root_rule_grows_with_the_batchs_root() -> None:
    assert scaled_rate(1e-5, 1, 8, "sqrt") == pytest.approx(2.8e-5, rel=0.02)


@pytest.mark.parametrize(
    ("optimizer", "rule"), [("adam", "sqrt"), ("AdamW", "sqrt"), ("muon", "sqrt"), ("sgd", "linear")]
)
def test_the_optimizer_decides_the_rule(optimizer: str, rule: str) -> None:
    assert scaling_rule(optimizer) == rule


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_that_is_none_has_no_rate(batch: int) -> None:
    with pytest.raises(ValueError, match="batches must be positive"):
        scaled_rate(1e-5, 1, batch, "sqrt")


@given(counts, counts, counts)
def test_accumulation_reaches_the_target_and_no_further_than_a_round(target: int, per_rank: int, ranks: int) -> None:
    steps = accumulation_steps(target, per_rank, ranks)
    assert per_rank * ranks * (steps - 1) < target <= per_rank * ranks * steps


@pytest.mark.parametrize(("target", "per_rank", "ranks"), [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, -5)])
def test_counts_below_one_are_refused(target: int, per_rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        accumulation_steps(target, per_rank, ranks)


@given(counts, st.integers(1, 64), st.one_of(st.none(), counts), counts)
def test_a_suggestion_is_closed_and_fits(ranks: int, start: int, fits: int | None, target: int) -> None:
    choice = suggest_batch(ranks=ranks, start=start, fits=fits, target=target, optimizer="adam")
    assert choice.per_rank * ranks * choice.accumulation == choice.total >= target
    assert choice.per_rank <= start and (fits is None or choice.per_rank <= fits)
    assert choice.total - target < choice.per_rank * ranks


def test_nothing_is_suggested_where_nothing_fits() -> None:
    with pytest.raises(ValueError, match="not even one sequence fits"):
        suggest_batch(ranks=2, start=4, fits=0, target=8, optimizer="adam")


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


def test_no_iterations_have_no_saves() -> None:
    with pytest.raises(ValueError, match="iterations must be positive: 0"):
        save_every(0, full=False)
