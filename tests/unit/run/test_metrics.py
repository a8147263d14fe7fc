"""The figures of reports, and of a program's output: of a report only numbers are taken."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.run import metrics
from engine.run.json_lines import parse_json_line
from engine.run.metrics import MetricsSeries, MetricsTrial, figures
from engine.security.sanitise import plain
from tests.unit.run.run_maker import report, validation

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


def test_of_a_long_history_few_rows_are_parsed_and_what_is_shown_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [report(step, 5.0 / step) for step in range(1, 301)]
    second = [report(step, 9.0 / step, attempt=2) for step in range(201, 601)]
    rows = list[dict[str, Any]]()
    for row in (*first, *second):
        rows += (
            [row] if row["iteration"] % 50 else [row, {**validation(row["iteration"], 1.0), "attempt": row["attempt"]}]
        )
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = MetricsSeries(path)
    for row in rows:
        whole.add(row)
    parsed = 0

    def parse(line: bytes) -> dict[str, Any] | None:
        nonlocal parsed
        parsed += 1
        return parse_json_line(line)

    monkeypatch.setattr(metrics, "parse_json_line", parse)
    monkeypatch.setattr(metrics, "_MOST_PARSED", 50)
    series = MetricsSeries(path)
    series.poll()
    assert parsed < 90
    for name in ("iteration", "learning_rate", "trained_tokens", "damaged"):
        assert getattr(series, name) == getattr(whole, name)
    built, full = series.build([]), whole.build([])
    assert (built.val, built.marks) == (full.val, full.marks)
    assert built.train[-1] == full.train[-1] and len(built.train) > 30
    assert series.seconds_left(1, 9) == whole.seconds_left(1, 9)
    with path.open("a") as file:
        file.writelines(json.dumps(report(600 + number, 1.0, attempt=2)) + "\n" for number in (1, 2, 3))
    series.poll()
    assert [step for step, _ in series.build([]).train[-3:]] == [601, 602, 603]
