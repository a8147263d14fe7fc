"""A run's snapshot, and its attempts, from the files of its directory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig, RecoveryConfig
from engine.errors import StateError
from engine.models import CheckResult, CheckStatus, PreflightReport, Reason, RunState
from engine.protocol.attempt import Identity
from engine.run.events import (
    AlarmRaised,
    Attempt,
    AttemptFailed,
    AttemptPlanned,
    AttemptResumed,
    Event,
    LogsMissing,
    NodeConditionChanged,
    NodesExcluded,
    RankExited,
    RankLaunched,
    RestartDelayed,
    RestartPlanned,
    RestartRefused,
    Resumed,
    RunPlanned,
    RunReopened,
    SavedFiles,
    StateChanged,
    StopStage,
    StopStageReached,
    SupervisorStarted,
    Verdict,
    WeightsSaved,
)
from engine.run.failure_cause import diagnose
from engine.run.journal import Journal, JournalTail
from engine.run.metrics import POINT_LIMIT, MetricsSeries
from engine.run.run_plan import RunPlan, write_plan
from engine.run.watch import RunWatch
from engine.snapshots import ChunkProgress, Diagnosis, Quiet, SeriesMark
from engine.store.layout import RunDir
from tests.damage import IRREGULAR, make_irregular
from tests.unit.run.run_maker import START, MadeRun, end, report, validation
from tui.formatting import attempt_summary, membership_change, recovery_summary

ADAPTER = "/data/my adapters/0000004_adapters.safetensors"


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


def test_a_loss_that_is_not_finite_any_more_is_no_finite_one(home: Path) -> None:
    run = MadeRun(home, command=("python", "train.py"))
    run.state("preflight", "launching").attempt().state("running")
    run.metrics([report(10, 4.0), report(20, math.nan), report(30, math.inf)])
    watch = watched(run)
    snapshot = watch.poll()
    assert (snapshot.record.iteration, snapshot.record.train_loss, snapshot.series.not_finite) == (30, None, (20, 30))
    without = report(40, 0.0)
    del without["train_loss"]
    run.metrics([without])
    assert watch.poll().series.not_finite == (20, 30)
    run.metrics([report(50, 3.0)])
    snapshot = watch.poll()
    assert (snapshot.record.train_loss, snapshot.series.not_finite) == (3.0, None)


def test_a_command_that_prints_its_last_iteration_has_progress_and_an_eta(home: Path) -> None:
    run = MadeRun(home, command=("python", "train.py"))
    run.state("preflight", "launching").attempt().state("running")
    run.metrics([report(10, 4.0) | {"iterations": 90}, report(20, 3.0)])
    snapshot = watched(run).poll()
    assert (snapshot.record.iteration, snapshot.record.iterations) == (20, 90)
    assert snapshot.eta_s == 17.5


def test_streamed_data_is_as_far_as_the_furthest_rank(run: MadeRun) -> None:
    run.state("preflight", "launching").attempt().state("running")
    watch = watched(run)
    assert watch.poll().chunk is None
    run.events(0, {"event": "chunk", "chunk": 3, "num_chunks": 20, "epoch": 0})
    run.events(1, {"event": "chunk", "chunk": 2, "num_chunks": 20, "epoch": 0})
    assert watch.poll().chunk == ChunkProgress(3, 20)


def test_the_newest_trained_weights_are_named_with_the_command_that_uses_them(run: MadeRun) -> None:
    run.state("preflight", "launching").attempt().state("running")
    watch = watched(run)
    assert watch.poll().trained is None
    saved = SavedFiles(folder="/data/my adapters", iteration=4, files=(("0000004_adapters.safetensors", 7, "0" * 64),))
    event = WeightsSaved(rank=0, node="node0", attempt=1, holds="adapter", saved=saved)
    best = saved.model_copy(update={"files": (("best_adapters.safetensors", 8, "0" * 64),)})
    run.append(event, event.model_copy(update={"val_loss": 1.5, "saved": best}))
    found = watch.poll().trained
    assert found is not None
    assert (found.node, found.path, found.size) == ("node0", ADAPTER, 7)
    assert found.command.endswith("-m mlx_lm generate --model /model --adapter-path '/data/my adapters' --prompt Hello")
    whole = SavedFiles(folder="/data/model", iteration=8, files=(("config.json", 2, "0" * 64),))
    run.append(event.model_copy(update={"attempt": 2, "holds": "model", "saved": whole}))
    found = watch.poll().trained
    assert found is not None and found.command.endswith("generate --model /data/model --prompt Hello")
    run.append(event.model_copy(update={"attempt": 3, "node": "of another plan", "saved": whole}))
    assert watch.poll().trained is None


def test_there_is_no_eta_when_nothing_runs(run: MadeRun) -> None:
    run.state("preflight", "launching").attempt().metrics([report(10, 4.0)])
    assert watched(run).poll().eta_s is None


def test_a_ended_run_keeps_the_figures_that_its_journal_has(run: MadeRun) -> None:
    run.state("preflight", "launching").attempt().state("running", "finishing")
    run.metrics([report(10, 4.0)])
    run.state("failed", reason="rank_failed", rank=1, host="node1", exit_code=3, iteration=7, train_loss=4.5)
    record = watched(run).poll().record
    assert (record.iteration, record.train_loss, record.tokens_per_second) == (7, 4.5, 800.0)


def test_a_command_of_which_no_step_is_read_runs_and_does_not_start_for_ever(run: MadeRun) -> None:
    watch = watched(run)
    run.state("preflight", "launching").attempt().state("running")
    for rank in (0, 1):
        identity = Identity(rank, "r", 1, "n", "b", 1, "1", 1, 1, "1", 1.7e9)
        run.append(RankLaunched(rank=rank, node=f"node{rank}", identity=identity))
    assert (watch.poll().activity, {rank.phase for rank in watch.poll().ranks}) == (None, {"starting"})
    run.events(0, {"event": "processes", "state": "idle"}, {"event": "group", "joined": True})
    run.events(1, {"event": "processes", "state": "stopped"})
    snapshot = watch.poll()
    assert [rank.phase for rank in snapshot.ranks] == ["running", "suspended"]
    assert snapshot.activity == "running, prints no step that is read here"
    run.events(0, {"event": "step", "iteration": 3})
    run.events(1, {"event": "processes", "state": "busy"})
    snapshot = watch.poll()
    assert ([rank.phase for rank in snapshot.ranks], snapshot.activity) == (["training", "running"], None)
    run.events(0, {"event": "processes", "state": "idle"})
    assert watch.poll().ranks[0].phase == "training", "that it waits is no other phase"
    run.events(0, {"event": "processes", "state": "stopped"})
    assert watch.poll().ranks[0].phase == "suspended"
    run.events(0, {"event": "step", "iteration": 4})
    assert watch.poll().ranks[0].phase == "training"


def printed(run: MadeRun, rank: int, at: datetime) -> None:
    """Its log grows at this time."""
    with run.directory.log(rank).open("a") as log:
        log.write("a line\n")
    os.utime(run.directory.log(rank), (at.timestamp(), at.timestamp()))


def arrived(run: MadeRun, rank: int, at: datetime, *events: dict[str, Any]) -> None:
    """They reach the head at this time; the nodes' clocks are 5 min behind."""
    sent_at = (at - timedelta(minutes=5)).timestamp()
    run.events(rank, *({"at": sent_at, **event} for event in events))
    os.utime(run.directory.events(rank), (at.timestamp(), at.timestamp()))


def silent_since(watch: RunWatch) -> datetime | None:
    quiet = watch.poll().quiet
    return quiet.since if quiet is not None else None


STEP, TRAINING = {"event": "step", "iteration": 1}, {"event": "phase", "phase": "training"}
MINUTE = [START + timedelta(minutes=minutes) for minutes in range(10)]


@pytest.fixture
def training(run: MadeRun) -> MadeRun:
    """Supervised; its ranks have reported that they train in minute 5, and no step."""
    run.state("preflight", "launching").attempt().state("running").supervised_by()
    for rank in (0, 1):
        arrived(run, rank, MINUTE[5], {"event": "start"}, TRAINING)
    return run


def test_the_last_step_of_a_training_and_the_last_output_of_a_command_are_their_signs(tmp_path: Path) -> None:
    for number, command in enumerate((None, ("python", "train.py"))):
        run = MadeRun(tmp_path, command=command, number=number).supervised_by()
        began = run.state("preflight", "launching").attempt().state("running").directory
        watch = watched(run)
        assert watch.poll().quiet is None, f"the ranks of {began} start"
        arrived(run, 0, MINUTE[1], STEP)
        arrived(run, 1, MINUTE[1], STEP)
        printed(run, 0, MINUTE[2])
        snapshot = watch.poll()
        sent_at = MINUTE[1] - timedelta(minutes=5)
        assert [dict(rank.signs) for rank in snapshot.ranks] == [
            {"step": sent_at, "output": MINUTE[2]},
            {"step": sent_at},
        ]
        signs = [("step", MINUTE[1], 60.0), ("output", MINUTE[2], 600.0)]
        assert snapshot.quiet is not None
        assert (snapshot.quiet.sign, snapshot.quiet.since, snapshot.quiet.hang_s) == signs[number]


@pytest.mark.parametrize("phase", ["loading", "validating", "saving", "generating"])
def test_a_phase_is_said_by_itself_and_its_end_is_a_sign(training: MadeRun, phase: str) -> None:
    watch = watched(training)
    arrived(training, 0, MINUTE[5], STEP, {"event": "phase", "phase": phase})
    assert silent_since(watch) is None
    arrived(training, 0, MINUTE[9], TRAINING)
    assert silent_since(watch) == silent_since(watched(training)) == MINUTE[9]


def test_before_the_first_step_ranks_are_silent_from_the_end_of_loading_on(training: MadeRun) -> None:
    assert silent_since(watched(training)) == MINUTE[5]


def test_that_processes_are_idle_is_no_sign(training: MadeRun) -> None:
    watch = watched(training)
    watch.poll()
    arrived(training, 0, MINUTE[9], {"event": "processes", "state": "idle"}, {"event": "group", "joined": True})
    assert silent_since(watch) == MINUTE[5]


def test_ranks_that_have_all_ended_are_not_silent(training: MadeRun) -> None:
    watch = watched(training)
    arrived(training, 0, MINUTE[6], {"event": "end", "completed": True})
    assert silent_since(watch) == MINUTE[6]
    arrived(training, 1, MINUTE[6], {"event": "end", "completed": True})
    assert silent_since(watch) is None


def test_without_a_supervisor_no_rank_is_silent_and_the_next_one_begins_anew(training: MadeRun) -> None:
    who = training.directory.supervisor.read_text()
    training.directory.supervisor.write_text(json.dumps({**json.loads(who), "start": "another time"}))
    watch, before = watched(training), datetime.now(UTC)
    assert silent_since(watch) is None
    training.directory.supervisor.write_text(who)
    since = silent_since(watch)
    assert since is not None and since >= before
    training.journal.append(SupervisorStarted(pid=1, start="1", boot_id="b", adopted=True))
    started_at = next(
        event.at for event in JournalTail(training.directory.journal).events() if event.kind == "supervisor"
    )
    training.journal.close()
    assert silent_since(watched(training)) == max(MINUTE[5], started_at)


def test_ranks_are_silent_only_while_one_of_their_nodes_answers(training: MadeRun) -> None:
    def link(node: str, condition: Literal["connected", "unreachable", "lost"]) -> None:
        training.append(NodeConditionChanged(node=node, condition=condition))

    link("node0", "connected")
    link("node1", "connected")
    link("node0", "unreachable")
    watch = watched(training)
    assert silent_since(watch) == MINUTE[5]
    link("node1", "lost")
    before = datetime.now(UTC)
    assert silent_since(watch) is None
    for rank in (0, 1):
        os.utime(training.directory.events(rank), (START.timestamp(), START.timestamp()))
    link("node0", "connected")
    since, link_of = silent_since(watch), watched(training).poll().ranks[0].link
    assert since is not None and since >= before
    assert link_of is not None and silent_since(watched(training)) == link_of.since, "also for a reader that comes now"


def test_after_a_gap_between_two_polls_ranks_are_silent_from_then_on(
    training: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, slept = watched(training), timedelta(hours=8)

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Later:
            return cls.fromtimestamp(time.time(), tz) + slept

    assert silent_since(watch) == silent_since(watch) == MINUTE[5]
    monkeypatch.setattr("engine.run.watch.datetime", Later)
    before = Later.now(UTC)
    since = silent_since(watch)
    assert since is not None and before <= since <= Later.now(UTC)
    assert silent_since(watch) == since


def test_when_it_counts_as_a_hang_is_said_only_of_what_is_judged_by_its_steps(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, command=("python", "train.py")).supervised_by()
    run.state("preflight", "launching").attempt().state("running")
    watch = watched(run)
    for rank in (0, 1):
        arrived(run, rank, MINUTE[1], {"event": "processes", "state": "busy"})
        printed(run, rank, MINUTE[2])
    assert watch.poll().quiet == Quiet("output", MINUTE[2], None)
    arrived(run, 0, MINUTE[3], STEP)
    assert watch.poll().quiet == Quiet("output", MINUTE[3], 600.0)


def test_output_of_an_earlier_attempt_is_none_of_this_one(run: MadeRun) -> None:
    printed(run, 0, START - timedelta(days=1))
    run.state("preflight", "launching").attempt().state("running")
    assert watched(run).poll().ranks[0].printed_at is None


def test_each_rank_has_the_phase_that_it_reported_last(run: MadeRun) -> None:
    watch = watched(run)
    run.state("preflight", "launching").attempt()
    run.append(RankLaunched(rank=0, node="node0", identity=Identity(0, "r", 1, "n", "b", 1, "1", 1, 1, "1", 1.7e9)))
    assert [rank.phase for rank in watch.poll().ranks] == ["starting", "waiting"]
    run.events(0, {"event": "start", "iterations": 60}, {"event": "phase", "phase": "validating"})
    run.events(1, {"event": "start", "iterations": 60})
    run.state("running")
    assert [rank.phase for rank in watch.poll().ranks] == ["validating", "loading"]
    run.append(RankExited(rank=1, node="node1", signal=9))
    ended = watch.poll().ranks[1]
    assert (ended.phase, ended.exit_code, ended.signal) == ("ended", None, 9)


def test_checkpoints_and_restarts_are_marks(run: MadeRun) -> None:
    run.attempt().metrics([report(10, 4.0), report(20, 3.0)])
    run.events(0, *({"event": "checkpoint", "phase": "committed", "iteration": iteration} for iteration in (0, 20)))
    run.metrics([report(25, 2.9, attempt=2)])
    assert watched(run).poll().series.marks == (SeriesMark(20, "checkpoint"), SeriesMark(25, "restart"))


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
    run.append(StopStageReached(stage=StopStage.TERM, purpose="fence"))
    assert watch.poll().stop is None
    run.append(StopStageReached(stage=StopStage.STOP, left=("node0 12 python",)))
    first = watch.poll()
    run.append(StopStageReached(stage=StopStage.STOP, acknowledged=(1,)))
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


def test_a_bad_end_is_diagnosed_once(run: MadeRun) -> None:
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
    builder = MetricsSeries(Path("metrics.jsonl"))
    for iteration in range(1, 60_001):
        assert builder.iteration is None or builder.train.points[-1][0] == builder.iteration
        builder.add(report(iteration, 99.0 if iteration == 12_345 else -99.0 if iteration == 54_321 else 1.0))
    points = builder.build([]).train
    assert len(points) <= POINT_LIMIT
    assert (points[0][0], points[-1][0]) == (1, 60_000)
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
        run.append(StopStageReached(stage=StopStage(stage)))
    stop = watch.poll().stop
    assert stop is not None
    assert stop.passed == ("stop", "verifying")


def test_alarms_are_those_of_the_last_attempt_and_what_is_verified_comes_from_the_ranks(run: MadeRun) -> None:
    run.state("preflight", "launching").attempt().state("running")
    run.append(AlarmRaised(alarm="BYZANTINE_WORKERS_DETECTED", ranks=(1,), iteration=30, message="rank 1 on b: apart"))
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
        "saving": None,
    }
    run.attempt()
    again = watch.poll()
    assert again.alarms == ()


def test_a_run_without_an_excluded_node_has_fewer_ranks_and_names_who_was_left_out(run: MadeRun) -> None:
    watch = watched(run)
    run.state("preflight")
    assert len(watch.poll().ranks) == 2
    run.append(NodesExcluded(nodes=("node0",), why="worker_consistency: node0 differs", world_size=1))
    snapshot = watch.poll()
    assert [(rank.rank, rank.node) for rank in snapshot.ranks] == [(0, "node1")]
    assert (snapshot.record.world_size, snapshot.record.excluded) == (1, ["node0"])
    assert watched(run).poll().record == snapshot.record


NODES = ("ana", "bea", "cyd")
KILLED = Verdict(RunState.FAILED, Reason.RANK_KILLED, "killed by SIGKILL (signal 9)", 1, "bea", signal=9)


def failure(verdict: Verdict = KILLED, attempt: int = 1) -> AttemptFailed:
    failed_at = datetime(2026, 1, 1, tzinfo=UTC)
    return AttemptFailed(attempt=attempt, verdict=verdict, reached=38, failed_at=failed_at, unconfirmed=("bea",))


WHY = "recovers from rank 1's death at iteration 38, without bea"


class JournaledRun:
    """A run of three nodes whose journal the test writes."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.dir = RunDir(path)
        nodes = tuple(NodeConfig(name=name, python="/py", workdir="/w") for name in NODES)
        job = JobConfig(name="t", model="/m", mlx_lm={"iters": 60})
        recovery = RecoveryConfig(max_restarts=3, min_nodes=2)
        config = Config(cluster=ClusterConfig(), nodes=nodes, job=job, recovery=recovery)
        plan = RunPlan(nonce="n", config=config, run_id=path.name, created_at=datetime(2026, 1, 1, tzinfo=UTC))
        write_plan(self.dir.plan, plan)
        self._journal = Journal(self.dir.journal)
        self.append(RunPlanned(run=plan.record(), nonce="n"))

    def append(self, event: Event) -> None:
        self._journal.append(event)

    def attempt(self, number: int, *nodes: str, log_bases: dict[int, int] | None = None) -> None:
        attempt = Attempt(
            number=number,
            nonce=f"n.{number}",
            starting_port=20_000,
            log_bases=log_bases or {},
            event_bases={},
            layouts=(),
            nodes=nodes,
        )
        self.append(AttemptPlanned(attempt=attempt))


def interrupted(path: Path) -> JournaledRun:
    """A run that has gone on without bea."""
    run = JournaledRun(path)
    run.attempt(1, *NODES)
    run.append(failure())
    run.append(RestartPlanned(attempt=2, after=1, members=("ana", "cyd"), left_out=("bea",), delay_s=0.1, why=WHY))
    run.attempt(2, "ana", "cyd")
    return run


def test_each_attempt_has_its_members_and_its_end(tmp_path: Path) -> None:
    snapshot = RunWatch(interrupted(tmp_path / "r").dir).poll()
    first, second = snapshot.attempts
    assert first.members == ((0, "ana"), (1, "bea"), (2, "cyd"))
    assert (first.reason, first.rank, first.host, first.reached) == (Reason.RANK_KILLED, 1, "bea", 38)
    assert (second.reason, second.why, second.members) == (None, WHY, ((0, "ana"), (1, "cyd")))
    assert snapshot.most_attempts == 4


def test_the_ranks_are_those_of_the_last_attempt_on_their_own_nodes(tmp_path: Path) -> None:
    run = JournaledRun(tmp_path / "r")
    watch = RunWatch(run.dir)
    assert [(rank.rank, rank.node) for rank in watch.poll().ranks] == [(0, "ana"), (1, "bea"), (2, "cyd")]
    run.attempt(1, *NODES)
    run.append(failure())
    run.attempt(2, "ana", "cyd")
    snapshot = watch.poll()
    assert [(rank.rank, rank.node) for rank in snapshot.ranks] == [(0, "ana"), (1, "cyd")]
    assert (snapshot.record.world_size, snapshot.record.attempts) == (2, 2)
    run.attempt(3, *NODES)
    assert [rank.node for rank in watch.poll().ranks] == list(NODES), "a node that is back"


def test_recoveries_and_attempts_are_described(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "r")
    watch = RunWatch(run.dir)
    assert recovery_summary(watch.poll()) == WHY
    run.append(AttemptResumed(attempt=2, resumed=Resumed("emergency", 37, 37, 0), repeated=1, seconds=8.21))
    snapshot = watch.poll()
    assert recovery_summary(snapshot) == f"{WHY.replace('recovers', 'recovered')}, 1 step repeated, 8.2 s"
    first, second = snapshot.attempts
    assert attempt_summary(first) == "rank killed: rank 1 on bea at iteration 38"
    assert "from the state of iteration 37 that its survivors saved, 1 step repeated, 8.2 s" in attempt_summary(second)
    assert membership_change(first, None) is None
    assert membership_change(second, first) == "rank 0 on ana, rank 1 on cyd; without bea"


@pytest.mark.parametrize(
    ("repeated", "seconds", "text"),
    [
        (38, 8.21, "begins anew: no state was saved up to iteration 38, 38 steps repeated, 8.2 s"),
        (None, None, "begins anew: no state was saved"),
    ],
)
def test_that_a_run_begins_anew_is_said_where_its_attempts_are_shown(
    tmp_path: Path, repeated: int | None, seconds: float | None, text: str
) -> None:
    run = interrupted(tmp_path / "r")
    run.append(AttemptResumed(attempt=2, resumed=Resumed("none"), repeated=repeated, seconds=seconds))
    snapshot = RunWatch(run.dir).poll()
    assert attempt_summary(snapshot.attempts[1]).endswith(f", {text}")
    assert str(recovery_summary(snapshot)).endswith(f", {text}")


@pytest.mark.parametrize(
    ("resumed_at", "repeated", "text"),
    [
        (304, 11, "its first step is 305, at least 11 steps repeated, 8.2 s"),
        (320, None, "its first step is 321, 8.2 s"),
        (0, 315, "from the beginning, 315 steps repeated, 8.2 s"),
    ],
)
def test_of_a_command_that_resumed_by_itself_only_what_its_steps_show_is_claimed(
    tmp_path: Path, resumed_at: int, repeated: int | None, text: str
) -> None:
    run = interrupted(tmp_path / "r")
    run.append(AttemptResumed(attempt=2, resumed=Resumed("command", resumed_at), repeated=repeated, seconds=8.21))
    snapshot = RunWatch(run.dir).poll()
    assert attempt_summary(snapshot.attempts[1]).endswith(text)
    assert ", ".join(text.split(", ")[1:]) in str(recovery_summary(snapshot))


def test_what_goes_on_between_two_attempts(tmp_path: Path) -> None:
    run = JournaledRun(tmp_path / "r")
    watch = RunWatch(run.dir)
    run.attempt(1, *NODES)
    run.append(failure())
    run.append(RestartDelayed(after=1, why="waits for bea"))
    assert recovery_summary(watch.poll()) == "waits for bea"
    run.append(RestartPlanned(attempt=2, after=1, members=(), delay_s=31.7, why="recovers from a hang"))
    assert recovery_summary(watch.poll()) == "recovers from a hang, after a wait of 32 s"
    run.attempt(2, *NODES)
    assert recovery_summary(watch.poll()) == "recovers from a hang"


def test_a_run_that_is_taken_up_again_has_not_ended_any_more(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "r")
    watch = RunWatch(run.dir)
    run.append(RestartRefused(after=2, why="restarted 3 times"))
    run.append(end("failed", ("bea",), reason="rank_killed", rank=1, host="bea", cause="killed"))
    ended = watch.poll()
    assert (ended.record.state, ended.given_up) == (RunState.FAILED, "restarted 3 times")
    run.append(RunReopened())
    again = watch.poll()
    assert (again.record.state, again.record.reason, again.record.cause, again.record.ended_at) == (
        *(RunState.PLANNED, None, None, None),
    )
    assert (again.record.attempts, again.given_up) == (2, None)
    run.attempt(3, *NODES)
    assert watch.poll().attempts[-1].why == "resumed as requested"


def test_preflight_of_a_run_that_is_taken_up_again_may_exclude_all_members_of_the_attempt_before(
    tmp_path: Path,
) -> None:
    run = JournaledRun(tmp_path / "r")
    watch = RunWatch(run.dir)
    run.attempt(1, "bea")
    run.append(end("failed", ("bea",), reason="rank_killed", rank=0, host="bea", cause="killed"))
    run.append(RunReopened())
    run.append(NodesExcluded(nodes=("bea",), why="ssh_connectivity: bea does not answer", world_size=2))
    assert [rank.node for rank in watch.poll().ranks] == ["ana", "cyd"]


def test_the_logs_are_read_from_the_attempt_that_the_cause_is_of(tmp_path: Path) -> None:
    run = JournaledRun(tmp_path / "r")
    run.dir.log(1).write_text("Traceback (most recent call last):\n  File x\nValueError: the first\nanother attempt\n")
    run.attempt(1, log_bases={1: 0})
    failed = Verdict(RunState.FAILED, Reason.RANK_FAILED, "exited with code 1", 1, "bea", exit_code=1)
    run.append(failure(failed))
    run.attempt(2, log_bases={1: 70})
    run.append(failure(Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, "no port", 1, "bea"), 2))
    run.append(StateChanged(state=RunState.FAILED, verdict=failed))
    found = diagnose(run.dir)
    assert found is not None and found.cause == "ValueError: the first"


def test_damaged_lines_are_reported_and_skipped(run: MadeRun) -> None:
    run.state("preflight")
    with run.directory.journal.open("a") as file:
        file.write("\0\0\0\n")
    run.state("launching")
    snapshot = watched(run).poll()
    assert snapshot.record.state is RunState.LAUNCHING
    assert snapshot.damage == ("journal.jsonl: line 3 is damaged and was skipped",)


def test_what_the_head_lacks_of_the_logs_is_said_until_it_has_come(run: MadeRun) -> None:
    run.attempt().append(LogsMissing(attempt=1, files={"rank1.log": 16_628, "rank0.events.jsonl": None}))
    watch, folder = watched(run), run.home / "node" / "runs" / run.id / "attempts" / "1"
    lines = [line for line in watch.poll().damage if "attempt 1, as" in line]
    assert [line.split(" of attempt")[0] for line in lines] == [
        "rank1.log lacks 16,628 bytes",
        "rank0.events.jsonl may lack bytes",
    ]
    assert lines[0].endswith(f"the disk was full or its node away: {folder}/rank1.log has all")
    run.append(LogsMissing(attempt=1, files={}))
    assert not [line for line in watch.poll().damage if "attempt 1, as" in line]


@pytest.mark.parametrize("kind", IRREGULAR)
def test_figures_in_a_file_that_is_none_are_named_and_the_run_is_shown(run: MadeRun, kind: str) -> None:
    run.attempt().state("preflight", "launching", "running")
    make_irregular(run.directory.metrics, kind)
    make_irregular(run.directory.events(1), kind)
    snapshot = watched(run).poll()
    assert snapshot.record.state is RunState.RUNNING
    named = [line.split(": it is")[0] for line in snapshot.damage if ": it is" in line]
    assert named == [f"{name}: the file cannot be read" for name in ("metrics.jsonl", "rank1.events.jsonl")]
