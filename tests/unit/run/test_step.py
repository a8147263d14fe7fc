"""The life of a run by its steps, from the launch to the proof of its end, on observations that the test makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from engine.config.models import JobConfig, RecoveryConfig
from engine.models import CheckResult, CheckStatus, PreflightReport, Reason, RunState
from engine.protocol.attempt import EMERGENCY_CHECKPOINT, END, STOP, ExitRecord, Identity
from engine.protocol.job import Strategy
from engine.run import events
from engine.run.effects import (
    Cancel,
    Connect,
    ConnectUnknown,
    Effect,
    EndTrackers,
    Find,
    Judge,
    PlanAttempt,
    Reconnect,
    Record,
    RequestProcesses,
    RunPreflight,
    Send,
    Settle,
    Start,
)
from engine.run.events import NODE_LOST
from engine.run.history import fold, run_history
from engine.run.observation import (
    Cancelled,
    Checked,
    Found,
    HostView,
    Judged,
    Observation,
    Planned,
    ProgressView,
    RankView,
    Result,
    Settled,
    Started,
)
from engine.run.state import HEAD, Phase
from engine.run.step import begin, step
from engine.task_result import Served
from tests.unit.launch.host_layouts import local_layout
from tests.unit.run.run_maker import START, MadeRun, planned_attempt

SUCCEEDED = events.Verdict(RunState.SUCCEEDED, Reason.COMPLETED)
KILLED = events.Verdict(RunState.FAILED, Reason.RANK_KILLED, "killed", rank=1, host="node1", signal=9)
ABORT = events.RequestReceived(request="abort", by="a test")
PASSED = PreflightReport(checks=[], overall_status=CheckStatus.PASS)
LAUNCHER = events.LauncherStarted(pid=7, start="then")


class Life:
    """A run of two ranks, each on a node of its own that answers at once; the test performs the effects."""

    def __init__(
        self,
        home: Path,
        *recorded: events.Event,
        adopting: bool = False,
        newest_attempt: int = 0,
        strategy: Strategy = "data",
        **recovery: Any,
    ) -> None:
        self.made = MadeRun(home, strategy=strategy).close()
        config = self.made.plan.config.model_copy(update={"recovery": RecoveryConfig(**recovery)})
        self.plan = self.made.plan.model_copy(update={"config": config})
        first = events.RunPlanned(run=self.plan.record(), nonce="n")
        history = run_history([first, *recorded], self.plan)
        self.state = begin(self.plan, history, newest_attempt, adopting=adopting)
        self.seen = Observation(100.0, START)
        self.effects: list[Effect] = []

    @property
    def phase(self) -> Phase:
        return self.state.phase

    @property
    def run_state(self) -> RunState:
        return self.state.history.record.state

    def step(self, *finished: Result, after_s: float = 0.1, **changes: Any) -> list[Effect]:
        """One step with what has changed; the effects that are no events."""
        at = self.seen.at + timedelta(seconds=after_s)
        self.seen = replace(self.seen, now=self.seen.now + after_s, at=at, finished=finished, news=(), **changes)
        return self._step()

    def request_abort(self, *, now: bool = False) -> list[Effect]:
        self.seen = replace(self.seen, finished=(), news=(ABORT.model_copy(update={"now": now}),))
        return self._step()

    def _step(self) -> list[Effect]:
        self.state, effects = step(self.state, self.seen)
        self.effects += effects
        return [effect for effect in effects if not isinstance(effect, Record)]

    def attempt(self, number: int = 1) -> events.Attempt:
        layouts = [local_layout(self.made.home / "node", 2)]
        return planned_attempt(self.made.directory, self.plan, layouts, number)

    def rank(self, number: int, **changes: Any) -> None:
        ranks = list(self.seen.ranks)
        ranks[number] = replace(ranks[number], **changes)
        self.seen = replace(self.seen, ranks=tuple(ranks))

    def host(self, number: int, **changes: Any) -> None:
        hosts = list(self.seen.hosts)
        hosts[number] = replace(hosts[number], **changes)
        self.seen = replace(self.seen, hosts=tuple(hosts))

    def connect(self, number: int = 1) -> None:
        """The hosts and ranks of an attempt, as they are seen once they are connected."""
        ranks = tuple(RankView(rank, f"node{rank}") for rank in (0, 1))
        hosts = tuple(HostView(f"{number}:node{rank}", (f"node{rank}",), (rank,), boot_id="b") for rank in (0, 1))
        self.seen = replace(self.seen, ranks=ranks, hosts=hosts, progress=ProgressView())

    def start_ranks(self) -> None:
        for rank in (0, 1):
            self.rank(rank, identity=identity(rank))

    def exit(self, rank: int, code: int | None = 0, **how: Any) -> None:
        record = ExitRecord(rank, 1, code, how.pop("signal", None), 0.0, 0, **how)
        self.rank(rank, record=record, succeeded=code == 0)

    def run(self, number: int = 1) -> None:
        """Launch, up to ranks that run."""
        if self.state.phase is Phase.BEGINNING:
            assert self.step() == [RunPreflight()]
            assert self.step(Checked(PASSED)) == [PlanAttempt(self.plan.nodes)]
        attempt = self.attempt(number)
        assert self.step(Planned(attempt)) == [Connect(attempt), Start(attempt)]
        self.connect(number)
        self.step(Started(LAUNCHER), launcher_alive=True)
        self.start_ranks()
        self.step()
        assert self.run_state is RunState.RUNNING

    def end(self, verdict: events.Verdict) -> None:
        """From the verdict that ends it on: nothing is left anywhere, and all files come."""
        self.step(Judged(verdict, 2), launcher_alive=False)
        for rank in (0, 1):
            self.host(rank, processes=())
        while self.state.phase is Phase.STOPPING:
            self.step()
        self.step(Settled(tuple(host.key for host in self.seen.hosts)))
        self.step(Judged(verdict, sum(rank.end_known for rank in self.seen.ranks)))

    def kill(self, number: int = 1) -> None:
        """An attempt that has come to iteration 5 x `number` is ended by the death of rank 1."""
        self.seen = replace(self.seen, progress=ProgressView(steps=5, furthest=5 * number))
        self.exit(1, None, signal=9)
        assert Judge in map(type, self.step())
        self.exit(0, 6)
        self.end(KILLED)


def identity(rank: int) -> Identity:
    return Identity(rank, "run", 1, "n.1", "b", 1, "", 1, 1, "", 1.0)


def recorded(life: Life) -> list[events.Event]:
    return [effect.event for effect in life.effects if isinstance(effect, Record)]


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    yield Life(tmp_path)


def test_a_run_succeeds_and_is_proved_to_be_gone(life: Life) -> None:
    life.run()
    for rank in (0, 1):
        life.exit(rank)
    judge = life.step()[-1]
    assert isinstance(judge, Judge) and not judge.over
    life.end(SUCCEEDED)
    assert (life.run_state, life.state.history.record.reason) == (RunState.SUCCEEDED, Reason.COMPLETED)
    assert isinstance(life.effects[-1], EndTrackers)
    life.step()
    assert life.phase is Phase.OVER
    changes = [event for event in recorded(life) if isinstance(event, events.StateChanged)]
    states = [change.state for change in changes]
    assert states == ["preflight", "launching", "running", "finishing", "succeeded"]


def test_every_host_is_asked_for_what_is_left_before_an_attempt_has_ended(life: Life) -> None:
    life.run()
    for rank in (0, 1):
        life.exit(rank)
    life.step()
    effects = life.step(Judged(SUCCEEDED, 2), launcher_alive=False)
    assert {RequestProcesses("1:node0"), RequestProcesses("1:node1")} <= set(effects)
    life.host(0, processes=())
    life.step()
    assert life.phase is Phase.STOPPING
    life.host(1, processes=())
    assert life.step() == [Settle(("1:node0", "1:node1"))]


def test_a_failed_attempt_is_followed_by_another_on_the_same_placement(life: Life) -> None:
    life.run()
    life.kill()
    assert (life.run_state, life.state.phase) == (RunState.RECOVERING, Phase.DECIDING)
    life.step()
    assert life.phase is Phase.BACKING_OFF
    first = life.state.planned
    assert life.step(after_s=5.0) == [PlanAttempt(("node0", "node1"), first)]
    life.run(2)
    assert life.state.watch is not None and life.state.watch.number == 2
    for rank in (0, 1):
        life.exit(rank)
    life.step()
    life.end(SUCCEEDED)
    assert (life.run_state, life.state.history.record.attempts) == (RunState.SUCCEEDED, 2)


@pytest.mark.parametrize("answered", [True, False])
def test_a_server_that_had_answered_has_made_progress_without_a_step(life: Life, *, answered: bool) -> None:
    served = Served(address="http://127.0.0.1:8080/v1", model="job", token=False)
    life.run()
    for attempt in (1, 2, 3):
        if answered:
            life.seen = replace(life.seen, finished=(), news=(events.ResultReported(attempt=attempt, result=served),))
            life._step()
        life.kill(0)
        life.step()
        if attempt == 2 and not answered:
            assert life.run_state is RunState.FAILED
            return
        assert (life.run_state, life.phase) == (RunState.RECOVERING, Phase.BACKING_OFF), attempt
        assert life.step(after_s=5.0) == [PlanAttempt(("node0", "node1"), life.state.planned)]
        life.run(attempt + 1)


def failed_with_node1_away(life: Life) -> None:
    """It waits for the proof that nothing is left there."""
    life.run()
    life.seen = replace(life.seen, progress=ProgressView(steps=5, furthest=5))
    life.exit(0, None, signal=9)
    life.host(1, silent_s=5.0)
    life.step()
    life.step(Judged(KILLED, 1), launcher_alive=False)
    life.host(0, processes=())
    while life.phase is Phase.STOPPING:
        life.step()
    life.step(Settled(("1:node0",)))
    life.step(Judged(KILLED, 1))


def test_no_other_attempt_begins_while_a_node_may_still_run_the_last(life: Life) -> None:
    failed_with_node1_away(life)
    for _ in range(20):
        assert not any(isinstance(effect, PlanAttempt) for effect in life.step(after_s=1.0))
    assert life.state.history.restart_pending == "waits for node1"
    life.host(1, silent_s=0.0)
    assert [Send("1:node1", 1, END), RequestProcesses("1:node1")] == life.step()
    life.host(1, processes=())
    assert life.step() == [Settle(("1:node1",))]
    life.step(Settled(("1:node1",)))
    assert any(isinstance(event, events.CleanupConfirmed) for event in recorded(life))
    assert any(isinstance(effect, PlanAttempt) for effect in life.step(after_s=5.0))


def test_a_node_that_goes_away_in_the_middle_of_its_log_is_asked_again(life: Life) -> None:
    failed_with_node1_away(life)
    life.host(1, silent_s=0.0)
    life.step()
    life.host(1, processes=())
    life.step()
    life.host(1, silent_s=10.0)
    life.step(Settled(("1:node1",)))
    assert not any(isinstance(event, events.CleanupConfirmed) for event in recorded(life))
    life.host(1, silent_s=0.0)
    assert RequestProcesses("1:node1") in life.step()


def test_what_events_that_come_late_show_was_reached(life: Life) -> None:
    failed_with_node1_away(life)
    assert life.state.history.newest_reached == 5
    life.step(Settled((), {"rank1.events.jsonl": None}), progress=ProgressView(steps=8, furthest=8))
    assert life.state.history.newest_reached == 8


def check(status: CheckStatus, **fields: Any) -> PreflightReport:
    result = CheckResult(name="disk", status=status, summary="no room", **fields)
    return PreflightReport(checks=[result], overall_status=status)


def test_a_check_that_fails_ends_the_run(life: Life) -> None:
    life.step()
    life.step(Checked(check(CheckStatus.FAIL)))
    assert (life.run_state, life.state.history.record.cause) == (RunState.FAILED, "disk: no room")


def test_an_error_of_preflight_ends_the_run(life: Life) -> None:
    life.step()
    life.step(Checked(error="it cannot be checked"))
    assert (life.run_state, life.state.history.record.cause) == (RunState.FAILED, "it cannot be checked")


def test_the_nodes_that_preflight_leaves_are_checked_again(life: Life) -> None:
    life.step()
    excluding = check(CheckStatus.WARN, excludes=("node1",))
    assert life.step(Checked(excluding)) == [RunPreflight({"node1": "disk: no room"})]
    assert life.step(Checked(PASSED)) == [PlanAttempt(("node0",))]


def test_a_run_without_any_node_ends(life: Life) -> None:
    life.step()
    life.step(Checked(check(CheckStatus.WARN, excludes=("node0", "node1"))))
    assert (life.run_state, life.state.history.record.reason) == (RunState.FAILED, Reason.PREFLIGHT_FAILED)


def test_an_abort_before_the_launch_ends_the_run_at_once(life: Life) -> None:
    life.step()
    assert life.request_abort() == [Cancel()]
    life.step(Cancelled())
    assert (life.run_state, life.state.phase) == (RunState.ABORTED, Phase.AFTERMATH)
    assert life.state.history.record.cause == "stopped as requested, before anything was launched"


@pytest.mark.parametrize("result", ["checked", "planned"])
def test_an_abort_is_final_though_a_result_was_faster_than_its_cancellation(life: Life, result: str) -> None:
    life.step()
    if result == "planned":
        life.step(Checked(PASSED))
    life.request_abort()
    life.step(Checked(PASSED) if result == "checked" else Planned(life.attempt()))
    assert life.run_state is RunState.ABORTED
    assert life.state.history.attempts == ()


def test_an_abort_cancels_a_plan_also_when_another_result_comes(life: Life) -> None:
    """Of files that were settled in the step that planned it."""
    life.run()
    life.kill()
    life.step()
    assert PlanAttempt in map(type, life.step(after_s=5.0))
    life.seen = replace(life.seen, finished=(Settled(()),), news=(ABORT,))
    assert life._step() == [Cancel()], "the plan is still being made"
    life.step(Cancelled())
    assert life.phase is Phase.ABANDONING


def test_an_abort_while_ranks_are_started_ends_what_has_started(life: Life) -> None:
    life.step()
    life.step(Checked(PASSED))
    life.step(Planned(life.attempt()))
    life.connect()
    assert life.request_abort() == [Cancel()]
    life.step(Cancelled())
    assert life.phase.name == "RUNNING"
    life.step()
    assert life.phase is Phase.STOPPING
    assert life.state.history.stop is not None


@pytest.mark.parametrize("now", [False, True])
def test_an_abort_of_a_run_asks_its_keepers_unless_it_is_to_be_now(life: Life, now: bool) -> None:
    life.run()
    sent = [effect.command for effect in life.request_abort(now=now) if isinstance(effect, Send)]
    assert sent == [END if now else b"stop\n"] * 2
    for rank in (0, 1):
        life.exit(rank, 0, stopped_by="stop")
        life.rank(rank, succeeded=False)
        life.host(rank, processes=())
    aborted = events.Verdict(RunState.ABORTED, Reason.USER_ABORT, "stopped as requested")
    while life.phase is Phase.STOPPING:
        life.step(launcher_alive=False)
    assert Judge in map(type, life.step(Settled(("1:node0", "1:node1"))))
    # Another record has come meanwhile, with which it is judged once more.
    assert Judge in map(type, life.step(Judged(aborted, 1)))
    life.step(Judged(aborted, 2))
    assert life.run_state is RunState.ABORTED


def with_budget(life: Life, **more: Any) -> Life:
    """Stopped ten seconds after its first attempt was planned."""
    life.plan = life.plan.model_copy(update={"budget_s": 10.0, **more})
    life.state = replace(life.state, launched_plan=life.plan, plan=life.plan)
    return life


def test_a_run_whose_time_is_up_is_stopped_as_if_that_were_requested(life: Life) -> None:
    with_budget(life).run()
    life.step(after_s=8.0)
    assert life.phase is Phase.RUNNING
    assert [effect.command for effect in life.step(after_s=2.0) if isinstance(effect, Send)] == [STOP, STOP]
    life.end(events.Verdict(RunState.ABORTED, Reason.USER_ABORT, "stopped as requested"))
    record = life.state.history.record
    assert (life.run_state, record.reason) == (RunState.ABORTED, Reason.BUDGET_SPENT)
    assert record.cause == "its time of 10 s was up: stopped as requested" and "resume" in (record.fix or "")


def test_a_run_whose_time_is_up_between_two_attempts_starts_no_other(life: Life) -> None:
    with_budget(life).run()
    life.kill()
    life.step()
    life.step(after_s=10.0)
    life.step()
    assert (life.run_state, life.state.history.record.reason) == (RunState.ABORTED, Reason.BUDGET_SPENT)


@pytest.mark.parametrize("without", [False, True])
def test_a_run_that_is_resumed_has_its_time_again_or_none(life: Life, *, without: bool) -> None:
    again = events.RunReopened(without_budget=without)
    history = replace(life.state.history, launched_at=START - timedelta(hours=1))
    life.state = replace(with_budget(life).state, history=replace(fold([again], history), record=history.record))
    life.run()
    life.step(after_s=9.0)
    assert life.phase is Phase.RUNNING
    life.step(after_s=2.0)
    assert life.phase is (Phase.RUNNING if without else Phase.STOPPING)


@pytest.mark.parametrize("steps", [1, 2])
def test_an_abort_between_two_attempts_ends_the_run(life: Life, steps: int) -> None:
    life.run()
    life.kill()
    for _ in range(steps):
        life.step()
    life.request_abort()
    life.step()
    assert life.run_state is RunState.ABORTED
    assert "while it recovered from rank 1's death" in (life.state.history.record.cause or "")


def test_a_launch_that_fails_at_first_ends_the_run_and_later_counts_as_a_failure(life: Life, tmp_path: Path) -> None:
    life.step()
    life.step(Checked(PASSED))
    life.step(Planned(error="no port is free"))
    assert (life.run_state, life.state.history.record.reason) == (RunState.FAILED, Reason.LAUNCH_FAILED)
    later = Life(tmp_path / "later")
    later.run()
    later.kill()
    later.step()
    later.step(after_s=5.0)
    later.step(Planned(error="no port is free"))
    assert (later.run_state, len(later.state.history.failures)) == (RunState.RECOVERING, 2)


PLANNED = [events.StateChanged(state=RunState(state)) for state in ("preflight", "launching")]


def launched(life: Life, *more: events.Event) -> list[events.Event]:
    """The events of a run that an earlier supervisor has launched."""
    return [*PLANNED, events.AttemptPlanned(attempt=life.attempt(), at=START), *more]


def reopened(home: Path) -> Life:
    """Its last attempt was not proved to be gone on node1."""
    ended = events.StateChanged(state=RunState.FAILED, verdict=KILLED, unconfirmed=("node1",))
    before = launched(Life(home / "first"), ended, events.RunReopened())
    return Life(home / "again", *before, newest_attempt=1)


def adopted(home: Path, *more: events.Event) -> Life:
    first = Life(home / "first")
    return Life(home / "adopted", *launched(first, *more), adopting=True, newest_attempt=1)


def test_an_adopter_goes_on_with_the_ranks_that_it_finds(tmp_path: Path) -> None:
    life = adopted(tmp_path, LAUNCHER, events.StateChanged(state=RunState.RUNNING))
    attempt = life.state.history.attempts[-1].plan
    assert life.step() == [Connect(attempt), Find(attempt)]
    life.connect()
    life.start_ranks()
    life.step(Found(LAUNCHER), launcher_alive=True)
    life.step()
    assert life.phase.name == "RUNNING"
    life.kill()
    assert life.phase is Phase.DECIDING


def of_the_queue(life: Life) -> Life:
    return with_budget(life, budget_s=None, unattended=True)


@pytest.mark.parametrize("states", [["preflight"], ["preflight", "launching"]])
def test_an_adopter_checks_a_run_of_the_queue_anew_that_was_not_launched(tmp_path: Path, states: list[str]) -> None:
    before = [events.StateChanged(state=RunState(state)) for state in states]
    life = of_the_queue(Life(tmp_path, *before, adopting=True))
    assert life.step() == [RunPreflight()]
    assert life.step(Checked(PASSED)) == [PlanAttempt(life.plan.nodes)]


def test_a_run_of_the_queue_goes_on_after_a_restart_of_this_machine(tmp_path: Path) -> None:
    lost = events.Verdict(RunState.LOST, Reason.SUPERVISOR_LOST, "the machine was restarted")
    life = of_the_queue(adopted(tmp_path, LAUNCHER, events.StateChanged(state=RunState.RUNNING)))
    life.step()
    life.connect()
    life.start_ranks()
    life.step(Found(), launcher_alive=False)
    for rank in (0, 1):
        life.rank(rank, vanished=True)
    life.step()
    life.end(lost)
    assert (life.run_state, life.phase) == (RunState.RECOVERING, Phase.DECIDING)
    assert "its supervisor" not in (life.state.history.restart_refused or "")


def test_a_run_of_the_queue_that_was_lost_in_its_launch_is_launched_again(tmp_path: Path) -> None:
    life = of_the_queue(adopted(tmp_path))
    life.step()
    life.connect()
    life.step(Found(anything=False))
    assert (life.run_state, life.phase) == (RunState.RECOVERING, Phase.DECIDING)


def test_an_adopter_stops_a_run_whose_time_has_come_meanwhile(tmp_path: Path) -> None:
    life = with_budget(adopted(tmp_path, LAUNCHER, events.StateChanged(state=RunState.RUNNING)))
    life.step(after_s=60.0)
    life.connect()
    life.start_ranks()
    sent = [*life.step(Found(LAUNCHER), launcher_alive=True), *life.step()]
    assert [effect.command for effect in sent if isinstance(effect, Send)] == [STOP, STOP]


def test_an_abort_that_comes_while_an_adopter_looks_for_the_attempt_ends_it_at_once(tmp_path: Path) -> None:
    life = adopted(tmp_path, LAUNCHER, events.StateChanged(state=RunState.RUNNING))
    life.step()
    life.connect()
    life.start_ranks()
    assert life.request_abort() == [Cancel()]
    life.step(Cancelled())
    commands = [effect for effect in life.step() if isinstance(effect, Send)]
    assert life.phase is Phase.STOPPING
    assert [(send.rank, send.command) for send in commands] == [(0, STOP), (1, STOP)]


def test_a_rank_that_an_earlier_supervisor_has_lost_is_lost_when_its_node_is_back(tmp_path: Path) -> None:
    lost = events.RankExited(rank=1, node="node1", error=NODE_LOST)
    life = adopted(tmp_path, LAUNCHER, events.StateChanged(state=RunState.RUNNING), lost)
    life.step()
    life.connect()
    life.start_ranks()
    life.step(Found(LAUNCHER), launcher_alive=True)
    judged = [effect for effect in life.step() if isinstance(effect, Judge)]
    assert [standing.lost for standing in judged[0].standings] == [False, True]


def test_an_adopter_that_finds_nothing_of_an_attempt_whose_failure_ends_the_run_ends_it(tmp_path: Path) -> None:
    finishing = [events.StateChanged(state=state) for state in (RunState.RUNNING, RunState.FINISHING)]
    failed = events.AttemptFailed(attempt=1, verdict=KILLED, reached=0, failed_at=START)
    life = adopted(tmp_path, LAUNCHER, *finishing, failed)
    life.step()
    life.connect()
    life.start_ranks()
    for rank in (0, 1):
        life.rank(rank, vanished=True)
    life.step(Found(anything=False))
    assert any(isinstance(effect, Judge) for effect in life.step())


def test_an_adopter_that_finds_nothing_of_a_first_launch_ends_the_run(tmp_path: Path) -> None:
    life = adopted(tmp_path)
    life.step()
    life.connect()
    life.step(Found(anything=False))
    record = life.state.history.record
    assert (record.state, record.cause) == (RunState.FAILED, "its supervisor was lost in the middle of the launch")


def test_an_adopter_remembers_an_abort_that_was_requested(tmp_path: Path) -> None:
    life = adopted(tmp_path, LAUNCHER, events.StateChanged(state=RunState.RUNNING), ABORT)
    life.step()
    life.connect()
    life.start_ranks()
    life.step(Found(LAUNCHER), launcher_alive=True)
    life.step()
    assert life.phase is Phase.STOPPING


def test_an_adopter_launches_nothing_by_surprise(tmp_path: Path) -> None:
    for before, cause in ((PLANNED[:1], "lost before anything"), ([*PLANNED[:1], ABORT], "stopped as requested")):
        life = Life(tmp_path / cause.split()[0], *before, adopting=True)
        life.step()
        assert cause in (life.state.history.record.cause or "")
        assert life.run_state.ended


def test_an_adopter_ends_an_attempt_that_the_journal_does_not_know(tmp_path: Path) -> None:
    life = Life(tmp_path, *PLANNED, adopting=True, newest_attempt=1)
    assert life.step() == [ConnectUnknown()]
    life.seen = replace(life.seen, hosts=(HostView("unknown:node0", ("node0",), (0,), current=False),))
    assert life.step() == [RequestProcesses("unknown:node0")]
    life.host(0, processes=())
    life.step()
    assert life.run_state is RunState.LOST


def test_an_adopter_of_a_failed_attempt_decides_what_follows_once_it_is_gone(tmp_path: Path) -> None:
    failed = events.AttemptFailed(attempt=1, verdict=KILLED, reached=5, failed_at=datetime.now(UTC))
    states = [events.StateChanged(state=state) for state in (RunState.RUNNING, RunState.RECOVERING)]
    life = adopted(tmp_path, *states, failed)
    life.step()
    life.connect()
    life.step()
    assert (life.state.phase, life.state.history.restart_pending) == (Phase.DECIDING, "waits for node0, node1")
    for rank in (0, 1):
        life.host(rank, processes=())
    life.step()
    life.step(Settled(("1:node0",)), Settled(("1:node1",)))
    life.step(Judged(KILLED, 0))
    assert life.phase is Phase.BACKING_OFF


def test_an_adopter_restarts_nothing_while_a_launcher_of_the_last_attempt_may_be_alive(tmp_path: Path) -> None:
    failed = events.AttemptFailed(attempt=1, verdict=KILLED, reached=5, failed_at=START, unconfirmed=(HEAD,))
    states = [events.StateChanged(state=state) for state in (RunState.RUNNING, RunState.RECOVERING)]
    life = adopted(tmp_path, *states, failed)
    life.step()
    life.connect()
    hosts = (*(replace(host, processes=()) for host in life.seen.hosts), HostView(f"1:{HEAD}", (HEAD,), local=True))
    assert RequestProcesses(f"1:{HEAD}") in life.step(hosts=hosts)
    life.step()
    life.step(Settled(("1:node0",)), Settled(("1:node1",)))
    life.step(Judged(KILLED, 0))
    assert life.phase.name == "DECIDING"
    life.host(2, processes=())
    life.step()
    life.step(Settled((f"1:{HEAD}",)))
    assert life.phase is Phase.BACKING_OFF


def test_a_run_that_is_taken_up_again_begins_once_its_last_attempt_is_gone(tmp_path: Path) -> None:
    life = reopened(tmp_path)
    assert life.step() == [RunPreflight()]
    attempt = life.state.history.attempts[-1].plan
    assert life.step(Checked(PASSED)) == [Connect(attempt)]
    life.connect()
    life.step()
    for rank in (0, 1):
        life.host(rank, processes=())
    life.step()
    assert life.step(Settled(("1:node0",)), Settled(("1:node1",))) == [PlanAttempt(life.plan.nodes)]


def test_a_run_is_not_taken_up_while_a_node_does_not_show_that_nothing_is_left(tmp_path: Path) -> None:
    life = reopened(tmp_path)
    life.step()
    life.step(Checked(PASSED))
    life.connect()
    life.host(1, silent_s=50.0)
    life.step(after_s=31.0)
    record = life.state.history.record
    assert (record.state, record.reason) == (RunState.FAILED, Reason.LAUNCH_FAILED)
    assert "node1" in (record.cause or "")


def test_a_run_that_goes_on_without_a_node_seeks_the_proof_there(tmp_path: Path) -> None:
    life = adopted(tmp_path, LAUNCHER, events.StateChanged(state=RunState.RUNNING))
    alone = life.attempt(2).model_copy(update={"nodes": ("node0",)})
    second = Life(
        tmp_path / "second",
        *launched(Life(tmp_path / "x"), LAUNCHER, events.AttemptPlanned(attempt=alone, at=START)),
        adopting=True,
        newest_attempt=2,
    )
    earlier = second.state.history.attempts[0].plan
    assert second.step() == [Connect(alone), Reconnect(earlier, ("node1",)), Find(alone)]


def test_an_adopter_goes_on_to_running_where_the_starts_of_all_ranks_are_recorded(tmp_path: Path) -> None:
    started = [events.RankLaunched(rank=rank, node=f"node{rank}", identity=identity(rank)) for rank in (0, 1)]
    life = adopted(tmp_path, LAUNCHER, *started)
    life.step()
    life.connect()
    life.start_ranks()
    life.step(Found(LAUNCHER), launcher_alive=True)
    life.step()
    assert life.run_state is RunState.RUNNING


def test_an_adopter_goes_on_where_the_line_of_the_launch_is_damaged(tmp_path: Path) -> None:
    planned = events.AttemptPlanned(attempt=Life(tmp_path / "first").attempt(), at=START)
    life = Life(tmp_path / "adopted", PLANNED[0], planned, LAUNCHER, adopting=True, newest_attempt=1)
    life.step()
    life.connect()
    life.start_ranks()
    life.step(Found(LAUNCHER), launcher_alive=True)
    life.step()
    life.kill()
    assert life.run_state is RunState.RECOVERING


def test_a_failure_is_recorded_once_also_over_supervisors(tmp_path: Path) -> None:
    failed = events.AttemptFailed(attempt=1, verdict=KILLED, reached=5, failed_at=START)
    states = [events.StateChanged(state=state) for state in (RunState.RUNNING, RunState.FINISHING)]
    life = adopted(tmp_path, LAUNCHER, *states, failed)
    life.step()
    life.connect()
    life.start_ranks()
    for rank in (0, 1):
        life.exit(rank, 1)
    life.step(Found())
    life.step()
    life.end(replace(KILLED, cause="another"))
    record = life.state.history.record
    assert (record.state, record.cause, len(life.state.history.failures)) == (RunState.FAILED, "killed", 1)


def test_who_is_needed_is_settled_when_an_attempt_is_to_end(tmp_path: Path) -> None:
    life = Life(tmp_path, strategy="local")
    life.run()
    life.exit(1, 1)
    life.step()
    # The first step comes while the verdict is awaited: from then on rank 1 could have been lost.
    life.seen = replace(life.seen, progress=ProgressView(steps=5, furthest=5))
    life.end(KILLED)
    assert [effect.standings[1].dispensable for effect in life.effects if isinstance(effect, Judge)] == [False, False]


@pytest.mark.parametrize("aborted", [False, True])
def test_workers_are_started_again_for_a_lost_node_unless_the_attempt_is_being_ended(
    tmp_path: Path, aborted: bool
) -> None:
    life = Life(tmp_path, min_nodes=1)
    job = JobConfig(name="job", framework="torch", strategy="auto", elastic=True, command=("torchrun", "train.py"))
    life.plan = life.plan.model_copy(update={"config": life.plan.config.model_copy(update={"job": job})})
    life.state = begin(life.plan, life.state.history, 0, adopting=False)
    life.run()
    if aborted:
        life.request_abort()
    life.host(1, silent_s=1000.0)
    sent = [effect.command for effect in life.step() if isinstance(effect, Send)]
    assert sent == ([] if aborted else [EMERGENCY_CHECKPOINT])


def test_nodes_on_one_host_that_an_attempt_leaves_out_are_connected_once(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, ranks=3).close()
    layouts = [local_layout(tmp_path / "node", 3)]
    attempts = [planned_attempt(made.directory, made.plan, layouts, number) for number in (1, 2)]
    attempts[1] = attempts[1].model_copy(update={"nodes": ("node0",)})
    planned = [events.AttemptPlanned(attempt=attempt, at=START) for attempt in attempts]
    history = run_history([events.RunPlanned(run=made.plan.record(), nonce="n"), *PLANNED, *planned], made.plan)
    _, effects = step(begin(made.plan, history, 2, adopting=True), Observation(100.0, START))
    connected = [effect for effect in effects if isinstance(effect, Reconnect)]
    assert connected == [Reconnect(attempts[0], ("node1", "node2"))]


def restarts_without_node1(life: Life) -> None:
    """Up to the wait before the next attempt."""
    failed_with_node1_away(life)
    life.host(1, silent_s=1000.0)
    life.step()
    assert life.phase is Phase.BACKING_OFF


def test_a_proof_that_is_about_to_be_found_is_awaited_before_the_next_attempt(tmp_path: Path) -> None:
    life = Life(tmp_path, min_nodes=1)
    restarts_without_node1(life)
    life.host(1, silent_s=0.0)
    life.step()
    life.host(1, processes=())
    assert life.step(after_s=5.0) == [Settle(("1:node1",))]
    [planned] = life.step(Settled(("1:node1",)))
    assert isinstance(planned, PlanAttempt)
    assert any(isinstance(event, events.CleanupConfirmed) for event in recorded(life))


def test_a_launch_that_fails_forgets_no_proof_of_an_attempt_before(tmp_path: Path) -> None:
    life = Life(tmp_path, min_nodes=1)
    life.run()
    life.kill()
    life.step()
    life.step(after_s=5.0)
    life.step(Planned(life.attempt(2).model_copy(update={"nodes": ("node0",)})))
    left_out = replace(life.seen.hosts[1], current=False, silent_s=50.0)
    host = HostView("2:node0", ("node0",), (0,), boot_id="b")
    life.seen = replace(life.seen, ranks=(RankView(0, "node0"),), hosts=(left_out, host))
    life.step(Started(error="no room"))
    assert life.state.history.failures[-1].unconfirmed == ("node0",)


@pytest.mark.parametrize("reason", [Reason.RANK_KILLED, Reason.NODE_LOST])
def test_the_proof_that_the_head_lacks_is_sought_after_the_end(tmp_path: Path, reason: Reason) -> None:
    verdict = replace(KILLED, reason=reason)
    states = [events.StateChanged(state=state) for state in (RunState.RUNNING, RunState.FINISHING)]
    life = adopted(tmp_path, *states, events.StateChanged(state=RunState.FAILED, verdict=verdict, unconfirmed=(HEAD,)))
    life.step()
    life.connect()
    effects = life.step(hosts=(*life.seen.hosts, HostView(f"1:{HEAD}", (HEAD,), local=True)))
    assert (RequestProcesses(f"1:{HEAD}") in effects, life.phase) == (True, Phase.AFTERMATH)


def test_a_node_on_which_the_end_is_not_proved_stays_so_when_the_run_cannot_be_taken_up(tmp_path: Path) -> None:
    life = reopened(tmp_path)
    life.step()
    life.step(Checked(error="it cannot be checked"))
    assert life.run_state is RunState.FAILED
    assert life.state.history.record.unconfirmed == ["node1"]
