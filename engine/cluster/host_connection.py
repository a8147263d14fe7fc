"""One host of an attempt as the supervisor sees it, whether that is this machine or behind ssh; and the one for this
machine, which needs no agent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.node import processes
from engine.node.probes.network import find_port_holder
from engine.node.processes import Process, oom_kill_count
from engine.protocol.attempt import HEARTBEAT, ExitRecord, Identity, NodeFiles, read_exit, read_identity
from engine.protocol.events import ExitOutput, exit_output

SILENCE_S = 3.0
"""A host that has not answered for as long is not waited for by those that do."""


@dataclass(frozen=True)
class RankObservation:
    """One rank as its host last showed it."""

    identity: Identity | None = None
    record: ExitRecord | None = None
    vanished: bool = False
    """Its keeper is gone without an exit record."""
    restarted: bool = False
    """Because its host has been restarted since."""


@dataclass(frozen=True)
class ConnectionState:
    """How well a host can be reached."""

    connected: bool
    silent_s: float
    """Since it last answered; before its first answer, since the connection was started."""
    answered: bool
    """It has answered at least once."""
    problem: str | None = None
    """Why it is not connected, in one line."""

    @property
    def answering(self) -> bool:
        return self.silent_s < SILENCE_S


@dataclass(frozen=True)
class HostFacts:
    """A host as its agent reports it."""

    boot_id: str
    memory_kills: int | None
    """Processes that it has killed for want of memory since it started."""
    clock_ahead_s: float
    """Its wall clock minus the head's, good to half a round trip."""


class NodeFile(Protocol):
    """A file on a node. Nothing here waits for the node: what has not come yet comes at a later call."""

    @property
    def generation(self) -> int:
        """Another number when the node has been away in between: the mirror's tail is then compared again."""
        ...

    def read_from(self, offset: int, size: int) -> bytes:
        """At most `size` bytes from `offset`; none at its end, while it is not there, or while they have not come.
        Raises OSError."""
        ...

    def read_whole(self, offset: int, size: int) -> bytes | None:
        """`size` bytes from `offset`, fewer only at its end; None while they have not come. Raises OSError."""
        ...

    def size(self) -> int | None:
        """Bytes that it has; None while that is not known."""
        ...


class LocalFile:
    """A node's file when the node is this machine."""

    generation = 0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def read_from(self, offset: int, size: int) -> bytes:
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b""
        return os.pread(self._descriptor, size, offset)

    def read_whole(self, offset: int, size: int) -> bytes:
        return self.read_from(offset, size)

    def size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def describe_port_holder(port: int) -> str | None:
    """Who listens on TCP `port` of this machine, as "pid 12 (command)"; None when nobody does."""
    held = find_port_holder("", port)
    return str(held["holder"]) if held is not None else None


class HostConnection(Protocol):
    """One host of the attempt. No method waits for the host or for the network; none raises for what they do. Once it
    has been started, it passes a heartbeat to its ranks' keepers every second, until it is closed."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its nodes, one for each of its ranks."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def local(self) -> bool:
        """It is this machine."""
        ...

    @property
    def state(self) -> ConnectionState: ...

    @property
    def facts(self) -> HostFacts | None:
        """None until it has answered."""
        ...

    def observe(self, rank: int, *, thorough: bool) -> RankObservation:
        """One of its ranks; `thorough` may cost a process on macOS."""
        ...

    def exit_output(self, rank: int) -> ExitOutput:
        """As last received: whole once the rank has ended, or `request_exit_output` has been answered."""
        ...

    def request_exit_output(self) -> None:
        """Request the exit output of all its ranks."""
        ...

    def send_command(self, rank: int, command: bytes) -> None:
        """STOP, EMERGENCY_CHECKPOINT or END to a keeper; while the host is away it is kept for its return."""
        ...

    def kill_ranks(self) -> None:
        """KILL to the groups of its ranks' programs."""
        ...

    def request_processes(self, *, kill: bool) -> None:
        """Request the processes of the attempt, all that carry its nonce. With `kill`, they are killed after they were
        listed, and nothing of the attempt can start there any more."""
        ...

    def processes(self) -> list[Process] | None:
        """The answer to the last `request_processes`; None until there is one."""
        ...

    def request_port_holders(self, ports: Sequence[int]) -> None:
        """Request who holds these TCP ports there."""
        ...

    def port_holders(self) -> dict[int, str] | None:
        """Port -> who holds it, as the host last answered `request_port_holders`; None until it has answered."""
        ...

    def file(self, name: str) -> NodeFile:
        """A file of the attempt's directory, by its name there."""
        ...

    def start(self) -> None: ...

    async def close(self) -> None: ...


HEARTBEAT_INTERVAL_S = 1.0
THIS_MACHINE = "this machine"
_HERE = ConnectionState(connected=True, silent_s=0.0, answered=True)


class LocalConnection:
    """This machine. Heartbeats come from a thread of their own: no stalled disk of the head holds them up."""

    local = True
    state = _HERE

    def __init__(
        self,
        files: NodeFiles,
        nonce: str,
        ranks: Sequence[int] = (),
        names: Sequence[str] = (),
        *,
        known: Mapping[int, Identity] | None = None,
    ) -> None:
        """`known` are identities that an earlier supervisor has seen."""
        self.ranks = tuple(ranks)
        self.names = tuple(names) or (THIS_MACHINE,)
        self.facts: HostFacts | None = HostFacts(processes.boot_id(), oom_kill_count(), 0.0)
        self._files = files
        self._nonce = nonce
        self._fifos: dict[int, int] = {}
        self._opening = threading.Lock()
        self._boot_id = processes.boot_id()
        self._identities = {rank: identity for rank, identity in (known or {}).items() if rank in self.ranks}
        self._left: list[Process] | None = None
        self._holders: dict[int, str] | None = None
        self._closing = threading.Event()
        self._heartbeats: threading.Thread | None = None

    def start(self) -> None:
        if self.ranks and self._heartbeats is None:
            self._heartbeats = threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True)
            self._heartbeats.start()

    async def close(self) -> None:
        self._closing.set()
        with self._opening:
            for fifo in self._fifos.values():
                os.close(fifo)
            self._fifos.clear()

    def observe(self, rank: int, *, thorough: bool) -> RankObservation:
        identity = self._identities.get(rank) or read_identity(self._files.identity(rank))
        if identity is not None:
            self._identities[rank] = identity
        # Liveness before the record: a keeper that leaves in between has written it by then.
        gone = thorough and identity is not None and not self._keeper_alive(identity)
        record = read_exit(self._files.exit(rank))
        return RankObservation(identity, record, vanished=gone and record is None)

    def exit_output(self, rank: int) -> ExitOutput:
        return exit_output(self._files, rank)

    def request_exit_output(self) -> None:
        return

    def send_command(self, rank: int, command: bytes) -> None:
        with self._opening:
            if self._closing.is_set():
                return
            try:
                if rank not in self._fifos:
                    # Reading too, so that opening never waits and a keeper that is late finds the command.
                    flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
                    self._fifos[rank] = os.open(self._files.control(rank), flags)
                os.write(self._fifos[rank], command)
            except OSError:
                # Not there yet; or full: a keeper that does not read has heartbeats enough, and is ended by signals.
                # Whatever else it is (no descriptor free, say), the next heartbeat is sent all the same.
                return

    def kill_ranks(self) -> None:
        for identity in self._identities.values():
            if processes.alive(identity.trainer_pid, identity.trainer_start):
                processes.kill_group(identity.trainer_pgid, signal.SIGKILL)

    def request_processes(self, *, kill: bool) -> None:
        if kill:
            self._files.fence()
        try:
            self._left = processes.with_nonce(self._nonce)
        except (OSError, subprocess.SubprocessError):
            # Without an answer there is no proof.
            self._left = None
        for process in (self._left or ()) if kill else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)

    def processes(self) -> list[Process] | None:
        return self._left

    def request_port_holders(self, ports: Sequence[int]) -> None:
        self._holders = {port: who for port in ports if (who := describe_port_holder(port)) is not None}

    def port_holders(self) -> dict[int, str] | None:
        return self._holders

    def file(self, name: str) -> NodeFile:
        return LocalFile(Path(self._files.directory) / name)

    def _keeper_alive(self, identity: Identity) -> bool:
        return identity.boot_id == self._boot_id and processes.alive(identity.keeper_pid, identity.keeper_start)

    def _send_heartbeats(self) -> None:
        while True:
            for rank in self.ranks:
                self.send_command(rank, HEARTBEAT)
            if self._closing.wait(HEARTBEAT_INTERVAL_S):
                return
