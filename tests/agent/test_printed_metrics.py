"""Metrics that a PyTorch script prints, read from its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.node.printed_metrics import PrintedMetrics
from engine.protocol.events import EventWriter
from tests.data import DATA


def events_of(folder: Path, *chunks: bytes, elastic: bool = False) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    path.unlink(missing_ok=True)
    metrics = PrintedMetrics(EventWriter(path, 0, 1), elastic=elastic)
    for chunk in chunks:
        metrics.feed(chunk)
    named = ("event", "iteration", "train_loss", "val_loss", "learning_rate")
    rows = map(json.loads, path.read_text().splitlines())
    return [{name: row[name] for name in named if name in row} for row in rows]


def test_a_json_object_with_a_step_is_a_report(tmp_path: Path) -> None:
    line = json.dumps({"step": 20, "loss": 1.25, "lr": 1e-4}).encode()
    assert events_of(tmp_path, b"epoch 1\n" + line[:9], line[9:] + b"\n", b'{"step": 20, "val_loss": 2.5}\n') == [
        {"event": "step", "iteration": 20},
        {"event": "report", "iteration": 20, "train_loss": 1.25, "learning_rate": 1e-4},
        {"event": "validation", "iteration": 20, "val_loss": 2.5},
    ]


@pytest.mark.parametrize("size", [1, 100, 1 << 16])
def test_the_trainers_logs_have_the_steps_of_its_own_progress_bar(tmp_path: Path, size: int) -> None:
    """Output of transformers 5.23.0: 6 steps, a log after every 2, an evaluation, with a bar of its own, after every
    3. The bar of a step may be older than its log."""
    output = (DATA / "trainer_output.txt").read_bytes()
    found = events_of(tmp_path, *(output[at : at + size] for at in range(0, len(output), size)))
    rows = [(row["event"], row["iteration"], row.get("train_loss", row.get("val_loss"))) for row in found]
    assert [row for row in rows if row[0] != "step"] == [
        ("report", 2, 3.024),
        ("validation", 3, 3.022),
        ("report", 4, 3.022),
        ("report", 6, 3.022),
        ("validation", 6, 3.021),
    ]


def test_the_bars_steps_are_progress_between_far_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 10))
    monkeypatch.setattr("engine.node.printed_metrics.time.monotonic", lambda: float(next(ticks)))
    bars = [b"\r %2d%%|##  | %d/200 [00:01<00:20, 9.1it/s]" % (step // 2, step) for step in (1, 2, 2, 3)]
    found = events_of(tmp_path, *bars, b"\r")
    assert found == [{"event": "step", "iteration": step} for step in (1, 2, 3)]


def test_other_bars_than_the_trainings_have_no_steps(tmp_path: Path) -> None:
    """That of the tokenizer, of the files of a checkpoint, of the evaluation."""
    bars = b"Map: 100%|##| 500/500 [00:01<00:00]\r\rWriting model shards: 100%|##| 1/1 [00:00<00:00]\r"
    bars += b"\n100%|##| 2/2 [00:00<00:00, 6.30it/s]\x1b[A\r"
    assert [row["iteration"] for row in events_of(tmp_path, bars + b"{'loss': '2.5'}\n")] == [1, 1]


def test_without_a_bar_logs_are_counted(tmp_path: Path) -> None:
    found = events_of(tmp_path, b"{'loss': 2.0}\n{'loss': 1.0}\n")
    assert [row["iteration"] for row in found if row["event"] == "report"] == [1, 2]


def test_of_an_elastic_job_the_worker_of_rank_0_counts(tmp_path: Path) -> None:
    chunk = b'[rank 1] {"step": 1, "loss": 9}\n[rank 0] {"step": 1, "loss": 3}\n{"step": 2, "loss": 4}\n'
    found = events_of(tmp_path, chunk, elastic=True)
    assert [row["train_loss"] for row in found if row["event"] == "report"] == [3]


@pytest.mark.parametrize(
    "text",
    [
        b'{"loss": "nan and more", "step": 1}',
        b'{"step": 1}',
        b"{" * 3000,
        b"[1, 2]",
        b"{'a': __import__('os').getcwd()}",
        b'{"step": 1, "loss": 1' + b" " * 5000 + b"}",
        b'{"loss": true, "step": 1}',
    ],
    ids=range(7),
)
def test_other_output_is_no_metric(tmp_path: Path, text: bytes) -> None:
    assert events_of(tmp_path, text + b"\n") == []


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_no_output_harms(chunks: list[bytes]) -> None:
    metrics = PrintedMetrics(EventWriter(None, 0, 1), elastic=False)
    for chunk in chunks:
        metrics.feed(chunk)


def test_a_line_without_an_end_is_not_kept(tmp_path: Path) -> None:
    found = events_of(tmp_path, *[b"x" * 65_536] * 20, b'\n{"step": 3, "loss": 1.0}\n')
    assert [row["iteration"] for row in found] == [3, 3]
