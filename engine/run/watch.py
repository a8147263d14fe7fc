"""A run as a frontend shows it, read from its directory: each poll reads only what is new."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from engine.cluster.transport.base import quoted
from engine.config.models import on_node
from engine.errors import StateError, plural
from engine.models import CheckResult, PreflightReport, Reason, RunRecord, RunState
from engine.node.processes import alive, boot_id, same_boot
from engine.protocol.attempt import NodeFiles, open_regular, read_regular
from engine.run.events import RunPlanned, SupervisorStarted
from engine.run.history import AttemptHistory, fold, run_history
from engine.run.journal import JournalTail, describe_damage
from engine.run.metrics import MetricsSeries
from engine.run.notifications import NOTIFIER, NotificationTail
from engine.run.rank_events import RankEvents
from engine.run.result import newest_weights, run_result
from engine.run.run_plan import read_plan_and_damage
from engine.run.verification import verify
from engine.snapshots import (
    ChunkProgress,
    Diagnosis,
    Quiet,
    RankReport,
    RankStatus,
    RunResult,
    RunSnapshot,
    TrackerStatus,
    TrainedFile,
    Verification,
)
from engine.store.layout import RunDir

_IDENTITY_AGE_S = 1.0
"""How long a supervisor that was seen alive counts as alive; checking costs a process on macOS."""
_GENERATE = "from transformers import pipeline; print(pipeline('text-generation', model={!r})('Hello'))"
"""Loads a model, or an adapter with the model that its adapter_config.json names."""
_HELD_UP = timedelta(seconds=15)
"""Longer between two polls: this machine slept, or nobody looked."""
_ACTIVE = frozenset({RunState.LAUNCHING, RunState.RUNNING, RunState.RECOVERING, RunState.FINISHING})

Diagnose = Callable[[RunDir], Diagnosis | None]


class RunWatch:
    """Follows one run's directory; `poll` reads only what is new. Not thread safe; made for one reader."""

    def __init__(self, rundir: RunDir, *, diagnose: Diagnose | None = None) -> None:
        """`diagnose` is called once, when the run has ended without success. Raises StateError when the plan cannot be
        read, as `poll` does for a journal of a newer release."""
        self._rundir = rundir
        self._whole_plan, self._plan_damage = read_plan_and_damage(rundir.plan)
        self._plan = self._whole_plan
        self._diagnose = diagnose
        self._diagnosed: tuple[Diagnosis | None, ...] = ()
        """Empty before that."""
        self._observed = (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC))
        """Since when no sign of the ranks was missed, and when that was last looked at."""
        self._journal = JournalTail(rundir.journal)
        self._history = run_history((), self._plan)
        self._unreadable: tuple[str, ...] = ()
        """The files of figures that cannot be read, each with the reason."""
        self._series = MetricsSeries(rundir.metrics)
        self._notifications = NotificationTail(rundir.notifications)
        self._ranks = self._rank_events()
        self._checks: tuple[tuple[CheckResult, ...], tuple[int, int] | None] = (), None
        """With the state of the file that they were read from."""
        self._alive_until = float("-inf")
        """Until when its supervisor counts as alive (monotonic)."""

    def poll(self) -> RunSnapshot:
        # Liveness first: a supervisor that leaves after this has written everything that is read below.
        supervised = self._is_supervised()
        # Before the journal, which has an attempt before it has a folder.
        newest_attempt = self._rundir.newest_attempt()
        for event in self._journal.events():
            self._history = fold([event], None if isinstance(event, RunPlanned) else self._history)
            if isinstance(event, SupervisorStarted):
                self._observed = event.at, self._observed[1]
        self._follow_plan()
        reports = self._poll_figures()
        self._read_checks()
        record = self._record(reports)
        running = record.state is RunState.RUNNING
        ranks = tuple(self._rank(rank, report) for rank, report in enumerate(reports))
        history, attempt = self._history, self._history.last_attempt
        return RunSnapshot(
            record=record,
            supervised=supervised,
            state_since=history.state_since,
            ranks=ranks,
            checks=self._checks[0],
            series=self._series.build(self._ranks[0].checkpoints),
            eta_s=self._series.seconds_left(record.iteration, record.iterations) if running else None,
            learning_rate=self._series.learning_rate,
            grad_norm=next((norm for report in reports if (norm := report.global_grad_norm) is not None), None),
            diagnosis=self._diagnosis(record),
            stop=history.stop,
            alarms=attempt.shown_alarms() if attempt is not None else (),
            verification=self._verification(reports, record),
            quiet=self._quiet(ranks, supervised=supervised) if running else None,
            taken_at=datetime.now(UTC),
            attempts=tuple(past.status for past in history.attempts),
            most_attempts=1 + self._plan.config.recovery.max_restarts,
            recovery=history.restart_pending if not record.state.ended else None,
            given_up=history.restart_refused,
            division=self._plan.division,
            chunk=_chunk(reports, record),
            damage=tuple(self._damage(newest_attempt, supervised=supervised)),
            trained=self.trained(),
            result=self.result() if record.state.ended else None,
            task_results=history.task_results,
            trackers=tuple(self._trackers()),
            notifications=tuple(self._notifications.by_key.values()),
        )

    def _diagnosis(self, record: RunRecord) -> Diagnosis | None:
        if not record.state.ended or record.reason is Reason.COMPLETED:
            # A run that had failed may have been reopened, or have succeeded as is known now.
            self._diagnosed = ()
        elif not self._diagnosed and self._diagnose is not None:
            self._diagnosed = (self._diagnose(self._rundir),)
        return next(iter(self._diagnosed), None)

    def _is_supervised(self) -> bool:
        now = time.monotonic()
        if now >= self._alive_until and supervisor_alive(self._rundir):
            self._alive_until = now + _IDENTITY_AGE_S
        return now < self._alive_until

    def _poll_figures(self) -> list[RankReport]:
        """Read metrics and events, as far as they can be read."""
        unreadable = []
        for poll in (self._series.poll, self._notifications.poll, *(events.poll for events in self._ranks)):
            try:
                poll()
            except StateError as error:
                unreadable.append(f"{PurePosixPath(error.where).name}: {error.what}: {error.why}")
        self._unreadable = tuple(unreadable)
        return [events.report for events in self._ranks]

    def _damage(self, newest_attempt: int, *, supervised: bool) -> Iterator[str]:
        """The run's files that are missing or damaged, one line each."""
        if self._plan_damage is not None:
            yield self._plan_damage
        if newest_attempt and not self._rundir.journal.exists():
            yield "journal.jsonl is missing"
        if (lines := describe_damage(self._journal.damaged)) is not None:
            yield lines
        if newest_attempt > self._history.record.attempts:
            yield f"journal.jsonl lacks attempt {newest_attempt}, which was launched"
        if self._series.damaged:
            yield f"metrics.jsonl: {plural(self._series.damaged, 'damaged line')} skipped"
        yield from self._unreadable
        for attempt in self._history.attempts:
            yield from self._missing(attempt)
        last = self._history.last_attempt
        if last is not None and last.started and not self._rundir.metrics.exists():
            yield "metrics.jsonl is missing: the next supervisor writes it again"
        if newest_attempt and supervised and newest_supervisor(self._rundir) is None:
            yield "supervisor.json cannot be read; its supervisor lives, since it holds supervisor.lock"

    def _missing(self, attempt: AttemptHistory) -> Iterator[str]:
        """Logs and events that were not copied from their nodes: while the supervisor lives, they may come."""
        plan = attempt.plan
        for name, size in attempt.missing.items():
            rank = name.removeprefix("rank").split(".")[0]
            root = next((layout.root for layout in plan.layouts if rank in map(str, layout.ranks)), "~/.flightdeck")
            place = NodeFiles.for_attempt(Path(root), self._rundir.id, plan.number).directory / name
            lacks = "may lack bytes" if size is None else f"lacks {plural(size, 'byte')}"
            yield f"{name} {lacks} of attempt {plan.number}, as the disk was full or its node away: {place} has all"

    def _follow_plan(self) -> None:
        """A run from which preflight has excluded nodes has fewer, renumbered ranks; so has an attempt that leaves a
        node out. Preflight of a run that is taken up again may exclude all members of the attempt before."""
        attempt = self._history.last_attempt
        members = attempt.plan.nodes if attempt is not None and self._history.launched else ()
        before, self._plan = self._plan, self._whole_plan.without(self._history.record.excluded).among(members)
        if self._plan.nodes != before.nodes:
            self._ranks = self._rank_events()

    def _rank_events(self) -> list[RankEvents]:
        return [RankEvents(self._rundir.events(rank)) for rank in range(len(self._plan.nodes))]

    def _verification(self, reports: Sequence[RankReport], record: RunRecord) -> tuple[Verification, ...]:
        kind = self._plan.config.job.kind
        if not (kind.reports and kind.trains and record.attempts):
            return ()
        current = [report if report.attempt == record.attempts else RankReport() for report in reports]
        checkpoint = max(self._ranks[0].checkpoints[-1:], default=None)
        return verify(self._plan, record.backend, current, self._series, checkpoint)

    def trained(self, *, saved: bool = False) -> TrainedFile | None:
        """As of the last poll; with `saved` the newest that were saved by themselves."""
        config = self._whole_plan.config
        weights = newest_weights(self._history, any_part=config.job.kind.outlives_ranks, saved_alone=saved)
        if weights is None:
            return None
        unserved, partitioned = config.job.kind.framework.unserved, config.job.kind.strategy.partitioned
        # MLX has no send and recv for nccl.
        divided = unserved is None and partitioned and len(config.nodes) > 1 and self._history.record.backend != "nccl"

        def used_by(command: str) -> TrainedFile:
            parts, iteration = weights.parts, weights.iteration
            return TrainedFile(weights.path, weights.size, weights.node, command, unserved, parts, iteration, divided)

        if weights.parts:
            return used_by(f"flightdeck generate {self._rundir.id} -p Hello")
        node = next((node for node in config.nodes if node.name == weights.node), None)
        if node is None:
            # Of a plan that was written anew or damaged.
            return None
        path, model = PurePosixPath(weights.path), on_node(node.model or config.job.model or "", node, config.folder)
        # A file of adapters is loaded with its folder's adapter_config.json, onto the model.
        adapters = path.suffix == ".safetensors"
        options = ["--model", model, "--adapter-path", str(path.parent)] if adapters else ["--model", str(path)]
        generate = {
            "mlx": ["-m", "mlx_lm", "generate", *options, "--prompt", "Hello"],
            "torch": ["-c", _GENERATE.format(str(path.parent if adapters else path))],
        }
        argv = [node.python, *generate[config.job.framework]]
        return used_by(" ".join(map(quoted, argv)))

    def result(self) -> RunResult:
        """The result so far, as of the last poll."""
        any_part = self._whole_plan.config.job.kind.outlives_ranks
        return run_result(self._history, self._series, datetime.now(UTC), any_part=any_part)

    def _trackers(self) -> Iterator[TrackerStatus]:
        if (why := self._history.trackers_failed.get(NOTIFIER)) is not None:
            yield TrackerStatus("notifications.jsonl", None, why)
        for name in self._plan.config.job.trackers if self._series.tail.offset else ():
            yield TrackerStatus(name, _use(self._rundir, name), self._history.trackers_failed.get(name))

    def _record(self, reports: Sequence[RankReport]) -> RunRecord:
        """The journal's record with the live figures: the journal only has those of the end."""
        record = self._history.record
        steps = [report.iteration for report in reports if report.iteration is not None]
        live: dict[str, Any] = {
            "iteration": max((*steps, self._series.iteration or 0), default=0) or None,
            "train_loss": self._series.train.last if self._series.train.not_finite is None else None,
            "val_loss": self._series.val.last,
            "test_loss": self._series.test_loss,
            "tokens_per_second": self._series.tokens_per_second.last,
        }
        if record.state.ended:
            live = {name: value for name, value in live.items() if getattr(record, name) is None}
        if record.iterations is None:
            planned = next((report.iterations for report in reports if report.iterations), None)
            live["iterations"] = planned or self._series.iterations
        return record.model_copy(update=live)

    def _rank(self, number: int, report: RankReport) -> RankStatus:
        node = self._plan.nodes[number]
        attempt = self._history.last_attempt
        current = attempt if self._history.launched else None
        ended = current.ended.get(number) if current is not None else None
        return RankStatus(
            **{**vars(report), "phase": self._phase(number, report, current)},
            rank=number,
            node=node,
            exit_code=ended.code if ended is not None else None,
            signal=ended.signal if ended is not None else None,
            link=attempt.condition(node) if attempt is not None else None,
            printed_at=self._printed_at(number, attempt.status.began_at) if attempt is not None else None,
        )

    def _printed_at(self, rank: int, since: datetime) -> datetime | None:
        with contextlib.suppress(OSError):
            log = self._rundir.log(rank).stat()
            at = datetime.fromtimestamp(log.st_mtime, UTC)
            return at if log.st_size and at > since else None
        return None

    def _quiet(self, ranks: Sequence[RankStatus], *, supervised: bool) -> Quiet | None:
        """None where a sign would not be seen, and for what loads, validates or saves: it has another limit."""
        kind, recovery, state_since = self._plan.config.job.kind, self._plan.config.recovery, self._history.state_since
        links = [ranks[number].link for number in kind.watched_ranks(len(ranks)) if number < len(ranks)]
        # A rank on this machine has no link. As for find_hang, time counts while any of them answers.
        connected = [link.since if link else state_since for link in links if not link or link.condition == "connected"]
        now, (since, looked_at) = datetime.now(UTC), self._observed
        observed = supervised and bool(connected)
        self._observed = (since if observed and now - looked_at <= _HELD_UP else now), now
        phases = {rank.phase for rank in ranks}
        if not (kind.signs and observed) or phases <= {"ended"} or phases - {"training", "running", "ended"}:
            return None
        times = [(sign, at) for rank in ranks for sign, at in (("step", rank.moved_at), ("output", rank.printed_at))]
        signs = [at for sign, at in times if at is not None and sign in kind.signs]
        hang_s = kind.hang_s(recovery.hang_s, recovery.stall_s)
        judged = kind.hangs(stepped=any(rank.iteration is not None for rank in ranks))
        since = max([self._observed[0], state_since, min(connected), *signs])
        return Quiet(kind.signs[0], since, hang_s if judged else None)

    def _phase(self, number: int, report: RankReport, attempt: AttemptHistory | None) -> str:
        record, stop = self._history.record, self._history.stop
        started = attempt is not None and number in attempt.started
        if attempt is not None and number in attempt.ended:
            return "ended"
        if record.state.ended:
            return "ended" if started or report.phase is not None else "waiting"
        if stop is not None and stop.stage != "asked" and record.state in _ACTIVE:
            return "saving" if report.phase == "saving" else "stopping"
        if report.phase is not None and report.attempt == record.attempts:
            return report.phase
        return "starting" if started else "waiting"

    def _read_checks(self) -> None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            stat = self._rundir.preflight.stat()
            if (seen := (stat.st_mtime_ns, stat.st_size)) != self._checks[1]:
                report = PreflightReport.model_validate_json(read_regular(self._rundir.preflight))
                self._checks = tuple(report.checks), seen


def _use(run_dir: RunDir, tracker: str) -> str | None:
    if tracker == "tensorboard":
        folder = run_dir.tracker(tracker)
        return f"tensorboard --logdir {quoted(str(folder))}" if folder.exists() else None
    with contextlib.suppress(OSError):
        return run_dir.wandb_url.read_text()
    unsent = max(run_dir.tracker("wandb").glob("offline-run-*"), default=None)
    return f"wandb sync {quoted(str(unsent))}" if unsent is not None else None


def _chunk(reports: Sequence[RankReport], record: RunRecord) -> ChunkProgress | None:
    """The foremost rank's: all ranks go through the same chunks."""
    done = [report.chunk for report in reports if report.chunk is not None and report.attempt == record.attempts]
    return max(done, key=lambda chunk: (chunk.epoch, chunk.done), default=None)


def supervisor_alive(rundir: RunDir) -> bool:
    """The process that wrote supervisor.json is still that process; where that file is missing, or does not tell that
    process from a later one, one holds the run's lock."""
    who = newest_supervisor(rundir)
    if who is not None and who.start and who.boot_id:
        return same_boot(who.boot_id, boot_id()) and alive(who.pid, who.start)
    with contextlib.suppress(OSError), open_regular(rundir.lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def newest_supervisor(rundir: RunDir) -> SupervisorStarted | None:
    """As in supervisor.json."""
    try:
        return SupervisorStarted.model_validate_json(read_regular(rundir.supervisor))
    except (OSError, ValueError):
        return None
