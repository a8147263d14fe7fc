"""Workers of a run, judged at one update: staleness, spread, Byzantine ones, and what too few workers cannot tell."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import ConsistencyMetrics, WorkerState, validate_worker_consistency
from engine.validators.workers import krum_scores

ISSUES = (
    "STALENESS_THRESHOLD_EXCEEDED",
    "KL_DIVERGENCE_THRESHOLD_EXCEEDED",
    "WASSERSTEIN_DISTANCE_THRESHOLD_EXCEEDED",
    "BYZANTINE_WORKERS_DETECTED",
)


def state(name: str = "w0", **fields: Any) -> WorkerState:
    figures = {"parameter_version": 100, "gradient_norm": 1.0, "loss_value": 2.0, "timestamp": 1.7e9}
    return WorkerState(name, **{**figures, **fields})


def states(**columns: list[Any]) -> list[WorkerState]:
    rows = zip(*columns.values(), strict=True)
    return [state(f"w{place}", **dict(zip(columns, row, strict=True))) for place, row in enumerate(rows)]


@pytest.mark.parametrize("name", ["", "w1\n", "a b", "a.b", "é", "../x", "w\0", "a;id", None, 7])
def test_a_worker_id_is_letters_digits_dash_and_underscore_to_its_very_end(name: Any) -> None:
    with pytest.raises(ValueError, match="worker_id"):
        state(name)


def test_a_worker_id_may_begin_with_anything_that_it_may_hold() -> None:
    assert [state(name).worker_id for name in ("a", "-", "_", "node-1_B")] == ["a", "-", "_", "node-1_B"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"parameter_version": -1},
        {"parameter_version": 1.5},
        {"parameter_version": True},
        {"gradient_norm": -0.1},
        {"gradient_norm": math.nan},
        {"gradient_norm": math.inf},
        {"loss_value": math.nan},
        {"loss_value": -math.inf},
        {"loss_value": "2.0"},
        {"loss_value": 10**400},
        {"timestamp": math.nan},
    ],
)
def test_a_figure_that_no_worker_can_have_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        state(**wrong)


def test_states_and_verdict_are_frozen() -> None:
    verdict = validate_worker_consistency([state()])
    for thing, name in ((verdict, "is_consistent"), (state(), "loss_value")):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, name, 0)


def test_no_worker_is_an_error_and_one_alone_agrees_with_itself() -> None:
    with pytest.raises(ValueError, match="no worker states"):
        validate_worker_consistency([])
    verdict = validate_worker_consistency([state()])
    assert (verdict.is_consistent, verdict.is_valid, verdict.total_workers, verdict.synchronized_workers) == (
        True,
        True,
        1,
        1,
    )
    assert "one worker" in verdict.byzantine_rule


def test_two_states_of_one_worker_are_refused() -> None:
    with pytest.raises(ValueError, match="two states of the worker w0"):
        validate_worker_consistency([state(), state()])


@pytest.mark.parametrize(("versions", "consistent"), [([100, 95], True), ([100, 94], False), ([0, 0, 6], False)])
def test_staleness_is_the_newest_version_minus_the_oldest_and_its_limit_is_inclusive(
    versions: list[int], consistent: bool
) -> None:
    verdict = validate_worker_consistency(states(parameter_version=versions))
    assert verdict.max_staleness == max(versions) - min(versions)
    assert verdict.is_consistent is consistent
    assert (ISSUES[0] in verdict.consistency_issues) is not consistent


def test_stale_workers_are_named_and_counted() -> None:
    verdict = validate_worker_consistency(states(parameter_version=[100, 99, 90, 80]))
    assert verdict.divergent_workers == ("w2", "w3")
    assert (verdict.synchronized_workers, verdict.total_workers) == (2, 4)


def test_the_proxies_are_the_formulas() -> None:
    losses, norms = [1.0, 2.0, 4.0], [0.5, 1.0, 3.0]
    verdict = validate_worker_consistency(states(loss_value=losses, gradient_norm=norms))
    mean = sum(losses) / 3
    variance = sum((loss - mean) ** 2 for loss in losses) / 3
    assert verdict.kl_divergence == pytest.approx(math.log(1 + variance) / 10)
    assert verdict.wasserstein_distance == pytest.approx(sum(abs(norm - 1.5) for norm in norms) / 3)


def test_the_spread_of_losses_ends_at_1_however_far_the_losses_are_apart() -> None:
    verdict = validate_worker_consistency(states(loss_value=[0.0, 1e300]))
    assert verdict.kl_divergence == 1.0
    assert verdict.consistency_issues == (ISSUES[1],)


def test_every_limit_is_an_argument_that_counts() -> None:
    spread = states(
        parameter_version=[10, 4], loss_value=[0.0, 4.0], gradient_norm=[0.0, 4.0]
    )  # 6 versions, ln(5)/10 = 0.161, 2.0
    assert validate_worker_consistency(spread).consistency_issues == ISSUES[:3]
    assert validate_worker_consistency(spread, 6, 0.17, 2.0).is_consistent
    assert validate_worker_consistency(spread, staleness_threshold=6).consistency_issues == ISSUES[1:3]
    assert validate_worker_consistency(spread, kl_threshold=0.17).consistency_issues == (ISSUES[0], ISSUES[2])
    assert validate_worker_consistency(spread, wasserstein_threshold=2.0).consistency_issues == ISSUES[:2]
    with pytest.raises(ValueError, match="kl_threshold"):
        validate_worker_consistency(spread, kl_threshold=math.nan)
    with pytest.raises(ValueError, match="staleness_threshold"):
        validate_worker_consistency(spread, staleness_threshold=-1)


def test_of_two_workers_either_may_be_wrong() -> None:
    verdict = validate_worker_consistency(states(loss_value=[1.0, 9.0]))
    assert verdict.byzantine_workers == ()
    assert verdict.divergent_workers == ("w0", "w1")
    assert "either may be the one that is wrong" in verdict.byzantine_rule


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("figure", ["loss_value", "gradient_norm"])
def test_below_five_workers_median_and_mad_find_the_one_apart_and_say_so(count: int, figure: str) -> None:
    usual = [2.0, 2.1, 1.9, 2.05][: count - 1]
    verdict = validate_worker_consistency(states(**{figure: [*usual, 40.0]}))
    assert verdict.byzantine_workers == (f"w{count - 1}",)
    assert ISSUES[3] in verdict.consistency_issues
    assert verdict.byzantine_rule.startswith("median and MAD: Krum needs 5 workers")


@pytest.mark.parametrize(("count", "bad"), [(5, 1), (6, 1), (7, 2), (9, 3)])
def test_from_five_workers_krum_finds_up_to_f_that_are_apart_also_when_they_agree_with_each_other(
    count: int, bad: int
) -> None:
    norms = [1.0 + 0.05 * (place % 3) for place in range(count - bad)] + [30.0] * bad
    verdict = validate_worker_consistency(states(gradient_norm=norms))
    assert verdict.byzantine_workers == tuple(f"w{place}" for place in range(count - bad, count))
    assert verdict.byzantine_rule.startswith("Krum")


def test_ranks_that_train_on_different_examples_are_no_byzantine_workers() -> None:
    norms = [1.0, 1.2, 0.9, 1.15, 0.85, 1.3]
    assert validate_worker_consistency(states(gradient_norm=norms)).is_consistent


def test_krums_score_is_the_papers() -> None:
    """Points on a line, n = 5, f = 1: the sum of the squared distances to the two nearest others."""
    scores = krum_scores([(0.0,), (1.0,), (2.0,), (4.0,), (100.0,)], 1)
    assert scores == [1 + 4, 1 + 1, 1 + 4, 4 + 9, 96**2 + 98**2]
    with pytest.raises(ValueError, match="Krum needs 5 workers"):
        krum_scores([(0.0,)] * 4, 1)


FIGURES = st.floats(0, 1e6)


@given(st.lists(st.tuples(st.integers(0, 20), FIGURES, st.floats(-1e6, 1e6)), min_size=1, max_size=9))
def test_whatever_the_figures_the_verdict_adds_up(rows: list[tuple[int, float, float]]) -> None:
    given_ = [
        state(f"w{place}", parameter_version=version, gradient_norm=norm, loss_value=loss)
        for place, (version, norm, loss) in enumerate(rows)
    ]
    verdict: ConsistencyMetrics = validate_worker_consistency(given_)
    assert verdict.total_workers == len(given_) == verdict.synchronized_workers + len(verdict.divergent_workers)
    assert set(verdict.byzantine_workers) <= set(verdict.divergent_workers)
    assert len(given_) > 2 or not verdict.byzantine_workers
    assert verdict.is_consistent is (verdict.consistency_issues == ())
    assert list(verdict.consistency_issues) == [issue for issue in ISSUES if issue in verdict.consistency_issues]
    assert 0 <= verdict.kl_divergence <= 1 and verdict.wasserstein_distance >= 0
    assert (ISSUES[0] in verdict.consistency_issues) is (verdict.max_staleness > 5)
    # Who comes first says nothing about who is judged how.
    turned = validate_worker_consistency(given_[::-1])
    assert set(turned.divergent_workers) == set(verdict.divergent_workers)


@given(st.integers(1, 12), FIGURES, st.floats(-1e6, 1e6))
def test_workers_that_say_the_same_are_consistent(count: int, norm: float, loss: float) -> None:
    same = [state(f"w{place}", gradient_norm=norm, loss_value=loss) for place in range(count)]
    assert validate_worker_consistency(same).is_consistent
