"""The filter language of the list of runs, its faults, and the order by a field."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError
from engine.models import Reason, RunRecord, RunState
from engine.run.run_filter import FIELDS, run_filter, sorted_runs
from tests.unit.store.records import record

NOW = datetime(2026, 1, 2, tzinfo=UTC)
RUNS = [
    record(1, name="qwen", settings={"learning_rate": 1e-4, "model": "~/models/Qwen3-0.6B"}, train_loss=2.0),
    record(2, name="qwen", state=RunState.FAILED, reason=Reason.NODE_LOST, cause="the node max was lost", host="max"),
    record(3, name="llama", settings={"learning_rate": 1e-5}, train_loss=1.5, tags=["night", "base"], note="best yet"),
    record(4, name="demo", state=RunState.ABORTED, train_loss=3.0, created_at=NOW, ended_at=NOW + timedelta(hours=3)),
]


def taken(text: str) -> list[int]:
    test = run_filter(text, NOW)
    return [number for number, run in enumerate(RUNS, 1) if test(run)]


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("", [1, 2, 3, 4]),
        ("qwen", [1, 2]),
        ("run-00003", [3]),
        ("LOST", [2]),
        ("night", [3]),
        ("state:failed", [2]),
        ("name=qwe", []),
        ("name=QWEN", [1, 2]),
        ("name!=qwen", [3, 4]),
        ("-name:qwen", [3, 4]),
        ("not state:failed name:qwen", [1]),
        ("lr<1e-4", [3]),
        ("lr=0.0001", [1]),
        ("lr>=1e-5 lr<=1e-4", [1, 3]),
        ("lr:*", [1, 3]),
        ("not lr:*", [2, 4]),
        ("tag:night", [3]),
        ("tag=nigh", []),
        ("note:*", [3]),
        ('note:"best yet"', [3]),
        ("model:qwen3", [1]),
        ("loss<1.8 or state:failed", [2, 3]),
        ("(loss<1.8 or state:failed) -tag:base", [2]),
        ("loss<10 and name:llama", [3]),
        ("took>2h name:demo", [4]),
        ("age<1d", [1, 2, 3, 4]),
        ("age<1min", [4]),
        ("started>2026-01-01T12:00+00:00", [4]),
        ("host:max reason:lost", [2]),
    ],
)
def test_terms_are_combined(text: str, runs: list[int]) -> None:
    assert taken(text) == runs


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("lossy<3", "runs have no 'lossy' (did you mean loss?)"),
        ("zzzz:1", "runs have no 'zzzz' (there are age, attempts, "),
        ("lr<", "the filter cannot be read: lr< needs a value (lr:* is any)"),
        ("lr<fast", "the filter cannot be read: lr is compared with a number, not 'fast' (lr<0.5)"),
        ("state<3", "the filter cannot be read: state is a text (state:3 is contained, state=3 is equal)"),
        ("took>2x", "the filter cannot be read: took is compared with a time (took<90s, took>30min, took>2h, took<7d)"),
        ("started>monday", "the filter cannot be read: started is compared with a day or time ("),
        ("(demo", "the filter cannot be read: a ( is not closed"),
        ("demo)", "the filter cannot be read: a ) has no ("),
        ("or demo", "the filter cannot be read: something is missing before 'or'"),
        ("demo or", "the filter cannot be read: something is missing at its end"),
        ("not", "the filter cannot be read: something is missing at its end"),
        pytest.param("(" * 5000 + "a" + ")" * 5000, "the filter cannot be read: too much is nested", id="brackets"),
        pytest.param("not " * 5000 + "a", "the filter cannot be read: too much is nested", id="nots"),
        ("started>0001-01-01", "the filter cannot be read: started is compared with a day or time ("),
        ('note:"best', "the filter cannot be read: a quote is not closed"),
    ],
)
def test_a_fault_is_one_clear_line(text: str, fault: str) -> None:
    with pytest.raises(InputError) as raised:
        run_filter(text, NOW)
    assert str(raised.value).startswith(fault)
    assert "\n" not in str(raised.value)


texts = st.text(st.sampled_from('ab:<>=!()-"* .1e_'), max_size=12)


@given(texts, texts)
def test_any_text_is_a_filter_or_has_a_fault_and_negation_complements(one: str, other: str) -> None:
    with suppress(InputError):
        first, second = run_filter(one, NOW), run_filter(other, NOW)
        if one.strip() and other.strip():
            joined = run_filter(f"({one}) ({other})", NOW)
            either, neither = run_filter(f"({one}) or ({other})", NOW), run_filter(f"-(({one}) or ({other}))", NOW)
            for run in RUNS:
                assert joined(run) == (first(run) and second(run))
                assert either(run) == (first(run) or second(run)) != neither(run)


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False)), st.booleans())
def test_runs_are_ordered_and_those_without_a_value_are_last(losses: list[float | None], descending: bool) -> None:
    runs = [record(number, train_loss=loss) for number, loss in enumerate(losses)]
    ordered = [run.train_loss for run in sorted_runs(runs, "-loss" if descending else "loss", NOW)]
    valued = [loss for loss in losses if loss is not None]
    assert ordered == sorted(valued, reverse=descending) + [None] * (len(losses) - len(valued))


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_orders_runs(field: str) -> None:
    assert sorted(run.id for run in sorted_runs(RUNS, field, NOW)) == [run.id for run in RUNS]


def test_an_order_by_no_field_is_refused() -> None:
    with pytest.raises(InputError, match="runs have no 'los'"):
        sorted_runs(list[RunRecord](), "los", NOW)
