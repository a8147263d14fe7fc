"""What is known of an attempt's end: what `witnesses` have heard, and what a verdict is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from engine.supervision.watchdog import Hang
from engine.worker.wire import ExitRecord


class Trigger(Enum):
    """Why the attempt was being ended when it was judged."""

    ABORT = auto()
    ENDED = auto()
    """Every rank had gone by itself."""
    RANK = auto()
    """A rank had failed and the others were ended."""
    LAUNCHER_GONE = auto()
    NOT_STARTED = auto()
    """A rank had not appeared in time."""
    HUNG = auto()
    """No rank had made a step for too long."""


@dataclass(frozen=True)
class RankEvidence:
    """What is known of one rank's end."""

    rank: int
    node: str
    python: str
    started: bool = False
    """Its keeper has been seen."""
    record: ExitRecord | None = None
    vanished: bool = False
    """Its keeper is gone and has left no exit record."""
    restarted: bool = False
    """Its node has been restarted since it was started."""
    unreachable_s: float | None = None
    """How long its node has not answered by now, when that is why nothing is known of its end."""
    unreachable_why: str | None = None
    cut_off_s: float = 0.0
    """The longest time for which its node was away."""
    lease_s: float = float("inf")
    clock_ahead_s: float = 0.0
    """Its node's wall clock minus the head's."""
    remote: bool = False
    """Its node is another machine."""
    launcher_code: int | None = None
    """The exit code of its start, for a rank that no keeper speaks for."""
    launcher_words: str = ""
    """What ssh, or whoever else was to start it, has said."""
    tail: str = ""
    """The end of its log."""
    keeper_tail: str = ""
    """The end of its keeper's own log."""
    failure: dict[str, Any] | None = None
    """The trainer's `failure` event."""
    end: dict[str, Any] | None = None
    """The trainer's `end` event."""
    port: str | None = None
    """Which port it could not have, and who has it."""
    left_for_peers: bool = False
    """Our trainer left because a peer was lost, with the exit code that says so."""
    memory_killed: bool = False
    """Its system has killed processes for want of memory since the attempt began."""


@dataclass(frozen=True)
class Evidence:
    """What is known of an attempt's end."""

    ranks: Sequence[RankEvidence]
    trigger: Trigger
    trainer: bool
    """The job is ours and ends with an `end` event; a command of the user's own has none."""
    launcher_tail: str = ""
    adopted: bool = False
    rebooted: bool = False
    """The machine has been restarted since."""
    hang: Hang | None = None
