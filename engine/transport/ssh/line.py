"""One connection and its sessions. An sshd gives only so many at once (MaxSessions), and says so by refusing one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import asyncssh
from asyncssh.constants import OPEN_REQUEST_SESSION_FAILED

from engine.transport.openssh import CONNECT_TIMEOUT_S
from engine.transport.ssh.dial import Dialled
from engine.transport.ssh.faults import FAULTS, lost, no_files, silent

SESSIONS = 9
"""On one connection: OpenSSH's MaxSessions is 10, and one is kept for ending what the others do."""
_BELIEVED_S = 10.0
"""After that, a limit learned by a refusal is tried again: a session that has ended may still have been counted."""


class Refused(Exception):
    """The node gives no further session on this connection."""


class LostBefore(Exception):
    """The connection was lost before the node had opened the session: nothing was started there."""


@dataclass
class Line:
    """A connection, and who uses it."""

    dialled: Dialled
    where: str
    clock: Callable[[], float] = time.monotonic
    used: int = 0
    lasting: int = 0
    """Of those, the ones that do not end by themselves."""
    _limit: int = SESSIONS
    _limit_until: float = 0.0

    @property
    def alive(self) -> bool:
        return self.dialled.alive

    @property
    def limit(self) -> int:
        return self._limit if self.clock() < self._limit_until else SESSIONS

    def take(self, *, lasting: bool) -> None:
        self.used += 1
        self.lasting += lasting

    def give(self, *, lasting: bool) -> None:
        self.used -= 1
        self.lasting -= lasting

    async def start(self, command: str) -> asyncssh.SSHClientProcess[bytes]:
        """Start a login shell with this line. Raises Refused, LostBefore, NodeUnreachable."""
        opened = False

        def session() -> asyncssh.SSHClientProcess[bytes]:
            nonlocal opened
            opened = True
            return asyncssh.SSHClientProcess[bytes]()

        connection = self.dialled.connection
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                # The user's own RequestTTY and RemoteCommand are for people; a terminal would change the bytes.
                _, process = await connection.create_session(
                    session, command, encoding=None, request_pty=False, x11_forwarding=False
                )
        except TimeoutError as error:
            self.dialled.abort()
            raise silent(self.where) from error
        except FAULTS as error:
            if not connection.is_closed() and isinstance(error, asyncssh.ChannelOpenError):
                self._limit, self._limit_until = max(1, self.used - 1), self.clock() + _BELIEVED_S
                raise Refused(error.reason) from error
            self.dialled.abort()
            if opened:
                raise lost(self.where, str(error)) from error
            raise LostBefore(str(error)) from error
        return cast("asyncssh.SSHClientProcess[bytes]", process)

    async def start_sftp(self) -> asyncssh.SFTPClient:
        """Raises Refused, LostBefore, NodeUnreachable."""
        connection = self.dialled.connection
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await connection.start_sftp_client()
        except TimeoutError as error:
            self.dialled.abort()
            raise silent(self.where) from error
        except asyncssh.ChannelOpenError as error:
            if connection.is_closed():
                raise LostBefore(str(error)) from error
            if error.code == OPEN_REQUEST_SESSION_FAILED:
                raise no_files(self.where, error) from error
            self._limit, self._limit_until = max(1, self.used - 1), self.clock() + _BELIEVED_S
            raise Refused(error.reason) from error
        except FAULTS as error:
            if connection.is_closed():
                raise LostBefore(str(error)) from error
            raise no_files(self.where, error) from error
