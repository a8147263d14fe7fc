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


def test_the_trainers_dict_has_the_step_of_its_progress_bar(tmp_path: Path) -> None:
    bar = b"  5%|5         | 10/200 [00:01<00:20, 9.1it/s]\r"
    log = b"{'loss': '2.31', 'grad_norm': '1.2', 'learning_rate': '5e-05', 'epoch': '0.1'}\n"
    evaluation = b"{'eval_loss': 2.2, 'eval_runtime': 0.5, 'epoch': 0.1}\n"
    summary = b"{'train_runtime': 9.1, 'train_loss': 2.0, 'epoch': 1.0}\n"
    assert events_of(tmp_path, bar + log + evaluation + summary) == [
        {"event": "step", "iteration": 10},
        {"event": "report", "iteration": 10, "train_loss": 2.31, "learning_rate": 5e-05},
        {"event": "validation", "iteration": 10, "val_loss": 2.2},
    ]


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
