"""The head's client of the agent on a host: probes and commands there, each with one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeVar

from pydantic import BaseModel

from engine.cluster.bundle import node_bundle
from engine.cluster.probe_results import WriteReport, parse_output
from engine.cluster.transport.base import Channel, Completed, Transport, expanded
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, LaunchError, NodeUnreachable
from engine.models import Late, NoValue
from engine.node.bootstrap import make_private, node_root
from engine.protocol import messages
from engine.protocol.attempt import lease_clock
from engine.protocol.exit_codes import ShellExit
from engine.security.identifiers import LOCAL, safe_repr
from engine.security.paths import path_fault
from engine.security.sanitise import count_or_none, json_object, json_or_none, plain

SILENCE_LIMIT_S = 20.0
"""A connection on which nothing comes for as long is given up; ssh's own keepalive is usually earlier."""
_CLOSE_LIMIT_S = 2.0
_READ_BYTES = 256 * 1024
_CANCEL_LIMIT_S = 5.0
_PIECE = 1 << 20
"""Bytes of stdin: less than a message holds."""
_FILES_LIMIT_S = 30.0
_ANSWER_S = 10.0
"""As long as for a new connection: one that was open before a node went away does not break any earlier by itself."""
_LINE_LIMIT = 1 << 17
"""For what a login shell prints before the bootstrap's first line, and that line."""
_OUTPUT_LIMIT = 1 << 25
_NO_FILE = 1
"""tail's exit code for a file that it cannot open."""
THIS_MACHINE = NodeConfig(name="this machine", ssh=LOCAL, python=sys.executable, workdir="/")
"""As a host, whether or not a rank runs here: its agent runs with the python that runs us."""
_NOT_EXECUTED = frozenset({"ENOEXEC", "EACCES", "ELOOP", "ENOTDIR", "EBADARCH", "EBADEXEC", "EBADMACHO"})
"""Errors of execve(2) that lie in the program; EBAD… are macOS's."""
_KILLED = frozenset({1, 2, 9, 13, 15})
"""HUP, INT, KILL, PIPE and TERM: what they end may be sound. A missing dylib ends it by ABRT."""
_SET_PYTHON = "set python in its [[node]] to the interpreter that has mlx, or torch for a PyTorch job"

Result = TypeVar("Result", bound=BaseModel)
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class InterpreterBroken(LaunchError):
    """The node's python cannot be run, or ends by itself before it has run anything."""


class InterpreterMissing(InterpreterBroken):
    """The node has no such python."""


@dataclass(frozen=True)
class SessionLimits:
    """All in seconds. The defaults are far above the 0.2 s of a node that is awake: a Mac that wakes, or one whose disk
    is cold, takes its time."""

    connect_s: float = 30.0
    """For the node's python to be started."""
    start_s: float = 30.0
    """From there to the agent's first message: a slow line takes its time for the bundle."""
    heartbeat_interval_s: float = 5.0
    idle_s: float = 60.0
    """An agent without requests for as long is ended; the next request starts another one."""


@dataclass(frozen=True)
class AgentHome:
    """Where an agent runs, and how far the bundle could be staged there."""

    home: str
    """The home of the node's user, absolute."""
    staging_problem: str | None = None
    """Why the bundle could not be written to the node's disk: the agent then runs from memory."""
    staging_path: str = ""
    free_bytes: int | None = None


class Heartbeats:
    """The heartbeats of one connection, and when anything came back."""

    def __init__(self) -> None:
        self.received_at = lease_clock()
        self.sent_at: dict[int, float] = {}
        """Heartbeat under way -> when it was sent (wall clock)."""
        self.acknowledged = asyncio.Event()
        self._number = self._answered = self._acknowledged_number = 0

    def next(self) -> messages.Heartbeat:
        self._number += 1
        self.sent_at[self._number] = time.time()
        return messages.Heartbeat(self._number, self._answered, self._acknowledged_number)

    def take(self, message: messages.Message) -> None:
        if isinstance(message, messages.HeartbeatAck):
            self.sent_at.pop(message.number, None)
            self._acknowledged_number = message.number
            self.acknowledged.set()
        # Whatever it was: on a slow line the acknowledgements come late, behind a megabyte of somebody's log.
        self.received_at = lease_clock()
        self._answered = self._number


class AgentSession:
    """One connection to an agent, from its start to its end. Close with `aclose()`."""

    def __init__(
        self,
        channel: Channel,
        started: tuple[AgentHome, bytes],
        where: str,
        limits: SessionLimits,
        on_message: Callable[[messages.Message], None],
    ) -> None:
        """`started` is the agent's home and what it has sent so far, from its Hello on. `on_message` receives what is
        no reply to a request that was begun here and is awaited, and first the Hello."""
        self.home, received = started
        self.heartbeats = Heartbeats()
        self.ending = False
        """No request is to begin any more: it was idle, or its connection has ended."""
        self.why_ended: str | None = None
        """None while it goes on."""
        self._channel = channel
        self._where = where
        self._limits = limits
        self._on_message = on_message
        self._decoder = messages.Decoder()
        self._outgoing = bytearray()
        self._to_write = asyncio.Event()
        self._numbers = itertools.count(1)
        self._pending: dict[int, AgentRequest] = {}
        self._idle_since = time.monotonic()
        self._take(received)
        self._ended = asyncio.create_task(self._run(), name=f"agent of {where}")

    def send(self, message: messages.Message) -> None:
        self._outgoing += messages.encode(message)
        self._to_write.set()

    async def ended(self) -> str:
        """Wait for the end of the connection; why it ended."""
        return await asyncio.shield(self._ended)

    def begin(self, request: Callable[[int], messages.Message]) -> AgentRequest:
        """Send a request made with its number. Raises NodeUnreachable."""
        self.check()
        number = next(self._numbers)
        begun = self._pending[number] = AgentRequest(self, number)
        self.send(request(number))
        self._idle_since = time.monotonic()
        return begun

    def check(self) -> None:
        """Raises NodeUnreachable when the connection has ended."""
        if self.why_ended is not None:
            raise NodeUnreachable("its agent has ended", where=self._where, why=self.why_ended)

    async def round_trip_s(self) -> float:
        """Seconds of one heartbeat and its acknowledgement. Raises NodeUnreachable."""
        self._idle_since = time.monotonic()
        began, heartbeat = time.perf_counter(), self.heartbeats.next()
        self.send(heartbeat)
        while heartbeat.number in self.heartbeats.sent_at:
            self.check()
            self.heartbeats.acknowledged.clear()
            await self.heartbeats.acknowledged.wait()
        return time.perf_counter() - began

    def forget(self, request: AgentRequest) -> None:
        pending = self._pending.pop(request.number, None)
        if pending is not None and request.ended is None and self.why_ended is None:
            self.send(messages.CancelRequest(request.number))

    async def aclose(self) -> None:
        """End the agent, and what it has started."""
        self._ended.cancel()
        await asyncio.wait({self._ended})
        await self._close("the connection was closed")

    async def _run(self) -> str:
        tasks = {
            asyncio.create_task(self._receive(), name="receive"),
            asyncio.create_task(self._write(), name="write"),
            asyncio.create_task(self._send_heartbeats(), name="heartbeats"),
        }
        why = "the connection was closed"
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            why = next(iter(done)).result()
        except (FlightDeckError, OSError, ValueError, KeyError, TypeError) as error:
            why = str(error) or type(error).__name__
        finally:
            self.ending = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close(why)
        return why

    async def _close(self, why: str) -> None:
        if self.why_ended is None:
            self.why_ended = why
            self.heartbeats.acknowledged.set()
            for request in self._pending.values():
                request.changed.set()
            await _close_quietly(self._channel)

    async def _receive(self) -> str:
        while data := await self._channel.read(_READ_BYTES):
            self._take(data)
        code = await self._channel.close()
        output = self._channel.exit_output
        return f"it ended with {code}" + (f": {output}" if output else "")

    def _take(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            if isinstance(message, messages.RequestOutput | messages.RequestEnded) and message.request in self._pending:
                self._take_reply(message, self._pending[message.request])
            else:
                self._on_message(message)
            self.heartbeats.take(message)

    def _take_reply(self, message: messages.RequestOutput | messages.RequestEnded, request: AgentRequest) -> None:
        if isinstance(message, messages.RequestEnded):
            request.ended = message
        elif len(request.output) + len(message.data) > _OUTPUT_LIMIT:
            # An agent of ours stops earlier: whatever this is, it does not fill the head's memory.
            self.send(messages.CancelRequest(message.request))
            request.ended = messages.RequestEnded(message.request, 1, f"more than {_OUTPUT_LIMIT:,} bytes of output")
        elif request.ended is None:
            request.output += message.data
        request.changed.set()

    async def _write(self) -> str:
        while True:
            await self._to_write.wait()
            self._to_write.clear()
            data = bytes(self._outgoing)
            self._outgoing.clear()
            await self._channel.write(data)

    async def _send_heartbeats(self) -> str:
        while lease_clock() - self.heartbeats.received_at < SILENCE_LIMIT_S:
            if self._pending:
                self._idle_since = time.monotonic()
            elif time.monotonic() - self._idle_since > self._limits.idle_s:
                # At once: a request that comes while it is being closed is another agent's.
                self.ending = True
                return "it was idle"
            self.send(self.heartbeats.next())
            await asyncio.sleep(self._limits.heartbeat_interval_s)
        return f"no answer for {SILENCE_LIMIT_S:.0f} s"


class AgentRequest:
    """One request, and its output as it comes. Close with `close()`."""

    def __init__(self, session: AgentSession, number: int) -> None:
        self.number = number
        self.output = bytearray()
        """Received and not read yet."""
        self.ended: messages.RequestEnded | None = None
        self.changed = asyncio.Event()
        self._session = session

    def send(self, data: bytes) -> None:
        """More stdin for a probe that goes on. Raises NodeUnreachable."""
        self._session.check()
        self._session.send(messages.RequestInput(self.number, data))

    def send_json(self, document: object) -> None:
        """A line of stdin: what would be an argument could be seen by others there. Raises NodeUnreachable."""
        text = json.dumps(document).encode() + b"\n"
        for at in range(0, len(text), _PIECE):
            self.send(text[at : at + _PIECE])

    async def completed(self, timeout_s: float) -> Completed:
        """Its end, exit code None when that does not come in time. Raises NodeUnreachable."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.ended is None:
                    await self._change()
        code, stderr = (None, "") if self.ended is None else (self.ended.exit_code, self.ended.stderr)
        return Completed(code, bytes(self.output), stderr.encode(errors="replace"))

    async def next_line(self, timeout_s: float) -> bytes | Late | messages.RequestEnded:
        """The next line of its output, or its end. Raises NodeUnreachable."""
        if none := await self._none(lambda: b"\n" in self.output, timeout_s):
            return none
        line, _, self.output = self.output.partition(b"\n")
        return bytes(line)

    async def next_data(self, timeout_s: float) -> bytes | Late | messages.RequestEnded:
        """All of its output that has come and was not read, or its end. Raises NodeUnreachable."""
        if none := await self._none(lambda: bool(self.output), timeout_s):
            return none
        data, self.output = self.output, bytearray()
        return bytes(data)

    async def _none(self, came: Callable[[], bool], timeout_s: float) -> Late | messages.RequestEnded | None:
        """Why what is waited for does not come; None once it has. Raises NodeUnreachable."""
        try:
            async with asyncio.timeout(timeout_s):
                while not came():
                    if self.ended is not None:
                        return self.ended
                    await self._change()
        except TimeoutError:
            return Late(command="the probe", after_s=timeout_s)
        return None

    async def next_result(self, name: str, result_type: type[Result], timeout_s: float) -> Result | NoValue:
        """The next document of a probe that goes on. Raises NodeUnreachable."""
        line = await self.next_line(timeout_s)
        if isinstance(line, Late):
            return line.model_copy(update={"command": f"the {name} probe"})
        if isinstance(line, messages.RequestEnded):
            done = Completed(line.exit_code, b"", line.stderr.encode(errors="replace"))
        else:
            done = Completed(0, line, b"")
        return parse_output(f"the {name} probe", done, result_type, after_s=timeout_s)

    async def cancel(self) -> None:
        """End it on the node, and wait until it has ended there. Raises NodeUnreachable."""
        self._session.send(messages.CancelRequest(self.number))
        await self.completed(_CANCEL_LIMIT_S)

    def close(self) -> None:
        """Give up what has not ended."""
        self._session.forget(self)

    async def _change(self) -> None:
        self._session.check()
        self.changed.clear()
        await self.changed.wait()


class AgentClient:
    """The agent of one host and python, started at first use, and again after its connection has broken. Close with
    `aclose()`."""

    def __init__(self, node: NodeConfig, transport: Transport) -> None:
        self.node = node
        self.transport = transport
        self._opening: asyncio.Task[AgentSession] | None = None

    @property
    def connected(self) -> bool:
        """Its agent runs, as far as is known."""
        return self._opening is not None and self._opening.done() and not self._over(self._opening)

    async def session(self) -> AgentSession:
        """Raises LaunchError when no agent can be started there, NodeUnreachable."""
        while True:
            opening = self._opening
            if opening is None or (opening.done() and self._over(opening)):
                opening = self._opening = asyncio.create_task(open_session(self.node, self.transport))
            session = await asyncio.shield(opening)
            if not session.ending:
                return session
            # Not cancelled with it when it is closed.
            await asyncio.wait({asyncio.ensure_future(session.ended())})

    async def round_trip_s(self) -> float | None:
        """Seconds of one exchange with the agent now; None for this machine. Raises LaunchError when no agent can be
        started there, NodeUnreachable."""
        if self.node.local:
            return None
        session = await self.session()
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await session.round_trip_s()
        except TimeoutError:
            why = f"no answer within {_ANSWER_S:g} s"
            raise NodeUnreachable("does not answer", where=self.node.ssh, why=why, todo="is it on and awake?") from None

    async def probe(self, name: str, *arguments: str, result_type: type[Result], timeout_s: float) -> Result | NoValue:
        """Run a probe of engine.node.probes; arguments may begin with `~/`. Raises LaunchError when no agent
        can be started there, NodeUnreachable."""
        with contextlib.closing(await self.start_probe(name, *arguments)) as request:
            done = await request.completed(timeout_s)
        return parse_output(f"the {name} probe", done, result_type, after_s=timeout_s)

    async def start_probe(self, name: str, *arguments: str) -> AgentRequest:
        """A probe that goes on until it is closed."""
        session = await self.session()
        there = [expanded(argument, session.home.home) for argument in arguments]
        return session.begin(lambda number: messages.ProbeRequest(number, name, there))

    async def start_command(self, argv: Sequence[str], *, directory: str | None = None) -> AgentRequest:
        """A program that goes on until it ends, or is cancelled; without `directory` in the user's home."""
        session = await self.session()
        there = [expanded(argument, session.home.home) for argument in argv]
        return session.begin(lambda number: messages.CommandRequest(number, there, directory))

    async def run(self, argv: Sequence[str], *, timeout_s: float) -> Completed:
        """Run a program in the user's home; exit code None when the time limit ended it, with all that it started."""
        with contextlib.closing(await self.start_command(argv)) as request:
            completed = await request.completed(timeout_s)
            if completed.code is None:
                await request.cancel()
            return completed

    async def write(self, folder: PurePath, files: Mapping[str, str | None]) -> None:
        """Put a folder with these files (name -> text, or None for a FIFO) in place, all of it or nothing. Raises
        OSError, LaunchError when that is not known, NodeUnreachable."""
        outcome = await self.probe(
            "write", str(folder), json.dumps(files), result_type=WriteReport, timeout_s=_FILES_LIMIT_S
        )
        if (problem := value_of(outcome, self.node).problem) is not None:
            raise OSError(errno.EIO, problem, str(folder))

    async def read_end(self, path: PurePath, size: int) -> bytes:
        """The last `size` bytes of a file; none when there is no such file. Raises LaunchError when no agent can be
        started there or the file's end did not come, NodeUnreachable."""
        done = await self.run(["tail", "-c", str(size), str(path)], timeout_s=_FILES_LIMIT_S)
        if done.code == _NO_FILE:
            return b""
        if done.code != 0:
            late = f"{_FILES_LIMIT_S:g} s are over"
            why = late if done.code is None else done.exit_output or f"exit code {done.code}"
            raise LaunchError(f"the end of {path} could not be read", where=self.node.name, why=why)
        return done.stdout

    async def aclose(self) -> None:
        opening, self._opening = self._opening, None
        if opening is None:
            return
        if not opening.done():
            opening.cancel()
            await asyncio.wait({opening})
        if not opening.cancelled() and opening.exception() is None:
            await opening.result().aclose()

    @staticmethod
    def _over(opening: asyncio.Task[AgentSession]) -> bool:
        return opening.cancelled() or opening.exception() is not None or opening.result().why_ended is not None


def value_of(outcome: Result | NoValue, node: NodeConfig) -> Result:
    """Raises LaunchError for an outcome without a value."""
    if isinstance(outcome, NoValue):
        raise LaunchError(str(outcome), where=node.name)
    return outcome


def each_of(answers: Sequence[Answer], asked: Sequence[Asked], node: NodeConfig) -> list[tuple[Asked, Answer]]:
    """The questions with their answers. Raises LaunchError where these are not as many."""
    if len(answers) != len(asked):
        raise LaunchError(f"{len(answers)} answers came to {len(asked)} questions", where=node.name)
    return list(zip(asked, answers, strict=True))


async def open_session(
    node: NodeConfig,
    transport: Transport,
    limits: SessionLimits = SessionLimits(),
    on_message: Callable[[messages.Message], None] = lambda message: None,
) -> AgentSession:
    """Start an agent on the node's host, its bundle staged first when it is not there. Raises InterpreterMissing,
    LaunchError when no agent can be started there, NodeUnreachable."""
    root = [str(node_root())] if transport.target.local else []
    if root:
        # What stands in the way is reported by the bootstrap.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(make_private, node_root())
    bundle = await asyncio.to_thread(node_bundle)
    limit_s = limits.connect_s
    try:
        async with asyncio.timeout(limit_s):
            channel = await transport.open([node.python, "-I", "-S", "-c", bundle.bootstrap, bundle.name, *root])
        limit_s = limits.start_s
        try:
            async with asyncio.timeout(limit_s):
                started = await _Start(node, channel).run()
            return AgentSession(channel, started, node.name, limits, on_message)
        except BaseException as error:
            await _close_quietly(channel)
            if isinstance(error, ValueError | KeyError | TypeError | OverflowError):
                raise LaunchError("no agent answers", where=node.name, why=str(error)) from error
            raise
    except TimeoutError:
        raise NodeUnreachable(f"no answer from {node.python}", where=node.name, why=f"{limit_s:g} s are over") from None
    except OSError as error:
        kind = InterpreterBroken if errno.errorcode.get(error.errno or 0) in _NOT_EXECUTED else LaunchError
        kind = InterpreterMissing if isinstance(error, FileNotFoundError) else kind
        raise _cannot_run(node, error.strerror or str(error), kind) from error


async def _close_quietly(channel: Channel) -> None:
    with contextlib.suppress(FlightDeckError, OSError, TimeoutError):
        async with asyncio.timeout(_CLOSE_LIMIT_S):
            await channel.close()


class _Start:
    """The exchange with the bootstrap, up to the agent's Hello."""

    def __init__(self, node: NodeConfig, channel: Channel) -> None:
        self._node = node
        self._channel = channel
        self._received = b""
        self._runs = False

    async def run(self) -> tuple[AgentHome, bytes]:
        """The agent's home, and what it has sent so far, from its Hello on."""
        report = await self._bootstrap_line()
        home = report.get("home")
        if not isinstance(home, str) or path_fault(home) or not home.startswith("/") or ".." in home.split("/"):
            why = f"it is reported as {safe_repr(home)}"
            raise LaunchError(f"the home on {self._node.name} cannot be used", where=self._node.ssh, why=why)
        agent_home = AgentHome(home)
        if report.get("missing"):
            await self._channel.write(await asyncio.to_thread(lambda: node_bundle().packed))
            staged = await self._bootstrap_line()
            if staged.get("staged") is not True:
                problem, path = plain(staged.get("problem"), 200), plain(staged.get("path"), 300)
                agent_home = AgentHome(home, problem, path, count_or_none(staged.get("free_bytes")))
        line = await self._line() + b"\n"
        if not isinstance(next(messages.Decoder().feed(line), None), messages.Hello):
            raise ValueError(f"not {line[:80]!r}")
        return agent_home, line + self._received

    async def _bootstrap_line(self) -> dict[str, object]:
        while True:
            # A login shell's start files print what they like.
            report = json_object(json_or_none(await self._line()))
            if report.get("kind") == "bootstrap":
                self._runs = True
                return report

    async def _line(self) -> bytes:
        while b"\n" not in self._received:
            if len(self._received) > _LINE_LIMIT:
                raise LaunchError(f"a line of more than {_LINE_LIMIT:,} bytes", where=self._node.name)
            block = await self._channel.read(65_536)
            if not block:
                raise await self._ended()
            self._received += block
        line, _, self._received = self._received.partition(b"\n")
        return line

    async def _ended(self) -> LaunchError:
        code = await self._channel.close()
        output = plain(self._channel.exit_output, 200)
        if code in (ShellExit.NOT_FOUND, ShellExit.CANNOT_RUN):
            missing = code == ShellExit.NOT_FOUND
            return _cannot_run(self._node, output, InterpreterMissing if missing else InterpreterBroken)
        why = f"it ended with {code}" + (f": {output}" if output else "")
        ended_itself = code and (code - 128 if code > 128 else -code) not in _KILLED
        kind = InterpreterBroken if ended_itself and not self._runs else LaunchError
        return kind(f"{self._node.python} gave no answer", where=self._node.name, why=why)


def _cannot_run(node: NodeConfig, why: str, kind: type[LaunchError]) -> LaunchError:
    todo = _SET_PYTHON if kind is not LaunchError else ""
    return kind(f"{node.python} cannot be run on {node.name}", where=node.ssh, why=why, todo=todo)
