"""How an attempt that runs is ended: when the ranks save an emergency checkpoint, what an abort leaves of it, and what
an attempt goes on without. By the supervisor's own loop, up to what follows the end."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.awake_clock import AwakeClock
from engine.cluster.host_connection import ConnectionState
from engine.config.models import JobConfig, RecoveryConfig
from engine.failures.signatures import BY_ID
from engine.models import Reason, RunState
from engine.protocol.attempt import EMERGENCY_CHECKPOINT, END
from engine.protocol.exit_codes import TrainerExit
from engine.protocol.job import Strategy
from engine.run import decide, running, shutdown, watched_attempt
from engine.run.decide import failed_run, refusal
from engine.run.driver import TICK_S
from engine.run.effects import Connect
from engine.run.events import HangDetected, Note, StateChanged, StopStageReached, Verdict
from engine.run.journal import read_journal
from engine.run.logs import mirror
from engine.run.observation import ProgressView
from engine.run.running import begin_watch
from engine.run.state import Phase, State
from engine.run.step import begin, step
from engine.run.supervisor_process import request_abort
from engine.security.identifiers import LOCAL
from tests.unit.run.live_attempt import LiveAttempt
from tests.waiting import until

MONITORED = {Phase.RUNNING, Phase.STOPPING, Phase.SETTLING}


class MonitoredAttempt(LiveAttempt):
    """An attempt of two ranks, or of three that are the nodes of an elastic job and of which one may be lost."""

    def __init__(
        self, home: Path, *, restarts: bool, steps: bool = True, strategy: Strategy = "data", elastic: str = ""
    ) -> None:
        """`elastic`: where the nodes of an elastic job are; what ranks report is read on this machine alone."""
        config: dict[str, Any] = {"recovery": RecoveryConfig(max_restarts=10 if restarts else 0)}
        if elastic:
            command = ("torchrun", "train.py")
            job = JobConfig(name="job", framework="torch", strategy="auto", elastic=True, command=command)
            config = {"job": job, "recovery": RecoveryConfig(min_nodes=2, lease_s=3.0)}
        ssh = [elastic] * 3 if elastic else [LOCAL] * 2
        super().__init__(home, strategy=strategy, ssh=ssh, **config)
        self.start(*range(len(ssh)))
        for rank in range(len(ssh)) if steps else ():
            self.report(rank, "step", iteration=3, update=3, t=1.0, at=1.0)
        self.last: State | None = None
        self.progress = ProgressView()

    def complete(self, rank: int) -> None:
        self.report(rank, "end", completed=True)
        self.exit(rank, 0)

    def events(self, kind: type[Any]) -> list[Any]:
        return [event for event in read_journal(self.directory.journal) if isinstance(event, kind)]

    def notes(self) -> list[str]:
        return [event.message for event in self.events(Note)]

    def stages(self) -> list[str]:
        return [event.stage.value for event in self.events(StopStageReached)]

    @property
    def verdict(self) -> Verdict:
        """Once it has ended."""
        history = self.recorder.history
        if history.failures:
            return history.failures[-1].verdict
        [change] = [event for event in self.events(StateChanged) if event.verdict is not None]
        verdict: Verdict = change.verdict
        return verdict

    async def monitor(self) -> None:
        """From its launch to the verdict on its end."""
        history = self.recorder.history
        await self.run.perform([Connect(self.attempt)])
        now = self.context.clock()
        ranks, slept_s = len(self.hosts), self.context.clock.slept_s
        watch = begin_watch(1, now, ranks=ranks, slept_s=slept_s)
        self.last = replace(begin(self.plan, history, 1, adopting=False), phase=Phase.RUNNING, watch=watch)
        while self.last.phase in MONITORED:
            seen = await self.run.observe()
            self.progress = seen.progress
            self.last, effects = step(self.last, seen)
            await self.run.perform(effects)
            await self.run.await_news(TICK_S)

    def begin(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.monitor())


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Callable[..., MonitoredAttempt]]:
    attempts: list[MonitoredAttempt] = []

    def make(**how: Any) -> MonitoredAttempt:
        attempts.append(MonitoredAttempt(tmp_path, **how))
        return attempts[-1]

    yield make
    for attempt in attempts:
        await attempt.close()


async def fail(attempt: MonitoredAttempt, error_type: str) -> None:
    await until(lambda: bool(attempt.progress.steps))
    attempt.report(1, "failure", error_type=error_type, message="x", certain=True)
    attempt.exit(1, 1)


@pytest.mark.parametrize("restarts", [True, False])
async def test_the_newest_state_is_saved_whether_a_restart_follows_or_not(
    made: Callable[..., MonitoredAttempt], restarts: bool
) -> None:
    attempt = made(restarts=restarts)
    run = attempt.begin()
    await fail(attempt, "OSError")
    await until(lambda: "emergency_checkpoint" in attempt.stages())
    assert attempt.recorder.state is (RunState.RECOVERING if restarts else RunState.FINISHING)
    attempt.exit(0, 6)
    await run
    assert attempt.stages()[:2] == ["emergency_checkpoint", "verifying"]


async def test_a_state_whose_manifest_comes_at_the_very_end_is_recorded(
    made: Callable[..., MonitoredAttempt],
) -> None:
    attempt, entries = made(restarts=False), [("2.0", 64 * "a"), ("3.0@1.0", 64 * "b")]
    for kind, (state, manifest) in zip(("checkpoint", "emergency_checkpoint"), entries, strict=True):
        attempt.report(0, kind, phase="committed", iteration=3, state=state, manifest=manifest)
    for rank in (0, 1):
        attempt.complete(rank)
    await attempt.monitor()
    assert attempt.recorder.history.manifests == {0: tuple(entries)}


@pytest.mark.parametrize("error_type", ["Diverged", "Corrupted"])
async def test_a_state_that_is_not_sound_is_not_saved(made: Callable[..., MonitoredAttempt], error_type: str) -> None:
    attempt = made(restarts=False)
    run = attempt.begin()
    await fail(attempt, error_type)
    await until(lambda: "term" in attempt.stages())
    attempt.exit(0, 1)
    await run
    assert "emergency_checkpoint" not in attempt.stages()


@pytest.mark.parametrize("now", [False, True])
async def test_an_abort_leaves_an_emergency_checkpoint_its_time_unless_it_is_to_be_now(
    made: Callable[..., MonitoredAttempt], now: bool
) -> None:
    attempt = made(restarts=True)
    run = attempt.begin()
    await fail(attempt, "OSError")
    attempt.report(0, "emergency_checkpoint", phase="begin", bytes=1)
    await until(
        lambda: attempt.progress.checkpoint_phases == {0: "begin"} and "emergency_checkpoint" in attempt.stages()
    )
    request_abort(attempt.directory, now=now)
    await until(lambda: "asked" in attempt.stages())
    if now:
        await until(lambda: "term" in attempt.stages())
    attempt.exit(0, 6)
    await run
    assert attempt.state is RunState.ABORTED
    assert ("term" in attempt.stages()) is now


@pytest.mark.parametrize("signature", ["ring.bind", "ring.connect"])
async def test_a_first_launch_that_fails_for_a_transient_cause_is_restarted(
    made: Callable[..., MonitoredAttempt], signature: str
) -> None:
    attempt = made(restarts=True, steps=False)
    attempt.files.log(1).write_text(BY_ID[signature].example + "\n")
    attempt.exit(1, 1)
    run = attempt.begin()
    await until(lambda: "term" in attempt.stages())
    attempt.exit(0, 1, stopped_by="end")
    await run
    assert (attempt.verdict.signature, attempt.state) == (signature, RunState.RECOVERING)
    assert refusal(failed_run(attempt.plan, attempt.recorder.history)) is None


LOSS = "rank 1 on node1 is lost: the others go on without it"
NOT_TO_THE_END = "rank 1 on node1 did not complete: the others went on without it"


async def verdict_of(attempt: MonitoredAttempt, run: Awaitable[None]) -> Verdict:
    await run
    return attempt.verdict


async def test_rank_0_goes_on_without_a_rank_that_failed_and_completes(
    made: Callable[..., MonitoredAttempt],
) -> None:
    attempt = made(restarts=True, strategy="local")
    run = attempt.begin()
    await fail(attempt, "OSError")
    await until(lambda: LOSS in attempt.notes())
    assert (attempt.stages(), attempt.recorder.state) == ([], RunState.RUNNING)
    attempt.complete(0)
    verdict = await verdict_of(attempt, run)
    assert (verdict.state, verdict.reason, verdict.cause) == (RunState.SUCCEEDED, Reason.COMPLETED, NOT_TO_THE_END)
    assert attempt.stages() == ["verifying", "stopped"]
    assert attempt.notes().count(LOSS) == 1
    assert attempt.last is not None and attempt.last.watch is not None and attempt.last.watch.failed_at is None


async def test_what_the_others_go_on_without_is_known_to_who_only_proves_the_end(
    made: Callable[..., MonitoredAttempt],
) -> None:
    attempt = made(restarts=True, strategy="local")
    attempt.exit(1, 1)
    attempt.complete(0)
    lost = Verdict(RunState.FAILED, Reason.NODE_LOST, "no answer", 1, "node1")
    attempt.recorder.append(StateChanged(state=RunState.FINISHING))
    attempt.recorder.append(StateChanged(state=RunState.FAILED, verdict=lost, unconfirmed=("node0", "node1")))
    await attempt.run.drive(begin(attempt.plan, attempt.recorder.history, 1, adopting=True))
    record = attempt.recorder.history.record
    assert (record.state, record.cause, record.unconfirmed) == (RunState.SUCCEEDED, NOT_TO_THE_END, [])


async def test_the_sleep_that_ended_a_lease_is_the_one_before_it(made: Callable[..., MonitoredAttempt]) -> None:
    attempt = made(restarts=True)
    now = [1000.0]
    clock = AwakeClock(lambda: now[0])
    attempt.supervise(clock)

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        clock()
        await until(lambda: any(f"for {seconds:.0f} s" in note for note in attempt.notes()))
        for _ in range(5):
            now[0] += 4.0
            clock()

    run = attempt.begin()
    await until(lambda: attempt.state is RunState.RUNNING)
    await sleep(100)
    await sleep(50)
    attempt.exit(1, 0, stopped_by="lease")
    await until(lambda: 1 in attempt.recorder.history.attempts[-1].ended)
    await sleep(200)
    attempt.exit(0, TrainerExit.PEER_LOST)
    verdict = await verdict_of(attempt, run)
    assert verdict.reason is Reason.HEAD_SLEPT
    assert "for 100 s: no heartbeat" in (verdict.cause or "")


async def test_a_rank_that_its_keeper_has_started_again_is_noted_once_over_supervisors(
    made: Callable[..., MonitoredAttempt],
) -> None:
    again = "rank 1 on node1 was started again"
    attempt = made(restarts=True, strategy="local")
    # An earlier supervisor has copied the first three starts.
    for _ in range(3):
        attempt.report(1, "start")
    shutil.copy(attempt.files.events(1), attempt.directory.events(1))
    run = attempt.begin()
    await until(lambda: bool(attempt.progress.steps))
    attempt.report(1, "start")
    await until(lambda: again in attempt.notes())
    attempt.complete(1)
    attempt.complete(0)
    await run
    assert attempt.notes() == [again]


async def test_a_silent_node_does_not_hold_a_completed_training_open(
    made: Callable[..., MonitoredAttempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "LINGER_S", 0.3)
    monkeypatch.setattr(shutdown, "SILENT_S", 0.3)
    attempt = made(restarts=True, strategy="local")
    run = attempt.begin()
    await until(lambda: bool(attempt.progress.steps))
    attempt.hosts[1].shown, attempt.hosts[1].left = ConnectionState(20.0, answered=True), None
    attempt.complete(0)
    verdict = await verdict_of(attempt, run)
    assert (verdict.state, verdict.cause) == (RunState.SUCCEEDED, NOT_TO_THE_END)
    assert attempt.recorder.history.record.unconfirmed == ["node1"]
    assert (1, END) in attempt.hosts[1].commands


async def test_a_rank_that_goes_on_after_the_training_has_completed_is_ended(
    made: Callable[..., MonitoredAttempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "LINGER_S", 0.3)
    attempt = made(restarts=True, strategy="local")
    run = attempt.begin()
    attempt.complete(0)
    await until(lambda: bool(attempt.hosts and attempt.hosts[1].commands))
    attempt.exit(1, 5)
    assert (await verdict_of(attempt, run)).state is RunState.SUCCEEDED
    assert attempt.hosts[1].commands == [(1, END)]
    assert attempt.stages() == ["term", "verifying", "stopped"]


@pytest.mark.usefixtures("impatient")
async def test_a_keeper_that_does_not_answer_does_not_undo_a_training_that_all_trainers_have_completed(
    made: Callable[..., MonitoredAttempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "LINGER_S", 0.5)
    monkeypatch.setattr(watched_attempt, "_ENDS_KNOWN_S", 0.2)
    attempt = made(restarts=False)
    run = attempt.begin()
    await until(lambda: bool(attempt.progress.steps))
    attempt.report(1, "end", completed=True)
    attempt.complete(0)
    await until(lambda: bool(attempt.hosts[1].commands))
    verdict = await verdict_of(attempt, run)
    assert (verdict.state, verdict.reason) == (RunState.SUCCEEDED, Reason.COMPLETED)
    assert attempt.events(HangDetected) == []
    assert RunState.RECOVERING not in [change.state for change in attempt.events(StateChanged)], "nothing to restart"
    assert "emergency_checkpoint" not in attempt.stages()


async def test_before_the_first_update_a_rank_that_fails_is_the_cause_and_not_rank_0_that_lost_it(
    made: Callable[..., MonitoredAttempt],
) -> None:
    attempt = made(restarts=True, strategy="local", steps=False)
    attempt.report(0, "failure", error_type="PeerLost", message="rank 1 was lost before the training began")
    attempt.exit(0, TrainerExit.PEER_LOST)
    attempt.report(1, "failure", error_type="JobError", message="the model is not there")
    attempt.exit(1, TrainerExit.EXCEPTION)
    verdict = await verdict_of(attempt, attempt.monitor())
    assert (verdict.state, verdict.rank, verdict.host) == (RunState.FAILED, 1, "node1")
    assert "JobError: the model is not there" in (verdict.cause or "")
    assert refusal(failed_run(attempt.plan, attempt.recorder.history)) is not None


async def test_the_end_of_rank_0_fails_the_attempt_though_another_rank_was_lost_before(
    made: Callable[..., MonitoredAttempt],
) -> None:
    attempt = made(restarts=True, strategy="local")
    run = attempt.begin()
    await fail(attempt, "OSError")
    await until(lambda: LOSS in attempt.notes())
    attempt.report(0, "failure", error_type="ValueError", message="no")
    attempt.exit(0, 1)
    verdict = await verdict_of(attempt, run)
    assert (verdict.state, verdict.reason, verdict.rank) == (RunState.FAILED, Reason.RANK_FAILED, 0)
    assert "emergency_checkpoint" not in attempt.stages()


async def test_a_rank_that_leaves_because_rank_0_has_failed_is_not_noted_as_lost(
    made: Callable[..., MonitoredAttempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SETTLE_S", 60.0)
    attempt = made(restarts=True, strategy="local")
    run = attempt.begin()
    await until(lambda: bool(attempt.progress.steps))
    attempt.exit(1, 5)
    await until(lambda: 1 in attempt.recorder.history.attempts[-1].ended)
    attempt.exit(0, 1)
    assert (await verdict_of(attempt, run)).rank == 0
    assert LOSS not in attempt.notes()


AWAY = ConnectionState(500.0, answered=True)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a node that is away has to send is not waited for."""
    for module, name in ((shutdown, "SILENT_S"), (shutdown, "UNCONFIRMED_S"), (mirror, "_LATE_BYTES_S")):
        monkeypatch.setattr(module, name, 0.3)
    monkeypatch.setattr(decide, "LINGER_S", 0.3)


async def elastic_run(made: Callable[..., MonitoredAttempt]) -> tuple[MonitoredAttempt, asyncio.Task[None]]:
    """On three other machines, each of which has started."""
    attempt = made(restarts=False, elastic="ana@box")
    run = attempt.begin()
    await until(lambda: len(attempt.recorder.history.attempts[-1].started) == 3)
    return attempt, run


async def test_an_elastic_job_goes_on_without_one_node_and_ends_with_the_second(
    made: Callable[..., MonitoredAttempt], impatient: None
) -> None:
    attempt, run = await elastic_run(made)
    for host in attempt.hosts[1:]:
        host.shown, host.left = AWAY, None
    await until(lambda: bool(attempt.stages()))
    attempt.exit(0, 1, stopped_by="end")
    verdict = await verdict_of(attempt, run)
    assert (verdict.state, verdict.reason) == (RunState.FAILED, Reason.NODE_LOST)


async def test_the_workers_are_started_again_once_for_a_lost_node_over_supervisors(
    made: Callable[..., MonitoredAttempt], impatient: None
) -> None:
    attempt, run = await elastic_run(made)
    attempt.hosts[2].shown, attempt.hosts[2].left = AWAY, None
    await until(lambda: len([note for note in attempt.notes() if "node2" in note]) == 1)
    run.cancel()
    await asyncio.wait({run})
    await attempt.run.let_go()
    attempt.supervise()
    run = attempt.begin()
    await until(lambda: len(attempt.recorder.history.attempts[-1].started) == 3)
    assert attempt.stages() == []
    for rank in (0, 1):
        attempt.exit(rank, 0)
    assert (await verdict_of(attempt, run)).state is RunState.SUCCEEDED
    again = [command for host in attempt.connected for command in host.commands if command[1] == EMERGENCY_CHECKPOINT]
    assert again == [(0, EMERGENCY_CHECKPOINT), (1, EMERGENCY_CHECKPOINT)]


async def test_a_torchrun_that_gave_up_is_the_cause_on_whichever_node(made: Callable[..., MonitoredAttempt]) -> None:
    attempt = made(restarts=False, elastic=LOCAL)
    run = attempt.begin()
    await until(lambda: bool(attempt.progress.steps))
    attempt.report(2, "failure", error_type="ValueError", message="bad row")
    attempt.exit(2, 1)
    await until(lambda: bool(attempt.stages()))
    for rank in (0, 1):
        attempt.exit(rank, 1, stopped_by="end")
    verdict = await verdict_of(attempt, run)
    assert (verdict.reason, verdict.rank) == (Reason.RANK_FAILED, 2)


async def test_the_nodes_that_completed_are_not_counted_as_lost(
    made: Callable[..., MonitoredAttempt], impatient: None
) -> None:
    attempt, run = await elastic_run(made)
    attempt.hosts[2].shown, attempt.hosts[2].left = AWAY, None
    await until(lambda: len(attempt.recorder.history.attempts[-1].ended) == 1)
    for rank in (1, 0):
        attempt.exit(rank, 0)
        await until(lambda rank=rank: rank in attempt.recorder.history.attempts[-1].ended)  # type: ignore[misc]
    verdict = await verdict_of(attempt, run)
    assert (verdict.state, verdict.reason) == (RunState.SUCCEEDED, Reason.COMPLETED)
