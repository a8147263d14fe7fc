"""The watch over one attempt, from its launch until nothing of it is left: mirrors, beats, liveness, the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from engine.models import RunState
from engine.runs.layout import LAUNCHER_SOURCE, RunDir
from engine.runs.mirror import Gap, Mirror
from engine.runs.plan_file import Plan
from engine.supervision.abort import Graces, Stage, Stop
from engine.supervision.attempt import Attempt
from engine.supervision.culprit import Evidence, Trigger, is_consequence
from engine.supervision.event_intake import EventIntake
from engine.supervision.evidence import Witnesses
from engine.supervision.launcher_watch import LauncherWatch
from engine.supervision.logbook import Logbook
from engine.supervision.ranks import Rank, Ranks
from engine.supervision.requests import Request
from engine.worker.processes import Process
from engine.worker.wire import BEAT

TICK_S = 0.1
_SECOND_S = 1.0
"""Between two beats, and between two looks at what costs more."""
START_LIMIT_S = 60.0
_SETTLE_S = 1.0
"""A rank that has only lost its peers waits this long for the one that began it."""
_PURPOSES = {Trigger.ABORT: "abort", Trigger.ENDED: "end"}


class Flight:
    """One attempt in the air. `watch` is its whole life; it may begin in the middle of one (adoption)."""

    def __init__(
        self,
        run_dir: RunDir,
        plan: Plan,
        attempt: Attempt,
        *,
        launcher: LauncherWatch | None,
        logbook: Logbook,
        adopted: bool = False,
        rebooted: bool = False,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self._plan = plan
        self._attempt = attempt
        files = attempt.files(plan.run_id, plan.ranks[0].rank)
        self._launcher = launcher
        self._logbook = logbook
        self._start_limit_s = start_limit_s
        self._ranks = Ranks(files, plan.ranks)
        self._witnesses = Witnesses(plan, attempt, files, launcher, adopted=adopted, rebooted=rebooted)
        self._entered = _entered(logbook)
        self._mirror = Mirror(run_dir, on_gap=self._note_gap)
        for rank in self._ranks.all:
            number = rank.number
            self._mirror.follow(number, attempt.number, files.log(number), attempt.log_bases[number])
            self._mirror.follow_events(number, attempt.number, files.events(number), attempt.event_bases[number])
        self._mirror.follow(LAUNCHER_SOURCE, attempt.number, None, attempt.log_bases[LAUNCHER_SOURCE])
        self.intake = EventIntake(run_dir, attempt.number, attempt.event_bases)
        self._began = time.monotonic()
        self._second_at = float("-inf")
        self._launcher_gone_at: float | None = None
        self._settling_since: float | None = None
        self._stop: Stop | None = None
        self._trigger = Trigger.ENDED
        self.unconfirmed: list[str] = []
        """Nodes on which something outlived the end."""

    async def watch(self, requests: Callable[[], Request | None]) -> Evidence:
        """Watch until everything of the attempt is gone; what is then known of it. `requests` gives the abort that has
        been asked for, if any."""
        try:
            while not await self._tick(requests()):
                await asyncio.sleep(TICK_S)
            if not await asyncio.to_thread(self._mirror.finish):
                self._logbook.append("note", message="the mirrors are not complete: the nodes hold what is missing")
            self.intake.poll()
            return await asyncio.to_thread(self._witnesses.heard, self._ranks.all, self._trigger)
        finally:
            self._ranks.close()
            self.intake.close()

    async def _tick(self, abort: Request | None) -> bool:
        """One look at everything; True when the attempt is over."""
        now = time.monotonic()
        thorough = now - self._second_at >= _SECOND_S
        if thorough:
            self._second_at = now
            self._ranks.tell(BEAT)
        # Liveness is read before the last read of a log.
        launcher_alive = self._launcher is not None and self._launcher.alive(thorough=thorough)
        changed = self._ranks.look(thorough=thorough) + self._listen_to_launcher()
        await asyncio.to_thread(self._mirror.pump)
        self.intake.poll()
        self._enter_changes(changed)
        if abort is not None and self._stop is None and not self._all_home():
            self._abort(abort)
        elif abort is not None and abort.now and self._stop is not None:
            # Whatever it is that ends the attempt, it has been judged worth ending: an abort can only hurry it.
            self._stop.hurry()
        if self._stop is None:
            self._decide(now, launcher_alive)
        if self._stop is not None:
            self._stop.advance(time.monotonic())
            return self._stop.done
        return False

    def _decide(self, now: float, launcher_alive: bool) -> None:
        """Whether it is time to end the attempt, and why."""
        ranks = self._ranks.all
        if launcher_alive or self._launcher_gone_at is None:
            self._launcher_gone_at = None if launcher_alive else now
        if all(rank.ended for rank in ranks):
            self._end(Trigger.ENDED)
        elif failed := [rank for rank in ranks if rank.ended and self._failed(rank)]:
            self._settling_since = self._settling_since or now
            own = any(not is_consequence(self._witnesses.of(rank)) for rank in failed)
            if own or now - self._settling_since > _SETTLE_S:
                self._end(Trigger.RANK)
        elif self._launcher_gone_at is not None and now - self._launcher_gone_at > _SETTLE_S:
            self._end(Trigger.LAUNCHER_GONE)
        elif not all(rank.started for rank in ranks) and now - self._began > self._start_limit_s:
            self._end(Trigger.NOT_STARTED)

    def _all_home(self) -> bool:
        """Every rank has done what it was to do: there is nothing left to abort."""
        return all(rank.ended and not self._failed(rank) for rank in self._ranks.all)

    def _failed(self, rank: Rank) -> bool:
        if rank.record is None or rank.record.code != 0 or rank.record.stopped_by is not None:
            return True
        # A command may leave with 0 before the others do; our trainer may not, unless it has completed.
        return self._plan.config.job.command is None and not self._witnesses.completed(rank)

    def _abort(self, abort: Request) -> None:
        self._trigger = Trigger.ABORT
        self._logbook.append(
            "stop", stage=Stage.ASKED.value, purpose="abort", acknowledged=self._acknowledged(), left=[]
        )
        self._begin_stop(cooperative=not abort.now)

    def _end(self, trigger: Trigger) -> None:
        self._trigger = trigger
        self._begin_stop(cooperative=False)

    def _begin_stop(self, *, cooperative: bool) -> None:
        if self._logbook.state is not RunState.FINISHING:
            self._logbook.change(RunState.FINISHING)
        recovery = self._plan.config.recovery
        self._stop = Stop(
            self._ranks,
            self._launcher,
            self._attempt.nonce,
            Graces(recovery.stop_grace_s, recovery.save_grace_s, recovery.term_grace_s),
            cooperative=cooperative,
            on_stage=self._enter_stage,
            saving=lambda: self.intake.saving,
        )

    def _enter_stage(self, stage: Stage, left: Sequence[Process]) -> None:
        # Every node of this release is this machine: what is left cannot be told apart by node.
        node = self._plan.ranks[0].node
        if stage is Stage.UNCONFIRMED:
            self.unconfirmed = [node]
        self._logbook.append(
            "stop",
            stage=stage.value,
            purpose=_PURPOSES.get(self._trigger, "fence"),
            acknowledged=self._acknowledged(),
            left=[f"{node} {process.pid} {process.command[:200]}" for process in left],
        )

    def _acknowledged(self) -> list[int]:
        return [rank.number for rank in self._ranks.all if rank.record is not None]

    def _enter_changes(self, changed: Sequence[Rank]) -> None:
        for rank in changed:
            if rank.identity is not None and not self._known("rank_started", rank):
                self._logbook.append(
                    "rank_started",
                    rank=rank.number,
                    host=rank.planned.node,
                    pid=rank.identity.trainer_pid,
                    start=rank.identity.trainer_start,
                    pgid=rank.identity.trainer_pgid,
                    started_at=rank.identity.started_at,
                )
            if rank.ended and not self._known("rank_ended", rank):
                record = rank.record
                self._logbook.append(
                    "rank_ended",
                    rank=rank.number,
                    host=rank.planned.node,
                    code=record.code if record is not None else rank.launcher_code,
                    signal=record.signal if record is not None else None,
                    stopped_by=record.stopped_by if record is not None else None,
                    error=record.error if record is not None else "no exit record",
                )
                if record is not None and record.dropped_bytes:
                    lost = f"rank {rank.number}: {record.dropped_bytes} bytes of output were lost to a full disk"
                    self._logbook.append("note", message=f"{lost} on {rank.planned.node}")
        if changed and all(rank.started for rank in self._ranks.all):
            if self._logbook.state is RunState.LAUNCHING:
                self._logbook.change(RunState.RUNNING)
            if self._launcher is not None:
                self._launcher.drop_pipes()

    def _known(self, event: str, rank: Rank) -> bool:
        """Whether this attempt's journal has it already, by us or by an earlier supervisor."""
        key = (event, rank.number)
        if key in self._entered:
            return True
        self._entered.add(key)
        return False

    def _listen_to_launcher(self) -> list[Rank]:
        return self._ranks.lost_keepers(self._launcher.rank_ends()) if self._launcher is not None else []

    def _note_gap(self, gap: Gap) -> None:
        self._logbook.append("note", message=f"{gap.file}: {gap.problem}{': over' if gap.over else ''}", **asdict(gap))


def _entered(logbook: Logbook) -> set[tuple[str, int]]:
    """What an earlier supervisor has entered of the ranks of the last attempt."""
    entered: set[tuple[str, int]] = set()
    for entry in logbook.entries:
        if entry["event"] == "attempt":
            entered.clear()
        elif entry["event"] in ("rank_started", "rank_ended"):
            entered.add((entry["event"], entry["rank"]))
    return entered
