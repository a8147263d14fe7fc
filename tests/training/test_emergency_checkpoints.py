"""The state of the last finished update, saved when a peer is lost."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from engine.trainer.checkpoint import store
from engine.trainer.checkpoint.saving import EmergencyCheckpoint
from engine.trainer.checkpoint.store import Snapshot
from engine.trainer.optimizer import Updater
from engine.trainer.single_node_bench import synthetic_model
from tests.training.states import WINDOW, events, origin, reporter, snapshot
from tests.unit.trainer.checkpoint.latest import latest


def emergency(home: Path, attempt: int = 2, **fields: Any) -> EmergencyCheckpoint:
    return EmergencyCheckpoint(home, attempt, 1, origin(**fields), reporter(home / "e", 1))


def test_an_emergency_checkpoint_is_written_once_and_replaces_older_ones(tmp_path: Path) -> None:
    for attempt in (1, 3):
        store.write(tmp_path / "emergency" / str(attempt) / "rank0", snapshot(attempt), origin())
    one = emergency(tmp_path)
    one.hold(snapshot(7))
    one.save_on_peer_loss()
    one.save_on_peer_loss()
    assert sorted(path.name for path in (tmp_path / "emergency").iterdir()) == ["2", "3"]
    found = latest(tmp_path / "emergency" / "2" / "rank1", lambda path, why: pytest.fail(why))
    assert found is not None and found.manifest.update == 7
    reported = [event for event in events(tmp_path / "e") if event["event"] == "emergency_checkpoint"]
    assert [(event["phase"], event["iteration"], event["update"]) for event in reported] == [
        ("begin", 14, 7),
        ("committed", 14, 7),
    ]
    assert (
        reported[0]["bytes"] == sum(each.nbytes for group in snapshot(7).state.values() for each in group.values()) > 0
    )


def test_the_state_is_not_written_while_an_update_changes_it(tmp_path: Path) -> None:
    one = emergency(tmp_path)
    one.hold(snapshot(7))
    with one.changing():
        writer = threading.Thread(target=one.save_on_peer_loss)
        writer.start()
        writer.join(0.2)
        assert writer.is_alive() and events(tmp_path / "e") == []
        one.hold(snapshot(8))
    writer.join(20)
    assert events(tmp_path / "e")[-1]["update"] == 8


def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    one = emergency(tmp_path)
    one.hold(snapshot(7))
    with pytest.raises(RuntimeError), one.changing():
        raise RuntimeError("diverged")
    one.save_on_peer_loss()
    assert not (tmp_path / "emergency").exists()


@pytest.mark.parametrize(("update", "fields"), [(0, {}), (7, {"part": 1, "parts": 2})])
def test_no_state_or_a_part_of_one_is_not_saved(tmp_path: Path, update: int, fields: dict[str, Any]) -> None:
    one = emergency(tmp_path, **fields)
    one.hold(snapshot(update))
    one.save_on_stop()
    one.save_on_peer_loss()
    assert not (tmp_path / "emergency").exists()


def test_a_full_disk_is_reported_and_tried_again_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "emergency").write_text("in the way")
    one = emergency(tmp_path)
    one.hold(snapshot(7))
    one.save_on_peer_loss()
    assert [event.get("phase") for event in events(tmp_path / "e")] == ["begin", "failed", None]
    (tmp_path / "emergency").unlink()
    one.save_on_peer_loss()
    assert events(tmp_path / "e")[-1]["phase"] == "committed"


def test_the_process_ends_on_request_whatever_the_save_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = list[int]()
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(store, "write", Mock(side_effect=RuntimeError("no memory")))
    one = emergency(tmp_path)
    one.hold(snapshot(7))
    one.save_and_exit(9)
    assert left == [9] and "RuntimeError: no memory" in capsys.readouterr().err


def test_a_state_that_failed_unexpectedly_is_written_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = emergency(tmp_path)
    one.hold(snapshot(7))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(store, "write", Mock(side_effect=RuntimeError("no memory")))
        one.save_on_stop()
    one.save_on_peer_loss()
    assert events(tmp_path / "e")[-1]["phase"] == "committed"


def test_a_state_held_by_reference_takes_no_memory(tmp_path: Path) -> None:
    value = mx.zeros((2**20,))
    mx.eval(value)
    one = emergency(tmp_path)
    before = mx.get_active_memory()
    one.hold(Snapshot(2, 1, WINDOW, {"weights": {"w": value}}))
    assert mx.get_active_memory() == before
    with one.changing():
        value = value + 1
        mx.eval(value)
        # The old state's memory is given back while the new one is made.
        assert mx.get_active_memory() <= before


def test_moments_are_allocated_only_after_a_state_is_restored(tmp_path: Path) -> None:
    """Two states would be too much for a model that just fits."""
    job, model = synthetic_model(1, tmp_path)
    size = sum(value.nbytes for _, value in tree_flatten(model.trainable_parameters()))
    before = mx.get_active_memory()
    updater = Updater(job, model)
    assert mx.get_active_memory() - before < size / 10
    mx.eval(updater.arrays)
    assert mx.get_active_memory() - before > 1.9 * size
