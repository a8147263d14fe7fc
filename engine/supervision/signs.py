"""The signs that an attempt is to be ended, and why: ranks that have ended, a start that fails, a hang."""

from __future__ import annotations

import time
from dataclasses import asdict

from engine.runs.plan_file import Plan
from engine.supervision.attempt import Attempt
from engine.supervision.event_intake import EventIntake
from engine.supervision.judging.evidence import Trigger
from engine.supervision.judging.weight import is_consequence
from engine.supervision.links.links import Links
from engine.supervision.logbook import Logbook
from engine.supervision.rank_entries import of_attempt
from engine.supervision.ranks import Rank, Ranks
from engine.supervision.watchdog import Hang, Watchdog
from engine.supervision.witnesses import Witnesses

_START_LIMIT_S = 60.0
"""For every rank to appear, s."""
_SETTLE_S = 1.0
"""A rank that has only lost its peers waits this long for the one that began it."""


class Signs:
    """Of one attempt. A hang, and a launcher that is missed, go into the journal when they are seen."""

    def __init__(
        self,
        plan: Plan,
        attempt: Attempt,
        *,
        ranks: Ranks,
        links: Links,
        witnesses: Witnesses,
        intake: EventIntake,
        logbook: Logbook,
        launched: bool,
    ) -> None:
        """`launched`: there is, or was, a launcher that this supervisor knows."""
        self._ranks = ranks
        self._links = links
        self._witnesses = witnesses
        self._intake = intake
        self._logbook = logbook
        self._launched = launched
        self._trainer = plan.config.job.command is None
        self._began = time.monotonic()
        self._launcher_gone_at: float | None = None
        self._launcher_missed = False
        self._settling_since: float | None = None
        recovery, numbers = plan.config.recovery, [rank.rank for rank in plan.ranks]
        self._watchdog = (
            Watchdog(intake.progress, numbers, recovery.hang_s, recovery.stall_s, self._began)
            if self._trainer
            else None
        )
        self.hang = Hang.told(of_attempt(logbook, attempt.number))
        """Also when an earlier supervisor has found it, and had begun to end it."""

    @property
    def all_home(self) -> bool:
        """Every rank has done what it was to do: there is nothing left to abort."""
        return all(rank.ended and not self.failed(rank) for rank in self._ranks.all)

    def failed(self, rank: Rank) -> bool:
        """Of one that has ended: whether it was not to end so."""
        if rank.record is None or rank.record.code != 0 or rank.record.stopped_by is not None:
            return True
        # A command may leave with 0 before the others do; our trainer may not, unless it has completed.
        return self._trainer and not self._witnesses.completed(rank)

    def look(self, now: float, launcher_alive: bool) -> Trigger | None:
        """Why it is time to end the attempt; None when it is not."""
        return self._of_ends(now, launcher_alive) or self._of_a_hang(now)

    def _of_ends(self, now: float, launcher_alive: bool) -> Trigger | None:
        ranks = self._ranks.all
        if launcher_alive or self._launcher_gone_at is None:
            self._launcher_gone_at = None if launcher_alive else now
        if all(rank.ended for rank in ranks):
            return Trigger.ENDED
        if failed := [rank for rank in ranks if rank.ended and self.failed(rank)]:
            self._settling_since = self._settling_since or now
            own = any(not is_consequence(self._witnesses.of(rank)) for rank in failed)
            return Trigger.RANK if own or now - self._settling_since > _SETTLE_S else None
        if all(rank.started for rank in ranks):
            self._miss_launcher()
            return None
        if self._launcher_gone_at is not None and self._nobody_else_will_start(now - self._launcher_gone_at):
            return Trigger.LAUNCHER_GONE if self._launched else Trigger.NOT_STARTED
        return Trigger.NOT_STARTED if now - self._began > _START_LIMIT_S else None

    def _of_a_hang(self, now: float) -> Trigger | None:
        ranks = self._ranks.all
        if self._watchdog is None or not all(rank.started for rank in ranks):
            return None
        answering = any(self._links.to(rank.number).state.answering for rank in ranks)
        hang = self._watchdog.look(now, hearing=answering and not self._intake.waiting)
        if self.hang is None and hang is not None:
            self.hang = hang
            node = next((rank.planned.node for rank in ranks if rank.number == hang.rank), None)
            self._logbook.append("hung", **asdict(hang), node=node)
        return Trigger.HUNG if self.hang is not None else None

    def _miss_launcher(self) -> None:
        """It has done its part when all ranks have started; its end is worth no more than a note."""
        if self._launched and self._launcher_gone_at is not None and not self._launcher_missed:
            self._launcher_missed = True
            self._logbook.append("note", message="mlx.launch has ended; the ranks go on without it")

    def _nobody_else_will_start(self, launcher_gone_s: float) -> bool:
        """Whether the nodes have been heard since the launcher ended, and the ranks that are missing were not there."""
        if launcher_gone_s <= _SETTLE_S:
            return False
        missing = [self._links.to(rank.number).state for rank in self._ranks.all if not rank.started]
        return all(state.heard and state.silent_s < launcher_gone_s - _SETTLE_S / 2 for state in missing)
