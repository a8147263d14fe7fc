"""The supervisor's connection to one host of an attempt: its ranks, heartbeats, commands, and its files as they grow.

Its own task does all the waiting: it connects to the host's agent, also to that of this machine, and reconnects without
end. The caller's thread reads what was left in memory, so that an unreachable host costs the others nothing; the files
of this machine it reads by their path."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from engine.cluster.agent_client import AgentSession, SessionLimits, open_session
from engine.cluster.awake_clock import AwakeClock
from engine.cluster.probe_results import PortHolders, last_json
from engine.cluster.telemetry import PowerMeter
from engine.cluster.transport.base import Transport, expanded
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError
from engine.node.processes import Process, same_boot
from engine.protocol import messages
from engine.protocol.attempt import ExitRecord, Identity, NodeFiles, lease_clock, open_regular, size_of
from engine.protocol.events import ExitOutput
from engine.security.sanitise import plain

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
    silent_s: float
    """Since it last answered, also while the head slept; before its first answer, since the connection was started.
    Soon after such a sleep, since its end."""
    answered: bool
    """It has answered at least once."""
    problem: str | None = None
    """Why it is not connected, in one line."""
    longest_silence_s: float = 0.0
    """Between two answers, or since the last, also of those that nobody has looked at."""

    @property
    def answering(self) -> bool:
        return self.silent_s < SILENCE_S


@dataclass(frozen=True)
class HostFacts:
    boot_id: str
    memory_kills: int | None
    """Processes that it has killed for want of memory since it started."""
    clock_ahead_s: float
    """Its wall clock minus the head's, good to half a round trip."""


class NodeFile(Protocol):
    """A file on a node. Nothing here waits for another machine: what has not come yet comes at a later call."""

    generation: int
    """Another number when the node has been away in between: the mirror's tail is then compared again."""

    def read_from(self, offset: int, size: int) -> bytes:
        """At most `size` bytes from `offset`; none at its end, while it is not there, or while they have not come.
        Raises OSError."""

    def read_whole(self, offset: int, size: int) -> bytes | None:
        """`size` bytes from `offset`, fewer only at its end; None while they have not come. Raises OSError."""

    def size(self) -> int | None:
        """Bytes that it has; None while that is not known."""


class LocalFile:
    """A NodeFile of this machine, read by its path: a flood of output costs half of what it costs through an agent."""

    generation = 0

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_from(self, offset: int, size: int) -> bytes:
        try:
            with open_regular(self._path) as file:
                return os.pread(file.fileno(), size, offset)
        except FileNotFoundError:
            return b""

    read_whole = read_from

    def size(self) -> int | None:
        return size_of(self._path)


WINDOW_BYTES = 1 << 20
"""Limit for one file, in memory and under way together."""


class AgentFile:
    """A NodeFile that the agent sends. Its reader and its writer are two threads."""

    def __init__(self, name: str, order: Callable[[messages.ReadFile], None]) -> None:
        self.generation = 0
        self._name = name
        self._order = order
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._start = -1
        """Offset of the buffer's first byte; -1 before the first read."""
        self._until = 0
        self._at_end = False
        self._size: int | None = None
        self._problem: str | None = None

    def size(self) -> int | None:
        """Known when nothing will be added any more."""
        return self._size

    def read_from(self, offset: int, size: int) -> bytes:
        with self._lock:
            self._go_to(offset)
            return bytes(memoryview(self._buffer)[:size])

    def read_whole(self, offset: int, size: int) -> bytes | None:
        with self._lock:
            self._go_to(offset)
            return bytes(self._buffer[:size]) if len(self._buffer) >= size or self._at_end else None

    def take(self, begin: int, data: bytes, *, end: bool) -> None:
        """Keep what the agent has sent, apart from what is here already or was under way when the order changed. Raises
        ValueError for more than was asked for."""
        with self._lock:
            kept = self._start + len(self._buffer) - begin
            if not 0 <= kept <= len(data):
                return
            if begin + len(data) > self._until:
                raise ValueError(f"it sends more of {self._name} than was asked for")
            self._buffer += data[kept:]
            self._at_end = end
            self._problem = None

    def fail(self, problem: str) -> None:
        """Reads raise from now on: the agent cannot read it."""
        self._problem = plain(problem, 200)

    def settle(self, size: int) -> None:
        """Nobody is left who could add to its `size` bytes."""
        self._size = size

    def reconnect(self) -> messages.ReadFile | None:
        """The request for a new agent; None when nothing was requested yet."""
        with self._lock:
            self.generation += 1
            self._problem = None
            if self._start < 0:
                return None
            self._until = self._start + WINDOW_BYTES
            return messages.ReadFile(self._name, self._until, self._start + len(self._buffer))

    def _go_to(self, offset: int) -> None:
        if self._problem is not None:
            raise OSError(errno.EIO, f"the node cannot read it: {self._problem}")
        passed = offset - self._start
        if self._start < 0 or not 0 <= passed <= len(self._buffer):
            self._buffer.clear()
            self._start, self._until, self._at_end = offset, offset + WINDOW_BYTES, False
            self._order(messages.ReadFile(self._name, self._until, offset))
            return
        del self._buffer[:passed]
        self._start = offset
        if offset + WINDOW_BYTES - self._until >= WINDOW_BYTES // 2:
            self._until = offset + WINDOW_BYTES
            self._order(messages.ReadFile(self._name, self._until))


_POWER, _POWER_EVERY_S = 0, 10.0
"""The number of the request for the host's power, which no other has, and how often it is told."""
HEARTBEAT_INTERVAL_S = 1.0
CONNECT_LIMIT_S = 12.0
START_LIMIT_S = 20.0
"""The bundle is there already."""
_CLOSE_LIMIT_S = 2.0
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 3.0


@dataclass(frozen=True)
class AttemptOnHost:
    files: NodeFiles
    """The attempt's directory there; `~` is the home of the node's user."""
    nonce: str
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Rank -> the name of its node."""
    known: Mapping[int, Identity] = field(default_factory=dict)
    """Identities that an earlier supervisor has seen, also of ranks on other hosts."""


class AgentConnection:
    """A host's agent, connected again whenever the connection ends. `send` is for any thread; all else runs on the loop
    that `start` was called on."""

    def __init__(
        self,
        node: NodeConfig,
        transport: Transport,
        opening: Callable[[str], Iterable[messages.Message]],
        on_message: Callable[[messages.Message], None],
    ) -> None:
        """`opening`: the messages that a new agent must get first, given its user's home."""
        self.session: AgentSession | None = None
        self.answered = False
        """It has answered at least once."""
        self.problem: str | None = None
        """Why it is not connected, in one line."""
        self.power = PowerMeter()
        self._node = node
        self._transport = transport
        self._opening = opening
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._answered_at = lease_clock()
        self.longest_silence_s = 0.0
        """Before its last message, by the clock of whoever reads them."""
        self._watching = False

    @property
    def answered_at(self) -> float:
        """By the lease clock. Before it has reported what there is of its ranks, an agent's word is no answer to where
        they are."""
        session = self.session
        if session is None or not self._watching:
            return self._answered_at
        return max(self._answered_at, session.heartbeats.received_at)

    def send(self, message: messages.Message) -> None:
        """Nothing while there is no agent: what must reach it is sent again then."""
        if self._loop is not None:
            # One that is closing sends nothing any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._put, message)

    def start(self) -> None:
        """On the running loop."""
        self._loop = asyncio.get_running_loop()
        self._answered_at = lease_clock()
        self._task = asyncio.create_task(self._stay_connected(), name=f"connection to {self._node.ssh}")

    async def close(self) -> None:
        while self._task is not None and not self._task.done():
            # Again: a cancellation that meets the end of a wait within it is lost.
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CLOSE_LIMIT_S)

    def _put(self, message: messages.Message) -> None:
        if self.session is not None:
            self.session.send(message)

    async def _stay_connected(self) -> None:
        """Connect, and again whenever the connection ends, until cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            started = time.monotonic()
            try:
                self.problem = await self._connect_once()
            except Exception as fault:
                # Whatever it is, ours or the node's: without this task the node's ranks get no heartbeats, and end.
                traceback.print_exception(fault, chain=False)
                self.problem = f"{type(fault).__name__}: {fault}"
            retry_s = FIRST_RETRY_S if time.monotonic() - started > LAST_RETRY_S else min(2 * retry_s, LAST_RETRY_S)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))

    async def _connect_once(self) -> str:
        """One connection from its beginning to its end; why it has ended."""
        limits = SessionLimits(CONNECT_LIMIT_S, START_LIMIT_S, HEARTBEAT_INTERVAL_S, idle_s=float("inf"))
        try:
            session = await open_session(self._node, self._transport, limits, self._take)
        except (FlightDeckError, OSError) as error:
            return str(error) or "no answer"
        try:
            self.session = session
            for message in self._opening(session.home.home):
                session.send(message)
            return await session.ended()
        finally:
            self._answered_at, self._watching, self.session = self.answered_at, False, None
            await session.aclose()

    def _take(self, message: messages.Message) -> None:
        self.problem = None
        if isinstance(message, messages.Watching):
            self.answered = self._watching = True
        self._on_message(message)


class ProcessListing:
    """The newest request for the processes of the attempt, and its answer."""

    def __init__(self) -> None:
        self.unanswered: messages.ListProcesses | None = None
        self.processes: list[Process] | None = None
        """None until there is an answer."""
        self.number = 0

    def request(self, *, kill: bool) -> messages.ListProcesses:
        if self.unanswered is None or self.unanswered.kill != kill:
            # The same request, sent again before it was answered, keeps its number: an answer that takes longer than
            # the time between two requests is an answer all the same.
            self.number += 1
            self.unanswered = messages.ListProcesses(self.number, kill)
        self.processes = None
        return self.unanswered

    def take(self, processes: list[Process]) -> None:
        self.unanswered, self.processes = None, processes


class HostConnection:
    """One host of the attempt. No method waits for the host or for the network; none raises for what they do. Once it
    has been started, it passes a heartbeat to its ranks' keepers every second, until it is closed.

    Methods are called from the supervisor's thread, tasks run on the loop that `start` was called on."""

    def __init__(self, node: NodeConfig, transport: Transport, part: AttemptOnHost) -> None:
        """`node` is that of the host's first rank."""
        self.names = tuple(part.nodes.values()) or (node.name,)
        self.ranks = tuple(part.nodes)
        self.local = node.local
        """It is this machine."""
        self.clock = AwakeClock()
        """The head's."""
        self.facts: HostFacts | None = None
        """None until it has answered."""
        self.on_news: Callable[[], None] = lambda: None
        """Called when a rank has started or ended, or no process is left."""
        self.port_holders: dict[int, str] | None = None
        """Port -> who holds it, as the host last answered `request_port_holders`; None until it has answered."""
        self._attempt = part
        self._agent = AgentConnection(node, transport, self._opening, self._take)
        self._observations = {rank: RankObservation(identity=part.known.get(rank)) for rank in self.ranks}
        self._exit_outputs: dict[int, ExitOutput] = {}
        self._standing: dict[int, messages.RankCommand] = {}
        """The last STOP, EMERGENCY_CHECKPOINT or END to each rank, sent again after each reconnect."""
        self._agent_files: dict[str, AgentFile] = {}
        self._listing = ProcessListing()
        self._asked_ports: tuple[int, tuple[int, ...]] = (0, ())
        """The number of the newest `request_port_holders`, and its ports."""

    @property
    def state(self) -> ConnectionState:
        silent_s = self.clock.silence_s(lease_clock() - self._agent.answered_at)
        longest_s = max(self._agent.longest_silence_s, silent_s)
        return ConnectionState(silent_s, self._agent.answered, self._agent.problem, longest_s)

    @property
    def power(self) -> PowerMeter:
        return self._agent.power

    def observe(self, rank: int) -> RankObservation:
        return self._observations[rank]

    def exit_output(self, rank: int) -> ExitOutput:
        """As last received: whole once the rank has ended, or `request_exit_output` has been answered."""
        return self._exit_outputs.get(rank, ExitOutput())

    def request_exit_output(self) -> None:
        for rank in self.ranks:
            self._agent.send(messages.ExitOutputRequest(rank))

    def send_command(self, rank: int, command: bytes) -> None:
        """STOP, EMERGENCY_CHECKPOINT or END to a keeper; while the host is away it is kept for its return."""
        # An END stays an END: STOP and EMERGENCY_CHECKPOINT come before it if at all.
        order = self._standing[rank] = messages.RankCommand(rank, command.decode().strip())
        self._agent.send(order)

    def kill_ranks(self) -> None:
        """KILL to the groups of its ranks' programs."""
        self._agent.send(messages.KillRanks())

    def request_processes(self, *, kill: bool) -> None:
        """Request the processes of the attempt, all that carry its nonce. With `kill`, they are killed after they were
        listed, and nothing of the attempt can start there any more."""
        self._agent.send(self._listing.request(kill=kill))

    def processes(self) -> list[Process] | None:
        """The answer to the last `request_processes`; None until there is one."""
        return self._listing.processes

    def request_port_holders(self, ports: Sequence[int]) -> None:
        """Request who holds these TCP ports there."""
        # Downwards: a session counts its own requests from 1.
        number = self._asked_ports[0] - 1
        self.port_holders, self._asked_ports = None, (number, tuple(ports))
        self._agent.send(messages.ProbeRequest(number, "ports", [f":{port}" for port in ports]))

    def file(self, name: str) -> NodeFile:
        """A file of the attempt's directory, by its name there."""
        if self.local:
            return LocalFile(self._attempt.files.directory / name)
        return self._agent_files.setdefault(name, AgentFile(name, self._agent.send))

    def start(self) -> None:
        """On the running loop."""
        self._agent.start()

    async def close(self) -> None:
        await self._agent.close()

    def _opening(self, home: str) -> Iterator[messages.Message]:
        """Everything that a new agent must know, in the order in which it is to answer."""
        identities = [seen.identity for seen in self._observations.values() if seen.identity is not None]
        directory = expanded(str(self._attempt.files.directory), home)
        yield messages.Watch(directory, self._attempt.nonce, list(self.ranks), identities)
        yield from list(self._standing.values())
        for file in list(self._agent_files.values()):
            if (order := file.reconnect()) is not None:
                yield order
        if self._listing.unanswered is not None:
            # Behind the files: with its answer the agent reports how long they are.
            yield self._listing.unanswered
        yield messages.ProbeRequest(_POWER, "telemetry", [f"{_POWER_EVERY_S:g}"])

    def _take(self, message: messages.Message) -> None:
        # Until now nothing had come.
        self._agent.longest_silence_s = self.state.longest_silence_s
        if (
            isinstance(message, messages.RankStarted | messages.RankEnded | messages.ExitOutputReply)
            and message.rank not in self._observations
        ):
            raise ValueError(f"it reports a rank {message.rank}, which it does not have")
        if isinstance(message, messages.FileData):
            self._agent_files[message.file].take(message.begin, message.data, end=message.end)
        elif isinstance(message, messages.FileError):
            self._agent_files[message.file].fail(message.problem)
        elif isinstance(message, messages.HeartbeatAck):
            self._take_ack(message)
        elif isinstance(message, messages.Hello):
            self._take_hello(message)
        elif isinstance(message, messages.RankStarted):
            self._update(message.rank, identity=message.identity)
            self._note_restart()
        elif isinstance(message, messages.RankEnded):
            self._take_end(message)
        elif isinstance(message, messages.ExitOutputReply):
            self._exit_outputs[message.rank] = message.output
        elif isinstance(message, messages.RequestOutput) and message.request == _POWER:
            self.power.feed(message.data, lease_clock())
        elif isinstance(message, messages.RequestOutput) and message.request == self._asked_ports[0]:
            self._take_port_holders(message)
        elif isinstance(message, messages.ProcessList) and message.number == self._listing.number:
            self._take_processes(message)

    def _take_port_holders(self, message: messages.RequestOutput) -> None:
        """The answer for the ports of a few ranks comes as one message."""
        reply, ports = last_json(message.data, PortHolders), self._asked_ports[1]
        if reply is not None and len(reply.ports) == len(ports):
            self.port_holders = {port: held.holder for port, held in zip(ports, reply.ports, strict=True) if held}

    def _take_hello(self, message: messages.Hello) -> None:
        ahead = self.facts.clock_ahead_s if self.facts is not None else message.at - time.time()
        self.facts = HostFacts(message.boot_id, message.memory_kills, ahead)
        self._note_restart()

    def _note_restart(self) -> None:
        """Since a rank was started. A restart of this machine ended the supervisor, too: the next one knows it from the
        journal. That its keeper is gone, and whether it has left an exit record, the agent reports."""
        boot_id = self.facts.boot_id if self.facts is not None else None
        for rank, seen in self._observations.items():
            if seen.identity is not None and boot_id and not same_boot(seen.identity.boot_id, boot_id):
                self._update(rank, restarted=not self.local)

    def _take_ack(self, message: messages.HeartbeatAck) -> None:
        session = self._agent.session
        sent_at = session.heartbeats.sent_at.get(message.number) if session is not None else None
        if sent_at is not None and self.facts is not None:
            self.facts = replace(self.facts, clock_ahead_s=message.at - (sent_at + time.time()) / 2)

    def _take_end(self, message: messages.RankEnded) -> None:
        record = message.record
        if record is not None:
            error, stopped_by = record.error and plain(record.error), record.stopped_by and plain(record.stopped_by)
            record = replace(record, error=error, stopped_by=stopped_by)
        self._exit_outputs[message.rank] = message.output
        if self.facts is not None:
            self.facts = replace(self.facts, memory_kills=message.memory_kills)
        self._update(message.rank, record=record, vanished=record is None)

    def _take_processes(self, message: messages.ProcessList) -> None:
        processes = [Process(pid, plain(command, 200)) for pid, command in message.processes]
        if not processes:
            # Before the answer: who sees that nothing is left also sees how long the files are.
            for name, size in message.sizes.items():
                self._agent_files[name].settle(size)
        self._listing.take(processes)
        if not processes:
            self.on_news()

    def _update(self, rank: int, **seen: Any) -> None:
        self._observations[rank] = replace(self._observations[rank], **seen)
        self.on_news()
