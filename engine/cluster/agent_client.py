"""The head's client of the agent on a host: probes and commands there, each with one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import BaseModel

from engine.cluster.bundle import bootstrap_text, bundle_name, packed_bundle
from engine.cluster.replies import parse_output
from engine.cluster.transport.base import Channel, Completed, Transport, in_home
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, LaunchError, NodeUnreachable
from engine.outcomes import Late, NoValue
from engine.protocol.messages import (
    VERSION,
    CancelRequest,
    CommandRequest,
    Decoder,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Message,
    ProbeRequest,
    RequestEnded,
    RequestInput,
    RequestOutput,
    encode,
)
from engine.security.identifiers import safe_repr
from engine.security.paths import make_private, path_fault
from engine.security.sanitise import plain
from engine.store.layout import node_root

OPEN_LIMIT_S = 30.0
"""Far above the 0.2 s of a node that is awake: a Mac that wakes, or one whose disk is cold, takes its time."""
HEARTBEAT_INTERVAL_S = 5.0
IDLE_LIMIT_S = 60.0
"""An agent without requests for as long is ended; the next request starts another one."""
SILENCE_LIMIT_S = 20.0
"""A connection on which nothing comes for as long is given up; ssh's own keepalive is usually earlier."""
_CLOSE_LIMIT_S = 2.0
_READ_BYTES = 256 * 1024
_CANCEL_LIMIT_S = 5.0
_LINE_LIMIT = 1 << 17
_OUTPUT_LIMIT = 1 << 25
"""For what a login shell prints before the bootstrap's first line, and that line."""
_CANNOT_RUN, _COMMAND_NOT_FOUND = 126, 127
_SET_PYTHON = "set python in its [[node]] to the interpreter that has mlx"

Result = TypeVar("Result", bound=BaseModel)


class InterpreterMissing(LaunchError):
    """The node has no such python."""


class AgentLost(NodeUnreachable):
    """The agent on a host has ended, or its connection."""


@dataclass(frozen=True)
class AgentHome:
    """Where an agent runs, and how far the bundle could be staged there."""

    home: str
    """The home of the node's user, absolute."""
    staging_problem: str | None = None
    """Why the bundle could not be written to the node's disk: the agent then runs from memory."""
    staging_path: str = ""
    free_bytes: int | None = None


@dataclass
class _Pending:
    """A request under way."""

    output: bytearray
    changed: asyncio.Event
    ended: RequestEnded | None = None


class AgentSession:
    """One connection to an agent, from its start to its end. Close with `aclose()`."""

    def __init__(
        self, channel: Channel, home: AgentHome, hello: Hello, where: str, on_message: Callable[[Message], None]
    ) -> None:
        """`on_message` receives what is no reply to a request."""
        self.home = home
        self.hello = hello
        self.sent_at: dict[int, float] = {}
        """Heartbeat under way -> when it was sent (wall clock)."""
        self.received_at = time.monotonic()
        self._channel = channel
        self._where = where
        self._on_message = on_message
        self._decoder = Decoder()
        self._outgoing = bytearray()
        self._to_write = asyncio.Event()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._heartbeat = self._answered = 0
        self._idle_since = time.monotonic()
        self._ended: asyncio.Task[str] | None = None
        self._why: str | None = None

    def start(self, heartbeat_interval_s: float, idle_limit_s: float, received: bytes) -> None:
        """Start the session's tasks; `received` came behind the Hello."""
        self._take(received)
        running = self._run(heartbeat_interval_s, idle_limit_s)
        self._ended = asyncio.create_task(running, name=f"agent of {self._where}")

    @property
    def why_ended(self) -> str | None:
        """None while it goes on."""
        return self._why

    def send(self, message: Message) -> None:
        self._outgoing += encode(message)
        self._to_write.set()

    async def ended(self) -> str:
        """Wait for the end of the connection; why it ended."""
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    def begin(self, request: Callable[[int], Message]) -> AgentRequest:
        """Send a request made with its number. Raises AgentLost."""
        self.check()
        number = next(self._numbers)
        pending = self._pending[number] = _Pending(bytearray(), asyncio.Event())
        self.send(request(number))
        self._idle_since = time.monotonic()
        return AgentRequest(self, number, pending)

    def check(self) -> None:
        """Raises AgentLost when the connection has ended."""
        if self._why is not None:
            raise AgentLost("its agent has ended", where=self._where, why=self._why)

    def forget(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None and pending.ended is None and self._why is None:
            self.send(CancelRequest(number))

    async def aclose(self) -> None:
        """End the agent, and what it has started."""
        if self._ended is not None:
            self._ended.cancel()
            await asyncio.wait({self._ended})
        await self._close("the connection was closed")

    async def _run(self, heartbeat_interval_s: float, idle_limit_s: float) -> str:
        tasks = {
            asyncio.create_task(self._receive(), name="receive"),
            asyncio.create_task(self._write(), name="write"),
            asyncio.create_task(self._send_heartbeats(heartbeat_interval_s, idle_limit_s), name="heartbeats"),
        }
        why = "the connection was closed"
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            why = next(iter(done)).result()
        except (FlightDeckError, OSError, ValueError, KeyError, TypeError) as error:
            why = str(error) or type(error).__name__
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close(why)
        return why

    async def _close(self, why: str) -> None:
        if self._why is None:
            self._why = why
            for pending in self._pending.values():
                pending.changed.set()
            with contextlib.suppress(FlightDeckError, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    await self._channel.close()

    async def _receive(self) -> str:
        while data := await self._channel.read(_READ_BYTES):
            self._take(data)
        code = await self._channel.close()
        output = self._channel.exit_output
        return f"it ended with {code}" + (f": {output}" if output else "")

    def _take(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            if isinstance(message, RequestOutput | RequestEnded):
                self._take_reply(message)
            else:
                self._on_message(message)
            if isinstance(message, HeartbeatAck):
                self.sent_at.pop(message.number, None)
            # Whatever it was: on a slow line the acknowledgements come late, behind a megabyte of somebody's log.
            self.received_at = time.monotonic()
            self._answered = self._heartbeat

    def _take_reply(self, message: RequestOutput | RequestEnded) -> None:
        pending = self._pending.get(message.request)
        if pending is None:
            return
        if isinstance(message, RequestEnded):
            pending.ended = message
        elif len(pending.output) + len(message.data) > _OUTPUT_LIMIT:
            # An agent of ours stops earlier: whatever this is, it does not fill the head's memory.
            self.send(CancelRequest(message.request))
            pending.ended = RequestEnded(message.request, 1, f"more than {_OUTPUT_LIMIT:,} bytes of output")
        elif pending.ended is None:
            pending.output += message.data
        pending.changed.set()

    async def _write(self) -> str:
        while True:
            await self._to_write.wait()
            self._to_write.clear()
            data = bytes(self._outgoing)
            self._outgoing.clear()
            await self._channel.write(data)

    async def _send_heartbeats(self, interval_s: float, idle_limit_s: float) -> str:
        while time.monotonic() - self.received_at < SILENCE_LIMIT_S:
            if self._pending:
                self._idle_since = time.monotonic()
            elif time.monotonic() - self._idle_since > idle_limit_s:
                return "it was idle"
            self._heartbeat += 1
            self.sent_at[self._heartbeat] = time.time()
            self.send(Heartbeat(self._heartbeat, self._answered))
            await asyncio.sleep(interval_s)
        return f"no answer for {SILENCE_LIMIT_S:.0f} s"


class AgentRequest:
    """One request, and its output as it comes. Close with `close()`."""

    def __init__(self, session: AgentSession, number: int, pending: _Pending) -> None:
        self._session = session
        self._number = number
        self._pending = pending

    def send(self, data: bytes) -> None:
        """More stdin for a probe that goes on. Raises AgentLost."""
        self._session.check()
        self._session.send(RequestInput(self._number, data))

    async def completed(self, timeout_s: float) -> Completed:
        """Its end, exit code None when that does not come in time. Raises AgentLost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._pending.ended is None:
                    await self._change()
        ended = self._pending.ended
        code, stderr = (None, "") if ended is None else (ended.exit_code, ended.stderr)
        return Completed(code, bytes(self._pending.output), stderr.encode(errors="replace"))

    async def next_line(self, timeout_s: float) -> bytes | Late | RequestEnded:
        """The next line of its output, or its end. Raises AgentLost."""
        try:
            async with asyncio.timeout(timeout_s):
                while b"\n" not in self._pending.output:
                    if self._pending.ended is not None:
                        return self._pending.ended
                    await self._change()
        except TimeoutError:
            return Late(command="the probe", after_s=timeout_s)
        line, _, rest = bytes(self._pending.output).partition(b"\n")
        self._pending.output[:] = rest
        return line

    async def next_result(self, name: str, result_type: type[Result], timeout_s: float) -> Result | NoValue:
        """The next document of a probe that goes on. Raises AgentLost."""
        line = await self.next_line(timeout_s)
        if isinstance(line, Late):
            return line.model_copy(update={"command": f"the {name} probe"})
        if isinstance(line, RequestEnded):
            done = Completed(line.exit_code, b"", line.stderr.encode(errors="replace"))
        else:
            done = Completed(0, line, b"")
        return parse_output(f"the {name} probe", done, result_type, after_s=timeout_s)

    async def cancel(self) -> None:
        """End it on the node, and wait until it has ended there. Raises AgentLost."""
        self._session.send(CancelRequest(self._number))
        await self.completed(_CANCEL_LIMIT_S)

    def close(self) -> None:
        """Give up what has not ended."""
        self._session.forget(self._number)

    async def _change(self) -> None:
        self._session.check()
        self._pending.changed.clear()
        await self._pending.changed.wait()


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
        opening = self._opening
        if opening is None or (opening.done() and self._over(opening)):
            opening = self._opening = asyncio.create_task(open_session(self.node, self.transport))
        return await asyncio.shield(opening)

    async def probe(self, name: str, *arguments: str, result_type: type[Result], timeout_s: float) -> Result | NoValue:
        """Run a probe of engine.node.probes; arguments may begin with `~/`. Raises LaunchError when no agent
        can be started there, NodeUnreachable."""
        request = await self.start_probe(name, *arguments)
        try:
            done = await request.completed(timeout_s)
        finally:
            request.close()
        return parse_output(f"the {name} probe", done, result_type, after_s=timeout_s)

    async def start_probe(self, name: str, *arguments: str) -> AgentRequest:
        """A probe that goes on until it is closed."""
        session = await self.session()
        expanded = [_expanded(argument, session.home.home) for argument in arguments]
        return session.begin(lambda number: ProbeRequest(number, name, expanded))

    async def run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> Completed:
        """Run a program in the user's home; exit code None when the time limit ended it, with all that it started."""
        session = await self.session()
        expanded = [_expanded(argument, session.home.home) for argument in argv]
        request = session.begin(lambda number: CommandRequest(number, expanded, stdin))
        try:
            completed = await request.completed(timeout_s)
            if completed.code is None:
                await request.cancel()
            return completed
        finally:
            request.close()

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


class TransportProvider(Protocol):
    """The way to each node, and its agent: engine.cluster.transport.fleet.Fleet."""

    def to(self, node: NodeConfig) -> Transport: ...

    def agent(self, node: NodeConfig) -> AgentClient: ...


def _expanded(argument: str, home: str) -> str:
    inside = in_home(argument)
    return argument if inside is None else f"{home}/{inside}".rstrip("/")


def _ignore(message: Message) -> None:
    """Where only replies are of interest."""


async def open_session(
    node: NodeConfig,
    transport: Transport,
    *,
    heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
    idle_limit_s: float = IDLE_LIMIT_S,
    on_message: Callable[[Message], None] = _ignore,
    limit_s: float = OPEN_LIMIT_S,
) -> AgentSession:
    """Start an agent on the node's host, its bundle staged first when it is not there. Raises InterpreterMissing,
    LaunchError when no agent can be started there, NodeUnreachable."""
    root = [str(node_root())] if transport.target.local else []
    if root:
        # What stands in the way is reported by the bootstrap.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(make_private, node_root())
    # Read once: a disk that stalls later holds up no reconnection.
    text = await asyncio.to_thread(bootstrap_text)
    name = await asyncio.to_thread(bundle_name)
    try:
        async with asyncio.timeout(limit_s):
            channel = await transport.open([node.python, "-I", "-S", "-c", text, name, *root])
            try:
                start = _Start(node, channel)
                home, hello, rest = await start.run()
                session = AgentSession(channel, home, hello, node.name, on_message)
                on_message(hello)
                session.start(heartbeat_interval_s, idle_limit_s, rest)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                await _close_quietly(channel)
                raise LaunchError("no agent answers", where=node.name, why=str(error)) from error
            except BaseException:
                await _close_quietly(channel)
                raise
    except FileNotFoundError as error:
        raise _no_python(node, error.strerror or str(error)) from error
    except TimeoutError:
        raise NodeUnreachable(f"no answer from {node.python}", where=node.name, why=f"{limit_s:g} s are over") from None
    except OSError as error:
        raise _cannot_run(node, error.strerror or str(error)) from error
    return session


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

    async def run(self) -> tuple[AgentHome, Hello, bytes]:
        """Where it runs, its Hello, and what has come behind that."""
        report = await self._bootstrap_line()
        home = report.get("home")
        if not isinstance(home, str) or path_fault(home) or not home.startswith("/") or ".." in home.split("/"):
            why = f"it is said to be {safe_repr(home)}"
            raise LaunchError(f"the home on {self._node.name} cannot be used", where=self._node.ssh, why=why)
        agent_home = AgentHome(home)
        if report.get("missing"):
            await self._channel.write(await asyncio.to_thread(packed_bundle))
            staged = await self._bootstrap_line()
            if staged.get("staged") is not True:
                problem = report if "problem" in report else staged
                free_bytes = problem.get("free_bytes")
                agent_home = AgentHome(
                    home,
                    plain(problem.get("problem"), 200),
                    plain(problem.get("path"), 300),
                    free_bytes if isinstance(free_bytes, int) else None,
                )
        return agent_home, await self._hello(), self._received

    async def _bootstrap_line(self) -> dict[str, object]:
        while True:
            line = await self._line()
            try:
                report = json.loads(line)
            except (ValueError, RecursionError):
                # A login shell's start files print what they like.
                continue
            if isinstance(report, dict) and report.get("kind") == "bootstrap":
                return report

    async def _hello(self) -> Hello:
        line = await self._line()
        try:
            message = next(Decoder().feed(line + b"\n"), None)
        except ValueError as error:
            raise LaunchError("no agent answers", where=self._node.name, why=str(error)) from error
        if not isinstance(message, Hello) or message.version != VERSION:
            raise LaunchError("no agent answers", where=self._node.name, why=f"not {line[:80]!r}")
        return message

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
        if code == _COMMAND_NOT_FOUND:
            return _no_python(self._node, output)
        if code == _CANNOT_RUN:
            return _cannot_run(self._node, output)
        why = f"it ended with {code}" + (f": {output}" if output else "")
        return LaunchError(f"{self._node.python} gave no answer", where=self._node.name, why=why)


def _no_python(node: NodeConfig, why: str) -> InterpreterMissing:
    return InterpreterMissing(f"{node.python} cannot be run on {node.name}", where=node.ssh, why=why, todo=_SET_PYTHON)


def _cannot_run(node: NodeConfig, why: str) -> LaunchError:
    return LaunchError(f"{node.python} cannot be run on {node.name}", where=node.ssh, why=why, todo=_SET_PYTHON)
