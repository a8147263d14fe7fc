"""A program on a node, in a session of its own.

Its output begins behind a marker that also carries its process group: output of the login shell's start-up files is
skipped, and a call that is cancelled can kill the whole group. sshd makes the login shell the session leader; the
shell then execs the program."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import secrets
import signal
from collections.abc import Awaitable, Callable, Sequence

import asyncssh

from engine.cluster.transport.base import Completed, for_any_shell, quoted
from engine.cluster.transport.ssh.connection import OpenConnection
from engine.cluster.transport.ssh.errors import REASON_LIMIT, SSH_ERRORS, connection_lost, unreachable_error
from engine.errors import NodeUnreachable
from engine.protocol.exit_codes import ShellExit
from engine.security.sanitise import plain

_BEGIN = f"""cd || exit {ShellExit.NOT_PREPARED}
case $1 in -*) false ;; *) command -v "$1" >/dev/null 2>&1 ;; esac ||
    {{ printf '\\n%s none\\n' "$flightdeck_mark"; exit {ShellExit.NOT_FOUND}; }}
printf '\\n%s\\n' "$flightdeck_mark" >&2
printf '\\n%s %s\\n' "$flightdeck_mark" $$ || exit {ShellExit.NOT_PREPARED}
unset flightdeck_mark
exec "$@"
"""
_LINE_LIMIT = 120_000
"""Bytes: Linux takes 128 KiB for one argument, and the line is one."""
_BEGIN_LIMIT_S = 20.0
"""For a login shell and its profile."""
_LEAVES_S = 1.0
_DIES_S = 5.0
_NOISE_LIMIT = 1 << 20
_STDERR_LIMIT = 1 << 20
_STDOUT_LIMIT = 1 << 25
"""Limit for a command that is awaited: answers are some kilobytes, and a node must not fill this machine's memory."""


class ShellCommand:
    """An argument list as a line for a login shell, and the mark that its output begins behind."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Raises InputError for what no argument can be, OSError when they are too long."""
        self.program = str(argv[0])
        mark = f"flightdeck-{secrets.token_hex(8)}"
        self.begun = re.compile(rf"(?:^|\n){mark} (\w+)\n".encode())
        self.begun_on_stderr = re.compile(rf"(?:^|\n){mark}\n".encode())
        self.line = for_any_shell(f"flightdeck_mark={mark}\nset -- {' '.join(map(quoted, argv))}\n{_BEGIN}")
        if len(self.line) > _LINE_LIMIT:
            raise OSError(errno.E2BIG, "the arguments are too long", self.program)


class SshChannel:
    """The Channel over SSH. `begin` comes first."""

    def __init__(
        self,
        process: asyncssh.SSHClientProcess[bytes],
        connection: OpenConnection,
        command: ShellCommand,
        *,
        kill_group: Callable[[int], Awaitable[None]],
        on_closed: Callable[[], None],
    ) -> None:
        self._process = process
        self._client = connection.client
        self._where = connection.where
        self._command = command
        self._kill_group = kill_group
        self._on_closed = on_closed
        self._group: int | None = None
        self._unread = b""
        self._stderr = b""
        self._noise_on_stderr = True
        self._listening = asyncio.create_task(self._listen(), name=f"stderr of {command.program}")
        self._closed = self._released = False

    async def begin(self) -> None:
        """Read up to the mark. Raises FileNotFoundError when there is no such program or directory there."""
        begun, output = self._command.begun, b""
        try:
            async with asyncio.timeout(_BEGIN_LIMIT_S):
                while (mark := begun.search(output)) is None:
                    block = await self._process.stdout.read(65_536)
                    if not block:
                        raise await self._never_began()
                    output = (output + block)[-_NOISE_LIMIT:]
        except TimeoutError:
            why = f"its login shell runs no command within {_BEGIN_LIMIT_S:g} s"
            raise NodeUnreachable("no command can be run", where=self._where, why=why) from None
        except SSH_ERRORS as error:
            raise unreachable_error(error, self._where) from error
        answer, self._unread = mark[1], output[mark.end() :]
        if answer == b"none":
            raise FileNotFoundError(errno.ENOENT, f"no such program on {self._where}", self._command.program)
        self._group = int(answer)

    async def complete(self) -> Completed:
        """End its stdin, and take all that it prints. Raises NodeUnreachable, also when that is too much."""
        self._end_input()
        output = bytearray()
        while block := await self.read(1 << 18):
            output += block
            if len(output) > _STDOUT_LIMIT:
                why = f"{self._command.program} printed more than {_STDOUT_LIMIT:,} bytes"
                raise NodeUnreachable("no answer can be read", where=self._where, why=why, todo="run it there")
        await self._process.wait_closed()
        await self._listening
        if self._code is None:
            raise connection_lost(self._where, "in the middle of a command")
        self._release()
        return Completed(self._code, bytes(output), self._stderr)

    async def write(self, data: bytes) -> None:
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except SSH_ERRORS as error:
            raise await self._gone(error) from error
        if self._process.channel.is_closing():
            raise await self._gone()

    async def read(self, size: int) -> bytes:
        if self._unread:
            data, self._unread = self._unread[:size], self._unread[size:]
            return data
        try:
            data = await self._process.stdout.read(size)
        except SSH_ERRORS as error:
            raise await self._gone(error) from error
        if not data:
            await self._take_last_stderr()
            if self._code is None and self._client.is_closed():
                raise await self._gone()
        return data

    async def close(self) -> int | None:
        if not self._closed:
            self._closed = True
            try:
                self._end_input()
                if not await self._closes_within(_LEAVES_S) and not self._client.is_closed():
                    with contextlib.suppress(NodeUnreachable):
                        await self.end()
            except BaseException:
                await asyncio.shield(self.end())
                raise
            self._release()
        return self._code

    async def end(self) -> None:
        """End its whole group on the node, and the session. Raises NodeUnreachable when it cannot be proved that the
        group is gone."""
        try:
            if self._group is not None:
                await self._kill_group(self._group)
                await self._closes_within(_DIES_S)
            else:
                # A login shell that hangs in its start-up files has reported no group; sshd knows it (OpenSSH 7.9).
                with contextlib.suppress(*SSH_ERRORS):
                    self._process.kill()
        finally:
            self._release()

    @property
    def exit_output(self) -> str:
        return Completed(None, b"", self._stderr).exit_output

    async def _closes_within(self, limit_s: float) -> bool:
        """True if the node closes the session in time, whatever the program still prints."""
        # What is not taken keeps sshd from closing the session.
        discarding = asyncio.create_task(self._discard(), name=f"stdout of {self._command.program}")
        try:
            # Not wait_for: in Python 3.11 it drops a cancellation that comes just at the end.
            async with asyncio.timeout(limit_s):
                await self._process.wait_closed()
        except TimeoutError:
            return False
        finally:
            discarding.cancel()
        return True

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self._listening.cancel()
            self._process.close()
            self._on_closed()

    def _end_input(self) -> None:
        with contextlib.suppress(*SSH_ERRORS):
            self._process.stdin.write_eof()

    async def _discard(self) -> None:
        with contextlib.suppress(*SSH_ERRORS):
            while await self._process.stdout.read(1 << 18):
                pass

    async def _listen(self) -> None:
        with contextlib.suppress(*SSH_ERRORS):
            while block := await self._process.stderr.read(65_536):
                self._stderr += block
                if self._noise_on_stderr and (mark := self._command.begun_on_stderr.search(self._stderr)):
                    self._stderr, self._noise_on_stderr = self._stderr[mark.end() :], False
                self._stderr = self._stderr[-_STDERR_LIMIT:]

    async def _take_last_stderr(self) -> None:
        """Its last stderr has arrived by the time that its stdout ends, and only needs reading."""
        await asyncio.wait({self._listening}, timeout=_LEAVES_S)

    async def _gone(self, error: Exception | None = None) -> NodeUnreachable:
        await self._take_last_stderr()
        if self._client.is_closed():
            return connection_lost(self._where, str(error or ""))
        return NodeUnreachable("the program has left", where=self._where, why=plain(self.exit_output, REASON_LIMIT))

    async def _never_began(self) -> Exception:
        await self._closes_within(_LEAVES_S)
        if self._client.is_closed() or self._code is None:
            return connection_lost(self._where, "before the command began")
        return NodeUnreachable(
            "no command can be run",
            where=self._where,
            why=plain(self.exit_output, REASON_LIMIT) or f"its login shell ends with {self._code}",
            todo="the login shell of the user there must run /bin/sh",
        )

    @property
    def _code(self) -> int | None:
        ended = self._process.exit_signal
        if ended is not None:
            return -int(getattr(signal, f"SIG{ended[0]}", signal.SIGKILL))
        return self._process.exit_status
