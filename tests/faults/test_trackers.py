"""Trackers of a real training: whatever happens to the run or to them, they have the curves of metrics.jsonl."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.config.models import CheckpointConfig, Config, RecoveryConfig
from engine.demo import demo_config
from engine.models import RunState
from engine.node import processes
from engine.run.events import TrackerFailed
from engine.run.supervisor_process import adopt_orphans
from engine.run.tracker import VARIABLE, mark
from tests.conftest import FLIGHTDECK
from tests.demo_copies import demo_below
from tests.faults.local_runs import Run, kill_and_await, start_config
from tests.faults.test_training import await_iteration, trained, with_keys
from tests.unit.run.tracker_files import scalars, steps, wandb_records

pytestmark = [pytest.mark.busy, pytest.mark.slow, pytest.mark.needs("trackers")]


def tracked_demo(folder: Path, *, ranks: int = 2, **keys: Any) -> Config:
    config = demo_config(demo_below(folder), ranks=ranks, iters=8)
    config = config.model_copy(update={"recovery": RecoveryConfig(max_restarts=1, term_grace_s=0.5, stop_grace_s=1.0)})
    config = with_keys(config, batch_size=2, max_seq_length=64, report_to="tensorboard, wandb", **keys)
    job = config.job.model_copy(update={"env": {**config.job.env, "WANDB_MODE": "offline"}})
    return config.model_copy(update={"job": job})


def trackers_of(run: Run, name: str) -> list[int]:
    return [each.pid for each in processes.with_variables({VARIABLE: mark(run.dir, name)})]


def await_trackers(run: Run) -> None:
    """The end of the run's supervisor, which ends them."""
    run.wait(lambda: not processes.exists(run.supervisor), after_end=True)
    assert trackers_of(run, "wandb") == trackers_of(run, "tensorboard") == []


def rows(run: Run) -> list[tuple[int, float]]:
    """(iteration, train loss) of metrics.jsonl, in its order."""
    found = [json.loads(line) for line in run.dir.metrics.read_text().splitlines()]
    return [(row["iteration"], row["train_loss"]) for row in found if row["kind"] == "train"]


def compare(run: Run) -> None:
    """Both have what metrics.jsonl has: W&B in its order, TensorBoard without what was trained again."""
    everything = rows(run)
    shown = [(step, value) for step, value, _ in scalars(run.dir.tracker("tensorboard"))["train_loss"]]
    newest = dict(everything)
    assert [step for step, _ in shown] == sorted(newest)
    assert [value for _, value in shown] == pytest.approx([newest[step] for step in sorted(newest)])
    assert steps(run.dir.tracker("tensorboard"), "val_loss") == sorted(
        set(steps(run.dir.tracker("tensorboard"), "val_loss"))
    )
    records = wandb_records(run.dir.tracker("wandb"))
    logged = [row for kind, row in records if kind == "history" and "train_loss" in row]
    assert [(row["iteration"], row["train_loss"]) for row in logged] == pytest.approx(everything)
    assert [fields["code"] for kind, fields in records if kind == "exit"] == [0]


def test_the_curves_of_a_training_are_in_both_trackers_after_a_restart(home: Path, tmp_path: Path) -> None:
    config = tracked_demo(tmp_path, ranks=1, iters=16)
    run = start_config(home, config.model_copy(update={"checkpoint": CheckpointConfig(every=2)}))
    await_iteration(run, 3)
    os.kill(run.identity(0).trainer_pid, signal.SIGKILL)
    assert run.ended().state is RunState.SUCCEEDED, run.troubles()
    assert (run.record.attempts, run.events_of(TrackerFailed)) == (2, [])
    shown = subprocess.run([FLIGHTDECK, "show", run.dir.id], capture_output=True, text=True, check=True).stdout
    assert f"tracker    tensorboard --logdir {run.dir.tracker('tensorboard')}\n" in shown
    assert f"tracker    wandb sync {run.dir.tracker('wandb')}/offline-run-" in shown
    # The trainers report to nobody.
    spec = json.loads(run.files_of(0).spec.read_text())
    assert spec["job"]["report_to"] is None
    await_trackers(run)
    compare(run)


def test_trackers_outlive_a_supervisor_and_are_replaced_when_killed(home: Path, tmp_path: Path) -> None:
    run = start_config(home, tracked_demo(tmp_path, iters=150))
    run.wait(lambda: len(trackers_of(run, "wandb")) == 2)
    await_iteration(run, 3)
    os.kill(trackers_of(run, "tensorboard")[0], signal.SIGKILL)
    kill_and_await(run.supervisor)
    assert adopt_orphans(home) == [run.dir.id]
    run.wait(lambda: len(trackers_of(run, "wandb")) == 2)
    for pid in trackers_of(run, "wandb"):
        os.kill(pid, signal.SIGKILL)
    assert run.ended().state is RunState.SUCCEEDED, run.troubles()
    assert (run.record.attempts, trained(run)) == (1, list(range(1, 151)))
    await_trackers(run)
    compare(run)
    assert run.events_of(TrackerFailed) == []


def test_a_tracker_that_fails_is_one_event_of_a_run_that_succeeds(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "wandb.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "package"))
    run = start_config(home, tracked_demo(tmp_path, iters=30))
    assert run.ended().state is RunState.SUCCEEDED, run.troubles()
    await_trackers(run)
    assert [(event.tracker, event.why) for event in run.events_of(TrackerFailed)] == [("wandb", "ImportError: broken")]
    shown = subprocess.run([FLIGHTDECK, "show", run.dir.id], capture_output=True, text=True, check=True).stdout
    assert "tracker    wandb is no longer written: ImportError: broken\n" in shown
