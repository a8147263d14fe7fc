"""The keys to log in with, in OpenSSH's order: the agent's that the configuration names, the agent's others, then the
named files. What is missing or locked is passed over, and said only when nobody lets us in."""

from __future__ import annotations

import contextlib
import shlex
import stat
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from engine.errors import NodeUnreachable

_USUAL = ("id_ed25519_sk", "id_ecdsa_sk", "id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True)
class Identities:
    """What is offered, and how it is called."""

    pairs: tuple[asyncssh.SSHKeyPair, ...]
    words: str


@dataclass(frozen=True)
class _Named:
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
async def identities(named: Sequence[str] | None, agent: str, *, only_named: bool) -> AsyncIterator[Identities]:
    """`named` are the configuration's IdentityFiles, None for ssh's usual ones; `agent` is its socket, "" for none.
    The pairs of an agent can be used within. Raises NodeUnreachable for a private key that others can read."""
    usual = [str(Path.home() / ".ssh" / name) for name in _USUAL]
    files = [Path(name).expanduser() for name in (usual if named is None else named)]
    found = [key for file in files if (key := _look(file, quiet=named is None)) is not None]
    client, held = None, list[asyncssh.SSHKeyPair]()
    with contextlib.suppress(OSError, asyncssh.Error, ValueError):
        if agent:
            client = await asyncssh.connect_agent(agent)
            held = list(await client.get_keys())
    try:
        publics = [key.public for key in found if key.public is not None]
        first = [pair for public in publics for pair in held if pair.public_data == public]
        others = [] if only_named else [pair for pair in held if pair not in first]
        theirs = {pair.public_data for pair in held}
        last = [pair for key in found if key.public not in theirs for pair in key.pairs]
        comments = [pair.get_comment_bytes() or b"a key" for pair in (*first, *others)]
        words = [f"{comment.decode(errors='replace')} of the agent" for comment in comments]
        words += [key.words for key in found if key.public not in theirs]
        yield Identities((*first, *others, *last), ", ".join(words))
    finally:
        if client is not None:
            client.close()


def _look(file: Path, *, quiet: bool) -> _Named | None:
    """None for a file that is not there and need not be."""
    public = _public(file.with_name(f"{file.name}.pub"))
    try:
        text = file.read_bytes()
    except OSError as error:
        return None if quiet and public is None else _Named(file, (), public, error.strerror or "cannot be read")
    if b"PRIVATE KEY" not in text:
        return _Named(file, (), _public(file), "no private key")
    if stat.S_IMODE(file.stat().st_mode) & 0o077:
        raise NodeUnreachable(
            "a private key can be read by others", where=str(file), todo=f"chmod 600 {shlex.quote(str(file))}"
        )
    try:
        pairs = asyncssh.load_keypairs(str(file), ignore_encrypted=True)
    except (asyncssh.KeyImportError, OSError) as error:
        return _Named(file, (), public, str(error))
    if not pairs:
        return _Named(file, (), public, "locked by a passphrase, and not in the agent")
    return _Named(file, tuple(pairs), pairs[0].key_public_data)


def _public(file: Path) -> bytes | None:
    try:
        return asyncssh.read_public_key(file).public_data
    except (asyncssh.KeyImportError, OSError):
        return None
