"""Checkpoints written in the background of a training."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import attempt
from engine.trainer.checkpoint import saving, store
from engine.trainer.checkpoint.store import Checkpoint, Snapshot
from tests.training.states import events, names, periodic, snapshot
from tests.waiting import wait_until


def test_a_checkpoint_begins_when_due_and_all_ranks_are_idle_and_old_ones_are_removed(tmp_path: Path) -> None:
    checkpoints = periodic(tmp_path)
    for update in range(1, 9):
        idle, settled = checkpoints.counters()
        # Known before the ranks tell each other anything.
        planned = checkpoints.planned(update)
        # The other rank writes nothing: it is always idle and settled.
        checkpoints.sync(idle + 1, settled + 1, 2)
        if checkpoints.due(update):
            assert planned and update % 2 == 0
            checkpoints.begin(snapshot(update))
            wait_until(lambda: checkpoints.counters()[0] == 1.0)
    assert checkpoints.committed == 6
    assert names(tmp_path / "p0") == [6, 8]
    phases = [(event["phase"], event["update"]) for event in events(tmp_path / "e0")]
    assert phases == [(phase, update) for update in (2, 4, 6, 8) for phase in ("begin", "committed")]
    last = events(tmp_path / "e0")[-1]
    assert last["background"] and last["bytes"] > 0 and 0 <= last["blocking_seconds"] < last["seconds"] + 1


def test_a_checkpoint_due_while_another_is_written_is_skipped_and_reported(tmp_path: Path) -> None:
    checkpoints = periodic(tmp_path)
    checkpoints.sync(1.0, 2.0, 2)
    assert not checkpoints.due(2)
    assert not checkpoints.due(3)
    assert not checkpoints.due(4)
    reported = events(tmp_path / "e0")
    assert [(event["phase"], event["update"]) for event in reported if event["event"] == "checkpoint"] == [
        ("skipped", 2),
        ("skipped", 4),
    ]
    (warning,) = [event["message"] for event in reported if event["event"] == "warning"]
    assert "was skipped because the one before was still being written" in warning


def test_a_full_disk_is_a_warning_and_the_next_checkpoint_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = periodic(tmp_path)
    checkpoints.begin(snapshot(2))
    checkpoints.finish(None)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "sync_folder", full)
        checkpoints.begin(snapshot(4))
        checkpoints.finish(None)
    assert checkpoints.counters() == [1.0, 0.0]
    checkpoints.begin(snapshot(6))
    checkpoints.finish(None)
    assert checkpoints.counters() == [1.0, 1.0]
    assert names(tmp_path / "p0") == [2, 6]
    warnings = [event["message"] for event in events(tmp_path / "e0") if event["event"] == "warning"]
    assert len(warnings) == 1 and "No space left on device" in warnings[0]


def test_a_volume_without_full_sync_takes_checkpoints_and_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> int:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(attempt, "_FULL_SYNC", 51)
    monkeypatch.setattr("fcntl.fcntl", unsupported)
    checkpoints = periodic(tmp_path)
    for update in (2, 4):
        checkpoints.begin(snapshot(update))
        checkpoints.finish(None)
    assert names(tmp_path / "p0") == [2, 4] and checkpoints.counters() == [1.0, 1.0]
    (warning,) = [event["message"] for event in events(tmp_path / "e0") if event["event"] == "warning"]
    assert "has no F_FULLFSYNC" in warning and str(tmp_path / "p0") in warning


def test_a_complete_state_is_kept_until_a_newer_one_is_complete(tmp_path: Path) -> None:
    """Another rank's disk is full: its parts never come, and the last complete state is kept."""
    checkpoints = periodic(tmp_path, parts=2)
    for update in (2, 4):
        checkpoints.sync(2.0, 2.0, 2)
        checkpoints.begin(snapshot(update))
        checkpoints.finish(None)
    for update in (6, 8, 10):
        checkpoints.sync(2.0, 1.0, 2)
        checkpoints.begin(snapshot(update))
        checkpoints.finish(None)
    assert {2, 4} <= set(names(tmp_path / "p0"))


def test_the_state_of_a_stop_is_written_once(tmp_path: Path) -> None:
    checkpoints = periodic(tmp_path)
    checkpoints.begin(snapshot(4))
    checkpoints.finish(snapshot(4))
    checkpoints.finish(snapshot(5))
    assert names(tmp_path / "p0") == [4, 5]
    assert len(events(tmp_path / "e0")) == 4


def test_what_the_background_thread_reads_is_made_for_it_before_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the host's reading of an array frees memory that kernels may be reading."""
    before = snapshot(2)
    made = {kind: dict(group) for kind, group in before.state.items()}
    monkeypatch.setattr(saving, "for_other_threads", lambda state: made if state is before.state else {})
    written: list[Snapshot] = []
    whole = store.write

    def write(folder: Path, given: Snapshot, *rest: Any) -> Checkpoint:
        written.append(given)
        return whole(folder, given, *rest)

    monkeypatch.setattr(store, "write", write)
    checkpoints = periodic(tmp_path)
    checkpoints.begin(before)
    checkpoints.finish(None)
    assert [given.state is made for given in written] == [True]
