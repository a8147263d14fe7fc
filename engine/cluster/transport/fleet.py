"""The transports to all nodes of a configuration: one per distinct host, opened at first use and shared by everyone
who holds the Fleet.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from types import TracebackType
from typing import TYPE_CHECKING, Self

from engine.cluster.agent_client import AgentClient
from engine.cluster.transport.base import Channel, Completed, Transport
from engine.cluster.transport.local import LocalTransport
from engine.config.models import NodeConfig
from engine.errors import InputError
from engine.security.identifiers import SshTarget

if TYPE_CHECKING:
    from engine.cluster.transport.ssh import ConnectionLimiter, SshTransport


class Fleet:
    """Opens nothing before its first use. Close with `close()`, or use as an async context."""

    def __init__(self, nodes: Iterable[NodeConfig], home: Path) -> None:
        """`home` is the state directory: accepted host keys lie there."""
        self.home = home
        self._ways: dict[str, Transport] = {}
        self._agents: dict[tuple[str, str], AgentClient] = {}
        self._doors = _SshTransportFactory()
        for node in nodes:
            self.reach(node.ssh)

    def to(self, node: NodeConfig) -> Transport:
        """The way to `node`."""
        return self.reach(node.ssh)

    def agent(self, node: NodeConfig) -> AgentClient:
        """The agent that runs with the node's own python, shared by all nodes of one host and python."""
        key = node.ssh, node.python
        if key not in self._agents:
            self._agents[key] = AgentClient(node, self.to(node))
        return self._agents[key]

    def reach(self, host: str) -> Transport:
        """The way to `[user@]host[:port]`. Raises InputError for what is none."""
        if host not in self._ways:
            target = SshTarget.parse(host)
            self._ways[host] = LocalTransport() if target.local else _LazySshTransport(target, self.home, self._doors)
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
        await _LazySshTransport(target, self.home, self._doors).accept(fingerprint)

    async def close(self) -> None:
        """Close every connection; returns when they are closed."""
        agents = list(self._agents.values())
        self._agents.clear()
        await asyncio.gather(*(agent.aclose() for agent in agents))
        ways = list(self._ways.values())
        self._ways.clear()
        await asyncio.gather(*(way.close() for way in ways))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _SshTransportFactory:
    """The Doors of a fleet, made when asyncssh is there."""

    def __init__(self) -> None:
        self._made: ConnectionLimiter | None = None

    async def transport(self, target: SshTarget, home: Path) -> SshTransport:
        # asyncssh takes 0.3 s to import: a cluster of this machine alone never needs it, and a console that asks its
        # nodes goes on painting meanwhile.
        if "engine.cluster.transport.ssh" not in sys.modules:
            await asyncio.to_thread(importlib.import_module, "engine.cluster.transport.ssh")
        from engine.cluster.transport.ssh import ConnectionLimiter, SshTransport

        self._made = self._made or ConnectionLimiter()
        return SshTransport(target, home, doors=self._made)


class _LazySshTransport:
    """The Transport over SSH, which imports asyncssh at its first use."""

    def __init__(self, target: SshTarget, home: Path, doors: _SshTransportFactory) -> None:
        self._target = target
        self._home = home
        self._doors = doors
        self._made: SshTransport | None = None
        self._making = asyncio.Lock()

    @property
    def target(self) -> SshTarget:
        return self._target

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", directory: PurePath | None = None
    ) -> Completed:
        return await (await self._way()).run(argv, timeout_s=timeout_s, stdin=stdin, directory=directory)

    async def open(self, argv: Sequence[str], *, directory: PurePath | None = None) -> Channel:
        return await (await self._way()).open(argv, directory=directory)

    async def read_from(self, path: PurePath, offset: int, size: int) -> bytes:
        return await (await self._way()).read_from(path, offset, size)

    async def put(self, path: PurePath, content: bytes, *, mode: int = 0o600) -> None:
        await (await self._way()).put(path, content, mode=mode)

    async def put_tree(self, path: PurePath, files: dict[str, bytes]) -> None:
        await (await self._way()).put_tree(path, files)

    async def round_trip_s(self) -> float | None:
        return await (await self._way()).round_trip_s()

    async def close(self) -> None:
        if self._made is not None:
            await self._made.close()

    async def accept(self, fingerprint: str) -> None:
        await (await self._way()).accept(fingerprint)

    async def _way(self) -> SshTransport:
        async with self._making:
            if self._made is None:
                self._made = await self._doors.transport(self._target, self._home)
        return self._made
