"""The attempt that is watched, as its hosts and the head's copies of its files show it: ranks, logs, events, evidence.

Every method may wait for the head's disk: they are called in one thread of the supervisor, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from engine.cluster.awake_clock import AwakeClock
from engine.cluster.host_connection import HostConnection
from engine.protocol.attempt import size_of
from engine.protocol.events import ExitOutput
from engine.run import events
from engine.run.command_watch import CommandWatch
from engine.run.consistency_watch import ConsistencyWatch
from engine.run.effects import Judge, Standing
from engine.run.failure_evidence import EvidenceCollector
from engine.run.history import MOST_RESULTS
from engine.run.logs.mirror import Gap, Mirror
from engine.run.observation import CommandView, Judged, RankView
from engine.run.progress import EventIntake
from engine.run.run_context import AttemptContext
from engine.run.verdict import is_consequence, verdict_on, with_cause
from engine.security.audit import audit_log

_CHECK_PIDS_S = 1.0
"""Between two checks that the launcher's process is no other one with its pid, which cost more than the others."""
_ENDS_KNOWN_S = 3.0
"""An agent looks once a second whether the keepers are there."""
_POLL_S = 0.1


class WatchedAttempt:
    def __init__(self, context: AttemptContext, clock: AwakeClock, report: Callable[[events.Event], object]) -> None:
        """`report` gets what the step is to record: alarms, states that were saved, what the head could not keep."""
        self.context = context
        self.evidence = EvidenceCollector(context)
        self.ranks = tuple(RankView(number, node) for number, node in enumerate(context.plan.nodes))
        self.command: CommandView | None = None
        self.launcher_alive = False
        self.missing: Mapping[str, int | None] = {}
        """Once it has been settled: the head's files that lack bytes, and how many; None where that is not known."""
        self._copying = True
        self._clock = clock
        self._report = report
        self._pids_checked_at = float("-inf")
        self._bases: dict[int, tuple[object, ...]] = {}
        """Rank → what its view's conclusions were drawn from."""

    @cached_property
    def mirror(self) -> Mirror:
        # Not with the attempt: its ranks can start while the indices of a week of logs are repaired.
        return Mirror.of_attempt(self.context, self._report_gap)

    @cached_property
    def intake(self) -> EventIntake:
        context, config = self.context, self.context.plan.config
        compared, nodes = config.consistency, dict(enumerate(context.plan.nodes))
        if not config.job.kind.compared:
            compared = compared.model_copy(update={"enabled": False})
        consistency = ConsistencyWatch(compared, nodes, self._raise_alarm, context.history.alarms, self._clock)
        bases = context.attempt.event_bases
        intake = EventIntake(context.run_dir, context.attempt.number, bases, consistency, self._clock)
        intake.on_event = self._report_once
        intake.any_rank_reports = config.job.kind.any_rank_reports
        intake.progress.updates.first_steps = config.job.kind.first_steps
        if not config.job.kind.reports:
            waits_busily = config.job.kind.framework.waits_busily
            intake.command = CommandWatch(len(nodes), config.recovery, waits_busily=waits_busily)
        return intake

    @property
    def ends_known(self) -> int:
        return sum(rank.end_known for rank in self.ranks)

    def poll(self) -> None:
        # Liveness is read before the last read of a log.
        self.launcher_alive = self._is_launcher_alive()
        self._poll_files()
        self.ranks = tuple(map(self._concluded, self._with_failed_starts()))
        if self.intake.command is not None:
            self.command = self._observe_command(self.intake.command)
        if self.missing and self._copying:
            self.missing = self.mirror.missing()

    def lacks_files_of(self, host: HostConnection) -> bool:
        """It has been settled, and the head lacks a part of the host's files."""
        return any(name.startswith(tuple(f"rank{rank}." for rank in host.ranks)) for name in self.missing)

    def judge(self, request: Judge) -> Judged:
        """With the failure signature that explains the end: whether a restart can fix it depends on that."""
        context, redactor = self.context, self.context.plan.config.job.redactor()
        evidence = self.evidence.collect(self.ranks, self.intake.progress.view.completed, request)
        if self.intake.command is not None:
            evidence = replace(evidence, apart=self.intake.command.apart)
        verdict = verdict_on(evidence)
        verdict = with_cause(verdict, evidence, context.run_dir, context.attempt.log_bases, redactor)
        return Judged(verdict, self.ends_known)

    def settle(self, hosts: Sequence[HostConnection]) -> None:
        """Take in the ends of the ranks of `hosts`, on which nothing is left, and the rest of their files."""
        numbers = [rank for host in hosts for rank in host.ranks]
        deadline = time.monotonic() + _ENDS_KNOWN_S
        while self._awaits_ends(numbers) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._poll_files()
        if self._copying:
            self.mirror.await_the_rest(hosts)
            self.missing = self.mirror.settle()
            self.intake.poll()
        for host in hosts:
            joules, seconds = host.power.take()
            if joules > 0.0:
                self._report(events.EnergyMeasured(node=host.names[0], joules=joules, seconds=seconds))

    def stop_copying(self) -> None:
        """Another attempt is to write the same files. What a host has not sent by now stays there."""
        if self.missing:
            self.missing = self.mirror.settle()
            self._report(events.LogsMissing(attempt=self.context.attempt.number, files=dict(self.missing)))
        self.close()

    def close(self) -> None:
        """Close the files; the connections belong to their maker."""
        self._copying = False
        self.mirror.close()
        self.intake.poll()
        self.intake.close()

    def _is_launcher_alive(self) -> bool:
        launcher, now = self.evidence.origin.launcher, self._clock()
        if launcher is None:
            return False
        check_pids = now - self._pids_checked_at >= _CHECK_PIDS_S
        if check_pids:
            self._pids_checked_at = now
        return launcher.alive(check_pids=check_pids)

    def _poll_files(self) -> None:
        self.ranks = tuple(map(self._seen, self.ranks))
        self.mirror.pump()
        self.intake.poll()

    def _seen(self, rank: RankView) -> RankView:
        if rank.record is not None:
            return rank
        seen = self.context.connections.to(rank.number).observe(rank.number)
        return replace(
            rank,
            identity=rank.identity or seen.identity,
            record=seen.record,
            vanished=seen.record is None and (rank.vanished or seen.vanished),
            restarted=rank.restarted or seen.restarted,
        )

    def _with_failed_starts(self) -> list[RankView]:
        """A start that has failed counts where no keeper has reported."""
        origin = self.evidence.origin
        codes = {failure.rank: failure.code for failure in origin.start_failures}
        codes |= dict(origin.launcher.rank_ends()) if origin.launcher is not None else {}
        return [
            replace(rank, launcher_code=codes[rank.number])
            if rank.number in codes and rank.record is None and not rank.started
            else rank
            for rank in self.ranks
        ]

    def _concluded(self, rank: RankView) -> RankView:
        """With what follows from its end, which is only found out when something of it has changed."""
        host, completed = self.context.connections.to(rank.number), self.intake.progress.view.completed
        output, answering = host.exit_output(rank.number), host.state.answered and host.state.answering
        seen = rank.identity, rank.record, rank.vanished, rank.restarted, rank.launcher_code
        basis = (*seen, output, answering, rank.number in completed)
        if self._bases.get(rank.number) == basis:
            return rank
        self._bases[rank.number] = basis
        succeeded = self.evidence.succeeded(rank, completed)
        # The signatures are only compiled where there is something to read.
        silent = rank.record is None and output == ExitOutput()
        consequence = not (succeeded or silent) and is_consequence(
            self.evidence.rank_evidence(rank, completed, Standing())
        )
        return replace(rank, succeeded=succeeded, consequence=consequence)

    def _observe_command(self, command: CommandWatch) -> CommandView:
        context, progress = self.context, self.intake.progress.view
        # Also without those that count as ended because their nodes are lost.
        ended = context.history.ended
        running = [rank.number for rank in self.ranks if rank.started and not (rank.end_known or rank.number in ended)]
        # What a node or the head cannot keep now comes later: until then nothing is known of it.
        answering = [rank for rank in running if context.connections.to(rank).state.answering]
        bases, run_dir = context.attempt.log_bases, context.run_dir
        printed = {
            rank: (size_of(run_dir.log(rank)) or 0) - bases[rank]
            for rank in (answering if not self.intake.blocked else ())
        }
        stepped = progress.steps > 0
        command.observe(self._clock(), printed, stepped=stepped)
        resumption = self.intake.own_resumption() if stepped else None
        return command.view(running, progress.furthest, stepped=stepped, resumption=resumption)

    def _awaits_ends(self, numbers: Sequence[int]) -> bool:
        return any(rank.started and not rank.end_known for rank in self.ranks if rank.number in numbers)

    def _report_once(self, event: events.Event) -> None:
        # A supervisor that adopts the attempt reads what an earlier one recorded.
        history = self.context.recorder.history
        match event:
            case events.StateSaved():
                recorded = (event.state, event.manifest) in history.manifests.get(event.rank, ())
                event = event.model_copy(update={"node": self.context.plan.nodes[event.rank]})
            case events.WeightsSaved():
                newest = history.weights.get((event.holds, event.val_loss is not None))
                event = event.model_copy(update={"node": self.context.plan.nodes[event.rank]})
                recorded = newest == event.model_copy(update={"at": newest.at if newest is not None else event.at})
            case events.ResultReported():
                results = history.task_results if event.attempt == history.results_of else ()
                recorded = event.result in results or len(results) >= MOST_RESULTS
            case _:
                recorded = history.training is not None and history.training.attempt == self.context.attempt.number
        if not recorded:
            self._report(event)

    def _report_gap(self, gap: Gap) -> None:
        if gap.lasting:
            self._raise_alarm(events.AlarmRaised(alarm="LOG_CUT", message=f"{gap.file}: {gap.problem}"))
            return
        self._report(events.Note(message=f"{gap.file}: {gap.problem}{': over' if gap.over else ''}"))

    def _raise_alarm(self, alarm: events.AlarmRaised) -> None:
        self._report(alarm)
        run_dir = self.context.run_dir
        fields = alarm.model_dump(mode="json", exclude={"at"})
        audit_log("worker_consistency", "alarm", {"run": run_dir.id, **fields}, home=run_dir.home)
