"""How a monitored attempt is ended: when the ranks save an emergency checkpoint, what an abort leaves of it, and what
an attempt goes on without."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.awake_clock import AwakeClock
from engine.cluster.host_connection import ConnectionState
from engine.config.models import JobConfig, RecoveryConfig
from engine.failures.signatures import BY_ID
from engine.models import Reason, RunState
from engine.node.processes import boot_id, start_time
from engine.protocol.attempt import EMERGENCY_CHECKPOINT, END, ExitRecord, Identity, write_atomic
from engine.protocol.exit_codes import TrainerExit
from engine.protocol.job import Strategy
from engine.run import attempt_monitor, decide, shutdown
from engine.run.attempt import AttemptOrigin
from engine.run.attempt_monitor import AttemptMonitor
from engine.run.decide import failed_run, refusal
from engine.run.events import AttemptFailed, HangDetected, Note, RequestReceived, StateSaved, StopStageReached, Verdict
from engine.run.journal import RunRecorder, read_journal
from engine.run.logs import mirror
from engine.run.ranks import AttemptContext, HostConnections
from engine.security.identifiers import LOCAL
from tests.unit.run.file_host import FileHost
from tests.unit.run.run_maker import MadeRun
from tests.waiting import until


class MonitoredAttempt:
    """A monitored attempt of two ranks, or of three that are the nodes of an elastic job and of which one may be
    lost; their keepers and trainers are the test itself."""

    def __init__(
        self,
        home: Path,
        *,
        restarts: bool,
        steps: bool = True,
        strategy: Strategy = "data",
        elastic: str = "",
    ) -> None:
        """`elastic`: where the nodes of an elastic job are; what ranks report is read on this machine alone."""
        ranks = range(3 if elastic else 2)
        run = MadeRun(home, strategy=strategy, ranks=len(ranks))
        run.attempt().state("preflight", "launching", "running").close()
        self.directory, self.plan = run.directory, run.plan
        if elastic:
            command = ("torchrun", "train.py")
            job = JobConfig(name="job", framework="torch", strategy="auto", elastic=True, command=command)
            changed = {"job": job, "recovery": RecoveryConfig(min_nodes=2, lease_s=3.0)}
            config = run.plan.config.model_copy(update=changed)
            self.plan = run.plan.model_copy(update={"config": config})
        self.recorder = RunRecorder(run.directory.journal, self.plan, lambda _record: None)
        attempt = self.recorder.history.attempts[-1].plan
        self.files = attempt.files(run.id, 0)
        self.files.directory.mkdir(parents=True, exist_ok=True)
        self.abort: RequestReceived | None = None
        self.verdicts: list[Verdict] = []
        self._restarts = restarts
        for rank in ranks:
            self._start(rank, attempt.nonce, run.id)
            if steps:
                self.report(rank, event="step", iteration=3, update=3, t=1.0, at=1.0)
        # As several hosts, so that one may be silent.
        self.hosts = [FileHost(self.files, (rank,), (f"node{rank}",), ssh=elastic or LOCAL) for rank in ranks]
        connections = HostConnections(self.hosts)
        self.context = AttemptContext(run.directory, self.plan, attempt, connections, self.recorder)
        self.monitor = AttemptMonitor(self.context, AttemptOrigin(), self._may_restart)

    def _start(self, rank: int, nonce: str, run_id: str) -> None:
        os.mkfifo(self.files.control(rank))
        pid = os.getpid()
        start = start_time(pid) or ""
        # The trainers' group is nobody's: what is sent to it reaches no process.
        nobody = 2**22 + 7
        identity = Identity(rank, run_id, 1, nonce, boot_id(), pid, start, nobody, nobody, start, 1.0)
        write_atomic(self.files.identity(rank), json.dumps(asdict(identity)))

    def _may_restart(self, verdict: Verdict, _reached: int) -> bool:
        self.verdicts.append(verdict)
        return self._restarts

    def adopt(self, clock: AwakeClock | None = None) -> None:
        """Another supervisor goes on with it; `run` was not called before."""
        self.monitor.close()
        self.monitor = AttemptMonitor(self.context, AttemptOrigin(adopted=True), self._may_restart, clock)

    def prove(self, nodes: Sequence[str] = ("node0", "node1")) -> None:
        """In place of `run`: another supervisor finds the run ended."""
        self.adopt()
        self.monitor.prove_again(nodes)

    def report(self, rank: int, **event: Any) -> None:
        with self.files.events(rank).open("a") as file:
            file.write(json.dumps({**event, "rank": rank}) + "\n")

    def complete(self, rank: int) -> None:
        self.report(rank, event="end", completed=True)
        self.exit(rank, 0)

    def exit(self, rank: int, code: int, **more: Any) -> None:
        write_atomic(self.files.exit(rank), json.dumps(asdict(ExitRecord(rank, 1, code, None, 0.0, 0, **more))))

    def notes(self) -> list[str]:
        return [event.message for event in read_journal(self.directory.journal) if isinstance(event, Note)]

    def stages(self) -> list[str]:
        return [
            event.stage.value for event in read_journal(self.directory.journal) if isinstance(event, StopStageReached)
        ]

    def run(self) -> asyncio.Task[Any]:
        return asyncio.create_task(self.monitor.run(lambda: self.abort))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., MonitoredAttempt]]:
    attempts: list[MonitoredAttempt] = []

    def make(**how: Any) -> MonitoredAttempt:
        attempts.append(MonitoredAttempt(tmp_path, **how))
        return attempts[-1]

    yield make
    for attempt in attempts:
        attempt.monitor.close()
        attempt.recorder.close()


async def fail(attempt: MonitoredAttempt, error_type: str) -> None:
    await until(lambda: bool(attempt.monitor.intake.progress.steps))
    attempt.report(1, event="failure", error_type=error_type, message="x", certain=True)
    attempt.exit(1, 1)


@pytest.mark.parametrize("restarts", [True, False])
async def test_the_newest_state_is_saved_whether_a_restart_follows_or_not(
    made: Callable[..., MonitoredAttempt], restarts: bool
) -> None:
    attempt = made(restarts=restarts)
    run = attempt.run()
    await fail(attempt, "OSError")
    await until(lambda: "emergency_checkpoint" in attempt.stages())
    assert attempt.recorder.state is (RunState.RECOVERING if restarts else RunState.FINISHING)
    attempt.exit(0, 6)
    await run
    assert attempt.stages()[:2] == ["emergency_checkpoint", "verifying"]


async def test_the_manifest_of_a_state_is_recorded_once_also_when_it_comes_at_the_very_end(
    made: Callable[..., MonitoredAttempt],
) -> None:
    attempt, entries = made(restarts=False), [("2.0", 64 * "a"), ("3.0@1.0", 64 * "b")]
    for kind, (state, manifest) in zip(("checkpoint", "emergency_checkpoint"), entries, strict=True):
        attempt.report(0, event=kind, phase="committed", iteration=3, state=state, manifest=manifest)
    for rank in (0, 1):
        attempt.complete(rank)
    await attempt.run()
    attempt.adopt()
    attempt.monitor.intake.poll()
    saved = [event for event in read_journal(attempt.directory.journal) if isinstance(event, StateSaved)]
    assert [(event.rank, event.state, event.manifest) for event in saved] == [(0, *entry) for entry in entries]
    assert attempt.recorder.history.manifests == {0: tuple(entries)}


@pytest.mark.parametrize("error_type", ["Diverged", "Corrupted"])
async def test_a_state_that_is_not_sound_is_not_saved(made: Callable[..., MonitoredAttempt], error_type: str) -> None:
    attempt = made(restarts=False)
    run = attempt.run()
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
    run = attempt.run()
    await fail(attempt, "OSError")
    attempt.report(0, event="emergency_checkpoint", phase="begin", bytes=1)
    await until(
        lambda: (
            attempt.monitor.intake.progress.checkpoint_phases == {0: "begin"}
            and "emergency_checkpoint" in attempt.stages()
        )
    )
    attempt.abort = RequestReceived(request="abort", now=now)
    await until(lambda: "asked" in attempt.stages())
    if now:
        await until(lambda: "term" in attempt.stages())
    attempt.exit(0, 6)
    await run
    assert attempt.monitor.aborted_in_recovery
    assert ("term" in attempt.stages()) is now


@pytest.mark.parametrize("signature", ["ring.bind", "ring.connect"])
async def test_a_first_launch_that_fails_for_a_transient_cause_is_restarted(
    made: Callable[..., MonitoredAttempt], signature: str
) -> None:
    attempt = made(restarts=True, steps=False)
    attempt.files.log(1).write_text(BY_ID[signature].example + "\n")
    attempt.exit(1, 1)
    run = attempt.run()
    await until(lambda: "term" in attempt.stages())
    attempt.exit(0, 1)
    await run
    [verdict] = attempt.verdicts
    assert verdict.signature == signature
    failed = AttemptFailed(attempt=1, verdict=verdict, failed_at=datetime.now(UTC))
    assert refusal(failed_run(attempt.plan, attempt.recorder.history, failed)) is None


LOSS = "rank 1 on node1 is lost: the others go on without it"
NOT_TO_THE_END = "rank 1 on node1 did not complete: the others went on without it"


async def verdict_of(attempt: MonitoredAttempt, run: Awaitable[Any]) -> Verdict:
    return attempt.monitor.verdict(await run)


async def test_rank_0_goes_on_without_a_rank_that_failed_and_completes(
    made: Callable[..., MonitoredAttempt],
) -> None:
    attempt = made(restarts=True, strategy="local")
    run = attempt.run()
    await fail(attempt, "OSError")
    await until(lambda: LOSS in attempt.notes())
    assert (attempt.stages(), attempt.recorder.state) == ([], RunState.RUNNING)
    attempt.complete(0)
    verdict = await verdict_of(attempt, run)
    assert (verdict.state, verdict.reason, verdict.cause) == (RunState.SUCCEEDED, Reason.COMPLETED, NOT_TO_THE_END)
    assert attempt.stages() == ["verifying", "stopped"]
    assert attempt.notes().count(LOSS) == 1
    assert attempt.monitor.failed_at is None


async def test_what_the_others_go_on_without_is_known_to_who_only_proves_the_end(
    made: Callable[..., MonitoredAttempt],
) -> None:
    attempt = made(restarts=True, strategy="local")
    attempt.exit(1, 1)
    attempt.complete(0)
    attempt.prove()
    evidence = await attempt.monitor.new_evidence()
    assert evidence is not None
    verdict = attempt.monitor.verdict(evidence)
    assert (verdict.state, verdict.cause) == (RunState.SUCCEEDED, NOT_TO_THE_END)


async def test_what_comes_before_the_next_attempt_is_kept_and_what_comes_after_it_is_not_this_ones(
    made: Callable[..., MonitoredAttempt],
) -> None:
    attempt = made(restarts=True)
    attempt.exit(1, 1)
    attempt.exit(0, 1)
    await attempt.run()
    attempt.report(0, event="report", iteration=3, train_loss=2.0)
    await attempt.monitor.stop_copying()
    with attempt.directory.events(0).open("a") as of_the_next:
        of_the_next.write(json.dumps({"event": "report", "rank": 0, "iteration": 4}) + "\n")
    # An abort has cancelled the next attempt before it was planned.
    await attempt.monitor.confirm()
    assert await attempt.monitor.new_evidence() is None
    assert [json.loads(line)["iteration"] for line in attempt.directory.metrics.read_bytes().splitlines()] == [3]


async def test_the_sleep_that_ended_a_lease_is_the_one_before_it(made: Callable[..., MonitoredAttempt]) -> None:
    attempt = made(restarts=True)
    now = [1000.0]
    clock = AwakeClock(lambda: now[0])
    attempt.adopt(clock)

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        clock()
        await until(lambda: any(f"for {seconds:.0f} s" in note for note in attempt.notes()))
        for _ in range(5):
            now[0] += 4.0
            clock()

    run = attempt.run()
    await sleep(100)
    await sleep(50)
    attempt.exit(1, 0, stopped_by="lease")
    await until(lambda: 1 in attempt.recorder.history.attempts[-1].ended)
    await sleep(200)
    attempt.exit(0, TrainerExit.PEER_LOST)
    verdict = attempt.monitor.verdict(await run)
    assert verdict.reason is Reason.HEAD_SLEPT
    assert "for 100 s: no heartbeat" in (verdict.cause or "")


async def test_a_rank_that_its_keeper_has_started_again_is_noted_once_over_supervisors(
    made: Callable[..., MonitoredAttempt],
) -> None:
    again = "rank 1 on node1 was started again"
    attempt = made(restarts=True, strategy="local")
    # An earlier supervisor has copied the first three starts.
    for _ in range(3):
        attempt.report(1, event="start")
    shutil.copy(attempt.files.events(1), attempt.directory.events(1))
    attempt.adopt()
    run = attempt.run()
    await until(lambda: bool(attempt.monitor.intake.progress.steps))
    attempt.report(1, event="start")
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
    run = attempt.run()
    await until(lambda: bool(attempt.monitor.intake.progress.steps))
    attempt.hosts[1].shown, attempt.hosts[1].left = ConnectionState(20.0, answered=True), None
    attempt.complete(0)
    verdict = await verdict_of(attempt, run)
    assert (verdict.state, verdict.cause) == (RunState.SUCCEEDED, NOT_TO_THE_END)
    assert [name for proof in attempt.monitor.proofs if not proof.found for name in proof.connection.names] == ["node1"]
    assert (1, END) in attempt.hosts[1].commands


async def test_a_rank_that_goes_on_after_the_training_has_completed_is_ended(
    made: Callable[..., MonitoredAttempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "LINGER_S", 0.3)
    attempt = made(restarts=True, strategy="local")
    run = attempt.run()
    attempt.complete(0)
    await until(lambda: bool(attempt.hosts[1].commands))
    attempt.exit(1, 5)
    assert (await verdict_of(attempt, run)).state is RunState.SUCCEEDED
    assert attempt.hosts[1].commands == [(1, END)]
    assert attempt.stages() == ["term", "verifying", "stopped"]


@pytest.mark.usefixtures("impatient")
async def test_a_keeper_that_does_not_answer_does_not_undo_a_training_that_all_trainers_have_completed(
    made: Callable[..., MonitoredAttempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "LINGER_S", 0.5)
    monkeypatch.setattr(attempt_monitor, "_ENDS_KNOWN_S", 0.2)
    attempt = made(restarts=False)
    run = attempt.run()
    await until(lambda: bool(attempt.monitor.intake.progress.steps))
    attempt.report(1, event="end", completed=True)
    attempt.complete(0)
    await until(lambda: bool(attempt.hosts[1].commands))
    verdict = await verdict_of(attempt, run)
    assert (verdict.state, verdict.reason) == (RunState.SUCCEEDED, Reason.COMPLETED)
    journal = list(read_journal(attempt.directory.journal))
    assert not any(isinstance(event, HangDetected) for event in journal)
    assert [each.state for each in attempt.verdicts] == [RunState.SUCCEEDED], "nothing to restart, before its end, too"
    assert "emergency_checkpoint" not in attempt.stages()


async def test_before_the_first_update_a_rank_that_fails_is_the_cause_and_not_rank_0_that_lost_it(
    made: Callable[..., MonitoredAttempt],
) -> None:
    attempt = made(restarts=True, strategy="local", steps=False)
    attempt.report(0, event="failure", error_type="PeerLost", message="rank 1 was lost before the training began")
    attempt.exit(0, TrainerExit.PEER_LOST)
    attempt.report(1, event="failure", error_type="JobError", message="the model is not there")
    attempt.exit(1, TrainerExit.EXCEPTION)
    verdict = await verdict_of(attempt, attempt.run())
    assert (verdict.state, verdict.rank, verdict.host) == (RunState.FAILED, 1, "node1")
    assert "JobError: the model is not there" in (verdict.cause or "")
    failed = AttemptFailed(attempt=1, verdict=verdict, failed_at=datetime.now(UTC))
    assert refusal(failed_run(attempt.plan, attempt.recorder.history, failed)) is not None


async def test_the_end_of_rank_0_fails_the_attempt_though_another_rank_was_lost_before(
    made: Callable[..., MonitoredAttempt],
) -> None:
    attempt = made(restarts=True, strategy="local")
    run = attempt.run()
    await fail(attempt, "OSError")
    await until(lambda: LOSS in attempt.notes())
    attempt.report(0, event="failure", error_type="ValueError", message="no")
    attempt.exit(0, 1)
    verdict = await verdict_of(attempt, run)
    assert (verdict.state, verdict.reason, verdict.rank) == (RunState.FAILED, Reason.RANK_FAILED, 0)
    assert "emergency_checkpoint" not in attempt.stages()


async def test_a_rank_that_leaves_because_rank_0_has_failed_is_not_noted_as_lost(
    made: Callable[..., MonitoredAttempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_monitor, "SETTLE_S", 60.0)
    attempt = made(restarts=True, strategy="local")
    run = attempt.run()
    await until(lambda: bool(attempt.monitor.intake.progress.steps))
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


async def elastic_run(made: Callable[..., MonitoredAttempt]) -> tuple[MonitoredAttempt, asyncio.Task[Any]]:
    """On three other machines, each of which has started."""
    attempt = made(restarts=False, elastic="ana@box")
    run = attempt.run()
    await until(lambda: len(attempt.context.history.started) == 3)
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
    attempt.adopt()
    run = attempt.run()
    await until(lambda: len(attempt.context.history.started) == 3)
    assert attempt.stages() == []
    for rank in (0, 1):
        attempt.exit(rank, 0)
    assert (await verdict_of(attempt, run)).state is RunState.SUCCEEDED
    again = [command for host in attempt.hosts for command in host.commands if command[1] == EMERGENCY_CHECKPOINT]
    assert again == [(0, EMERGENCY_CHECKPOINT), (1, EMERGENCY_CHECKPOINT)]


async def test_a_torchrun_that_gave_up_is_the_cause_on_whichever_node(made: Callable[..., MonitoredAttempt]) -> None:
    attempt = made(restarts=False, elastic=LOCAL)
    run = attempt.run()
    await until(lambda: bool(attempt.monitor.intake.progress.steps))
    attempt.report(2, event="failure", error_type="ValueError", message="bad row")
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
    await until(lambda: len(attempt.context.history.ended) == 1)
    for rank in (1, 0):
        attempt.exit(rank, 0)
        await until(lambda rank=rank: rank in attempt.context.history.ended)  # type: ignore[misc]
    verdict = await verdict_of(attempt, run)
    assert (verdict.state, verdict.reason) == (RunState.SUCCEEDED, Reason.COMPLETED)
