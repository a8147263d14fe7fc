"""Monitors one attempt from its launch until nothing of it is left: log mirrors, liveness, its end and the proof of
that end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, Literal, TypeVar, TypeVarTuple

from engine.cluster.awake_clock import AwakeClock
from engine.cluster.host_connection import HostConnection
from engine.models import RunState
from engine.protocol.attempt import EMERGENCY_CHECKPOINT, END, size_of
from engine.run import events
from engine.run.attempt import AttemptOrigin
from engine.run.command_watch import RANKS_APART, CommandWatch
from engine.run.consistency_watch import ConsistencyWatch
from engine.run.decide import SETTLE_S, RankState, RunningAttempt, Trigger, stop_trigger
from engine.run.failure_evidence import EvidenceCollector, FailureEvidence
from engine.run.logs.mirror import Gap, Mirror
from engine.run.node_health import NodeHealth, lost_after_s
from engine.run.progress import EventIntake, Watchdog
from engine.run.ranks import AttemptContext, Rank, Ranks, record_rank_changes
from engine.run.shutdown import CleanupProof, Shutdown, StopPlan
from engine.run.verdict import is_consequence, verdict_on, with_cause
from engine.security.audit import audit_log

TICK_S = 0.1
_CHECK_PIDS_S = 1.0
"""Between two checks that the processes are alive, which cost more than the others."""
_ENDS_KNOWN_S = 3.0
"""An agent looks once a second whether the keepers are there."""
_PURPOSES: Final[Mapping[Trigger, Literal["abort", "fence", "end"]]] = {Trigger.ABORT: "abort", Trigger.ENDED: "end"}

AbortSource = Callable[[], events.RequestReceived | None]
"""The requested abort, if any."""
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class AttemptMonitor:
    """One attempt. `run` is its whole life; it may begin in the middle of one (adoption)."""

    def __init__(
        self,
        context: AttemptContext,
        origin: AttemptOrigin,
        may_restart: Callable[[events.Verdict, int], bool],
        clock: AwakeClock | None = None,
    ) -> None:
        """`may_restart`: another attempt may follow such an end, at that iteration."""
        self._clock = clock or AwakeClock()
        self._slept_noted_s = self._clock.slept_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="attempt")
        self._context = context
        self._recorder = context.recorder
        self._recovery = context.plan.config.recovery
        self._trainer = context.plan.config.job.command is None
        self._launcher = origin.launcher
        self._may_restart = may_restart
        history = context.history
        self._ranks = Ranks(context.connections, context.plan.nodes)
        if context.plan.config.job.elastic:
            # Without those that an earlier supervisor saw the end of, the attempt has gone on.
            for number in history.ended:
                self._ranks.all[number].dispensable = number != 0
        self._health = NodeHealth(
            context.connections, self._recorder.append, lost_after_s(context.plan.config), history.nodes
        )
        self._start_failures = [(each.rank, each.code) for each in origin.start_failures]
        self._evidence = EvidenceCollector(context, self._health, origin)
        self._mirror = Mirror.of_attempt(context, self._note_gap)
        nodes = dict(enumerate(context.plan.nodes))
        self._outlives_ranks = context.plan.config.job.outlives_ranks
        compared = context.plan.config.consistency
        if self._outlives_ranks:
            # Its ranks are neither in step nor replicas.
            compared = compared.model_copy(update={"enabled": False})
        consistency = ConsistencyWatch(compared, nodes, self._raise_alarm, history.alarms, self._clock)
        self.intake = EventIntake(context.run_dir, self.number, context.attempt.event_bases, consistency, self._clock)
        self.intake.on_saved = self._record_saved
        self._watched = (0,) if self._outlives_ranks else tuple(nodes)
        """The ranks without whose steps the attempt hangs."""
        self._watchdog = self._new_watchdog()
        self._began = self._clock()
        self._pids_checked_at = float("-inf")
        self._launcher_gone_at: float | None = None
        self._launcher_noted = False
        self._failing_since: float | None = None
        self._completed_at: float | None = None
        self._starts_noted: Counter[int] | None = None
        """None before the first look: what an earlier supervisor has seen is noted."""
        self._losses: list[tuple[float, str]] = []
        """When the loss of a dispensable rank was noticed, and its note for the journal."""
        self._shutdown: Shutdown | None = None
        self._trigger = Trigger.ENDED
        self.failed_at: datetime | None = None
        """When the failure was noticed, on the head."""
        self.aborted_in_recovery = False
        """An abort was requested while the attempt was being ended for a restart."""
        self._ends_judged = 0
        """How many ranks' ends were known when the evidence was last collected."""
        self.unsent: list[HostConnection] = []
        """Nodes on which nothing is left but the rest of their logs."""

    @property
    def proofs(self) -> Sequence[CleanupProof]:
        """One for every host of the attempt, once it is being ended."""
        return self._shutdown.proofs if self._shutdown is not None else ()

    @property
    def number(self) -> int:
        return self._context.attempt.number

    @property
    def outputs(self) -> int:
        """Seconds in which a rank of a command printed something; 0 for a trainer."""
        return self.intake.command.outputs if self.intake.command is not None else 0

    async def run(self, abort: AbortSource) -> FailureEvidence:
        """Monitor until everything of the attempt is gone, as far as its nodes answer; the evidence of its end. `abort`
        is called in another thread."""
        # A thread of its own for all that touches the head's disk: a disk that stalls holds up no heartbeat.
        while not await self._in_thread(self._tick, abort):
            await self._context.connections.await_news(TICK_S)
        proved = [proof.connection for proof in self.proofs if proof.found]
        await self._in_thread(self._await_ends, proved)
        await self._in_thread(self._mirror.await_the_rest, proved)
        if await self._in_thread(self._mirror.settle):
            self.unsent = [connection for connection in proved if self._mirror.incomplete(connection)]
            self._record_missing()
        self.intake.poll()
        return await self._in_thread(self._collect)

    async def new_evidence(self) -> FailureEvidence | None:
        """After `run`: the evidence again, once the end of another rank is known; else None."""
        return await self._in_thread(self._collect_again)

    async def confirm(self) -> None:
        """After `run`: poll the nodes on which the end could not be proved, or that have unsent logs."""
        await self._in_thread(self._try_to_confirm)

    async def stop_copying(self) -> None:
        """After `run`: another attempt is to write the same files on the head. What a node has not sent by now stays
        there."""
        if self.unsent:
            await self._in_thread(self._mirror.settle)
            self._record_missing()
        self.unsent = []
        await self._in_thread(self._close_files)

    def verdict(self, evidence: FailureEvidence) -> events.Verdict:
        """With the failure signature that explains the end: whether a restart can fix it depends on that. Reads the
        mirrors."""
        verdict, redactor = verdict_on(evidence), self._context.plan.config.job.redactor()
        return with_cause(verdict, evidence, self._context.run_dir, self._context.attempt.log_bases, redactor)

    def prove_again(self, nodes: Sequence[str]) -> None:
        """In place of `run`, before `confirm`: the attempt has ended, and on `nodes` that is not proved yet."""
        plan = StopPlan(self._recovery, self.intake.progress)
        self._shutdown = Shutdown(self._ranks, self._launcher, plan, self._record_stage)
        for proof in self.proofs:
            proof.found = not set(nodes) & set(proof.connection.names)
        lacking = {int(name.removeprefix("rank").split(".")[0]) for name in self._context.history.missing}
        self.unsent = [each for each in self._context.connections if not lacking.isdisjoint(each.ranks)]

    def close(self) -> None:
        """Close the files; the connections belong to their maker."""
        self._close_files()
        self._thread.shutdown(wait=False)

    def _close_files(self) -> None:
        self._mirror.close()
        self.intake.poll()
        self.intake.close()

    async def _in_thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """`work` in the monitor's own thread: the loop's common ones may all be waiting for the names of nodes that are
        not there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _tick(self, requested: AbortSource) -> bool:
        """Observe everything once, decide, act; True when the attempt is over."""
        abort, now = requested(), self._clock()
        launcher_alive = self._poll(now)
        if self._shutdown is None:
            self._act(abort, now, launcher_alive)
        elif abort is not None:
            self._abort_shutdown(abort)
        if self._shutdown is not None:
            self._shutdown.advance(self._clock())
            return self._shutdown.done
        return False

    def _poll(self, now: float) -> bool:
        """Observe ranks, nodes and logs; the launcher is alive."""
        check_pids = now - self._pids_checked_at >= _CHECK_PIDS_S
        if check_pids:
            self._pids_checked_at = now
        running = [rank for rank in self._ranks.all if not rank.ended]
        # Liveness is read before the last read of a log.
        launcher_alive = self._launcher is not None and self._launcher.alive(check_pids=check_pids)
        lost = self._health.poll()
        changed = self._poll_ranks() + self._poll_launcher() + self._lose(lost)
        self._note_sleep(running)
        starts = self.intake.progress.starts.copy()
        before = starts if self._starts_noted is None else self._starts_noted
        self._starts_noted = starts
        for rank, count in starts.items():
            if self._ranks.all[rank].dispensable and count > max(1, before[rank]):
                self._recorder.append(
                    events.Note(message=f"rank {rank} on {self._ranks.all[rank].node} was started again")
                )
        self._record_changes(changed)
        self._record_resumption()
        return launcher_alive

    def _await_ends(self, proved: Sequence[HostConnection]) -> None:
        """Until each rank of a host on which nothing is left has its record, or it is known that it left none."""
        ranks = [self._ranks.all[number] for connection in proved for number in connection.ranks]
        deadline = time.monotonic() + _ENDS_KNOWN_S
        while any(rank.started and not rank.ended for rank in ranks) and time.monotonic() < deadline:
            time.sleep(TICK_S)
            self._record_changes(self._poll_ranks())

    def _poll_ranks(self) -> list[Rank]:
        """Observe the ranks, then their logs and events; those that have changed."""
        changed = self._ranks.poll()
        self._mirror.pump()
        self.intake.poll()
        for rank in self._ranks.all:
            rank.completed = rank.number in self.intake.progress.completed
        if self.intake.command is not None:
            self._observe_command(self.intake.command)
        if self._context.plan.config.job.elastic:
            self._dispense_nodes()
        elif self._outlives_ranks and self.intake.progress.steps:
            for rank in self._ranks.all:
                # Until the first update every rank is needed.
                rank.dispensable = rank.started and rank.number != 0
        return changed

    def _observe_command(self, command: CommandWatch) -> None:
        # What a node or the head cannot keep now comes later: until then nothing is known of it.
        ranks = [] if self.intake.blocked else self._running()
        answering = [each for each in ranks if self._context.connections.to(each).state.answering]
        bases, run_dir = self._context.attempt.log_bases, self._context.run_dir
        printed = {rank: (size_of(run_dir.log(rank)) or 0) - bases[rank] for rank in answering}
        command.observe(self._clock(), printed, stepped=self.intake.progress.steps > 0)
        message, known = command.alarm(), {each.alarm for each in self._context.history.alarms}
        if message is not None and RANKS_APART not in known:
            self._recorder.append(events.AlarmRaised(alarm=RANKS_APART, ranks=command.apart, message=message))

    def _running(self) -> list[int]:
        return [rank.number for rank in self._ranks.all if rank.started and not rank.ended]

    def _new_watchdog(self) -> Watchdog:
        limits, job = self._recovery, self._context.plan.config.job
        if not self._trainer:
            # It does not say when it loads, validates or saves, and rank 0 alone reports; of an elastic job's nodes the
            # one to which torchrun has given it.
            limits = limits.model_copy(update={"hang_s": max(limits.hang_s, limits.stall_s)})
            self._watched = tuple(rank.number for rank in self._ranks.all) if job.elastic else (0,)
            self.intake.any_rank_reports = job.elastic
            self.intake.progress.first_steps = 0
            mlx = job.framework == "mlx"
            self.intake.command = CommandWatch(len(self._ranks.all), self._recovery, waits_busily=mlx)
        return Watchdog(self.intake.progress, self._watched, limits, self._clock(), is_command=not self._trainer)

    def _lose(self, numbers: Sequence[int]) -> list[Rank]:
        """Mark the ranks of lost nodes. An elastic job's workers elsewhere do not notice a node that fell silent: they
        are started again, without it."""
        lost = self._ranks.lose(numbers)
        if self._context.plan.config.job.elastic:
            self._dispense_nodes()
            # An earlier supervisor has done so for those that it recorded.
            unknown = any(rank.number not in self._context.history.ended for rank in lost)
            for rank in self._ranks.all if unknown else ():
                if not rank.ended:
                    self._context.connections.to(rank.number).send_command(rank.number, EMERGENCY_CHECKPOINT)
        return lost

    def _dispense_nodes(self) -> None:
        """Mark the nodes that an elastic job can lose, each of which is a rank: all but rank 0's, as long as the least
        number remains. One that was lost while that was so stays dispensable. One whose torchrun gave up does not: it
        has closed the rendezvous, and all others end with it."""
        ranks = self._ranks.all
        for rank in ranks:
            record = rank.record
            if record is not None and record.code and record.stopped_by is None:
                rank.dispensable = False
        spare = len(ranks) - (self._recovery.min_nodes or len(ranks))
        ends = list(self._context.history.ended)
        gone = [rank for rank in ranks if rank.ended and rank.dispensable and self._failed(rank)]
        gone.sort(key=lambda rank: ends.index(rank.number) if rank.number in ends else len(ends))
        for rank in gone[spare:]:
            rank.dispensable = False
        for rank in ranks:
            if not rank.ended:
                rank.dispensable = len(gone) < spare and rank.started and rank.number != 0

    def _act(self, abort: events.RequestReceived | None, now: float, launcher_alive: bool) -> None:
        state = self._observe(now, launcher_alive, abort=abort is not None)
        trigger = stop_trigger(state)
        if trigger is None:
            self._note_missing_launcher(state)
            trigger = stop_trigger(replace(state, hang=self._check_hang(now)))
        if trigger is None:
            self._note_losses(now)
            return
        self._trigger = trigger
        if abort is not None and trigger is Trigger.ABORT:
            self._record_stage(events.StopStage.ASKED)
            self._begin_shutdown(RunState.FINISHING, cooperative=not abort.now)
        else:
            self._end()

    def _observe(self, now: float, launcher_alive: bool, *, abort: bool) -> RunningAttempt:
        if launcher_alive or self._launcher_gone_at is None:
            self._launcher_gone_at = None if launcher_alive else now
        ranks = tuple(self._rank_state(rank) for rank in self._ranks.all)
        if self._failing_since is None and any(rank.failed for rank in ranks):
            self._failing_since = now
        state = RunningAttempt(ranks)
        if self._completed_at is None and state.all_completed:
            self._completed_at = now
        command, stepped = self.intake.command, self.intake.progress.steps > 0
        return replace(
            state,
            age_s=now - self._began,
            failing_s=now - self._failing_since if self._failing_since is not None else 0.0,
            launched=self._launcher is not None,
            launcher_gone_s=now - self._launcher_gone_at if self._launcher_gone_at is not None else None,
            abort=abort,
            completed_s=now - self._completed_at if self._completed_at is not None else 0.0,
            apart=command is not None and command.trains_apart(stepped=stepped),
        )

    def _rank_state(self, rank: Rank) -> RankState:
        state = self._context.connections.to(rank.number).state
        failed = rank.ended and not rank.dispensable and self._failed(rank)
        return RankState(
            started=rank.started,
            ended=rank.ended,
            failed=failed,
            consequence=failed and is_consequence(self._evidence.rank_evidence(rank)),
            node_silent_s=state.silent_s if state.answered else float("inf"),
            dispensable=rank.dispensable,
            completed=rank.completed,
        )

    def _failed(self, rank: Rank) -> bool:
        """A rank that has ended was not meant to end so."""
        return not self._evidence.succeeded(rank)

    def _check_hang(self, now: float) -> events.Hang | None:
        """Recorded when it is found; one that an earlier supervisor found counts too."""
        if not all(rank.started for rank in self._ranks.all) or self._completed_at is not None:
            return None
        hang, progress = None, self.intake.progress
        # A command that never reports a step may do anything, for as long as it likes.
        if self._trainer or progress.steps > 0:
            ranks = [rank for rank in self._ranks.all if rank.number in self._watched]
            answering = any(self._context.connections.to(rank.number).state.answering for rank in ranks)
            started_at = min((each.identity.started_at for each in ranks if each.identity is not None), default=None)
            receiving = answering and not self.intake.blocked
            hang = self._watchdog.check(now, receiving=receiving, started_at=started_at)
        if self.intake.command is not None:
            hang = self.intake.command.hang(self._running(), progress.furthest) or hang
        if hang is not None and self._context.history.hang is None:
            node = self._ranks.all[hang.rank].node if hang.rank is not None else None
            self._recorder.append(events.HangDetected(hang=hang, node=node))
        return self._context.history.hang

    def _note_missing_launcher(self, state: RunningAttempt) -> None:
        """It has done its part when all ranks have started; its end is worth no more than a note."""
        gone = state.launched and state.launcher_gone_s is not None and all(rank.started for rank in state.ranks)
        if gone and not self._launcher_noted and not any(rank.failed for rank in state.ranks):
            self._launcher_noted = True
            self._recorder.append(events.Note(message="mlx.launch has ended; the ranks go on without it"))

    def _note_losses(self, now: float) -> None:
        """Not at once: a rank that was lost because rank 0 has failed may be noticed before it."""
        settled = [loss for loss in self._losses if now - loss[0] > SETTLE_S]
        for loss in settled if self._completed_at is None else ():
            self._losses.remove(loss)
            self._recorder.append(events.Note(message=loss[1]))

    def _abort_shutdown(self, abort: events.RequestReceived) -> None:
        """Whatever ends the attempt, it has to be ended: an abort can only speed that up."""
        assert self._shutdown is not None
        if self._recorder.state is RunState.RECOVERING and not self.aborted_in_recovery:
            # From here on it is the user's stop, and recorded as such.
            self.aborted_in_recovery = True
            self._record_stage(events.StopStage.ASKED)
        if abort.now:
            # Otherwise what the ranks are writing, perhaps the only newest state, is still of use.
            self._shutdown.skip_grace()

    def _end(self) -> None:
        if self._trigger is Trigger.HUNG:
            self.failed_at = datetime.now(UTC)
        so_far = self.verdict(self._collect(over=False))
        progress = self.intake.progress
        finishing = self._recorder.state is RunState.FINISHING
        recovering = not finishing and self._may_restart(so_far, progress.furthest)
        # The surviving ranks may save their state, if one of them has enough of it. Who goes on after a success saves
        # nothing that counts.
        whole = self._trainer and not self._context.plan.config.job.partitioned
        saves = whole and progress.steps > 0 and so_far.reason.traits.state_sound
        state = RunState.RECOVERING if recovering else RunState.FINISHING
        self._begin_shutdown(state, save_state=saves, first_failure=so_far.rank)

    def _note_sleep(self, running: Sequence[Rank]) -> None:
        self._clock()
        slept_s, self._slept_noted_s = self._clock.slept_s - self._slept_noted_s, self._clock.slept_s
        if slept_s > 0:
            for rank in running:
                rank.head_slept_s = max(rank.head_slept_s, self._clock.sleep_s)
            lease_s = self._recovery.lease_s
            longer = f", longer than the ranks' lease of {lease_s:g} s" if slept_s > lease_s else ""
            note = f"this machine slept, or its supervisor was stopped, for {slept_s:.0f} s{longer}"
            self._recorder.append(events.Note(message=note))

    def _begin_shutdown(
        self, state: RunState, *, cooperative: bool = False, save_state: bool = False, first_failure: int | None = None
    ) -> None:
        if self._recorder.state not in (state, RunState.FINISHING):
            self._recorder.change(state)
        plan = StopPlan(self._recovery, self.intake.progress, cooperative, save_state, first_failure)
        self._shutdown = Shutdown(self._ranks, self._launcher, plan, self._record_stage)

    def _record_stage(self, stage: events.StopStage) -> None:
        if stage in (events.StopStage.KILL, events.StopStage.VERIFYING):
            for connection in self._context.connections:
                # The exit output of a rank without an exit record has not been sent yet.
                connection.request_exit_output()
        trigger = Trigger.ABORT if self.aborted_in_recovery else self._trigger
        purpose = _PURPOSES.get(trigger, "fence")
        acknowledged = tuple(rank.number for rank in self._ranks.all if rank.record is not None)
        left = tuple(
            f"{proof.connection.names[0]} {process.pid} {process.command[:200]}"
            for proof in self.proofs
            if not proof.found
            for process in proof.left
        )
        self._recorder.append(
            events.StopStageReached(stage=stage, purpose=purpose, acknowledged=acknowledged, left=left)
        )

    def _collect(self, *, over: bool = True) -> FailureEvidence:
        self._ends_judged = self._ranks.ends_known
        evidence = self._evidence.collect(self._ranks.all, self._trigger, self._context.history.hang, over=over)
        return replace(evidence, apart=self.intake.command.apart if self.intake.command is not None else ())

    def _collect_again(self) -> FailureEvidence | None:
        self._record_changes(self._poll_ranks())
        return self._collect(over=False) if self._ranks.ends_known != self._ends_judged else None

    def _try_to_confirm(self) -> None:
        now = self._clock()
        self._health.poll()
        self._record_changes(self._poll_ranks())
        for connection in [each for each in self.unsent if not self._mirror.incomplete(each)]:
            self.unsent.remove(connection)
            self._record_missing()
        for proof in self.proofs:
            if not proof.found and proof.connection.state.answering:
                self._try_to_prove(proof, now)

    def _try_to_prove(self, proof: CleanupProof, now: float) -> None:
        connection = proof.connection
        ranks = [self._ranks.all[rank] for rank in connection.ranks]
        for rank in ranks:
            if rank.record is None:
                connection.send_command(rank.number, END)
        proof.seek(now)
        if not proof.found:
            return
        self._mirror.await_the_rest([connection])
        self.intake.poll()
        # One that goes away again in the middle of its log is waited for once more.
        proof.found = connection.state.answering
        if proof.found:
            self._record_changes(ranks)
            for name in connection.names:
                self._recorder.append(events.CleanupConfirmed(node=name))
            if self._mirror.incomplete(connection):
                # The head's disk is full.
                self.unsent.append(connection)
            if self._context.history.missing or self.unsent:
                self._record_missing()

    def _record_missing(self) -> None:
        self._recorder.append(events.LogsMissing(attempt=self.number, files=self._mirror.missing()))

    def _record_changes(self, changed: Sequence[Rank]) -> None:
        known = set(self._context.history.ended)
        record_rank_changes(self._context, changed)
        for rank in (rank for rank in changed if rank.ended and self._failed(rank)):
            if not rank.dispensable:
                self.failed_at = self.failed_at or datetime.now(UTC)
            elif rank.number not in known:
                note = f"rank {rank.number} on {rank.node} is lost: the others go on without it"
                self._losses.append((self._clock(), note))
        if changed and all(rank.started for rank in self._ranks.all):
            if self._recorder.state is RunState.LAUNCHING:
                self._recorder.change(RunState.RUNNING)
            if self._launcher is not None:
                self._launcher.drop_pipes()

    def _record_resumption(self) -> None:
        """Once, with the first step of an attempt that goes on from an earlier one."""
        progress = self.intake.progress
        if not (self._context.attempt.number > 1 and progress.steps) or self._context.history.status.source is not None:
            return
        resumed, repeated, seconds = progress.resumed or events.Resumed("none"), None, None
        if not self._trainer and progress.resumed is None:
            resumed = self.intake.own_resumption()
        failures = self._recorder.history.failures
        if failures:
            repeated = max(0, failures[-1].reached - resumed.iteration)
            if resumed.source == "command" and not repeated:
                repeated = None
            seconds = round((datetime.now(UTC) - failures[-1].failed_at).total_seconds(), 2)
        number = self._context.attempt.number
        self._recorder.append(
            events.AttemptResumed(attempt=number, resumed=resumed, repeated=repeated, seconds=seconds)
        )

    def _record_saved(self, saved: events.StateSaved) -> None:
        # A supervisor that adopts the attempt reads what an earlier one recorded.
        if (saved.state, saved.manifest) not in self._recorder.history.manifests.get(saved.rank, ()):
            self._recorder.append(saved)

    def _poll_launcher(self) -> list[Rank]:
        failed, self._start_failures = self._start_failures, []
        if self._launcher is not None:
            failed += self._launcher.rank_ends()
        return self._ranks.fail_to_start(failed)

    def _note_gap(self, gap: Gap) -> None:
        if gap.lasting:
            self._raise_alarm(events.AlarmRaised(alarm="LOG_CUT", message=f"{gap.file}: {gap.problem}"))
            return
        self._recorder.append(events.Note(message=f"{gap.file}: {gap.problem}{': over' if gap.over else ''}"))

    def _raise_alarm(self, alarm: events.AlarmRaised) -> None:
        self._recorder.append(alarm)
        run_dir = self._context.run_dir
        fields = alarm.model_dump(mode="json", exclude={"event", "at"})
        audit_log("worker_consistency", "alarm", {"run": run_dir.id, **fields}, home=run_dir.home)
