"""Ends everything of an attempt, in stages, and proves on every host that nothing is left. Driven by the supervisor's
clock.

    stop        every keeper is asked for a cooperative stop (left out by a fence, and by "now")
    rescue      only after a failure that leaves the state sound: "end" to the rank that began it, "rescue" to all
                others, whose trainers write the state of their last finished step and leave
    term        "end" to the keepers, which TERM and KILL their own groups; TERM to the launcher's group
    kill        KILL to the ranks' groups, to the launcher's, and to whatever still carries the nonce
    verifying   nobody with the nonce may be left on any host; what is left is killed
    stopped     proved; or "unconfirmed", when something outlived every KILL for UNCONFIRMED_S, or a host did not answer

A stage is left as soon as its work is done, so a run whose ranks listen is gone in a fraction of the time allowed. A
host that does not answer is told everything as soon as it does, and holds up none of the others.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from engine.supervision.launcher_watch import LauncherWatch
from engine.supervision.links.base import NodeLink
from engine.supervision.links.links import Links
from engine.supervision.ranks import Ranks
from engine.worker.processes import Process
from engine.worker.wire import END, RESCUE, STOP

UNCONFIRMED_S = 10.0
"""After the first KILL."""
SILENT_S = 4.0
"""For a host that does not answer, after all others are proved."""
_AWAY_S = 15.0
"""A host whose ranks have been asked for their last checkpoint, or are to be, may be silent for as long: it does not
find out that they are to be killed when it is back after a moment."""
_ASK_AGAIN_S = 1.0
RESCUE_BYTES_PER_S = 100e6
"""At which a disk at least takes a rescued state; what is slower is not waited for to the end."""
_KEEPER_MARGIN_S = 0.3
"""What a keeper needs beyond its graces to drain the log, sweep and write its exit record."""
_LEAVES_S = 1.0
"""A trainer that has written its state."""
_LAUNCHER_LEAVES_S = 0.3
"""After the last rank; the launcher would take up to a second, and nothing of it is needed any more."""


class Stage(StrEnum):
    ASKED = "asked"
    STOP = "stop"
    RESCUE = "rescue"
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


@dataclass(frozen=True)
class Rescue:
    """What a fence after a failure waits for."""

    culprit: int | None
    """The rank that is to be ended at once; None when it is not known which."""
    told: Mapping[int, str]
    """Rank → "begin" or "committed", as the trainers have told by now."""
    patience_s: float
    """Until a trainer has begun: it may be in the middle of a step."""
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Rank → bytes of the state that it writes, as the trainers have told by now."""


@dataclass
class Proof:
    """That nothing of the attempt is left on one host."""

    link: NodeLink
    asked_at: float = float("-inf")
    left: list[Process] = field(default_factory=list)
    """What the last answer named."""
    found: bool = False

    def seek(self, now: float) -> None:
        """Take in the answer to the last question, and ask again when it was not the proof. What is left is killed."""
        if self.found:
            return
        answer = self.link.left() if self.asked_at > float("-inf") else None
        if answer is not None:
            self.left = answer
            self.found = not answer
        if not self.found and (answer is not None or now - self.asked_at > _ASK_AGAIN_S):
            self.asked_at = now
            self.link.ask_left(kill=True)
            if (at_once := self.link.left()) is not None:
                self.left, self.found = at_once, not at_once


class Stop:
    """One ending. `advance` is to be called at every tick until `done`; everything in it may happen twice."""

    def __init__(
        self,
        ranks: Ranks,
        links: Links,
        launcher: LauncherWatch | None,
        graces: Graces,
        *,
        cooperative: bool,
        on_stage: Callable[[Stage, Sequence[Proof]], None],
        saving: Callable[[], bool] = lambda: False,
        rescue: Rescue | None = None,
    ) -> None:
        self._ranks = ranks
        self._links = links
        self._launcher = launcher
        self._graces = graces
        self._on_stage = on_stage
        self._saving = saving
        self._rescue = rescue
        self._wanted = Stage.STOP if cooperative else Stage.TERM if rescue is None else Stage.RESCUE
        self._written_at: float | None = None
        self._killing_since: float | None = None
        self._others_proved_at: float | None = None
        self._since = self._begun = self._last_saving = 0.0
        self.stage: Stage | None = None
        self.proofs = [Proof(link) for link in links]

    @property
    def done(self) -> bool:
        return self.stage in (Stage.STOPPED, Stage.UNCONFIRMED)

    def hurry(self) -> None:
        """Leave out what is left of the cooperative stop, or of a rescue."""
        if self.stage in (None, Stage.STOP, Stage.RESCUE):
            self._wanted = Stage.TERM

    def advance(self, now: float) -> None:
        """Do what is due at `now` (monotonic seconds)."""
        if self.done:
            return
        if self.stage is None:
            self._begun = now
            self._last_saving = float("-inf")
        if self._all_ended() and self.stage not in (Stage.VERIFYING, Stage.KILL):
            if self.stage is None and not self._everybody_answers():
                # Whoever is away must find the word when it is back.
                self._ranks.tell(END)
            self._enter(Stage.VERIFYING, now)
        elif self.stage is None or (self._wanted is Stage.TERM and self.stage in (Stage.STOP, Stage.RESCUE)):
            self._enter(self._wanted, now)
        match self.stage:
            case Stage.STOP:
                self._while_stopping(now)
            case Stage.RESCUE if self._rescued(now):
                self._enter(Stage.TERM, now)
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

    def _rescued(self, now: float) -> bool:
        """Whether nothing more is to be waited for: each rank has ended or said that its state is written, or has had
        its time."""
        assert self._rescue is not None
        waited, told = now - self._since, self._rescue.told
        awaited = [
            rank.number
            for rank in self._ranks.all
            if not (rank.ended or rank.number == self._rescue.culprit or self._gone(self._links.to(rank.number)))
        ]
        if all(told.get(rank) == "committed" for rank in awaited):
            # What has written its state is on its way out.
            self._written_at = self._written_at or now
            return not awaited or now - self._written_at > _LEAVES_S
        writing = any(told.get(rank) == "begin" for rank in awaited)
        return waited > (self._writes_s() if writing else min(self._rescue.patience_s, self._graces.save_s))

    def _writes_s(self) -> float:
        """How long the ranks may write their states; those of one host share its disk."""
        assert self._rescue is not None
        sizes = self._rescue.sizes
        largest = max((sum(sizes.get(rank, 0) for rank in link.ranks) for link in self._links), default=0)
        return self._graces.save_s + largest / RESCUE_BYTES_PER_S

    def _while_verifying(self, now: float) -> None:
        if self.stage is Stage.VERIFYING and now - self._since < _LAUNCHER_LEAVES_S and self._launcher_alive():
            return
        if self.stage is Stage.KILL and now - self._since < _KEEPER_MARGIN_S and not self._all_ended():
            # Their ranks are dead: the keepers have a moment to say so.
            return
        for proof in self.proofs:
            proof.seek(now)
        if all(proof.found for proof in self.proofs) and not self._launcher_alive():
            self._enter(Stage.STOPPED, now)
            return
        self._signal_launcher(signal.SIGKILL)
        self._killing_since = self._killing_since or now
        if now - self._killing_since > UNCONFIRMED_S or self._only_silent_ones_are_missing(now):
            self._enter(Stage.UNCONFIRMED, now)

    def _only_silent_ones_are_missing(self, now: float) -> bool:
        """Whether every host that answers is proved, and the others have had their time to answer."""
        missing = [proof.link for proof in self.proofs if not proof.found]
        if self._launcher_alive() or any(link.state.answering for link in missing):
            self._others_proved_at = None
            return False
        self._others_proved_at = self._others_proved_at or now
        return now - self._others_proved_at > SILENT_S

    def _enter(self, stage: Stage, now: float) -> None:
        self.stage, self._since = stage, now
        match stage:
            case Stage.STOP:
                self._ranks.tell(STOP)
            case Stage.RESCUE:
                assert self._rescue is not None
                self._ranks.tell(RESCUE, but=self._rescue.culprit)
                if self._rescue.culprit is not None:
                    self._ranks.tell(END, only=self._rescue.culprit)
            case Stage.TERM:
                self._ranks.tell(END)
                self._signal_launcher(signal.SIGTERM)
            case Stage.KILL:
                self._ranks.tell(END)
                for link in self._links:
                    link.kill_groups()
        self._on_stage(stage, self.proofs)

    def _all_ended(self) -> bool:
        """Whether every rank has ended, of the hosts that answer."""
        return all(rank.ended or self._gone(self._links.to(rank.number)) for rank in self._ranks.all)

    def _gone(self, link: NodeLink) -> bool:
        """Whether a host is not waited for now."""
        asking = self._wanted is Stage.STOP and self.stage in (None, Stage.STOP)
        return link.state.silent_s > _AWAY_S if asking else not link.state.answering

    def _everybody_answers(self) -> bool:
        return all(link.state.answering for link in self._links)

    def _launcher_alive(self) -> bool:
        return self._launcher is not None and self._launcher.alive()

    def _signal_launcher(self, number: signal.Signals) -> None:
        if self._launcher is not None:
            self._launcher.signal_group(number)
