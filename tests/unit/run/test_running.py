"""When a training hangs, and who is named, on a clock of the test's own."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from engine.config.models import JobConfig, RecoveryConfig
from engine.protocol.attempt import Identity
from engine.run import running
from engine.run.events import AttemptPlanned, Hang, RunPlanned
from engine.run.history import run_history
from engine.run.observation import HostView, Observation, RankView
from engine.run.progress import AttemptProgress
from engine.run.run_plan import RunPlan
from engine.run.running import begin_watch
from engine.run.state import State, Transition
from engine.store.layout import RunDir
from tests.unit.run.run_maker import START, make_run_config, planned_attempt

HANG_S, STALL_S = 10.0, 600.0
COMMAND = ("python", "train.py")
HOSTS = tuple(HostView(f"1:node{rank}", (f"node{rank}",), (rank,)) for rank in (0, 1))


def line(iteration: int, t: float, at: float = 1e9) -> bytes:
    """A step as a trainer writes it; `t` is its own monotonic clock."""
    event = {"event": "step", "rank": 0, "seq": 1, "t": t, "at": at, "attempt": 1, "iteration": iteration, "loss": 1.0}
    return json.dumps(event).encode()


class Training:
    """Two ranks of a job, both started, whose nodes answer."""

    def __init__(self, **job: Any) -> None:
        self.now = 1000.0
        config = make_run_config()
        if job.get("elastic"):
            job |= {"framework": "torch", "strategy": "auto"}
        config = config.model_copy(
            update={
                "job": JobConfig(name="job", **job),
                "recovery": RecoveryConfig(hang_s=HANG_S, stall_s=STALL_S),
            }
        )
        plan = RunPlan(nonce="n", config=config, run_id="r", created_at=START)
        attempt = planned_attempt(RunDir(Path("/")), plan, [])
        history = run_history([RunPlanned(run=plan.record(), nonce="n"), AttemptPlanned(attempt=attempt)], plan)
        watch = begin_watch(1, self.now, ranks=2, slept_s=0.0)
        self.state = State(plan, plan, history, watch=watch)
        self.progress = AttemptProgress()
        self.progress.updates.first_steps = config.job.kind.first_steps
        identity = Identity(0, "r", 1, "n", "b", 1, "s", 1, 1, "s", self.now)
        self._ranks = tuple(RankView(rank, f"node{rank}", identity) for rank in (0, 1))

    def steps(self, first: int, last: int, *, seconds: float = 1.0, ranks: tuple[int, ...] = (0, 1)) -> None:
        for iteration in range(first, last + 1):
            self.now += seconds
            for rank in ranks:
                self.progress.step(rank, line(iteration, self.now - 900.0, self.now), self.now)
            assert self.check() is None

    def event(self, rank: int, **fields: Any) -> None:
        self.progress.take(rank, fields, self.now)

    def check(self, *, receiving: bool = True) -> Hang | None:
        progress, at = self.progress.view, START + timedelta(seconds=self.now)
        seen = Observation(self.now, at, ranks=self._ranks, hosts=HOSTS, progress=progress, receiving=receiving)
        transition = Transition(self.state, seen)
        hang = running._overdue(transition)
        self.state = transition.state
        return hang

    def wait(self, seconds: float, *, receiving: bool = True) -> Any:
        """What is found meanwhile, at ten checks a second, or 300 in all, but one at least every 10 s."""
        checks = max(min(round(seconds * 10), 300), round(seconds / 10))
        for _ in range(checks):
            self.now += seconds / checks
            if (hang := self.check(receiving=receiving)) is not None:
                return hang
        return None


def test_no_step_for_the_limit_is_a_hang() -> None:
    training = Training()
    training.steps(1, 10)
    assert training.wait(HANG_S - 0.5) is None
    found = training.wait(1.0)
    assert (found.doing, found.iteration, found.rank) == ("training", 10, None)
    assert found.silent_s > HANG_S == found.limit_s


def test_slow_steps_have_five_times_their_99th_percentile() -> None:
    training = Training()
    training.steps(1, 10, seconds=4.0)
    assert training.wait(19.5) is None
    assert training.wait(1.0).limit_s == 20.0


def test_micro_batches_that_are_reported_in_one_burst_are_not_quick_steps() -> None:
    training = Training()
    for update in range(1, 9):
        assert training.wait(15.0) is None, "an update takes longer than the limit of quick steps"
        for micro in range(1, 9):
            last = b', "update": %d}' % update if micro == 8 else b"}"
            for rank in (0, 1):
                text = line(8 * (update - 1) + micro, training.now - 900.0)[:-1] + last
                training.progress.step(rank, text, training.now)
    found = training.progress.view.long_step_s
    assert found is not None and round(found) == 15
    assert training.wait(74.0) is None
    assert training.wait(2.0) is not None


def test_the_one_that_is_behind_is_named() -> None:
    training = Training()
    training.steps(1, 10)
    training.now += 1.0
    training.progress.step(0, line(11, 111.0), training.now)
    assert training.wait(HANG_S + 1).rank == 1


def test_before_the_first_update_what_any_rank_loads_is_progress() -> None:
    training = Training(strategy="local")
    for rank in (0, 1):
        training.event(rank, event="phase", phase="loading")
    assert training.wait(STALL_S - 1) is None
    training.event(1, event="download")
    assert training.wait(STALL_S - 1) is None
    assert training.wait(2).doing == "loading"


def test_only_the_steps_of_watched_ranks_count() -> None:
    training = Training(strategy="local")
    training.steps(1, 10)
    training.event(1, event="phase", phase="loading")
    for iteration in range(11, 31):
        training.now += 10.0
        training.progress.step(0, line(iteration, training.now - 900.0), training.now)
        assert training.check() is None, "rank 1 alone makes no steps"
    for _ in range(5):
        training.event(1, event="fetch", done=1)
        training.now += HANG_S / 5
    assert training.wait(50.0).rank == 0, "rank 0 makes none, and rank 1 is loading"


def test_loading_validating_saving_and_the_first_steps_have_a_limit_of_their_own() -> None:
    training = Training()
    assert training.wait(60.0) is None, "loading"
    training.steps(1, 3)
    assert training.wait(60.0) is None, "the first steps"
    training.steps(4, 10)
    for phase in ("validating", "saving"):
        training.event(0, event="phase", phase=phase)
        assert training.wait(60.0) is None, phase
        training.event(0, event="phase", phase="training")
    assert training.wait(HANG_S + 1).doing == "training"
    training.event(0, event="phase", phase="validating")
    assert training.wait(STALL_S + 1).doing == "validating"


def test_a_rank_that_reports_its_loading_does_not_hang() -> None:
    training = Training()
    training.event(0, event="phase", phase="loading")
    for _ in range(3):
        assert training.wait(STALL_S - 1.0) is None
        training.event(0, event="fetch", done=1)
    training.event(0, event="phase", phase="training")
    assert training.wait(STALL_S - 1.0) is None
    training.event(0, event="warning", message="w")
    assert training.wait(2.0) is not None, "no other phase is kept up by words"


def test_what_lies_between_two_steps_is_no_step() -> None:
    training = Training()
    training.steps(1, 10)
    training.event(0, event="phase", phase="validating")
    training.event(1, event="phase", phase="validating")
    training.now += 100.0
    training.event(0, event="phase", phase="training")
    training.event(1, event="phase", phase="training")
    training.steps(11, 12)
    assert training.wait(HANG_S + 1) is not None, "100 s of validation are not taken for the length of a step"


def test_time_in_which_nothing_could_be_received_does_not_count() -> None:
    training = Training()
    training.steps(1, 10)
    assert training.wait(300.0, receiving=False) is None
    assert training.wait(HANG_S - 1) is None
    assert training.wait(2.0) is not None


@pytest.mark.parametrize("held_up_s", [76.0, 9.0])
def test_of_the_time_in_which_the_supervisor_was_held_up_a_quarter_of_the_limit_counts(held_up_s: float) -> None:
    training = Training()
    training.steps(1, 10)
    training.now += held_up_s
    assert training.check() is None
    assert training.wait(0.75 * HANG_S - 0.5) is None
    assert training.wait(1.0) is not None


@pytest.mark.parametrize("phase", ["validating", "saving"])
def test_a_validation_or_a_fusion_that_goes_on_does_not_hang_however_long_it_is(phase: str) -> None:
    training = Training()
    training.steps(1, 10)
    training.event(0, event="phase", phase=phase)
    for _ in range(3):
        assert training.wait(STALL_S - 1.0) is None
        training.event(0, event="going_on", phase=phase)
    assert training.wait(STALL_S + 1.0).doing == phase, "one of its batches has the whole limit"


def test_a_command_that_reports_rarely_has_five_times_its_longest_interval() -> None:
    training = Training(command=COMMAND)
    rare = 2 * STALL_S
    training.now += rare
    training.steps(500, 500, seconds=0.0, ranks=(0,))
    assert training.wait(4.9 * rare) is None, "the first report was as late"
    training.steps(1000, 1000, seconds=0.0, ranks=(0,))
    assert training.wait(20 * rare) is None
    assert training.wait(5 * rare).limit_s == pytest.approx(5 * 4.9 * rare, rel=0.01)


def test_activity_is_life_and_no_step() -> None:
    training = Training(command=COMMAND)
    training.steps(1, 2, ranks=(0,))
    for _ in range(4):
        assert training.wait(0.9 * STALL_S) is None
        training.event(0, event="activity")
    assert training.progress.view.furthest == 2
    assert training.wait(1.1 * STALL_S) is not None


def test_of_an_elastic_job_any_rank_may_be_the_one_that_reports() -> None:
    training = Training(command=COMMAND, elastic=True)
    training.steps(1, 20, ranks=(1,), seconds=STALL_S / 10)
    assert training.wait(STALL_S + 0.2).rank is None
