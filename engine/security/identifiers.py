"""Identifiers and ssh targets from outside, checked against an allow-list before they become part of paths, ids and
command lines."""

from __future__ import annotations

import ipaddress
import re
import reprlib
from dataclasses import dataclass

from engine.errors import InputError

MAX_IDENTIFIER_LENGTH = 64
IDENTIFIER_FORM = f"letters, digits, - and _, {MAX_IDENTIFIER_LENGTH} at most, not beginning with -"
_IDENTIFIER = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_-]{{0,{MAX_IDENTIFIER_LENGTH - 1}}}")


def safe_repr(value: object, limit: int = 80) -> str:
    """Any value, however large or hostile, as at most `limit` printable characters."""
    cutter = reprlib.Repr()
    cutter.maxstring = cutter.maxother = cutter.maxlong = limit
    cutter.maxlevel = 3
    try:
        text = cutter.repr(value)
    except (ValueError, RecursionError):
        # An integer of more digits than Python prints, or a nesting deeper than it walks.
        text = f"<{type(value).__name__}>"
    printable = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return printable if len(printable) <= limit else printable[: limit - 1] + "…"


def is_identifier(text: object) -> bool:
    return isinstance(text, str) and _IDENTIFIER.fullmatch(text) is not None


def validate_identifier(text: str, what: str) -> str:
    """`text` itself when it is a valid name. Raises InputError about `what`."""
    if not is_identifier(text):
        raise InputError(f"{what} {safe_repr(text)}", why="not a valid name", todo=IDENTIFIER_FORM)
    return text


def make_identifier(text: str, fallback: str) -> str:
    """A name from the valid characters of `text`: "Qwen3.5 4B (mlx)" gives "Qwen3-5-4B-mlx"."""
    name = re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")[:MAX_IDENTIFIER_LENGTH].strip("-")
    return name or fallback


LOCAL = "127.0.0.1"
"""The one host that means this machine without ssh, as for mlx.launch."""
SSH_TARGET_FORM = "[user@]host[:port]: letters, digits and . - _, none of them first a -"
_USER = r"(?P<user>[A-Za-z_][A-Za-z0-9._-]{0,63})"
_HOST = r"(?P<host>[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])"
_TARGET = re.compile(rf"(?:{_USER}@)?{_HOST}(?::(?P<port>[0-9]{{1,5}}))?")


@dataclass(frozen=True)
class SshTarget:
    """A node's ssh address. A field that is None comes from ssh's own configuration."""

    host: str
    """A name, an alias of ~/.ssh/config, or an address; IPv6 without its brackets."""
    user: str | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> SshTarget:
        """`text` is `[user@]host[:port]`. Raises InputError."""
        match = _TARGET.fullmatch(text)
        if match is None:
            raise InputError(f"{text[:80]!r} is not a host", todo=SSH_TARGET_FORM)
        host, port = match["host"], int(match["port"]) if match["port"] else None
        if host.startswith("["):
            host = host[1:-1]
            try:
                ipaddress.IPv6Address(host)
            except ValueError:
                raise InputError(f"{text[:80]!r} is not a host", why="the address in brackets is not IPv6") from None
        if port is not None and not 1 <= port <= 65535:
            raise InputError(f"{text[:80]!r} is not a host", why=f"there is no port {port}")
        return cls(host, match["user"], port)

    @property
    def local(self) -> bool:
        """The head itself, reached without ssh."""
        return self == SshTarget(LOCAL)

    @property
    def openssh(self) -> str:
        """As OpenSSH's `ssh` and mlx.launch take it: `user@host`, with a port `ssh://user@host:port`."""
        if self.port is not None:
            return f"ssh://{self}"
        return f"{self.user}@{self.host}" if self.user else self.host

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        at = f"{self.user}@{host}" if self.user else host
        return f"{at}:{self.port}" if self.port is not None else at
