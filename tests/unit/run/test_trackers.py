"""Trackers as processes of their own: what they write, and that nothing that happens to them is more than a line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from engine.node import processes
from engine.run.events import TrackerFailed
from engine.run.run_plan import write_plan
from engine.run.tracker import VARIABLE, RunTrackers, mark
from engine.run.watch import RunWatch
from engine.store.layout import RunDir
from tests.unit.run.run_maker import START, MadeRun
from tests.unit.run.tracker_files import history, scalars, steps, wandb_records
from tests.waiting import wait_until

pytestmark = pytest.mark.needs("trackers")


class Tracked:
    """A run whose rows a test writes, and its trackers."""

    def __init__(self, home: Path, report_to: str, **env: str) -> None:
        made = MadeRun(home)
        job = made.plan.config.job
        keys = {**job.mlx_lm, "report_to": report_to, "project_name": "ours"}
        self.job = job.model_copy(update={"mlx_lm": keys, "env": env})
        self.made, self.dir = made, made.directory
        plan = made.plan.model_copy(update={"config": made.plan.config.model_copy(update={"job": self.job})})
        write_plan(self.dir.plan, plan)
        self.trackers = RunTrackers(self.dir, self.job)

    def row(self, iteration: int, attempt: int = 1, **figures: Any) -> None:
        figures = figures or {"train_loss": 1 / iteration, "learning_rate": 1e-5, "peak_memory": 2}
        at = (START + timedelta(seconds=iteration)).isoformat()
        kind = "val" if "val_loss" in figures else "train"
        row = {"kind": kind, "attempt": attempt, "at": at, "iteration": iteration, **figures}
        with self.dir.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def pids(self, name: str) -> list[int]:
        """The tracker's own process, and what it has started."""
        return [each.pid for each in processes.with_variables({VARIABLE: mark(self.dir, name)})]

    def close(self) -> list[TrackerFailed]:
        self.trackers.close()
        return list(self.trackers.faults())


@pytest.fixture
def tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tracked]]:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    made: list[Tracked] = []

    def make(report_to: str, *, started: bool = True, **env: str) -> Tracked:
        made.append(Tracked(tmp_path / "state", report_to, **env))
        if started:
            made[-1].trackers.start()
        return made[-1]

    yield make
    for each in made:
        each.trackers.close()
        assert each.pids("wandb") == each.pids("tensorboard") == []


def event_files(run_dir: RunDir) -> list[Path]:
    return sorted(run_dir.tracker("tensorboard").glob("*"))


def use(run: Tracked) -> str | None:
    """What is told of the one tracker."""
    (status,) = RunWatch(run.dir).poll().trackers
    return status.use


def test_tensorboard_reads_every_figure_and_drops_what_a_restart_repeats(tracked: Callable[..., Tracked]) -> None:
    run = tracked("tensorboard")
    run.row(1, val_loss=3.5, val_time=0.1)
    for iteration in (1, 2, 3, 4):
        run.row(iteration)
    with run.dir.metrics.open("a") as file:
        file.write("damaged\n")
    run.row(3, attempt=2, train_loss=9.0)
    run.row(5, attempt=2, train_loss=None, tokens_per_second=1e9, note="a text", good=True)
    assert run.close() == []
    found = scalars(run.dir.tracker("tensorboard"))
    reported = {"train_loss", "learning_rate", "peak_memory", "val_loss", "val_time", "tokens_per_second"}
    assert found.keys() == reported
    assert [point[:2] for point in found["train_loss"]] == [(1, 1.0), (2, 0.5), (3, 9.0)]
    assert found["tokens_per_second"][0][1] == 1e9
    assert found["val_loss"][0] == (1, 3.5, (START + timedelta(seconds=1)).timestamp())
    assert use(run) == f"tensorboard --logdir {run.dir.tracker('tensorboard')}"


def test_a_killed_tracker_is_replaced_by_one_that_writes_everything(tracked: Callable[..., Tracked]) -> None:
    run = tracked("tensorboard")
    for iteration in (1, 2, 3):
        run.row(iteration)
    wait_until(lambda: bool(event_files(run.dir)) and event_files(run.dir)[0].stat().st_size > 300)
    (before,) = event_files(run.dir)
    (pid,) = run.pids("tensorboard")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: run.pids("tensorboard") not in ([], [pid]) and event_files(run.dir) not in ([], [before]))
    run.row(4)
    assert run.close() == []
    assert steps(run.dir.tracker("tensorboard"), "train_loss") == [1, 2, 3, 4]


_SUPERVISOR = """
import sys, time
from pathlib import Path
from engine.run.run_plan import read_plan
from engine.run.tracker import RunTrackers
from engine.store.layout import RunDir
run = RunDir(Path(sys.argv[1]))
RunTrackers(run, read_plan(run.plan).config.job).start()
time.sleep(600)
"""


@contextlib.contextmanager
def earlier_supervisor(run: Tracked) -> Iterator[list[int]]:
    """One that dies at the end; the processes of its tracker."""
    before = list(run.dir.tracker("wandb").glob("offline-run-*/*.wandb"))
    with subprocess.Popen([sys.executable, "-c", _SUPERVISOR, str(run.dir.path)]) as process:
        wait_until(lambda: list(run.dir.tracker("wandb").glob("offline-run-*/*.wandb")) not in ([], before))
        wait_until(lambda: len(run.pids("wandb")) == 2)  # it and W&B's service
        yield run.pids("wandb")
        process.kill()


def test_wandb_writes_an_offline_run_and_an_adopter_writes_it_anew(tracked: Callable[..., Tracked]) -> None:
    run = tracked("wandb", started=False, WANDB_MODE="offline")
    for iteration in (1, 2, 3):
        run.row(iteration)
    with earlier_supervisor(run):
        pass
    wait_until(lambda: not run.pids("wandb"))  # they see that it is gone
    with earlier_supervisor(run) as stopped:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
    run.row(2, attempt=2)
    run.trackers.start()
    wait_until(lambda: not set(stopped) & set(run.pids("wandb")))
    assert run.close() == []
    assert str(use(run)).startswith(f"wandb sync {run.dir.tracker('wandb')}/offline-run-")
    records = wandb_records(run.dir.tracker("wandb"))
    (made,) = [fields for kind, fields in records if kind == "run"]
    assert (made["id"], made["project"]) == (run.dir.id, "ours")
    assert (made["config"]["iters"], made["config"]["world_size"]) == (60, 2)
    rows = history(run.dir.tracker("wandb"))
    assert [(row["_step"], row["iteration"]) for row in rows] == [(0, 1), (1, 2), (2, 3), (3, 2)]
    assert rows[1]["train_loss"] == 0.5 and rows[1]["_timestamp"] == (START + timedelta(seconds=2)).timestamp()


_SERVICE = """
import json
class Run:
    offline, starting_step, url = False, 2, "https://wandb.example/ours"
    def define_metric(self, *_, **__): pass
    def log(self, row, step): print(json.dumps([step, row["iteration"]]), flush=True)
    def finish(self, exit_code): print(exit_code)
Settings, init = dict, lambda **given: Run()
"""


def test_a_service_that_has_some_rows_already_gets_the_others(
    tracked: Callable[..., Tracked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text(_SERVICE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = tracked("wandb")
    for iteration in (10, 20, 30, 40):
        run.row(iteration)
    run.made.state("preflight", "failed")
    assert run.close() == []
    assert run.dir.tracker_log("wandb").read_text().splitlines() == ["[2, 30]", "[3, 40]", "1"]
    (status,) = RunWatch(run.dir).poll().trackers
    assert (status.name, status.use, status.problem) == ("wandb", "https://wandb.example/ours", None)


@pytest.mark.parametrize(
    ("package", "why"),
    [
        ("", "No API key configured"),
        ("raise ImportError('no such package, alas')", "ImportError: no such package, alas"),
    ],
)
def test_wandb_without_key_or_package_is_one_line_and_tensorboard_goes_on(
    tracked: Callable[..., Tracked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, why: str
) -> None:
    if package:
        (tmp_path / "wandb.py").write_text(package)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = tracked("wandb, tensorboard")
    run.row(1)
    (fault,) = wait_for_fault(run)
    assert fault.tracker == "wandb" and why in fault.why
    run.row(2)
    assert run.close() == []
    assert steps(run.dir.tracker("tensorboard"), "train_loss") == [1, 2]


def wait_for_fault(run: Tracked) -> list[TrackerFailed]:
    found: list[TrackerFailed] = []

    def failed() -> bool:
        found.extend(run.trackers.faults())
        return bool(found)

    wait_until(failed)
    return found


def test_a_tracker_that_is_killed_again_and_again_is_given_up(
    tracked: Callable[..., Tracked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = tracked("wandb")
    run.row(1)
    assert [fault.why for fault in wait_for_fault(run)] == ["it was ended by SIGKILL 4 times"]


def test_a_service_that_takes_nothing_holds_the_end_up_for_a_while_only(
    tracked: Callable[..., Tracked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.run.tracker._SEND_LIMIT_S", 0.2)
    (tmp_path / "wandb.py").write_text("import time; open('stuck', 'w').close(); time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = tracked("wandb")
    run.row(1)
    wait_until((run.dir.path / "stuck").exists)
    (fault,) = run.close()
    assert fault.why == "it did not send what was left within 0 s of the run's end"


def test_a_run_that_reports_nothing_has_no_tracker(tracked: Callable[..., Tracked]) -> None:
    run = tracked("wandb, tensorboard")
    assert run.close() == []
    assert not run.dir.tracker("wandb").exists() and not run.dir.tracker("tensorboard").exists()


@pytest.mark.parametrize("validated", [False, True])
def test_an_attempt_that_begins_with_a_validation_keeps_what_was_trained_before_it(
    tracked: Callable[..., Tracked], validated: bool
) -> None:
    run = tracked("tensorboard")
    for iteration in range(1, 8):
        run.row(iteration)
    if validated:
        run.row(7, val_loss=2.0)
    run.row(7, attempt=2, val_loss=2.0)
    run.row(8, attempt=2)
    assert run.close() == []
    assert steps(run.dir.tracker("tensorboard"), "train_loss") == list(range(1, 9))
    assert steps(run.dir.tracker("tensorboard"), "val_loss") == [7]


def test_an_attempt_that_goes_back_validates_again(tracked: Callable[..., Tracked]) -> None:
    run = tracked("tensorboard")
    for iteration in (1, 2, 3):
        run.row(iteration)
    run.row(3, val_loss=2.0)
    for iteration in (2, 3):
        run.row(iteration, attempt=2)
    run.row(3, attempt=2, val_loss=1.5)
    assert run.close() == []
    assert steps(run.dir.tracker("tensorboard"), "train_loss") == [1, 2, 3]
    assert [point[:2] for point in scalars(run.dir.tracker("tensorboard"))["val_loss"]] == [(3, 1.5)]
