"""A node over SSH. The one module that knows asyncssh.

One connection per target: made at the first use, shared, and made anew by the next call after it broke. A command runs
in a session of its own on the node; what it prints begins behind a mark that carries its process group, so that noise
of a login shell is passed over and a call that is given up ends the whole group there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import getpass
import random
import re
import secrets
import shlex
import signal
import stat
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path, PurePath

import asyncssh

from engine.errors import HostKeyChanged, HostKeyUnknown, LoginRefused, NodeUnreachable
from engine.security.hosts import SshTarget
from engine.transport.base import Channel, Completed, in_home, quoted
from engine.transport.known_hosts import add_known_host, known_hosts_files, ssh_configs
from engine.transport.openssh import CONNECT_TIMEOUT_S, KEEPALIVE_S, KEEPALIVES

CONNECTS_AT_ONCE = 8
"""By one process: sshd drops some of 50 at once (MaxStartups 10:30:100), none of 8."""
SESSIONS = 9
"""On one connection; OpenSSH's MaxSessions is 10, and one is SFTP's."""
_TURN_S = 1.0
_CONNECT_TRIES = 5
_SESSION_TRIES = 6
_KILL_LIMIT_S = 5.0
_LEAVES_S = 1.0
_MARK_LIMIT_S = 20.0
_LAST_WORDS_BYTES = 4096
_NOISE_LIMIT = 1 << 20

_RUN = """cd "$1" 2>/dev/null || { printf '\\n%s dir\\n' "$2"; exit 125; }
mark=$2; shift 2
command -v "$1" >/dev/null 2>&1 || { printf '\\n%s none\\n' "$mark"; exit 127; }
printf '\\n%s %s\\n' "$mark" $$
exec "$@\""""
"""What /bin/sh does on the node: tell the group (sshd has made the shell its leader), then become the program."""


class SshTransport:
    """The Transport over SSH."""

    def __init__(
        self,
        target: SshTarget,
        home: Path,
        *,
        connecting: asyncio.Semaphore | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._target = target
        self._home = home
        self._connecting = connecting or asyncio.Semaphore(CONNECTS_AT_ONCE)
        self._rng = rng or random.Random()
        self._lock = asyncio.Lock()
        self._sessions = asyncio.Semaphore(SESSIONS)
        self._connection: asyncssh.SSHClientConnection | None = None
        self._sftp: asyncssh.SFTPClient | None = None
        self._sftp_lock = asyncio.Lock()

    @property
    def target(self) -> SshTarget:
        return self._target

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", directory: PurePath | None = None
    ) -> Completed:
        async with self._sessions:
            channel = await self._start(argv, directory)
            try:
                async with asyncio.timeout(timeout_s):
                    return await channel.complete(stdin)
            except TimeoutError:
                await asyncio.shield(channel.kill())
                return Completed(None, b"", b"")
            except asyncio.CancelledError:
                await asyncio.shield(channel.kill())
                raise

    async def open(self, argv: Sequence[str], *, directory: PurePath | None = None) -> Channel:
        await self._sessions.acquire()
        try:
            channel = await self._start(argv, directory)
            await channel.begin()
        except BaseException:
            self._sessions.release()
            raise
        channel.on_closed = self._sessions.release
        return channel

    async def read_from(self, path: PurePath, offset: int, size: int) -> bytes:
        async with self._files() as sftp, sftp.open(_remote(path), "rb", block_size=0) as file:
            data = await file.read(size, offset)
        return data if isinstance(data, bytes) else data.encode()

    async def put(self, path: PurePath, content: bytes, *, mode: int = 0o600) -> None:
        name = _remote(path)
        folder, _, last = name.rpartition("/")
        temporary = f"{folder + '/' if folder or name.startswith('/') else ''}.{last}.{secrets.token_hex(4)}"
        async with self._files() as sftp:
            try:
                await _write(sftp, temporary, content, mode)
                await sftp.posix_rename(temporary, name)
            except BaseException:
                with contextlib.suppress(asyncssh.Error, OSError):
                    await asyncio.shield(sftp.remove(temporary))
                raise

    async def put_tree(self, path: PurePath, files: dict[str, bytes]) -> None:
        name = _remote(path)
        parent, _, last = name.rpartition("/")
        made = f"{parent + '/' if parent or name.startswith('/') else ''}.{last}-{secrets.token_hex(4)}"
        private = asyncssh.SFTPAttrs(permissions=0o700)
        async with self._files() as sftp:
            if await sftp.exists(name):
                raise FileExistsError(errno.EEXIST, "is there already", str(path))
            if parent:
                await sftp.makedirs(parent, private, exist_ok=True)
            try:
                folders = {str(folder) for file in files for folder in PurePath(file).parents}
                for folder in sorted(folders):
                    await sftp.makedirs(f"{made}/{folder}", private, exist_ok=True)
                await asyncio.gather(
                    *(_write(sftp, f"{made}/{file}", content, 0o600) for file, content in files.items())
                )
                await sftp.rename(made, name)
            except BaseException:
                with contextlib.suppress(asyncssh.Error, OSError):
                    await asyncio.shield(sftp.rmtree(made, ignore_errors=True))
                raise

    async def round_trip_s(self) -> float | None:
        async with self._files() as sftp:
            began = time.perf_counter()
            await sftp.realpath(".")
            return time.perf_counter() - began

    async def accept(self, fingerprint: str) -> None:
        """Add the node's host key to our known_hosts, when it still shows the very key that a person has compared.
        Nothing is done for one that is known by now. Raises HostKeyChanged, NodeUnreachable, OSError."""
        witness = _Witness()
        try:
            connection = await self._dial(witness)
        except (asyncssh.Error, OSError, ValueError) as error:
            told = self._told(error, witness)
            if not isinstance(told, HostKeyUnknown):
                raise told from error
            if told.fingerprint != fingerprint:
                raise HostKeyChanged(
                    "the host key is not the one that was accepted",
                    where=str(self._target),
                    why=f"accepted was {fingerprint}, it shows {told.fingerprint}",
                    todo="find out what stands between",
                    expected=fingerprint,
                    found=told.fingerprint,
                ) from error
            await asyncio.to_thread(add_known_host, self._home, witness.name, told.key)
        else:
            connection.abort()

    async def close(self) -> None:
        connection, self._connection, self._sftp = self._connection, None, None
        if connection is not None:
            connection.close()
            with contextlib.suppress(TimeoutError, asyncssh.Error, OSError):
                await asyncio.wait_for(connection.wait_closed(), _LEAVES_S)
            connection.abort()

    async def _start(self, argv: Sequence[str], directory: PurePath | None) -> SshChannel:
        """A started program, its mark not read yet. A session that the node refuses (MaxSessions) is asked for anew."""
        mark = f"flightdeck-{secrets.token_hex(8)}"
        words = [quoted("~" if directory is None else directory), mark, *(quoted(argument) for argument in argv)]
        line = f"exec /bin/sh -c {shlex.quote(_RUN)} flightdeck {' '.join(words)}"
        for attempt in range(_SESSION_TRIES):
            connection = await self._connected()
            try:
                process = await connection.create_process(line, encoding=None)
                return SshChannel(process, mark, argv[0], self)
            except asyncssh.ChannelOpenError as refused:
                if attempt == _SESSION_TRIES - 1:
                    raise self._told(refused) from refused
                await asyncio.sleep(self._rng.uniform(0.05, 0.2) * 2**attempt)
            except (asyncssh.Error, OSError) as error:
                # The connection was lost since it was last used: one new one is worth a try.
                self._drop(connection)
                if attempt:
                    raise self._told(error) from error
        raise AssertionError("unreachable")

    async def _connected(self) -> asyncssh.SSHClientConnection:
        async with self._lock:
            if self._connection is not None and not self._connection.is_closed():
                return self._connection
            self._connection, self._sftp = None, None
            async with self._turn():
                self._connection = await self._connect()
            return self._connection

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One of the few that may connect at once, for a moment: who waits longer waits for a host that is dead, and
        burdens no sshd."""
        await self._connecting.acquire()
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._connecting.release()

        early = asyncio.get_running_loop().call_later(_TURN_S, release)
        try:
            yield
        finally:
            early.cancel()
            release()

    async def _connect(self) -> asyncssh.SSHClientConnection:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        for attempt in range(_CONNECT_TRIES):
            witness = _Witness()
            try:
                async with asyncio.timeout_at(
                    asyncio.get_running_loop().time() + max(0.1, deadline - time.monotonic())
                ):
                    return await self._dial(witness)
            except (ConnectionResetError, asyncssh.ConnectionLost, BrokenPipeError) as dropped:
                # So does an sshd that has too many strangers at its door.
                pause = self._rng.uniform(0.1, 0.4) * 2**attempt
                if attempt == _CONNECT_TRIES - 1 or time.monotonic() + pause > deadline:
                    raise self._told(dropped) from dropped
                await asyncio.sleep(pause)
            except (asyncssh.Error, OSError, ValueError) as error:
                raise self._told(error, witness) from error
        raise AssertionError("unreachable")

    async def _dial(self, witness: _Witness) -> asyncssh.SSHClientConnection:
        target = self._target
        options = asyncssh.SSHClientConnectionOptions(
            config=[str(file) for file in ssh_configs()],
            host=target.host,
            **({"username": target.user} if target.user else {}),
            **({"port": target.port} if target.port else {}),
        )
        _refuse_open_keys(options)
        configured = options.known_hosts if isinstance(options.known_hosts, list) else None
        files = [str(file) for file in known_hosts_files(self._home, configured)]
        known = asyncssh.read_known_hosts(files) if files else asyncssh.import_known_hosts("")
        witness.known = known
        return await asyncssh.connect(
            target.host,
            options=options,
            known_hosts=known,
            client_factory=lambda: witness,
            connect_timeout=CONNECT_TIMEOUT_S,
            login_timeout=CONNECT_TIMEOUT_S,
            keepalive_interval=KEEPALIVE_S,
            keepalive_count_max=KEEPALIVES,
            # Nobody is there to be asked.
            password_auth=False,
            kbdint_auth=False,
            agent_forwarding=False,
        )

    def _drop(self, connection: asyncssh.SSHClientConnection) -> None:
        connection.abort()
        if self._connection is connection:
            self._connection, self._sftp = None, None

    @contextlib.asynccontextmanager
    async def _files(self) -> AsyncIterator[asyncssh.SFTPClient]:
        """The connection's SFTP client; its errors are OSErrors and NodeUnreachable."""
        connection = await self._connected()
        try:
            async with self._sftp_lock:
                if self._sftp is None:
                    self._sftp = await connection.start_sftp_client()
            yield self._sftp
        except asyncssh.SFTPNoSuchFile as error:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(self._target)) from error
        except asyncssh.SFTPPermissionDenied as error:
            raise PermissionError(errno.EACCES, "permission denied", str(self._target)) from error
        except (asyncssh.SFTPNoConnection, asyncssh.SFTPConnectionLost) as error:
            self._drop(connection)
            raise self._told(error) from error
        except asyncssh.SFTPError as error:
            # OpenSSH says "Failure" for all the rest, a full disk among it.
            raise OSError(errno.EIO, f"refused there: {error.reason}", str(self._target)) from error
        except asyncssh.Error as error:
            raise self._told(error) from error

    async def kill_group(self, group: int) -> None:
        """KILL a process group on the node, over a session of its own; silent when the node cannot be reached."""
        with contextlib.suppress(NodeUnreachable, asyncssh.Error, OSError, TimeoutError):
            async with asyncio.timeout(_KILL_LIMIT_S):
                connection = await self._connected()
                await connection.run(f"exec /bin/sh -c 'kill -s KILL -- -{group:d}'", encoding=None)

    def _told(self, error: Exception, witness: _Witness | None = None) -> NodeUnreachable:
        """One of ours for one of asyncssh's or the system's."""
        where = str(self._target)
        if isinstance(error, NodeUnreachable):
            return error
        if isinstance(error, asyncssh.HostKeyNotVerifiable):
            return _key_problem(where, error, witness)
        if isinstance(error, asyncssh.PermissionDenied):
            return LoginRefused(
                "login refused",
                where=where,
                why="no key of ours is accepted there",
                todo=f"ssh-copy-id {self._target.openssh}, and see that the user is right",
            )
        if isinstance(error, TimeoutError):
            why, todo = f"no answer within {CONNECT_TIMEOUT_S} s", "is it on, awake and on this network?"
        elif isinstance(error, ConnectionRefusedError):
            why, todo = "connection refused", "is Remote Login (sshd) on there?"
        elif isinstance(error, asyncssh.ChannelOpenError):
            why, todo = f"no further session: {error.reason}", "raise MaxSessions of its sshd"
        elif isinstance(error, asyncssh.ConnectionLost | asyncssh.DisconnectError):
            why, todo = f"connection lost: {error.reason or 'closed by the other side'}", ""
        elif isinstance(error, OSError):
            why, todo = _os_words(error), ""
        else:
            why, todo = str(error).splitlines()[0] if str(error) else type(error).__name__, ""
        return NodeUnreachable("cannot be reached", where=where, why=why, todo=todo)


class SshChannel:
    """A program on a node, over one session. `begin` or `complete` first."""

    def __init__(
        self, process: asyncssh.SSHClientProcess[bytes], mark: str, program: str, transport: SshTransport
    ) -> None:
        self._process = process
        self._mark = mark.encode()
        self._program = program
        self._transport = transport
        self._group: int | None = None
        self._waiting = b""
        self._stderr = b""
        self._listening: asyncio.Task[None] | None = None
        self._closed = False
        self.on_closed = _nothing

    async def begin(self) -> None:
        """Read up to the mark. Raises FileNotFoundError when there is no such program or directory there."""
        self._listening = asyncio.create_task(self._listen(), name=f"stderr of {self._program}")
        try:
            async with asyncio.timeout(_MARK_LIMIT_S):
                noise = b""
                while (found := re.search(rb"(?:^|\n)%s (\w+)\n" % self._mark, noise)) is None:
                    block = await self._process.stdout.read(65_536)
                    if not block:
                        raise self._never_began()
                    noise = (noise + block)[-_NOISE_LIMIT:]
        except BaseException:
            self._listening.cancel()
            self._process.close()
            raise
        told, self._waiting = found[1], noise[found.end() :]
        if not told.isdigit():
            self._listening.cancel()
            self._process.close()
            what = self._program if told == b"none" else "the directory"
            raise FileNotFoundError(errno.ENOENT, f"{what} is not there", str(self._transport.target))
        self._group = int(told)

    async def complete(self, stdin: bytes) -> Completed:
        """Give it all of its stdin, and take all that it says."""
        await self.begin()
        try:
            writing = asyncio.create_task(self._feed(stdin))
            blocks = [self._waiting]
            while block := await self._process.stdout.read(1 << 18):
                blocks.append(block)
            await writing
            await self._process.wait_closed()
            if self._listening is not None:
                await self._listening
        except (asyncssh.Error, OSError) as error:
            raise self._transport._told(error) from error
        code = self._code()
        if code is None:
            raise NodeUnreachable(
                "connection lost", where=str(self._transport.target), why="in the middle of a command"
            )
        return Completed(code, b"".join(blocks), self._stderr)

    async def kill(self) -> None:
        """End its whole group on the node, and the session."""
        if self._group is not None:
            await self._transport.kill_group(self._group)
        if self._listening is not None:
            self._listening.cancel()
        self._process.close()

    async def write(self, data: bytes) -> None:
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except (asyncssh.Error, OSError) as error:
            raise self._gone() from error

    async def read(self, size: int) -> bytes:
        if self._waiting:
            data, self._waiting = self._waiting[:size], self._waiting[size:]
            return data
        try:
            data = await self._process.stdout.read(size)
        except (asyncssh.Error, OSError) as error:
            raise self._gone() from error
        if not data and self._process.channel.get_exit_status() is None and self._transport_lost():
            raise self._gone()
        return bytes(data)

    async def close(self) -> int | None:
        if self._closed:
            return self._code()
        self._closed = True
        try:
            with contextlib.suppress(asyncssh.Error, OSError):
                self._process.stdin.write_eof()
            try:
                async with asyncio.timeout(_LEAVES_S):
                    await self._process.wait_closed()
            except TimeoutError:
                if not self._transport_lost():
                    await asyncio.shield(self.kill())
        finally:
            if self._listening is not None:
                self._listening.cancel()
            self._process.close()
            self.on_closed()
        return self._code()

    @property
    def last_words(self) -> str:
        return Completed(None, b"", self._stderr[-_LAST_WORDS_BYTES:]).last_words

    async def _feed(self, data: bytes) -> None:
        with contextlib.suppress(asyncssh.Error, OSError):
            if data:
                self._process.stdin.write(data)
                await self._process.stdin.drain()
            self._process.stdin.write_eof()

    async def _listen(self) -> None:
        with contextlib.suppress(asyncssh.Error, OSError):
            while block := await self._process.stderr.read(65_536):
                self._stderr = (self._stderr + block)[-_NOISE_LIMIT:]

    def _transport_lost(self) -> bool:
        connection = self._transport._connection
        return connection is None or connection.is_closed() or self._process.channel.get_connection() is not connection

    def _gone(self) -> NodeUnreachable:
        why = self.last_words or "the program or the connection is gone"
        return NodeUnreachable("connection lost", where=str(self._transport.target), why=why)

    def _never_began(self) -> Exception:
        if self._process.exit_status is None:
            return self._gone()
        return NodeUnreachable(
            "no command can be run",
            where=str(self._transport.target),
            why=self.last_words or f"its login shell ended with {self._process.exit_status}",
            todo="the user's login shell there must run /bin/sh",
        )

    def _code(self) -> int | None:
        ended = self._process.exit_signal
        if ended is not None:
            return -int(getattr(signal, f"SIG{ended[0]}", 1))
        return self._process.exit_status


class _Witness(asyncssh.SSHClient):
    """Remembers the host key that no known_hosts vouches for; it is never accepted here."""

    def __init__(self) -> None:
        self.known: asyncssh.SSHKnownHosts | None = None
        self.asked: tuple[str, str, int | None] | None = None
        self.offered: asyncssh.SSHKey | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.asked, self.offered = (host, addr, port), key
        return False

    @property
    def name(self) -> str:
        """The node as a line of known_hosts names it."""
        assert self.asked is not None
        host, _, port = self.asked
        return host if port in (None, 22) else f"[{host}]:{port}"

    def accepted(self) -> list[asyncssh.SSHKey]:
        """The keys that known_hosts has for the same host."""
        if self.known is None or self.asked is None:
            return []
        return list(self.known.match(*self.asked)[0])


def _key_problem(where: str, error: asyncssh.HostKeyNotVerifiable, witness: _Witness | None) -> NodeUnreachable:
    if witness is None or witness.offered is None:
        # A revoked key, or one of a jump host's.
        return NodeUnreachable("host key not accepted", where=where, why=error.reason)
    found = witness.offered.get_fingerprint()
    before = witness.accepted()
    if before:
        return HostKeyChanged(
            "the host key has changed",
            where=where,
            why=f"accepted is {before[0].get_fingerprint()}, it shows {found}",
            todo="find out why; only then remove the old line from known_hosts (ssh-keygen -R)",
            expected=before[0].get_fingerprint(),
            found=found,
        )
    return HostKeyUnknown(
        "the host key is not known",
        where=where,
        target=where,
        key=" ".join(witness.offered.export_public_key().decode().split()[:2]),
        fingerprint=found,
        todo=f"compare {found} with the node's own, then accept it in the console or by `flightdeck nodes`",
    )


def _refuse_open_keys(options: asyncssh.SSHClientConnectionOptions) -> None:
    """OpenSSH uses no private key that others can read; neither do we. Raises NodeUnreachable naming it."""
    named = options.config.get("IdentityFile", []) if options.config is not None else []
    for name in named if isinstance(named, list) else []:
        file = Path(str(name)).expanduser()
        try:
            mode = file.stat().st_mode
        except OSError:
            continue
        if stat.S_IMODE(mode) & 0o077:
            raise NodeUnreachable(
                f"the private key {file} can be read by others",
                where=f"{getpass.getuser()} on this machine",
                todo=f"chmod 600 {shlex.quote(str(file))}",
            )


def _os_words(error: OSError) -> str:
    # asyncio names the address once more; the system's own words do.
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "no route to it"
    if isinstance(error, asyncssh.Error) or error.strerror is None:
        return str(error)
    return error.strerror.rpartition(":")[0] if "Connect call failed" in error.strerror else error.strerror


def _remote(path: PurePath) -> str:
    """For SFTP, which begins in the user's home."""
    inside = in_home(path)
    return str(path) if inside is None else inside or "."


async def _write(sftp: asyncssh.SFTPClient, name: str, content: bytes, mode: int) -> None:
    async with sftp.open(name, "wb", asyncssh.SFTPAttrs(permissions=mode)) as file:
        await file.write(content)
        with contextlib.suppress(asyncssh.SFTPOpUnsupported):
            await file.fsync()


def _nothing() -> None:
    return
