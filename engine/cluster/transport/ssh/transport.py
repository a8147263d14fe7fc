"""SshTransport: one connection, opened at first use, shared, and reopened by the next call after it broke.

A further connection is opened only where long-running programs take all sessions of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import asyncssh

from engine.cluster.transport.base import Channel, Completed, for_any_shell
from engine.cluster.transport.ssh import ConnectionLimiter
from engine.cluster.transport.ssh.auth import NamedHostKeyUnknown, host_key_mismatch
from engine.cluster.transport.ssh.channel import ShellCommand, SshChannel
from engine.cluster.transport.ssh.connection import LostBeforeStart, SessionRefused, SharedConnection, dial
from engine.cluster.transport.ssh.errors import SSH_ERRORS, connection_lost, unreachable_error
from engine.cluster.transport.ssh_config import add_known_host
from engine.errors import NodeUnreachable
from engine.security.identifiers import SshTarget

_CONNECTIONS = 6
_TRIES = 5
_PAUSE_S = 0.05
_KILL_LIMIT_S = 5.0
_CLOSE_LIMIT_S = 1.0
_GIVEN_UP_S = 2.0
_BACKGROUND_LIMIT_S = 3.0
_KILL = """kill -s KILL -- -{group} 2>/dev/null
left=40
while kill -s 0 -- -{group} 2>/dev/null; do
    alive=$(ps -A -o pgid= -o stat= | while read -r group state; do
        [ "$group" = {group} ] && case $state in (Z*) ;; (*) echo "$state" ;; esac
    done)
    [ -z "$alive" ] && command -v ps >/dev/null && break
    left=$((left - 1)); [ $left -gt 0 ] || exit 1
    sleep 0.05
done"""
"""On the node: end a process group, and look that nothing of it is alive: a zombie is not. (The Mac's sh reads no case
within `$( )` but with both brackets.)"""


class SshTransport:
    """One node over SSH."""

    def __init__(self, target: SshTarget, home: Path, limiter: ConnectionLimiter) -> None:
        """`home` is the state directory, with the host keys that were accepted; `limiter` is shared by all transports
        of a process."""
        self._target = target
        self._home = home
        self._limiter = limiter
        self._lines: list[SharedConnection] = []
        self._dialling: asyncio.Task[None] | None = None
        self._freed = asyncio.Event()
        self._echo: SshChannel | None = None
        self._measuring = asyncio.Lock()
        self._behind: set[asyncio.Task[None]] = set()

    @property
    def target(self) -> SshTarget:
        return self._target

    async def run(self, argv: Sequence[str], *, timeout_s: float) -> Completed:
        channel = await self._start(ShellCommand(argv), lasting=False)
        try:
            async with asyncio.timeout(timeout_s):
                return await channel.complete()
        except TimeoutError:
            # Also when the call is cancelled.
            await asyncio.shield(self._do_behind(channel.end()))
            return Completed(None, b"", b"")
        except BaseException:
            # Cancelled, or the connection was lost: then another one tells whether it runs on.
            await self._likely(channel.end())
            raise

    async def open(self, argv: Sequence[str]) -> Channel:
        return await self._start(ShellCommand(argv), lasting=True)

    async def round_trip_s(self) -> float | None:
        # Over a program that stays: no start of a login shell is measured.
        async with self._measuring:
            echo, self._echo = self._echo, None
            if echo is None or not echo.connected:
                echo = await self._start(ShellCommand(["cat"]), lasting=True)
            try:
                began = time.perf_counter()
                await echo.write(b"\n")
                if not await echo.read(1):
                    raise connection_lost(str(self._target), "the program that answers has left")
                seconds = time.perf_counter() - began
            except BaseException:
                await self._likely(echo.end())
                raise
            self._echo = echo
            return seconds

    async def accept(self, fingerprint: str) -> None:
        """Add the node's host key to our known_hosts, when it still shows the very key that a person has compared.
        Nothing is done for one that is known by now. Raises HostKeyChanged, NodeUnreachable, OSError."""
        try:
            dialled = await dial(self._target, self._home, self._limiter)
        except NamedHostKeyUnknown as offered:
            if offered.target != str(self._target):
                raise
            if offered.fingerprint != fingerprint:
                raise host_key_mismatch(str(self._target), fingerprint, offered.fingerprint) from offered
            await asyncio.to_thread(add_known_host, self._home, offered.name, offered.key)
        else:
            dialled.abort()

    async def close(self) -> None:
        lines, self._lines, self._echo = self._lines, [], None
        if self._dialling is not None:
            self._dialling.cancel()
        # What is being ended on the node is, first, where the node still answers.
        if self._behind:
            await asyncio.wait(set(self._behind), timeout=_BACKGROUND_LIMIT_S)
        for task in list(self._behind):
            task.cancel()
        await asyncio.gather(*(line.dialled.close(_CLOSE_LIMIT_S) for line in lines))

    async def _start(self, command: ShellCommand, *, lasting: bool) -> SshChannel:
        """A program that has begun. A session that the node refuses is asked for anew."""
        for attempt in range(_TRIES):
            line = await self._session(lasting=lasting)
            starting = asyncio.create_task(
                self._begun(line, command, lasting), name=f"{command.program} on {line.where}"
            )
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:
                # It may be under way already: whatever comes of it is ended.
                await self._likely(_undone(starting))
                raise
            except SessionRefused as refused:
                problem = unreachable_error(asyncssh.ChannelOpenError(2, str(refused)), str(self._target))
            except LostBeforeStart as gone:
                problem = connection_lost(str(self._target), str(gone))
            await self._pause(attempt)
        raise problem

    async def _begun(self, line: SharedConnection, command: ShellCommand, lasting: bool) -> SshChannel:
        """Takes over the session, and gives it back when the program has not begun."""

        def give() -> None:
            line.give(lasting=lasting)
            self._freed.set()

        try:
            process = await line.start(command.line)
        except BaseException:
            give()
            raise
        channel = SshChannel(process, line, command, kill_group=self._kill_group, on_closed=give)
        try:
            await channel.begin()
        except BaseException:
            with contextlib.suppress(NodeUnreachable):
                await channel.end()
            raise
        return channel

    async def _session(self, *, lasting: bool) -> SharedConnection:
        """A session on a connection, waited for while commands that end have them all. Raises NodeUnreachable."""
        while True:
            self._lines = [line for line in self._lines if line.alive]
            for line in self._lines:
                if line.used < line.limit:
                    line.take(lasting=lasting)
                    return line
            if len(self._lines) < _CONNECTIONS and all(line.lasting >= line.limit for line in self._lines):
                await self._another_line()
            else:
                self._freed.clear()
                await self._freed.wait()

    async def _another_line(self) -> None:
        """All who wait for a connection wait for the same one, and share why there is none."""

        async def connect() -> None:
            dialled = await dial(self._target, self._home, self._limiter)
            self._lines.append(SharedConnection(dialled, str(self._target)))

        if self._dialling is None or self._dialling.done():
            self._dialling = self._do_behind(connect())
        try:
            # Whoever gives up does not end it.
            await asyncio.shield(self._dialling)
        except asyncio.CancelledError:
            if self._dialling.cancelled():
                raise connection_lost(str(self._target), "closed here") from None
            raise

    async def _pause(self, attempt: int) -> None:
        """The first time is an accident; from then on others are in the way; the last time nothing follows."""
        if 0 < attempt < _TRIES - 1:
            await asyncio.sleep(random.uniform(1, 2) * _PAUSE_S * 2**attempt)

    async def _kill_group(self, group: int) -> None:
        """End a process group on the node, proved. Raises NodeUnreachable."""
        where = str(self._target)
        try:
            async with asyncio.timeout(_KILL_LIMIT_S):
                code = await self._ask(for_any_shell(_KILL.format(group=group)))
        except SSH_ERRORS as error:
            raise unreachable_error(error, where) from error
        if code is None:
            raise connection_lost(where, "while a command was being ended")
        if code != 0:
            why = f"its process group {group} is still there"
            raise NodeUnreachable("a command could not be ended", where=where, why=why)

    async def _ask(self, line: str) -> int | None:
        """The exit code of a short command, over the session that is kept for it, else a connection of its own."""
        for dialled in [line.dialled for line in self._lines if line.alive]:
            with contextlib.suppress(asyncssh.ChannelOpenError):
                return await _code_of(dialled.connection, line)
        dialled = await dial(self._target, self._home, self._limiter)
        try:
            return await _code_of(dialled.connection, line)
        finally:
            dialled.abort()

    def _do_behind(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that outlives the call that began it, and not the transport."""
        task = asyncio.create_task(work)
        self._behind.add(task)
        task.add_done_callback(self._done_behind)
        return task

    def _done_behind(self, task: asyncio.Task[None]) -> None:
        self._behind.discard(task)
        if not task.cancelled():
            # Whoever still waits for it is told; nobody need.
            task.exception()

    async def _likely(self, ending: Coroutine[Any, Any, None]) -> None:
        """Before a call that has failed returns, and behind it when that takes long: the node may be gone."""
        await asyncio.wait({self._do_behind(ending)}, timeout=_GIVEN_UP_S)


async def _code_of(connection: asyncssh.SSHClientConnection, line: str) -> int | None:
    done = await connection.run(line, encoding=None, request_pty=False, x11_forwarding=False)
    return done.exit_status


async def _undone(starting: asyncio.Task[SshChannel]) -> None:
    with contextlib.suppress(NodeUnreachable, OSError, SessionRefused, LostBeforeStart):
        await (await starting).end()
