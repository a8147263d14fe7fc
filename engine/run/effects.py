"""The effects that a step of a run may have, as frozen values: engine.run.step decides on them, engine.run.driver
does them. Those that take long end in a Result of a later observation; at most one of these is under way."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.run import events


class Effect:
    __slots__ = ()


@dataclass(frozen=True)
class Record(Effect):
    """Append the event to the journal, before what follows it is done."""

    event: events.Event


@dataclass(frozen=True)
class Send(Effect):
    """STOP, EMERGENCY_CHECKPOINT or END to the keeper of a rank."""

    host: str
    rank: int
    command: bytes


@dataclass(frozen=True)
class KillPrograms(Effect):
    """KILL to the groups of the programs of the host's ranks."""

    host: str


@dataclass(frozen=True)
class RequestProcesses(Effect):
    """Ask for the attempt's processes on the host, and kill them; nothing of the attempt can start there any more."""

    host: str


@dataclass(frozen=True)
class RequestExitOutput(Effect):
    host: str


@dataclass(frozen=True)
class SignalLauncher(Effect):
    number: signal.Signals


@dataclass(frozen=True)
class DropPipes(Effect):
    """The launcher lets go of the pipes that its ranks have left."""


@dataclass(frozen=True)
class Standing:
    """A rank, as far as a step knows more of it than its RankView."""

    lost: bool = False
    """Its node has been away for longer than its lease."""
    dispensable: bool = False
    """The others go on without it."""
    outlived: bool = False
    """It had not ended when the attempt began to be ended."""
    answered_since: bool = False
    """Its node has answered since the attempt began to be ended."""
    head_slept_s: float = 0.0
    """The longest sleep of the head before its end was known."""
    cut_off_s: float = 0.0
    """The longest time for which its node was away."""


@dataclass(frozen=True)
class Judge(Effect):
    """Collect the evidence of the attempt's end, and give the verdict on it → Judged."""

    trigger: events.Trigger
    standings: tuple[Standing, ...]
    hang: events.Hang | None = None
    over: bool = False
    """Nothing runs any more: who holds a port that was taken is looked up."""


@dataclass(frozen=True)
class Settle(Effect):
    """Take in the ends of these hosts' ranks, and the rest of their files, and see what is missing → Settled."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class RunPreflight(Effect):
    """Preflight of the run's nodes → Checked."""

    excluded: Mapping[str, str] = field(default_factory=dict)
    """The nodes that the check before it has excluded → why."""


@dataclass(frozen=True)
class PlanAttempt(Effect):
    """Decide on the next attempt, with free ports → Planned. It writes the same files as the last one: what a host of
    that has not sent by now stays there."""

    members: tuple[str, ...]
    placement: events.Attempt | None = None
    """The last attempt, whose nodes need not be probed again."""


@dataclass(frozen=True)
class Connect(Effect):
    """Connect the hosts of the attempt, which is the one that is watched from here on."""

    attempt: events.Attempt
    kept: tuple[str, ...] = ()
    """Hosts of attempts before it on which the proof of their end is still sought; all others are let go."""


@dataclass(frozen=True)
class Reconnect(Effect):
    """Connect the hosts of an attempt before the one that is watched, of these nodes, and end what is left there."""

    attempt: events.Attempt
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class ConnectUnknown(Effect):
    """The same for an attempt of which the journal has nothing, by the nonce of the run, on all its nodes."""


@dataclass(frozen=True)
class Start(Effect):
    """Put the files of the attempt in place, and start its ranks → Started."""

    attempt: events.Attempt


@dataclass(frozen=True)
class Find(Effect):
    """Look for an earlier supervisor's launcher and ranks → Found."""

    attempt: events.Attempt


@dataclass(frozen=True)
class Cancel(Effect):
    """Cancel the check, the plan, the start or the search that is under way → Cancelled."""


@dataclass(frozen=True)
class EndTrackers(Effect):
    pass
