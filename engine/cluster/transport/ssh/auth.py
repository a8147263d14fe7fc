"""SSH authentication: the host key is checked against known_hosts, and no key is ever accepted here; login identities
are offered in OpenSSH's order: the agent's that the configuration names, the agent's others, then the named files."""

from __future__ import annotations

import contextlib
import shlex
import stat
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from engine.cluster.transport.base import quoted
from engine.errors import HostKeyChanged, HostKeyUnknown, NodeUnreachable

_NIST = ("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521")
PLAIN_HOST_KEY_ALGORITHMS = ("ssh-ed25519", *_NIST, "rsa-sha2-512")
"""Host key algorithms without certificates."""


class KnownHosts(asyncssh.SSHKnownHosts):
    """Files of known_hosts as one, the first first. A line that is none is passed over, as ssh does."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Raises OSError."""
        super().__init__()
        self.files = {file: asyncssh.SSHKnownHosts() for file in files}
        for file, alone in self.files.items():
            for line in file.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    self.load(line)
                    alone.load(line)


class HostKeyRecorder(asyncssh.SSHClient):
    """Remembers the host key that no known_hosts vouches for."""

    def __init__(self, known_hosts: KnownHosts, alias: str | None) -> None:
        self.known = known_hosts
        self._alias = alias
        self._asked: tuple[str, str, int] | None = None
        self._connection: asyncssh.SSHClientConnection | None = None
        self.offered: asyncssh.SSHKey | None = None

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        self._connection = conn

    @property
    def greeted(self) -> bool:
        """An ssh server has sent its version: one that turns strangers away sends nothing."""
        return self._connection is not None and self._connection.get_extra_info("server_version") is not None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self._asked, self.offered = (self._alias or host, addr, port), key
        return False

    @property
    def name(self) -> str:
        """The node as a line of known_hosts names it."""
        assert self._asked is not None
        host, _, port = self._asked
        return host if port == 22 or self._alias else f"[{host}]:{port}"

    @property
    def strange(self) -> bool:
        """Nothing in known_hosts could vouch for the key that was shown."""
        if self._asked is None:
            return False
        host, address, port = self._asked
        keys, authorities, *_ = self.known.match(host, address, None if port == 22 else port)
        return not authorities and self.offered not in keys

    def accepted(self) -> list[tuple[Path, str, asyncssh.SSHKey]]:
        """The keys that files of known_hosts have for this very host and port, with the file and the name there."""
        if self._asked is None:
            return []
        _, address, port = self._asked
        names = [self.name, *([address if port == 22 else f"[{address}]:{port}"] if address else [])]
        return [
            (file, name, key)
            for file, alone in self.known.files.items()
            for name in names
            for key in alone.match(name, "", None)[0]
        ]


def host_key_error(where: str, target: str, recorder: HostKeyRecorder, reason: str = "") -> NodeUnreachable:
    """The error for a host key that was not accepted; `reason` is asyncssh's, for one that it has not shown."""
    if recorder.offered is None:
        todo = "do not log in; ask its owner" if "revoked" in reason else ""
        return NodeUnreachable("host key refused", where=where, why=reason, todo=todo)
    fingerprint = recorder.offered.get_fingerprint()
    if before := recorder.accepted():
        expected = before[0][2].get_fingerprint()
        commands = dict.fromkeys(f"`ssh-keygen -R '{name}' -f {quoted(file)}`" for file, name, _ in before)
        forget = " and ".join(commands)
        return HostKeyChanged(
            "the host key has changed",
            where=where,
            why=f"accepted is {expected}, it shows {fingerprint}",
            todo=f"find out why; only then {forget}, and accept anew",
            expected=expected,
            shown=fingerprint,
        )
    return HostKeyUnknown(
        "the host key is not known",
        where=where,
        name=recorder.name,
        target=target,
        key=" ".join(recorder.offered.export_public_key().decode().split()[:2]),
        fingerprint=fingerprint,
        todo=f"compare it with the node's own, then accept it: flightdeck nodes --trust {fingerprint}",
    )


LOCKED = "locked by a passphrase, and not in the agent"
_USUAL = ("id_ed25519_sk", "id_ecdsa_sk", "id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True)
class Identities:
    pairs: tuple[asyncssh.SSHKeyPair, ...]
    words: str


@dataclass(frozen=True)
class _KeyFile:
    """A key file: its pairs if it can be used, its public half if that is known."""

    file: Path
    pairs: tuple[asyncssh.SSHKeyPair, ...]
    """With its certificate, if there is one, and without."""
    public: bytes | None
    trouble: str = ""

    @property
    def words(self) -> str:
        return f"{self.file} ({self.trouble})" if self.trouble else str(self.file)


@contextlib.asynccontextmanager
async def identities(
    named: Sequence[str] | None, agent: str, certificates: Sequence[str] = (), *, only_named: bool
) -> AsyncIterator[Identities]:
    """`named` are the configuration's IdentityFiles, None for ssh's usual ones; `agent` is its socket, "" for none;
    `certificates` its CertificateFiles, of which those that cannot be read are passed over, as ssh does. The pairs of
    an agent can be used within. Raises NodeUnreachable for a private key that others can read."""
    usual = [str(Path.home() / ".ssh" / name) for name in _USUAL]
    files = [Path(name).expanduser() for name in (usual if named is None else named)]
    certs = [cert for name in certificates for cert in _read_certificates(Path(name).expanduser())]
    keys = [key for file in files if (key := _read_key_file(file, certs, quiet=named is None)) is not None]
    client, held = None, list[asyncssh.SSHKeyPair]()
    with contextlib.suppress(OSError, asyncssh.Error, ValueError):
        if agent:
            client = await asyncssh.connect_agent(agent)
            held = list(await client.get_keys())
    try:
        first = [pair for key in keys for pair in held if pair.public_data == key.public]
        others = [] if only_named else [pair for pair in held if pair not in first]
        theirs = {pair.public_data for pair in held}
        last = [pair for key in keys if key.public not in theirs for pair in key.pairs]
        comments = [pair.get_comment_bytes() or b"a key" for pair in (*first, *others)]
        words = [f"{comment.decode(errors='replace')} of the agent" for comment in comments]
        words += [key.words for key in keys if key.public not in theirs]
        yield Identities((*first, *others, *last), ", ".join(words))
    finally:
        if client is not None:
            client.close()


def _read_certificates(file: Path) -> Sequence[asyncssh.SSHCertificate]:
    try:
        return asyncssh.load_certificates(str(file))
    except (asyncssh.KeyImportError, OSError):
        return ()


def _read_key_file(file: Path, certificates: Sequence[asyncssh.SSHCertificate], *, quiet: bool) -> _KeyFile | None:
    """None for a file that is not there and need not be."""
    public = _read_public_key(file.with_name(f"{file.name}.pub"))
    try:
        text = file.read_bytes()
    except OSError as error:
        return None if quiet and public is None else _KeyFile(file, (), public, error.strerror or "cannot be read")
    if b"PRIVATE KEY" not in text:
        return _KeyFile(file, (), _read_public_key(file), "no private key")
    if stat.S_IMODE(file.stat().st_mode) & 0o077:
        raise NodeUnreachable(
            "a private key can be read by others", where=str(file), todo=f"chmod 600 {shlex.quote(str(file))}"
        )
    try:
        pairs = asyncssh.load_keypairs(str(file), certlist=certificates, ignore_encrypted=True)
    except (asyncssh.KeyImportError, OSError) as error:
        return _KeyFile(file, (), public, str(error))
    if not pairs:
        return _KeyFile(file, (), public, LOCKED)
    return _KeyFile(file, tuple(pairs), pairs[0].key_public_data)


def _read_public_key(file: Path) -> bytes | None:
    try:
        return asyncssh.read_public_key(file).public_data
    except (asyncssh.KeyImportError, OSError):
        return None
