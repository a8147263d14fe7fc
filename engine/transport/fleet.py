"""The ways to all nodes of a configuration: one per distinct host, shared by everyone who is given the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from engine.config.models import NodeConfig
from engine.errors import InputError
from engine.security.hosts import SshTarget
from engine.transport.base import Transport
from engine.transport.local import LocalTransport

if TYPE_CHECKING:
    from engine.transport.ssh import Doors, SshTransport


class Fleet:
    """Opens nothing until somebody asks something of a node. To be closed, or used as an async context."""

    def __init__(self, nodes: Iterable[NodeConfig], home: Path) -> None:
        """`home` is the state directory: accepted host keys lie there."""
        self.home = home
        self._ways: dict[str, Transport] = {}
        self._doors: Doors | None = None
        for node in nodes:
            self.reach(node.ssh)

    def to(self, node: NodeConfig) -> Transport:
        """The way to `node`."""
        return self.reach(node.ssh)

    def reach(self, host: str) -> Transport:
        """The way to `[user@]host[:port]`. Raises InputError for what is none."""
        if host not in self._ways:
            target = SshTarget.parse(host)
            self._ways[host] = LocalTransport() if target.local else self._over_ssh(target)
        return self._ways[host]

    def answer(self, host: str, way: Transport) -> None:
        """Reach `host` over `way` from now on: a recording of it, say."""
        self._ways[host] = way

    async def accept(self, host: str, fingerprint: str) -> None:
        """Accept the host key of `[user@]host[:port]` that a person has compared. Raises HostKeyChanged when it shows
        another one by now, NodeUnreachable, OSError, InputError."""
        target = SshTarget.parse(host)
        if target.local:
            raise InputError(f"{host} has no host key", why="this machine is reached without ssh")
        await self._over_ssh(target).accept(fingerprint)

    async def close(self) -> None:
        """Close every connection; returns when they are closed."""
        ways = list(self._ways.values())
        self._ways.clear()
        await asyncio.gather(*(way.close() for way in ways))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _over_ssh(self, target: SshTarget) -> SshTransport:
        # Here, since asyncssh takes 0.3 s to import: a cluster of this machine alone never needs it.
        from engine.transport.ssh import Doors, SshTransport

        self._doors = self._doors or Doors()
        return SshTransport(target, self.home, doors=self._doors)
