"""What a face is told of a run's attempts: who was in each, how it failed, what the next one went on from."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.config.models import ClusterConfig, FlightConfig, JobConfig, NodeConfig, RecoveryConfig
from engine.models import Reason, RunState
from engine.runs.diagnosis import diagnose
from engine.runs.journal import Journal
from engine.runs.layout import RunDir
from engine.runs.plan_file import Plan, write_plan
from engine.runs.watch import RunWatch
from tui.attempts import how_it_went, members, recovered

NODES = ("ana", "bea", "cyd")
FAILED: dict[str, Any] = {
    "attempt": 1,
    "reason": "rank_killed",
    "rank": 1,
    "host": "bea",
    "cause": "killed by SIGKILL (signal 9)",
    "signal": 9,
    "reached": 38,
    "failed_at": "2026-01-01T00:00:00+00:00",
    "unconfirmed": ["bea"],
}
WHY = "recovers from rank 1's death at iteration 38, without bea"


class Told:
    """A run of three nodes whose journal the test writes."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.dir = RunDir(path)
        nodes = tuple(NodeConfig(name=name, python="/py", workdir="/w") for name in NODES)
        job = JobConfig(name="t", model="/m", mlx_lm={"iters": 60})
        recovery = RecoveryConfig(max_restarts=3, min_nodes=2)
        config = FlightConfig(cluster=ClusterConfig(), nodes=nodes, job=job, recovery=recovery)
        plan = Plan.of(config, run_id=path.name, created_at=datetime(2026, 1, 1, tzinfo=UTC))
        write_plan(self.dir.plan, plan)
        self._journal = Journal(self.dir.journal)
        self.say("planned", run=plan.record().model_dump(mode="json"), nonce="n")

    def say(self, event: str, **fields: Any) -> None:
        self._journal.append(event, **fields)

    def attempt(self, number: int, *nodes: str) -> None:
        self.say("attempt", attempt=number, members=[[rank, node] for rank, node in enumerate(nodes)])


def interrupted(path: Path) -> Told:
    """A run that has gone on without bea."""
    told = Told(path)
    told.attempt(1, *NODES)
    told.say("attempt_ended", **FAILED)
    told.say("recovery", attempt=2, after=1, members=["ana", "cyd"], left_out=["bea"], delay_s=0.1, why=WHY)
    told.attempt(2, "ana", "cyd")
    return told


def test_each_attempt_has_its_members_and_its_end(tmp_path: Path) -> None:
    snapshot = RunWatch(interrupted(tmp_path / "r").dir).poll()
    first, second = snapshot.attempts
    assert first.members == ((0, "ana"), (1, "bea"), (2, "cyd"))
    assert (first.reason, first.rank, first.host, first.reached) == (Reason.RANK_KILLED, 1, "bea", 38)
    assert (second.reason, second.why, second.members) == (None, WHY, ((0, "ana"), (1, "cyd")))
    assert snapshot.most_attempts == 4


def test_the_ranks_are_those_of_the_last_attempt_on_their_own_nodes(tmp_path: Path) -> None:
    told = Told(tmp_path / "r")
    watch = RunWatch(told.dir)
    assert [(rank.rank, rank.node) for rank in watch.poll().ranks] == [(0, "ana"), (1, "bea"), (2, "cyd")]
    told.attempt(1, *NODES)
    told.say("attempt_ended", **FAILED)
    told.attempt(2, "ana", "cyd")
    snapshot = watch.poll()
    assert [(rank.rank, rank.node) for rank in snapshot.ranks] == [(0, "ana"), (1, "cyd")]
    assert (snapshot.record.world_size, snapshot.record.attempts) == (2, 2)
    told.attempt(3, *NODES)
    assert [rank.node for rank in watch.poll().ranks] == list(NODES), "a node that is back"


def test_how_it_is_said(tmp_path: Path) -> None:
    told = interrupted(tmp_path / "r")
    watch = RunWatch(told.dir)
    assert recovered(watch.poll()) == WHY
    told.say("recovered", attempt=2, source="rescue", iteration=37, update=37, from_rank=0, repeated=1, seconds=8.21)
    snapshot = watch.poll()
    assert recovered(snapshot) == f"{WHY.replace('recovers', 'recovered')}, 1 step repeated, 8.2 s"
    first, second = snapshot.attempts
    assert how_it_went(first) == "rank_killed of rank 1 on bea at iteration 38"
    assert "from the state that its survivors saved of iteration 37, 1 step repeated, 8.2 s" in how_it_went(second)
    assert members(first, None) is None
    assert members(second, first) == "rank 0 on ana, rank 1 on cyd; without bea"


def test_what_goes_on_between_two_attempts(tmp_path: Path) -> None:
    told = Told(tmp_path / "r")
    watch = RunWatch(told.dir)
    told.attempt(1, *NODES)
    told.say("attempt_ended", **FAILED)
    told.say("recovery_waits", after=1, why="waits for bea")
    assert recovered(watch.poll()) == "waits for bea"
    told.say("recovery", attempt=2, after=1, members=[], left_out=[], delay_s=31.7, why="recovers from a hang")
    assert recovered(watch.poll()) == "recovers from a hang, after a wait of 32 s"
    told.attempt(2, *NODES)
    assert recovered(watch.poll()) == "recovers from a hang"


def test_a_run_that_is_taken_up_again_has_not_ended_any_more(tmp_path: Path) -> None:
    told = interrupted(tmp_path / "r")
    watch = RunWatch(told.dir)
    told.say("given_up", after=2, why="restarted 3 times")
    told.say("state", state="failed", reason="rank_killed", rank=1, host="bea", cause="killed", unconfirmed=["bea"])
    ended = watch.poll()
    assert (ended.record.state, ended.given_up) == (RunState.FAILED, "restarted 3 times")
    told.say("reopened")
    again = watch.poll()
    assert (again.record.state, again.record.reason, again.record.cause, again.record.ended_at) == (
        *(RunState.PLANNED, None, None, None),
    )
    assert (again.record.attempts, again.given_up) == (2, None)
    told.attempt(3, *NODES)
    assert watch.poll().attempts[-1].why == "taken up as asked"


def test_the_logs_are_read_from_the_attempt_that_the_cause_is_of(tmp_path: Path) -> None:
    told = Told(tmp_path / "r")
    told.dir.log(1).write_text("Traceback (most recent call last):\n  File x\nValueError: the first\nanother attempt\n")
    told.say("attempt", attempt=1, members=[], log_bases={"1": 0})
    failed = {**FAILED, "reason": "rank_failed", "signal": None, "exit_code": 1, "cause": "exited with code 1"}
    told.say("attempt_ended", **failed)
    told.say("attempt", attempt=2, members=[], log_bases={"1": 70})
    told.say("attempt_ended", **{**FAILED, "attempt": 2, "reason": "launch_failed", "cause": "no port"})
    kept = ("reason", "rank", "host", "cause", "exit_code")
    told.say("state", state="failed", **{key: failed[key] for key in kept})
    found = diagnose(told.dir)
    assert found is not None and found.cause == "ValueError: the first"
