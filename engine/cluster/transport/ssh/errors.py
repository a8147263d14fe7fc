"""Maps the exceptions of asyncssh and the operating system to NodeUnreachable and LoginRefused, with a reason and a
fix."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys

import asyncssh

from engine.cluster.transport.ssh.auth import LOCKED
from engine.cluster.transport.ssh_config import CONNECT_TIMEOUT_S
from engine.errors import LoginRefused, NodeUnreachable
from engine.security.sanitise import plain

SSH_ERRORS = (asyncssh.Error, OSError, ValueError)
"""Whatever asyncssh raises when something outside is wrong; TimeoutError is an OSError."""
CONNECTION_DROPS = (ConnectionResetError, BrokenPipeError, asyncssh.ConnectionLost)
"""How an sshd looks that has too many connections before their login (MaxStartups)."""
REASON_LIMIT = 200
"""Longest reason quoted from a server that is not authenticated yet."""
_ERRNO = re.compile(r"\[Errno (\d+)\]")


class ConnectionDropped(NodeUnreachable):
    """The connection was closed before the login: a later try may be taken in."""


class SessionRefused(NodeUnreachable):
    """The connection gives no session (MaxSessions), or was lost before it did: nothing was started there."""


def unreachable_error(error: Exception, where: str, *, tried: str = "") -> NodeUnreachable:
    """One of ours for one of theirs. `tried` are the keys that were offered, in words."""
    if "authentication failures" in str(error):
        todo = "name the right one: IdentityFile and IdentitiesOnly yes"
        return LoginRefused("login refused", where=where, why=f"too many keys were offered: {tried}", todo=todo)
    if isinstance(error, asyncssh.PermissionDenied):
        if not tried:
            todo = "make one by ssh-keygen and put it there by ssh-copy-id"
            return LoginRefused("login refused", where=where, why="there is no key to offer", todo=todo)
        why, todo = f"none of our keys is accepted there: {tried}", "is the user right? Else ssh-copy-id puts a key"
        if LOCKED in tried:
            # macOS's own ssh takes the passphrase from the keychain, asyncssh only from an agent: its ssh-add(1).
            todo = f"unlock the key: ssh-add{' --apple-load-keychain' if sys.platform == 'darwin' else ''}"
        return LoginRefused("login refused", where=where, why=why, todo=todo)
    why, todo = _why_and_fix(error)
    kind = ConnectionDropped if isinstance(error, CONNECTION_DROPS) else NodeUnreachable
    return kind("cannot be reached", where=where, why=plain(why, REASON_LIMIT), todo=todo)


def connection_lost(where: str, why: str) -> NodeUnreachable:
    """An open connection that is there no more."""
    why = plain(why, REASON_LIMIT) or "closed by the other side"
    return NodeUnreachable("connection lost", where=where, why=why)


_CAUSES: tuple[tuple[type[Exception], str, str], ...] = (
    (TimeoutError, f"no answer within {CONNECT_TIMEOUT_S} s", "is it on, awake and on this network?"),
    (socket.gaierror, "its name is not known here", "is it spelled right? A Mac's name ends in .local"),
    (asyncssh.ProtocolNotSupported, "what answers there is no ssh server", "is the port right?"),
    (asyncssh.ChannelOpenError, "a session is refused: {error.reason}", "MaxSessions of its sshd must be 1 at least"),
)
"""(error, why, what to do), the first that fits."""
_NO_ROUTE = ("no route to it", "is it on, and on this network?")
_ERRNO_CAUSES = {
    errno.ECONNREFUSED: ("connection refused", "is Remote Login (sshd) on there?"),
    errno.EHOSTUNREACH: _NO_ROUTE,
    errno.ENETUNREACH: _NO_ROUTE,
    errno.EHOSTDOWN: _NO_ROUTE,
    errno.ECONNRESET: ("the connection is reset by the other side", ""),
}


def _why_and_fix(error: Exception) -> tuple[str, str]:
    for kind, why, todo in _CAUSES:
        if isinstance(error, kind):
            return why.format(error=error), todo
    if isinstance(error, asyncssh.DisconnectError):
        return error.reason or "closed by the other side", ""
    if not isinstance(error, OSError):
        return str(error).splitlines()[0] if str(error) else type(error).__name__, ""
    # asyncio gives several addresses' errors as one without a number, and says the address once more.
    numbers = [error.errno] if error.errno is not None else [int(digits) for digits in _ERRNO.findall(str(error))]
    number = numbers[-1] if numbers else None
    if number is None:
        return str(error) or type(error).__name__, ""
    if number in _ERRNO_CAUSES:
        return _ERRNO_CAUSES[number]
    named = f": {error.filename}" if error.filename else ""
    return f"{os.strerror(number)}{named}", ""
