"""What a supervisor can see and do on one host, whether that is this machine or the other end of an ssh connection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.runs.mirror import NodeFile
from engine.worker.last_words import LastWords
from engine.worker.processes import Process
from engine.worker.wire import ExitRecord, Identity

SILENCE_S = 3.0
"""A host that has not answered a beat for as long is not waited for by those that do."""


@dataclass(frozen=True)
class Sighting:
    """One rank as its host last showed it."""

    identity: Identity | None = None
    record: ExitRecord | None = None
    vanished: bool = False
    """Its keeper is gone without an exit record."""
    restarted: bool = False
    """Because its host has been restarted since."""


@dataclass(frozen=True)
class LinkState:
    """How well a host can be reached."""

    connected: bool
    silent_s: float
    """Since it last answered; before its first answer since the link was started."""
    heard: bool
    """Whether it has ever answered."""
    problem: str | None = None
    """Why it is not connected, in one line."""

    @property
    def answering(self) -> bool:
        return self.silent_s < SILENCE_S


@dataclass(frozen=True)
class HostFacts:
    """What a host has said of itself."""

    boot_id: str
    memory_kills: int | None
    """Processes that it has killed for want of memory since it started."""
    clock_ahead_s: float
    """Its wall clock minus the head's, good to half a round trip."""


class NodeLink(Protocol):
    """One host of the attempt. No method waits for the host or for the network; none raises for what they do. Once it
    has been started, a link passes a beat to its ranks' keepers every second, until it is closed."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its nodes, one for each of its ranks."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def local(self) -> bool:
        """Whether it is this machine."""
        ...

    @property
    def state(self) -> LinkState: ...

    @property
    def facts(self) -> HostFacts | None:
        """None until it has answered."""
        ...

    def sight(self, rank: int, *, thorough: bool) -> Sighting:
        """One of its ranks; `thorough` may cost a process on macOS."""
        ...

    def words(self, rank: int) -> LastWords:
        """As last heard: whole once the rank has ended, or `hear_words` has been answered."""
        ...

    def hear_words(self) -> None:
        """Ask for the last words of all its ranks."""
        ...

    def tell(self, rank: int, word: bytes) -> None:
        """STOP, RESCUE or END to a keeper; while the host is away it is kept for its return."""
        ...

    def kill_groups(self) -> None:
        """KILL to the groups of its ranks' programs."""
        ...

    def ask_left(self, *, kill: bool) -> None:
        """Ask what is left of the attempt, all that carries its nonce. With `kill`, that is killed after it was listed,
        and nothing of the attempt can start there any more."""
        ...

    def left(self) -> list[Process] | None:
        """The answer to the last `ask_left`; None until there is one."""
        ...

    def ask_holders(self, ports: Sequence[int]) -> None:
        """Ask who holds these TCP ports there."""
        ...

    def holders(self) -> dict[int, str] | None:
        """The answer to the last `ask_holders`, in words, of those that somebody holds; None until there is one."""
        ...

    def file(self, name: str) -> NodeFile:
        """A file of the attempt's directory, by its name there."""
        ...

    def start(self) -> None: ...

    async def close(self) -> None: ...
