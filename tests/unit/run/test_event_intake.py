"""Metrics come from rank 0's events, each once, however often the supervisor is replaced."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.config.models import ConsistencyConfig
from engine.run.consistency_watch import ConsistencyWatch
from engine.run.events import Figures
from engine.run.progress import EventIntake
from engine.run.rank_events import RankEvents
from engine.store.layout import RunDir


def event(name: str, rank: int = 0, **fields: Any) -> str:
    head = {"event": name, "rank": rank, "seq": 1, "t": 1.0, "at": 1_700_000_000.0, "attempt": 1}
    return json.dumps({**head, **fields}) + "\n"


def write(run_dir: RunDir, rank: int, *lines: str) -> None:
    with run_dir.events(rank).open("a") as file:
        file.write("".join(lines))


def rows(run_dir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]


def intake_of(run_dir: RunDir, bases: dict[int, int]) -> EventIntake:
    watch = ConsistencyWatch(ConsistencyConfig(), {rank: f"node{rank}" for rank in bases}, lambda _alarm: None)
    return EventIntake(run_dir, 1, bases, watch)


def report(iteration: int) -> str:
    return event("report", iteration=iteration, train_loss=9.0 / iteration, tokens_per_second=100.0)


def test_reports_and_validations_of_rank_0_become_metrics(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    intake = intake_of(run_dir, {0: 0, 1: 0})
    write(
        run_dir, 0, event("validation", iteration=0, val_loss=6.0, val_time=0.5), event("step", iteration=1), report(1)
    )
    write(run_dir, 1, event("report", rank=1, iteration=1, train_loss=5.0))
    intake.poll()
    intake.close()
    first, second = rows(run_dir)
    assert first == {
        "kind": "val",
        "attempt": 1,
        "at": "2023-11-14T22:13:20+00:00",
        "iteration": 0,
        "val_loss": 6.0,
        "val_time": 0.5,
    }
    assert (second["kind"], second["iteration"], second["train_loss"]) == ("train", 1, 9.0)
    assert intake.latest == Figures(iteration=1, train_loss=9.0, val_loss=6.0, tokens_per_second=100.0)


@pytest.mark.parametrize("torn", [0, 1, 30])
def test_a_successor_goes_on_where_the_first_was_killed(tmp_path: Path, torn: int) -> None:
    run_dir = RunDir(tmp_path)
    write(run_dir, 0, "an earlier attempt's\n")
    base = run_dir.events(0).stat().st_size
    intake = intake_of(run_dir, {0: base})
    write(run_dir, 0, report(1), report(2), report(3))
    intake.poll()
    os.truncate(run_dir.metrics, run_dir.metrics.stat().st_size - torn)
    successor = intake_of(run_dir, {0: base})
    write(run_dir, 0, report(4))
    successor.poll()
    assert [row["iteration"] for row in rows(run_dir)] == [1, 2, 3, 4]
    assert successor.latest.iteration == 4
    intake.close()
    successor.close()


def test_a_rank_is_saving_from_begin_to_commit(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    intake = intake_of(run_dir, {0: 0, 1: 0})
    for rank, phase, saving in ((1, "begin", True), (1, "committed", False)):
        write(run_dir, rank, event("checkpoint", rank=rank, phase=phase, iteration=3))
        intake.poll()
        assert intake.progress.saving is saving
    intake.close()


def test_a_full_disk_delays_metrics_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    intake = intake_of(run_dir, {0: 0})
    write(run_dir, 0, report(1))

    def no_room(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", no_room)
        intake.poll()
        intake.poll()
    write(run_dir, 0, report(2))
    intake.poll()
    intake.poll()
    assert [row["iteration"] for row in rows(run_dir)] == [1, 2]
    intake.close()


def test_only_numbers_become_the_latest_figures(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    intake = intake_of(run_dir, {0: 0})
    write(run_dir, 0, report(1), event("report", iteration="10", train_loss={"nan": 1}, tokens_per_second=50.0))
    intake.poll()
    intake.close()
    assert intake.latest == Figures(iteration=1, train_loss=9.0, tokens_per_second=50.0)


@pytest.mark.parametrize("at", [None, "2026-11-22T10:00:00", 1e20, float("inf"), 10**400])
def test_a_report_with_no_usable_time_is_kept(tmp_path: Path, at: object) -> None:
    run_dir = RunDir(tmp_path)
    intake = intake_of(run_dir, {0: 0})
    write(run_dir, 0, event("report", iteration=1, train_loss=9.0, at=at))
    rank = RankEvents(run_dir.events(0))
    intake.poll()
    intake.close()
    assert [row["iteration"] for row in rows(run_dir)] == [1]
    assert rank.poll().seen_at is None
