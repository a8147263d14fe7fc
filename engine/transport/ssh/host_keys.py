"""Whether a node is the one that it was: its host key against known_hosts. No key is ever accepted here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import asyncssh

from engine.errors import HostKeyChanged, HostKeyUnknown, NodeUnreachable

PLAIN = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "rsa-sha2-512")
"""Host key algorithms without certificates."""


class Offered(HostKeyUnknown):
    """A key that nobody has accepted, and `name`, under which known_hosts would hold it."""

    name: str


class Witness(asyncssh.SSHClient):
    """Remembers the host key that no known_hosts vouches for."""

    def __init__(self, known: asyncssh.SSHKnownHosts, alias: str | None) -> None:
        self.known = known
        self._alias = alias
        self._asked: tuple[str, str, int] | None = None
        self._connection: asyncssh.SSHClientConnection | None = None
        self.offered: asyncssh.SSHKey | None = None

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        self._connection = conn

    @property
    def greeted(self) -> bool:
        """Whether an ssh server has said its name: one that turns strangers away says nothing."""
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
        """Whether nothing in known_hosts could vouch for the key that was shown."""
        if self._asked is None:
            return False
        host, address, port = self._asked
        keys, authorities, *_ = self.known.match(host, address, None if port == 22 else port)
        return not authorities and self.offered not in keys

    def accepted(self) -> list[asyncssh.SSHKey]:
        """The keys that known_hosts has for this very host and port."""
        if self._asked is None:
            return []
        _, address, port = self._asked
        names = [self.name, *([address if port == 22 else f"[{address}]:{port}"] if address else [])]
        return [key for name in names for key in self.known.match(name, "", None)[0]]


def read_known_hosts(files: Iterable[Path]) -> asyncssh.SSHKnownHosts:
    """All of them as one, the first first. A line that is none is passed over, as ssh does. Raises OSError."""
    known = asyncssh.SSHKnownHosts()
    for file in files:
        for line in file.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                known.load(line)
    return known


def problem(where: str, target: str, witness: Witness, error: asyncssh.HostKeyNotVerifiable) -> NodeUnreachable:
    """What is the matter with the key that the node has shown."""
    if witness.offered is None:
        todo = "do not log in; ask its owner" if "revoked" in error.reason else ""
        return NodeUnreachable("host key refused", where=where, why=error.reason, todo=todo)
    found = witness.offered.get_fingerprint()
    before = witness.accepted()
    if before:
        expected = before[0].get_fingerprint()
        return HostKeyChanged(
            "the host key has changed",
            where=where,
            why=f"accepted is {expected}, it shows {found}",
            todo=f"find out why; only then `ssh-keygen -R '{witness.name}' -f` the known_hosts file and accept anew",
            expected=expected,
            found=found,
        )
    offered = Offered(
        "the host key is not known",
        where=where,
        target=target,
        key=" ".join(witness.offered.export_public_key().decode().split()[:2]),
        fingerprint=found,
        todo=f"compare it with the node's own, then accept it: flightdeck nodes --trust {found}",
    )
    offered.name = witness.name
    return offered


def not_that_key(where: str, accepted: str, found: str) -> HostKeyChanged:
    """A node shows another key than the one that a person has just compared."""
    return HostKeyChanged(
        "the host key is not the one that was accepted",
        where=where,
        why=f"accepted was {accepted}, it shows {found}",
        todo="find out what stands between",
        expected=accepted,
        found=found,
    )
