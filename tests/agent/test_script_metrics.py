"""Metrics of a PyTorch script, read from its output or from its tracker's files."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.node.script_metrics import PrintedMetrics, TensorBoardMetrics
from engine.protocol.events import EventWriter
from tests.data import DATA
from tests.waiting import wait_until


def events_of(folder: Path, *chunks: bytes, elastic: bool = False) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    path.unlink(missing_ok=True)
    metrics = PrintedMetrics(EventWriter(path, 0, 1), elastic=elastic)
    for chunk in chunks:
        metrics.feed(chunk)
    return rows_of(path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    named = ("event", "iteration", "train_loss", "val_loss", "learning_rate", "iterations_per_second")
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


@pytest.mark.parametrize(
    "bar", [b"\r %2d%%|##  | %d/200 [00:01<00:20, 9.1it/s]", b"\rMap: %2d%%|##| %d/500 [00:01<00:00]\x1b[A"]
)
def test_a_bar_of_whatever_kind_is_activity_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bar: bytes
) -> None:
    """That a script goes through its data is not an iteration."""
    monkeypatch.setattr("engine.node.script_metrics._ACTIVITY_EVERY_S", 0.0)
    found = events_of(tmp_path, *[bar % (step // 2, step) for step in (1, 2)], b"\r")
    assert found == [{"event": "activity"}] * 2


def test_beside_a_tracker_the_output_is_activity_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.node.script_metrics._ACTIVITY_EVERY_S", 0.0)
    metrics = PrintedMetrics(EventWriter(tmp_path / "events", 0, 1), elastic=False, activity_only=True)
    metrics.feed(b'{"step": 1, "loss": 1.0}\r 10%|#  | 2/20 [00:01<00:09, 1.0it/s]\r')
    assert rows_of(tmp_path / "events") == [{"event": "activity"}]


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


def test_a_worker_may_write_into_the_line_of_another_one(tmp_path: Path) -> None:
    bar = b"[rank 1]  10%|#  | 3/30 [00:00<00:01, 30it/s]"
    chunk = bar + b'[rank 0] {"step": 5, "loss": 0.5}\n[rank 0] {"step": 6, "loss": 0.25}' + bar + b"\n"
    found = events_of(tmp_path, chunk, elastic=True)
    assert [row["train_loss"] for row in found if row["event"] == "report"] == [0.5, 0.25]


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


@pytest.fixture(autouse=True)
def searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """New files are found at once."""
    monkeypatch.setattr("engine.node.script_metrics._SEARCH_EVERY_S", 0.0)


class Tracker:
    """A script's TensorBoard, and the keeper's reader of it."""

    def __init__(self, folder: Path) -> None:
        event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
        summary_pb2 = pytest.importorskip("tensorboard.compat.proto.summary_pb2")
        self.event, self.summary = event_pb2.Event, summary_pb2.Summary
        self.folder, self.path = folder / "logs" / "run", folder / "events.jsonl"
        self.reader = TensorBoardMetrics(EventWriter(self.path, 0, 1), folder / "logs")
        self.reader.skip()
        self.writer = self.file()

    def file(self) -> Any:
        writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
        return writer.EventFileWriter(str(self.folder))

    def add(self, step: int, *, at: float = 0.0, **values: float) -> None:
        """One event for each value, as SummaryWriter.add_scalar writes them."""
        for name, value in values.items():
            summary = self.summary(value=[self.summary.Value(tag=name.replace("__", "/"), simple_value=value)])
            self.writer.add_event(self.event(wall_time=at, step=step, summary=summary))
        self.writer.flush()

    @property
    def rows(self) -> list[dict[str, Any]]:
        self.reader.poll()
        return rows_of(self.path)


@pytest.mark.needs("trackers")
def test_the_scalars_of_a_step_are_one_report(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.add(10, at=100.0, train_loss=2.0)
    assert tracker.rows == []
    tracker.add(10, at=100.0, learning_rate=0.125, accuracy=0.5)
    tracker.add(30, at=105.0, train__loss=1.5, eval__loss=1.75)
    assert tracker.rows == []
    first = [
        {"event": "step", "iteration": 10},
        {"event": "report", "iteration": 10, "train_loss": 2.0, "learning_rate": 0.125},
    ]
    second = [
        {"event": "step", "iteration": 30},
        {"event": "report", "iteration": 30, "train_loss": 1.5, "iterations_per_second": 4.0},
        {"event": "validation", "iteration": 30, "val_loss": 1.75},
    ]
    assert tracker.rows == first + second


@pytest.mark.needs("trackers")
def test_what_was_there_before_is_another_runs(tmp_path: Path) -> None:
    before = Tracker(tmp_path)
    before.add(1, train_loss=9.0)
    tracker = Tracker(tmp_path)
    tracker.add(2, train_loss=1.0)
    assert tracker.rows == []
    assert {row["iteration"] for row in tracker.rows} == {2}


@pytest.mark.needs("trackers")
def test_what_a_script_writes_last_is_reported_when_it_has_ended(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.add(1, train_loss=9.0)
    reader = TensorBoardMetrics(EventWriter(tracker.path, 0, 1), tmp_path)
    reader.start()
    wait_until(lambda: reader.follows)
    tracker.add(2, train_loss=1.0)
    reader.finish(within_s=30.0)
    assert [(row["event"], row["iteration"]) for row in rows_of(tracker.path)] == [("step", 2), ("report", 2)]


@pytest.mark.needs("trackers")
def test_the_trainers_mean_loss_is_not_the_last_one(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.add(30, train__loss=1.5, train__train_loss=2.25, train__train_runtime=9.0)
    assert tracker.rows == []
    assert [row["train_loss"] for row in tracker.rows if row["event"] == "report"] == [1.5]


@pytest.mark.needs("trackers")
def test_a_record_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.add(5, train_loss=3.0)
    (file,) = tracker.folder.iterdir()
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert tracker.rows == []
    file.write_bytes(whole)
    assert tracker.rows == []
    assert [row["train_loss"] for row in tracker.rows if row["event"] == "report"] == [3.0]


@given(st.binary(max_size=300), st.booleans())
def test_no_file_harms(tmp_path_factory: pytest.TempPathFactory, content: bytes, framed: bool) -> None:
    folder = tmp_path_factory.mktemp("logs")
    reader = TensorBoardMetrics(EventWriter(None, 0, 1), folder)
    if framed:
        content = len(content).to_bytes(8, "little") + bytes(4) + content + bytes(4)
    (folder / f"events.out.tfevents.1.{socket.gethostname()}.1.0").write_bytes(content)
    reader.poll()
    reader.poll()
