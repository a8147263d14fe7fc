"""Where ssh goes: `[user@]host[:port]` of a configuration, by an allow-list, before anything is started with it."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from engine.errors import InputError

LOCAL = "127.0.0.1"
"""The one host that is this machine without ssh, as for mlx.launch."""
ACCEPTED = "[user@]host[:port]: letters, digits and . - _, none of them first a -"
_USER = r"(?P<user>[A-Za-z_][A-Za-z0-9._-]{0,63})"
_HOST = r"(?P<host>[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])"
_TARGET = re.compile(rf"(?:{_USER}@)?{_HOST}(?::(?P<port>[0-9]{{1,5}}))?")


@dataclass(frozen=True)
class SshTarget:
    """One node as ssh reaches it. What is None comes from ssh's own configuration."""

    host: str
    """A name, an alias of ~/.ssh/config, or an address; IPv6 without its brackets."""
    user: str | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> SshTarget:
        """Raises InputError for what is not `[user@]host[:port]`."""
        match = _TARGET.fullmatch(text)
        if match is None:
            raise InputError(f"{text[:80]!r} is no host", todo=ACCEPTED)
        host, port = match["host"], int(match["port"]) if match["port"] else None
        if host.startswith("["):
            host = host[1:-1]
            try:
                ipaddress.IPv6Address(host)
            except ValueError:
                raise InputError(f"{text[:80]!r} is no host", why="what is in the brackets is not IPv6") from None
        if port is not None and not 1 <= port <= 65535:
            raise InputError(f"{text[:80]!r} is no host", why=f"there is no port {port}")
        return cls(host, match["user"], port)

    @property
    def local(self) -> bool:
        """Whether this is the head itself, reached without ssh."""
        return self == SshTarget(LOCAL)

    @property
    def openssh(self) -> str:
        """As OpenSSH's `ssh` and mlx.launch take it: `user@host`, with a port `ssh://user@host:port`."""
        host = f"[{self.host}]" if ":" in self.host and self.port is not None else self.host
        at = f"{self.user}@{host}" if self.user else host
        return f"ssh://{at}:{self.port}" if self.port is not None else at

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        at = f"{self.user}@{host}" if self.user else host
        return f"{at}:{self.port}" if self.port is not None else at
