"""Ends everything of an attempt, in stages, and proves that nothing is left. Driven by the supervisor's clock.

    stop        every keeper is asked for a cooperative stop (left out by a fence, and by "now")
    term        "end" to the keepers, which TERM and KILL their own groups; TERM to the launcher's group
    kill        KILL to the ranks' groups, to the launcher's, and to whatever still carries the nonce
    verifying   nobody with the nonce may be left; what is left is killed
    stopped     proved; or "unconfirmed", when something outlived every KILL for UNCONFIRMED_S

A stage is left as soon as its work is done, so a run whose ranks listen is gone in a fraction of the time allowed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.supervision.launcher_watch import LauncherWatch
from engine.supervision.ranks import Ranks
from engine.worker import processes
from engine.worker.processes import Process
from engine.worker.wire import END, STOP

UNCONFIRMED_S = 10.0
"""After the first KILL."""
_KEEPER_MARGIN_S = 0.3
"""What a keeper needs beyond its graces to drain the log, sweep and write its exit record."""
_LAUNCHER_LEAVES_S = 0.3
"""After the last rank; the launcher would take up to a second, and nothing of it is needed any more."""


class Stage(StrEnum):
    ASKED = "asked"
    STOP = "stop"
    TERM = "term"
    KILL = "kill"
    VERIFYING = "verifying"
    STOPPED = "stopped"
    UNCONFIRMED = "unconfirmed"


@dataclass(frozen=True)
class Graces:
    """Seconds, as in [recovery]."""

    stop_s: float
    save_s: float
    term_s: float


class Stop:
    """One ending. `advance` is to be called at every tick until `done`; everything in it may happen twice."""

    def __init__(
        self,
        ranks: Ranks,
        launcher: LauncherWatch | None,
        nonce: str,
        graces: Graces,
        *,
        cooperative: bool,
        on_stage: Callable[[Stage, Sequence[Process]], None],
        saving: Callable[[], bool] = lambda: False,
        list_processes: Callable[[str], list[Process]] = processes.with_nonce,
    ) -> None:
        self._ranks = ranks
        self._launcher = launcher
        self._nonce = nonce
        self._graces = graces
        self._on_stage = on_stage
        self._saving = saving
        self._list = list_processes
        self._wanted = Stage.STOP if cooperative else Stage.TERM
        self._killing_since: float | None = None
        self._since = self._begun = self._last_saving = 0.0
        self.stage: Stage | None = None
        self.left: list[Process] = []

    @property
    def done(self) -> bool:
        return self.stage in (Stage.STOPPED, Stage.UNCONFIRMED)

    def hurry(self) -> None:
        """Leave out what is left of the cooperative stop."""
        if self.stage in (None, Stage.STOP):
            self._wanted = Stage.TERM

    def advance(self, now: float) -> None:
        """Do what is due at `now` (monotonic seconds)."""
        if self.done:
            return
        if self.stage is None:
            self._begun = now
            self._last_saving = float("-inf")
        if self._all_ended() and self.stage not in (Stage.VERIFYING, Stage.KILL):
            self._enter(Stage.VERIFYING, now)
        elif self.stage is None or (self._wanted is Stage.TERM and self.stage is Stage.STOP):
            self._enter(self._wanted, now)
        match self.stage:
            case Stage.STOP:
                self._while_stopping(now)
            case Stage.TERM if now - self._since > self._graces.term_s + _KEEPER_MARGIN_S:
                self._enter(Stage.KILL, now)
            case Stage.VERIFYING | Stage.KILL:
                self._while_verifying(now)

    def _while_stopping(self, now: float) -> None:
        """The keepers end their ranks by themselves; only one that does not is a matter for us."""
        if self._saving():
            self._last_saving = now
        patience = self._begun + self._graces.stop_s
        patience = max(patience, min(self._last_saving + self._graces.stop_s, self._begun + self._graces.save_s))
        if now > patience + self._graces.term_s + _KEEPER_MARGIN_S:
            # They have had TERM and KILL in their time: the keepers themselves do not answer.
            self._enter(Stage.KILL, now)

    def _while_verifying(self, now: float) -> None:
        if self.stage is Stage.VERIFYING and now - self._since < _LAUNCHER_LEAVES_S and self._launcher_alive():
            return
        if self.stage is Stage.KILL and now - self._since < _KEEPER_MARGIN_S and not self._all_ended():
            # Their ranks are dead: the keepers have a moment to say so.
            return
        self.left = self._list(self._nonce)
        if not self.left and not self._launcher_alive():
            self._enter(Stage.STOPPED, now)
            return
        self._kill_all(now)
        if self._killing_since is not None and now - self._killing_since > UNCONFIRMED_S:
            self._enter(Stage.UNCONFIRMED, now)

    def _enter(self, stage: Stage, now: float) -> None:
        self.stage, self._since = stage, now
        match stage:
            case Stage.STOP:
                self._ranks.tell(STOP)
            case Stage.TERM:
                self._ranks.tell(END)
                self._signal_launcher(signal.SIGTERM)
            case Stage.KILL:
                self._kill_ranks()
        self._on_stage(stage, self.left)

    def _kill_ranks(self) -> None:
        for rank in self._ranks.all:
            identity = rank.identity
            if identity is not None and processes.alive(identity.trainer_pid, identity.trainer_start):
                processes.kill_group(identity.trainer_pgid, signal.SIGKILL)

    def _kill_all(self, now: float) -> None:
        if self._killing_since is None:
            self._killing_since = now
        self._signal_launcher(signal.SIGKILL)
        for process in self.left:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

    def _all_ended(self) -> bool:
        return all(rank.ended for rank in self._ranks.all)

    def _launcher_alive(self) -> bool:
        return self._launcher is not None and self._launcher.alive()

    def _signal_launcher(self, number: signal.Signals) -> None:
        if self._launcher is not None:
            self._launcher.signal_group(number)
