"""One SSH connection: opened as ssh_config says, over its jump hosts, with its host key checked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import asyncssh
from asyncssh.config import SSHClientConfig

from engine.cluster.transport import ssh_config
from engine.cluster.transport.ssh import ConnectionLimiter, auth
from engine.cluster.transport.ssh.errors import (
    CONNECTION_DROPS,
    REASON_LIMIT,
    SSH_ERRORS,
    ConnectionDropped,
    SessionRefused,
    connection_lost,
    unreachable_error,
)
from engine.errors import InputError, NodeUnreachable
from engine.security.identifiers import SshTarget
from engine.security.sanitise import plain

for _option in (
    *("connecttimeout", "serveraliveinterval", "serveralivecountmax", "rekeylimit", "pubkeyauthentication"),
    *("setenv", "sendenv", "requesttty", "remotecommand"),
):
    # Ours are used in place of these, and asyncssh refuses values that ssh accepts: "1m", "none", "host-bound".
    SSHClientConfig._handlers.pop(_option, None)

_TRIES = 5
_JUMPS = 4
_CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
"""Tried first where the user's configuration names none: to asyncssh they cost half of what ChaCha20 costs."""


@dataclass(frozen=True)
class OpenConnection:
    """An open connection, and those to the jump hosts that it goes over, the first first."""

    where: str
    """The target, for messages."""
    client: asyncssh.SSHClientConnection
    jumps: tuple[asyncssh.SSHClientConnection, ...] = ()

    @property
    def alive(self) -> bool:
        return not any(client.is_closed() for client in (self.client, *self.jumps))

    def abort(self) -> None:
        for client in (self.client, *reversed(self.jumps)):
            client.abort()

    async def close(self, limit_s: float) -> None:
        for client in (self.client, *reversed(self.jumps)):
            client.close()
            with contextlib.suppress(*SSH_ERRORS):
                async with asyncio.timeout(limit_s):
                    await client.wait_closed()
        self.abort()

    async def start(self, command: str) -> asyncssh.SSHClientProcess[bytes]:
        """Start a login shell with this command line. Raises SessionRefused, NodeUnreachable."""
        try:
            async with asyncio.timeout(ssh_config.CONNECT_TIMEOUT_S):
                # The user's own RequestTTY and RemoteCommand are for people; a terminal would change the bytes.
                return await self.client.create_process(command, encoding=None, request_pty=False, x11_forwarding=False)
        except (AssertionError, AttributeError, *SSH_ERRORS) as error:
            # asyncssh takes for granted that no connection closes in the very moment that it opens a session.
            closed = self.client.is_closed()
            if isinstance(error, AttributeError):
                if not closed:
                    raise
                raise connection_lost(self.where, "") from error
            problem = connection_lost(self.where, str(error)) if closed else unreachable_error(error, self.where)
            if isinstance(error, asyncssh.ChannelOpenError) and error.code != asyncssh.OPEN_REQUEST_SESSION_FAILED:
                raise SessionRefused(problem.what, where=self.where, why=problem.why, todo=problem.todo) from error
            if isinstance(error, TimeoutError):
                # Else a session that is opened after all would stay, with what was started in it.
                self.abort()
            raise problem from error


@dataclass(frozen=True)
class _Setup:
    options: asyncssh.SSHClientConnectionOptions
    known: auth.KnownHosts

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


class _Admission:
    """The limiter for one dial, and the end of its time, to which what it waits for the limiter is added."""

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self._limiter = limiter
        self.ends = time.monotonic() + ssh_config.CONNECT_TIMEOUT_S

    @contextlib.asynccontextmanager
    async def at(self, host: str, port: int) -> AsyncIterator[None]:
        asked = time.monotonic()
        async with self._limiter.at(host, port):
            self.ends += time.monotonic() - asked
            yield


async def dial(target: SshTarget, home: Path, limiter: ConnectionLimiter) -> OpenConnection:
    """Connect, again where an sshd drops connections. Raises NodeUnreachable and what is below it, within the connect
    timeout once the limiter lets it."""
    admission = _Admission(limiter)
    for attempt in range(_TRIES - 1):
        try:
            return await _dial(target, home, admission)
        except ConnectionDropped:
            pause = random.uniform(0.1, 0.4) * 2**attempt
            if time.monotonic() + pause > admission.ends:
                raise
        await asyncio.sleep(pause)
    return await _dial(target, home, admission)


async def _dial(
    target: SshTarget,
    home: Path,
    admission: _Admission,
    destinations: tuple[SshTarget, ...] = (),
    tunnel: OpenConnection | None = None,
) -> OpenConnection:
    """One try. `destinations` are the targets that this one is a jump host of, `tunnel` leads up to it."""
    where = f"{target} (on the way to {destinations[0]})" if destinations else str(target)
    try:
        setup = await asyncio.to_thread(_set_up, target, home)
        hops = setup.jumps
    except InputError as error:
        raise NodeUnreachable("ProxyJump names no host", where=where, why=str(error)) from error
    except SSH_ERRORS as error:
        raise NodeUnreachable("ssh's configuration cannot be used", where=where, why=str(error)) from error
    # It is its own jump host, as where `Host *` says ProxyJump: ssh then goes there directly.
    over_itself = any((hop.host, hop.port or 22) == (setup.options.host, setup.options.port) for hop in hops)
    if tunnel is not None or len(destinations) >= _JUMPS or (destinations and over_itself):
        hops = []
    try:
        for hop in hops:
            # Of several only the first is reached as its own configuration says: the others lie behind it.
            tunnel = await _dial(hop, home, admission, (*destinations, target), tunnel)
        client = await _log_in(setup, tunnel.client if tunnel is not None else None, where, str(target), admission)
    except BaseException:
        if tunnel is not None:
            tunnel.abort()
        raise
    return OpenConnection(where, client, (*tunnel.jumps, tunnel.client) if tunnel is not None else ())


def _set_up(target: SshTarget, home: Path) -> _Setup:
    """Blocking: reads the configuration and known_hosts."""
    options = asyncssh.SSHClientConnectionOptions(
        config=[str(file) for file in ssh_config.ssh_configs()] or None,
        host=target.host,
        port=target.port if target.port is not None else (),
        username=target.user if target.user is not None else (),
        client_keys=iter(()),
        client_certs=[],
        known_hosts=None,
    )
    user, system = (_files(options, f"{owner}KnownHostsFile") for owner in ("User", "Global"))
    return _Setup(options, auth.KnownHosts(ssh_config.known_hosts_files(home, user, system)))


def _files(options: asyncssh.SSHClientConnectionOptions, name: str) -> list[str] | None:
    return cast("list[str] | None", options.config.get(name))


async def _log_in(
    setup: _Setup, tunnel: asyncssh.SSHClientConnection | None, where: str, target: str, admission: _Admission
) -> asyncssh.SSHClientConnection:
    """Connect to what `setup` says, through `tunnel` if that is given."""
    only_named = bool(setup.options.config.get("IdentitiesOnly"))
    files, certificates = (_files(setup.options, f"{kind}File") for kind in ("Identity", "Certificate"))
    offered = auth.identities(files, setup.agent, certificates or (), only_named=only_named)
    async with admission.at(setup.options.host, setup.options.port), offered as keys:
        recorder = auth.HostKeyRecorder(setup.known, setup.options.host_key_alias)
        try:
            return await _connect(setup, tunnel, recorder, keys)
        except asyncssh.HostKeyNotVerifiable as error:
            if recorder.offered is None and "revoked" not in error.reason:
                # A certificate of a CA that nobody trusts: as for ssh, the key below it decides.
                recorder = await _record_plain_key(setup, tunnel) or recorder
            raise auth.host_key_error(where, target, recorder, error.reason) from error
        except asyncssh.ChannelOpenError as error:
            why = plain(error.reason, REASON_LIMIT)
            raise NodeUnreachable(
                "cannot be reached from its jump host", where=where, why=why, todo="see ProxyJump"
            ) from error
        except SSH_ERRORS as error:
            # Only the accepted kinds of key were asked for: where the exchange fails, it may have others by now.
            failed = isinstance(error, (asyncssh.KeyExchangeFailed, *CONNECTION_DROPS)) and recorder.greeted
            if failed and (shown := await _record_plain_key(setup, tunnel)) is not None and shown.strange:
                raise auth.host_key_error(where, target, shown) from error
            raise unreachable_error(error, where, tried=keys.words) from error


async def _record_plain_key(setup: _Setup, tunnel: asyncssh.SSHClientConnection | None) -> auth.HostKeyRecorder | None:
    """Connect once more, only to see the plain host key; None when that is not to be had."""
    recorder = auth.HostKeyRecorder(setup.known, setup.options.host_key_alias)
    with contextlib.suppress(*SSH_ERRORS):
        connection = await _connect(setup, tunnel, recorder, auth.Identities((), ""), learning=True)
        connection.abort()
    return recorder if recorder.offered is not None else None


async def _connect(
    setup: _Setup,
    tunnel: asyncssh.SSHClientConnection | None,
    recorder: auth.HostKeyRecorder,
    keys: auth.Identities,
    *,
    learning: bool = False,
) -> asyncssh.SSHClientConnection:
    async with asyncio.timeout(ssh_config.CONNECT_TIMEOUT_S):
        return await asyncssh.connect(
            setup.options.orig_host,
            setup.options.port,
            options=setup.options,
            # What the options were made from counts, and no ~/.ssh/config besides.
            config=None,
            tunnel=tunnel,
            known_hosts=asyncssh.import_known_hosts("") if learning else setup.known,
            client_factory=lambda: recorder,
            # asyncssh takes an empty list for "the usual files", which have been looked at already.
            client_keys=list(keys.pairs) or iter(()),
            agent_path="",
            agent_identities=None,
            connect_timeout=ssh_config.CONNECT_TIMEOUT_S,
            login_timeout=ssh_config.CONNECT_TIMEOUT_S,
            keepalive_interval=ssh_config.KEEPALIVE_S,
            keepalive_count_max=ssh_config.KEEPALIVES,
            # Nobody is there to be asked.
            password_auth=False,
            kbdint_auth=False,
            agent_forwarding=False,
            **({"server_host_key_algs": auth.PLAIN_HOST_KEY_ALGORITHMS} if learning else {}),
            **({} if setup.options.config.get("Ciphers") else {"encryption_algs": _CIPHERS}),
        )
