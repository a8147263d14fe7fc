"""SshTransport: one connection, opened at first use, on which each program on the node is a session.

Only a program whose session the sshd refuses has a connection of its own. A host has few programs: nearly everything
there is asked of its agent, which is one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import asyncssh

from engine.cluster.transport.base import Completed, for_any_shell
from engine.cluster.transport.ssh import ConnectionLimiter
from engine.cluster.transport.ssh.channel import ShellCommand, SshChannel
from engine.cluster.transport.ssh.connection import OpenConnection, dial
from engine.cluster.transport.ssh.errors import SSH_ERRORS, SessionRefused, connection_lost, unreachable_error
from engine.cluster.transport.ssh_config import add_known_host
from engine.errors import HostKeyChanged, HostKeyUnknown, NodeUnreachable
from engine.security.identifiers import SshTarget

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

Result = TypeVar("Result")


class SshTransport:
    def __init__(self, target: SshTarget, home: Path, limiter: ConnectionLimiter) -> None:
        """`home` is the state directory, with the host keys that were accepted; `limiter` is shared by all transports
        of a process."""
        self.target = target
        self._home = home
        self._limiter = limiter
        self._shared: asyncio.Task[OpenConnection] | None = None
        self._connections: set[OpenConnection] = set()
        self._background: set[asyncio.Task[Any]] = set()

    async def run(self, argv: Sequence[str], *, timeout_s: float) -> Completed:
        channel = await self.open(argv)
        try:
            async with asyncio.timeout(timeout_s):
                return await channel.complete()
        except TimeoutError:
            # Also when the call is cancelled.
            await asyncio.shield(self._in_background(channel.end()))
            return Completed(None, b"", b"")
        except BaseException:
            # Cancelled, or the connection was lost: then another one tells whether it runs on.
            await self._end_soon(channel.end())
            raise

    async def open(self, argv: Sequence[str]) -> SshChannel:
        command = ShellCommand(argv)
        for _ in range(2):
            shared = await self._shared_connection()
            try:
                return await self._start(shared, command, exclusive=False)
            except SessionRefused:
                if self._shared is None:
                    # Lost by close(): another one would have no owner.
                    raise
                if shared.alive:
                    break
                # It was lost: all programs share the next one, too.
        return await self._start(await self._dial(), command, exclusive=True)

    async def accept(self, fingerprint: str) -> None:
        """Add the node's host key to our known_hosts, when it still shows the very key that a person has compared.
        Nothing is done for one that is known by now. Raises HostKeyChanged, NodeUnreachable, OSError."""
        where = str(self.target)
        try:
            connection = await dial(self.target, self._home, self._limiter)
        except HostKeyUnknown as offered:
            if offered.target != where:
                raise
            if offered.fingerprint != fingerprint:
                raise HostKeyChanged(
                    "the host key is not the one that was accepted",
                    where=where,
                    why=f"accepted was {fingerprint}, it shows {offered.fingerprint}",
                    todo="find out what stands between",
                    expected=fingerprint,
                    shown=offered.fingerprint,
                ) from offered
            await asyncio.to_thread(add_known_host, self._home, offered.name, offered.key)
        else:
            connection.abort()

    def forwarded(self, host: str, port: int) -> AbstractAsyncContextManager[tuple[str, int]]:
        return self._forwarding(lambda client: client.forward_local_port("127.0.0.1", 0, host, port))

    def exposed(self, host: str, port: int) -> AbstractAsyncContextManager[tuple[str, int]]:
        return self._forwarding(lambda client: client.forward_remote_port("127.0.0.1", 0, host, port))

    @contextlib.asynccontextmanager
    async def _forwarding(
        self, listen: Callable[[asyncssh.SSHClientConnection], Awaitable[asyncssh.SSHListener]]
    ) -> AsyncIterator[tuple[str, int]]:
        shared = await self._shared_connection()
        try:
            listener = await listen(shared.client)
        except SSH_ERRORS as error:
            raise unreachable_error(error, str(self.target)) from error
        try:
            yield "127.0.0.1", listener.get_port()
        finally:
            listener.close()
            await listener.wait_closed()

    async def close(self) -> None:
        if self._shared is not None:
            self._shared.cancel()
            self._shared = None
        # What is being ended on the node is, first, where the node still answers.
        if self._background:
            await asyncio.wait(set(self._background), timeout=_BACKGROUND_LIMIT_S)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*map(self._disconnect, list(self._connections)))

    async def _shared_connection(self) -> OpenConnection:
        """The one that all programs share: all who wait for it wait for the same task, and share why there is none."""
        if self._shared is None or (self._shared.done() and not _is_alive(self._shared)):
            self._shared = self._in_background(self._dial())
        shared = self._shared
        # Whoever gives up does not end it.
        await asyncio.wait({shared})
        if shared.cancelled():
            raise connection_lost(str(self.target), "closed here")
        return shared.result()

    async def _dial(self) -> OpenConnection:
        for lost in [opened for opened in self._connections if not opened.alive]:
            # Those to its jump hosts may still be open.
            lost.abort()
            self._connections.discard(lost)
        connection = await dial(self.target, self._home, self._limiter)
        self._connections.add(connection)
        return connection

    async def _start(self, connection: OpenConnection, command: ShellCommand, *, exclusive: bool) -> SshChannel:
        """`exclusive`: the connection is the program's own, and closed with it."""
        beginning = self._begin(connection, command, exclusive)
        starting = asyncio.create_task(beginning, name=f"{command.program} on {self.target}")
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # It may be under way already: whatever comes of it is ended.
            await self._end_soon(_end_started(starting))
            raise

    async def _begin(self, connection: OpenConnection, command: ShellCommand, exclusive: bool) -> SshChannel:
        def on_closed() -> None:
            if exclusive:
                self._in_background(self._disconnect(connection))

        try:
            process = await connection.start(command.line)
        except BaseException:
            on_closed()
            raise
        kill_group = partial(self._kill_group, connection)
        channel = SshChannel(process, connection, command, kill_group=kill_group, on_closed=on_closed)
        try:
            await channel.begin()
        except BaseException:
            with contextlib.suppress(NodeUnreachable):
                await channel.end()
            raise
        return channel

    async def _disconnect(self, connection: OpenConnection) -> None:
        await connection.close(_CLOSE_LIMIT_S)
        self._connections.discard(connection)

    async def _kill_group(self, connection: OpenConnection, group: int) -> None:
        """End a process group on the node, proved. Raises NodeUnreachable."""
        where = str(self.target)
        try:
            async with asyncio.timeout(_KILL_LIMIT_S):
                code = await self._exit_status(connection, for_any_shell(_KILL.format(group=group)))
        except SSH_ERRORS as error:
            raise unreachable_error(error, where) from error
        if code is None:
            raise connection_lost(where, "while a command was being ended")
        if code != 0:
            why = f"its process group {group} is still there"
            raise NodeUnreachable("a command could not be ended", where=where, why=why)

    async def _exit_status(self, connection: OpenConnection, line: str) -> int | None:
        """The exit status of a short command, over the program's connection, or over another one where that is lost
        or gives no second session."""
        run = partial(asyncssh.SSHClientConnection.run, encoding=None, request_pty=False, x11_forwarding=False)
        if connection.alive:
            with contextlib.suppress(asyncssh.ChannelOpenError):
                return (await run(connection.client, line)).exit_status
        other = await dial(self.target, self._home, self._limiter)
        try:
            return (await run(other.client, line)).exit_status
        finally:
            other.abort()

    def _in_background(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """A task that outlives the call that began it, and not the transport."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)
        return task

    def _background_done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            # Retrieved, since asyncio reports an exception that nobody awaits; who awaits it has it, too.
            task.exception()

    async def _end_soon(self, ending: Coroutine[Any, Any, None]) -> None:
        """Before a call that has failed returns, and in the background when that takes long: the node may be gone."""
        await asyncio.wait({self._in_background(ending)}, timeout=_GIVEN_UP_S)


def _is_alive(opened: asyncio.Task[OpenConnection]) -> bool:
    return not opened.cancelled() and opened.exception() is None and opened.result().alive


async def _end_started(starting: asyncio.Task[SshChannel]) -> None:
    with contextlib.suppress(NodeUnreachable, OSError):
        await (await starting).end()
