"""A run as it is seen at one moment, as frozen values: engine.run.observer makes them, engine.run.step reads them.
Times are seconds of the head's AwakeClock unless said otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from engine.cluster.host_connection import SILENCE_S
from engine.models import PreflightReport
from engine.node.processes import Process
from engine.protocol.attempt import ExitRecord, Identity
from engine.run import events


@dataclass(frozen=True)
class RankView:
    """One rank as its host last showed it."""

    number: int
    node: str
    identity: Identity | None = None
    record: ExitRecord | None = None
    vanished: bool = False
    """Its keeper is gone without an exit record."""
    restarted: bool = False
    """Its node has been restarted since it started."""
    launcher_code: int | None = None
    """The exit code of its start, where no keeper has reported another."""
    succeeded: bool = False
    """By its record and its trainer's last event: it has done its work."""
    consequence: bool = False
    """Its end follows from another rank's."""

    @property
    def started(self) -> bool:
        return self.identity is not None

    @property
    def end_known(self) -> bool:
        """It has left an exit record, or will leave none."""
        return self.record is not None or self.vanished

    @property
    def refused(self) -> bool:
        """It did not start."""
        return self.launcher_code is not None and not self.started


@dataclass(frozen=True)
class HostView:
    """One host that is connected: of the attempt that is watched, or of one before it."""

    key: str
    """Tells it from every other host, also from the same machine in another attempt."""
    names: tuple[str, ...]
    """Its nodes."""
    ranks: tuple[int, ...] = ()
    local: bool = False
    """This machine."""
    current: bool = True
    """It belongs to the attempt that is watched."""
    silent_s: float = 0.0
    """Since it last answered; soon after a sleep of the head, since its end."""
    longest_silence_s: float = 0.0
    answered: bool = True
    """It has answered at least once."""
    problem: str | None = None
    """Why it is not connected, in one line."""
    boot_id: str | None = None
    """None until it has answered."""
    memory_kills: int | None = None
    """Processes that it has killed for want of memory since it started."""
    processes: tuple[Process, ...] | None = None
    """The answer to the last request for the attempt's processes; None while there is none."""
    unsent: bool = False
    """The head lacks a part of its files. Seen once they have been settled."""

    @property
    def answering(self) -> bool:
        return self.silent_s < SILENCE_S


@dataclass(frozen=True)
class ProgressView:
    """How far the attempt has come, by the events of its trainers that have arrived."""

    steps: int = 0
    """Iterations made by the foremost rank."""
    furthest: int = 0
    """The last iteration that any rank finished, or that the attempt went on from; 0 for none."""
    reached: Mapping[int, int] = field(default_factory=dict)
    """Rank → the last iteration that it reported."""
    phases: Mapping[int, str] = field(default_factory=dict)
    checkpoint_phases: Mapping[int, str] = field(default_factory=dict)
    """Rank → "begin" or "committed", of its emergency checkpoint."""
    checkpoint_bytes: Mapping[int, int] = field(default_factory=dict)
    moved_at: Mapping[int, float] = field(default_factory=dict)
    """Rank → when its last step or change of phase came, or any event while it loads or validates."""
    starts: Mapping[int, int] = field(default_factory=dict)
    """Rank → how often its trainer was started."""
    completed: frozenset[int] = frozenset()
    """The ranks whose trainer has reported that it has done its work."""
    long_step_s: float | None = None
    """The 99th percentile of the updates' durations; None while there are none."""
    first_step_at: float | None = None
    """By the wall clock of the rank's node."""
    resumed: events.Resumed | None = None


@dataclass(frozen=True)
class CommandView:
    """The ranks of a command, by what they print and by what their keepers see of their processes."""

    outputs: int = 0
    """Seconds in which the rank that printed in the most of them did."""
    apart: tuple[int, ...] = ()
    """The ranks that train in groups of their own."""
    trains_apart: bool = False
    """For so long that it is stopped."""
    alarm: str | None = None
    """The fault of the ranks' group, in one line."""
    hang: events.Hang | None = None
    resumption: events.Resumed | None = None
    """The state that it went on from, by its first steps."""


@dataclass(frozen=True)
class Checked:
    report: PreflightReport | None = None
    error: str | None = None
    """Why there is no report."""


@dataclass(frozen=True)
class Planned:
    """The next attempt is planned, and what was decided anew for it; nothing of it has started."""

    attempt: events.Attempt | None = None
    decided: tuple[events.Event, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Started:
    launcher: events.LauncherStarted | None = None
    """None where the ranks were started by hand, or nothing was."""
    error: str | None = None
    """Why no rank runs."""


@dataclass(frozen=True)
class Found:
    """An earlier supervisor's attempt, as an adopter finds it."""

    launcher: events.LauncherStarted | None = None
    anything: bool = True
    """A rank has started, or may still: a node that does not answer may have one, or this machine was restarted."""


@dataclass(frozen=True)
class Judged:
    verdict: events.Verdict
    ends_known: int
    """How many ranks' ends were known."""


@dataclass(frozen=True)
class Settled:
    """The rest of these hosts' files has come, or does not come any more."""

    hosts: tuple[str, ...]
    missing: Mapping[str, int | None] = field(default_factory=dict)
    """As events.LogsMissing."""


@dataclass(frozen=True)
class Cancelled:
    """A task was cancelled before it had a result."""


Result = Checked | Planned | Started | Found | Judged | Settled | Cancelled


@dataclass(frozen=True)
class Observation:
    now: float
    at: datetime
    """The wall clock."""
    slept_s: float = 0.0
    """For how long the head has slept, or the supervisor was stopped, in all."""
    sleep_s: float = 0.0
    """The newest such time."""
    news: tuple[events.Event, ...] = ()
    """Requests, alarms, states that were saved, and faults of trackers and mirrors, since the last observation."""
    launcher_alive: bool = False
    ranks: tuple[RankView, ...] = ()
    hosts: tuple[HostView, ...] = ()
    progress: ProgressView = ProgressView()
    command: CommandView | None = None
    """None for our trainer."""
    receiving: bool = True
    """The head's disk takes what the nodes send."""
    figures: events.Figures = field(default_factory=events.Figures)
    unknown: events.Verdict | None = None
    """By the exit records of an attempt of which the journal has nothing."""
    jitter: float = 1.0
    """Drawn anew, 0.5 to 1."""
    finished: tuple[Result, ...] = ()
    """The results of what has ended since the last observation."""

    @property
    def current_hosts(self) -> tuple[HostView, ...]:
        return tuple([host for host in self.hosts if host.current])

    def host_of(self, rank: int) -> HostView:
        return next(host for host in self.hosts if host.current and rank in host.ranks)
