"""A watch tells what the run's files say, no more, and reads each byte once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.errors import StateError
from engine.events import ChunkProgress, Diagnosis, Mark
from engine.models import CheckResult, CheckStatus, PreflightReport, RunState
from engine.runs.layout import RunDir
from engine.runs.plan_file import write_plan
from engine.runs.watch import RunWatch
from tests.unit.watch.run_maker import MadeRun, report, validation


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MadeRun]:
    made = MadeRun(tmp_path)
    yield made
    made.close()


def watched(run: MadeRun) -> RunWatch:
    return RunWatch(run.directory)


def test_a_run_is_planned_before_its_journal_exists(run: MadeRun) -> None:
    run.directory.journal.unlink()
    snapshot = watched(run).poll()
    assert (snapshot.record.state, snapshot.record.iterations, snapshot.supervised) == (RunState.PLANNED, 60, False)
    assert [rank.phase for rank in snapshot.ranks] == ["waiting", "waiting"]


def test_a_directory_without_a_plan_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="plan"):
        RunWatch(RunDir(tmp_path))


def test_states_and_since_when_they_hold(run: MadeRun) -> None:
    watch = watched(run)
    run.state("preflight", "launching")
    first = watch.poll()
    run.state("running")
    second = watch.poll()
    assert (first.record.state, second.record.state) == (RunState.LAUNCHING, RunState.RUNNING)
    assert (second.state_since - first.state_since).total_seconds() == 1


def test_live_figures_come_from_reports_and_steps(run: MadeRun) -> None:
    run.state("preflight", "launching").attempt().state("running")
    run.metrics([validation(1, 5.0), report(10, 4.0), report(20, 3.0)])
    run.events(0, {"event": "step", "iteration": 24, "compute_s": 0.1, "peak_memory_bytes": 10})
    snapshot = watched(run).poll()
    record = snapshot.record
    assert (record.iteration, record.train_loss, record.val_loss, record.tokens_per_second) == (24, 3.0, 5.0, 800.0)
    assert snapshot.series.train == ((10, 4.0), (20, 3.0))
    assert snapshot.learning_rate == 1e-3
    # 36 iterations at 4 a second.
    assert snapshot.eta_s == 9.0


def test_streamed_data_is_as_far_as_the_furthest_rank(run: MadeRun) -> None:
    run.state("preflight", "launching").attempt().state("running")
    watch = watched(run)
    assert watch.poll().chunk is None
    run.events(0, {"event": "chunk", "chunk": 3, "num_chunks": 20, "epoch": 0})
    run.events(1, {"event": "chunk", "chunk": 2, "num_chunks": 20, "epoch": 0})
    assert watch.poll().chunk == ChunkProgress(3, 20)


def test_there_is_no_eta_when_nothing_runs(run: MadeRun) -> None:
    run.state("preflight", "launching").attempt().metrics([report(10, 4.0)])
    assert watched(run).poll().eta_s is None


def test_a_ended_run_keeps_the_figures_that_its_journal_has(run: MadeRun) -> None:
    run.state("preflight", "launching").attempt().state("running", "finishing")
    run.metrics([report(10, 4.0)])
    run.state("failed", reason="rank_failed", rank=1, host="node1", exit_code=3, iteration=7, train_loss=4.5)
    record = watched(run).poll().record
    assert (record.iteration, record.train_loss, record.tokens_per_second) == (7, 4.5, 800.0)


def test_each_rank_has_the_phase_of_its_last_word(run: MadeRun) -> None:
    watch = watched(run)
    run.state("preflight", "launching").attempt()
    run.journal.append("rank_started", rank=0, host="node0", pid=1, start="1", pgid=1, started_at=1.7e9)
    assert [rank.phase for rank in watch.poll().ranks] == ["starting", "waiting"]
    run.events(0, {"event": "start", "iterations": 60}, {"event": "phase", "phase": "validating"})
    run.events(1, {"event": "start", "iterations": 60})
    run.state("running")
    assert [rank.phase for rank in watch.poll().ranks] == ["validating", "loading"]
    run.journal.append("rank_ended", rank=1, host="node1", code=None, signal=9)
    ended = watch.poll().ranks[1]
    assert (ended.phase, ended.exit_code, ended.signal) == ("ended", None, 9)


def test_checkpoints_and_restarts_are_marks(run: MadeRun) -> None:
    run.attempt().metrics([report(10, 4.0), report(20, 3.0)])
    run.events(0, {"event": "checkpoint", "phase": "committed", "iteration": 20})
    run.metrics([report(25, 2.9, attempt=2)])
    assert watched(run).poll().series.marks == (Mark(20, "checkpoint"), Mark(25, "restart"))


def test_checks_are_those_of_the_report_as_far_as_it_is(run: MadeRun) -> None:
    watch = watched(run)
    for status in (CheckStatus.RUNNING, CheckStatus.PASS):
        check = CheckResult(name="versions_match", status=status)
        report_now = PreflightReport(checks=[check], overall_status=status, finished_at=datetime.now(UTC))
        run.directory.preflight.write_text(report_now.model_dump_json() + " " * (status is CheckStatus.PASS))
        assert [found.status for found in watch.poll().checks] == [status]


def test_a_stop_is_followed_stage_by_stage_and_a_fence_is_not_one(run: MadeRun) -> None:
    watch = watched(run)
    run.state("preflight", "launching").attempt().state("running")
    run.journal.append("stop", stage="term", purpose="fence", acknowledged=[], left=[])
    assert watch.poll().stop is None
    run.journal.append("stop", stage="stop", purpose="abort", acknowledged=[], left=["node0 12 python"])
    first = watch.poll()
    run.journal.append("stop", stage="stop", purpose="abort", acknowledged=[1], left=[])
    second = watch.poll()
    assert first.stop is not None
    assert second.stop is not None
    assert (first.stop.left, second.stop.acknowledged) == (("node0 12 python",), (1,))
    assert first.stop.since == second.stop.since
    assert {rank.phase for rank in second.ranks} == {"stopping"}


def test_a_supervisor_is_alive_only_while_it_is_that_process(run: MadeRun) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        run.supervised_by(process.pid)
        assert watched(run).poll().supervised
        who = json.loads(run.directory.supervisor.read_text())
        run.directory.supervisor.write_text(json.dumps({**who, "start": "another time"}))
        assert not watched(run).poll().supervised
        run.supervised_by(process.pid)
        process.kill()
    assert not watched(run).poll().supervised


def test_the_diagnosis_is_asked_for_once_and_only_of_a_bad_end(run: MadeRun) -> None:
    asked = []

    def diagnose(directory: RunDir) -> Diagnosis:
        asked.append(directory.id)
        return Diagnosis("the disk is full")

    watch = RunWatch(run.directory, diagnose=diagnose)
    run.state("preflight", "launching", "running")
    watch.poll()
    assert asked == []
    run.state("finishing", "failed", reason="disk_full")
    assert [watch.poll().diagnosis for _ in range(3)] == [Diagnosis("the disk is full")] * 3
    assert asked == [run.id]


def test_a_series_stays_bounded_and_keeps_its_extremes(tmp_path: Path) -> None:
    from engine.runs.series import POINT_LIMIT, SeriesBuilder

    builder = SeriesBuilder()
    for iteration in range(1, 100_001):
        assert builder.iteration is None or builder.train.points[-1][0] == builder.iteration
        builder.add(report(iteration, 99.0 if iteration == 12_345 else -99.0 if iteration == 54_321 else 1.0))
    points = builder.build([]).train
    assert len(points) <= POINT_LIMIT
    assert (points[0][0], points[-1][0]) == (1, 100_000)
    assert {(12_345, 99.0), (54_321, -99.0)} <= set(points)
    assert [x for x, _ in points] == sorted({x for x, _ in points})


def test_nothing_new_gives_the_same_series_object(run: MadeRun) -> None:
    run.metrics([report(1, 2.0)])
    watch = watched(run)
    assert watch.poll().series is watch.poll().series


def test_a_stop_remembers_only_the_stages_that_were_needed(run: MadeRun) -> None:
    watch = watched(run)
    run.state("preflight", "launching").attempt().state("running")
    for stage in ("stop", "stop", "verifying", "stopped"):
        run.journal.append("stop", stage=stage, purpose="abort", acknowledged=[], left=[])
    stop = watch.poll().stop
    assert stop is not None
    assert stop.passed == ("stop", "verifying")


def test_alarms_are_those_of_the_last_attempt_and_what_is_verified_comes_from_the_ranks(run: MadeRun) -> None:
    run.state("preflight", "launching").attempt().state("running")
    run.journal.append(
        "alarm", alarm="BYZANTINE_WORKERS_DETECTED", ranks=[1], iteration=30, message="rank 1 on b: apart"
    )
    for rank in (0, 1):
        run.events(
            rank,
            {"event": "start", "backend": "ring", "world_size": 2, "device": "Device(cpu, 0)", "iterations": 60},
            {"event": "replica_check", "iteration": 50, "agreed": True},
        )
    watch = watched(run)
    snapshot = watch.poll()
    (alarm,) = snapshot.alarms
    assert (alarm.name, alarm.ranks, alarm.iteration) == ("BYZANTINE_WORKERS_DETECTED", (1,), 30)
    found = {line.name: line.good for line in snapshot.verification}
    assert found == {
        "backend": True,
        "throughput": None,
        "GPU use": None,
        "loss": None,
        "replicas": True,
        "checkpoint": None,
    }
    run.attempt()
    again = watch.poll()
    assert again.alarms == ()


def test_a_plan_that_was_made_again_has_fewer_ranks_and_names_who_was_left_out(run: MadeRun) -> None:
    watch = watched(run)
    run.state("preflight")
    assert len(watch.poll().ranks) == 2
    write_plan(run.directory.plan, run.plan.without(["node0"]))
    run.journal.append("replanned", excluded=["node0"], why="worker_consistency: node0 differs", world_size=1)
    snapshot = watch.poll()
    assert [(rank.rank, rank.node) for rank in snapshot.ranks] == [(0, "node1")]
    assert (snapshot.record.world_size, snapshot.record.excluded) == (1, ["node0"])
    assert watched(run).poll().record == snapshot.record
