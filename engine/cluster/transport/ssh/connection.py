"""One SSH connection: opened as ssh_config says, over its jump hosts, with its host key checked; and the sessions on
it, of which an sshd allows a limited number (MaxSessions).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import asyncssh

from engine.cluster.transport.ssh import ConnectionLimiter
from engine.cluster.transport.ssh.auth import (
    PLAIN_HOST_KEY_ALGORITHMS,
    HostKeyRecorder,
    Identities,
    host_key_error,
    identities,
    read_known_hosts,
)
from engine.cluster.transport.ssh.errors import (
    CONNECTION_DROPS,
    REASON_LIMIT,
    SSH_ERRORS,
    connection_lost,
    unreachable_error,
)
from engine.cluster.transport.ssh_config import (
    CONNECT_TIMEOUT_S,
    KEEPALIVE_S,
    KEEPALIVES,
    known_hosts_files,
    ssh_configs,
)
from engine.errors import InputError, NodeUnreachable
from engine.security.identifiers import SshTarget
from engine.security.sanitise import plain

_TRIES = 5
_JUMPS = 4


@dataclass(frozen=True)
class OpenConnection:
    """An open connection, and those to the jump hosts that it goes over, the first first."""

    connection: asyncssh.SSHClientConnection
    jumps: tuple[asyncssh.SSHClientConnection, ...] = ()

    @property
    def alive(self) -> bool:
        return not any(one.is_closed() for one in (self.connection, *self.jumps))

    def abort(self) -> None:
        for one in (self.connection, *reversed(self.jumps)):
            one.abort()

    async def close(self, limit_s: float) -> None:
        for one in (self.connection, *reversed(self.jumps)):
            one.close()
            with contextlib.suppress(TimeoutError, *SSH_ERRORS):
                await asyncio.wait_for(one.wait_closed(), limit_s)
        self.abort()


@dataclass(frozen=True)
class _Setup:
    """The configuration of a target."""

    options: asyncssh.SSHClientConnectionOptions
    known: asyncssh.SSHKnownHosts

    @property
    def agent(self) -> str:
        configured = self.options.agent_path or ""
        named = configured.removeprefix("$")
        return os.environ.get(named, "") if configured in ("SSH_AUTH_SOCK", f"${named}") else configured

    @property
    def jumps(self) -> list[SshTarget]:
        """ProxyJump, in order. Raises InputError."""
        configured = self.options.tunnel
        if not isinstance(configured, str) or configured.lower() == "none":
            return []
        return [SshTarget.parse(hop.strip().removeprefix("ssh://")) for hop in configured.split(",")]

    @property
    def over_itself(self) -> bool:
        """It is its own jump host, as where `Host *` says ProxyJump: ssh then goes there directly."""
        return any((hop.host, hop.port or 22) == (self.options.host, self.options.port) for hop in self.jumps)


async def dial(target: SshTarget, home: Path, limiter: ConnectionLimiter) -> OpenConnection:
    """Connect, anew where an sshd drops strangers. Raises NodeUnreachable and what is below it, within the connect
    timeout once the limiter lets it."""
    ends = time.monotonic() + CONNECT_TIMEOUT_S
    for attempt in range(_TRIES):
        try:
            return await _dial(target, home, limiter)
        except _Dropped as dropped:
            pause = random.uniform(0.1, 0.4) * 2**attempt
            if attempt == _TRIES - 1 or time.monotonic() + pause > ends:
                raise dropped.error from dropped
        await asyncio.sleep(pause)
    raise AssertionError("unreachable")


class _Dropped(Exception):
    def __init__(self, error: NodeUnreachable) -> None:
        super().__init__(str(error))
        self.error = error


async def _dial(
    target: SshTarget,
    home: Path,
    limiter: ConnectionLimiter,
    beyond: tuple[SshTarget, ...] = (),
    way: OpenConnection | None = None,
) -> OpenConnection:
    """One try. `beyond` are the targets that this one is a jump host of, `way` leads up to it."""
    where = f"{target} (on the way to {beyond[0]})" if beyond else str(target)
    try:
        setup = await asyncio.to_thread(_set_up, target, home)
        hops = setup.jumps
    except InputError as error:
        raise NodeUnreachable("ProxyJump names no host", where=where, why=str(error)) from error
    except SSH_ERRORS as error:
        raise NodeUnreachable("ssh's configuration cannot be used", where=where, why=str(error)) from error
    if way is not None or len(beyond) >= _JUMPS or (beyond and setup.over_itself):
        hops = []
    try:
        for hop in hops:
            # Of several only the first is reached as its own configuration says: the others lie behind it.
            way = await _dial(hop, home, limiter, (*beyond, target), way)
        connection = await _through(setup, way.connection if way is not None else None, where, str(target), limiter)
    except BaseException:
        if way is not None:
            way.abort()
        raise
    return OpenConnection(connection, (*way.jumps, way.connection) if way is not None else ())


def _set_up(target: SshTarget, home: Path) -> _Setup:
    """Blocking: reads the configuration and known_hosts."""
    options = asyncssh.SSHClientConnectionOptions(
        config=[str(file) for file in ssh_configs()] or None,
        host=target.host,
        port=target.port if target.port is not None else (),
        username=target.user if target.user is not None else (),
        client_keys=iter(()),
        known_hosts=None,
    )
    config = options.config
    files = known_hosts_files(
        home,
        cast("list[str] | None", config.get("UserKnownHostsFile")),
        cast("list[str] | None", config.get("GlobalKnownHostsFile")),
    )
    return _Setup(options, read_known_hosts(files))


async def _through(
    setup: _Setup, way: asyncssh.SSHClientConnection | None, where: str, target: str, limiter: ConnectionLimiter
) -> asyncssh.SSHClientConnection:
    """Connect to what `setup` says, over `way` if that is given."""
    config = setup.options.config
    named = cast("list[str] | None", config.get("IdentityFile"))
    offered = identities(named, setup.agent, only_named=bool(config.get("IdentitiesOnly")))
    async with limiter.at(setup.options.host, setup.options.port), offered as keys:
        witness = HostKeyRecorder(setup.known, setup.options.host_key_alias)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await _connect(setup, way, witness, keys)
        except asyncssh.HostKeyNotVerifiable as error:
            if witness.offered is None and "revoked" not in error.reason:
                # A certificate of a CA that nobody trusts: as for ssh, the key below it decides.
                witness = await _shown(setup, way) or witness
            raise host_key_error(where, target, witness, error) from error
        except asyncssh.ChannelOpenError as error:
            raise NodeUnreachable(
                "cannot be reached from its jump host",
                where=where,
                why=plain(error.reason, REASON_LIMIT),
                todo="see ProxyJump",
            ) from error
        except (asyncssh.KeyExchangeFailed, *CONNECTION_DROPS) as error:
            if witness.greeted and (shown := await _shown(setup, way)) is not None and shown.strange:
                # Only the accepted kinds of key were asked for, and it has others by now.
                raise host_key_error(
                    where, target, shown, asyncssh.HostKeyNotVerifiable("Host key is not trusted")
                ) from error
            if isinstance(error, CONNECTION_DROPS):
                raise _Dropped(unreachable_error(error, where)) from error
            raise unreachable_error(error, where) from error
        except SSH_ERRORS as error:
            raise unreachable_error(error, where, tried=keys.words) from error


async def _shown(setup: _Setup, way: asyncssh.SSHClientConnection | None) -> HostKeyRecorder | None:
    """Knock once more, only to see the plain host key; None when that is not to be had."""
    witness = HostKeyRecorder(setup.known, setup.options.host_key_alias)
    with contextlib.suppress(*SSH_ERRORS):
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            connection = await _connect(setup, way, witness, Identities((), ""), learning=True)
            connection.abort()
    return witness if witness.offered is not None else None


async def _connect(
    setup: _Setup,
    way: asyncssh.SSHClientConnection | None,
    witness: HostKeyRecorder,
    keys: Identities,
    *,
    learning: bool = False,
) -> asyncssh.SSHClientConnection:
    return await asyncssh.connect(
        setup.options.orig_host,
        setup.options.port,
        options=setup.options,
        # What the options were made from counts, and no ~/.ssh/config besides.
        config=None,
        tunnel=way,
        known_hosts=asyncssh.import_known_hosts("") if learning else setup.known,
        client_factory=lambda: witness,
        # asyncssh takes an empty list for "the usual files", which have been looked at already.
        client_keys=list(keys.pairs) or iter(()),
        agent_path="",
        agent_identities=None,
        connect_timeout=CONNECT_TIMEOUT_S,
        login_timeout=CONNECT_TIMEOUT_S,
        keepalive_interval=KEEPALIVE_S,
        keepalive_count_max=KEEPALIVES,
        # Nobody is there to be asked.
        password_auth=False,
        kbdint_auth=False,
        agent_forwarding=False,
        **({"server_host_key_algs": PLAIN_HOST_KEY_ALGORITHMS} if learning else {}),
    )


SESSIONS = 9
"""On one connection: OpenSSH's MaxSessions is 10, and one is kept for ending what the others do."""
_LIMIT_BELIEVED_S = 10.0
"""After that, a limit learned by a refusal is tried again: a session that has ended may still have been counted."""


class SessionRefused(Exception):
    """The node gives no further session on this connection."""


class LostBeforeStart(Exception):
    """The connection was lost before the node had opened the session: nothing was started there."""


@dataclass
class SharedConnection:
    """A connection, and who uses it."""

    dialled: OpenConnection
    where: str
    used: int = 0
    lasting: int = 0
    """Those of `used` that do not end by themselves."""
    _limit: int = SESSIONS
    _limit_until: float = 0.0

    @property
    def alive(self) -> bool:
        return self.dialled.alive

    @property
    def limit(self) -> int:
        return self._limit if time.monotonic() < self._limit_until else SESSIONS

    def take(self, *, lasting: bool) -> None:
        self.used += 1
        self.lasting += lasting

    def give(self, *, lasting: bool) -> None:
        self.used -= 1
        self.lasting -= lasting

    async def start(self, command: str) -> asyncssh.SSHClientProcess[bytes]:
        """Start a login shell with this line. Raises SessionRefused, LostBeforeStart, NodeUnreachable."""
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
            raise unreachable_error(error, self.where) from error
        except SSH_ERRORS as error:
            if not connection.is_closed() and isinstance(error, asyncssh.ChannelOpenError):
                self._limit, self._limit_until = max(1, self.used - 1), time.monotonic() + _LIMIT_BELIEVED_S
                raise SessionRefused(error.reason) from error
            self.dialled.abort()
            if opened:
                raise connection_lost(self.where, str(error)) from error
            raise LostBeforeStart(str(error)) from error
        return cast("asyncssh.SSHClientProcess[bytes]", process)
