"""The transports to the nodes: one per distinct host, opened at first use, and shared by all who hold the Fleet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Self

from engine.cluster.agent_client import AgentClient
from engine.cluster.transport.base import Transport
from engine.cluster.transport.local import LocalTransport
from engine.cluster.transport.ssh import ConnectionLimiter
from engine.config.models import NodeConfig
from engine.errors import InputError
from engine.node.processes import allow_open_files
from engine.security.identifiers import SshTarget

if TYPE_CHECKING:
    from engine.cluster.transport.ssh.transport import SshTransport


class Fleet:
    """Opens nothing before its first use. Close with `close()`, or use as an async context."""

    def __init__(self, home: Path) -> None:
        """`home` is the state directory: accepted host keys lie there."""
        allow_open_files()
        self.home = home
        self._transports: dict[str, Transport] = {}
        self._agents: dict[tuple[str, str], AgentClient] = {}
        self._limiter = ConnectionLimiter()

    def to(self, node: NodeConfig) -> Transport:
        return self.reach(node.ssh)

    def agent(self, node: NodeConfig) -> AgentClient:
        """The agent that runs with the node's own python, shared by all nodes of one host and python."""
        key = node.ssh, node.python
        if key not in self._agents:
            self._agents[key] = AgentClient(node, self.to(node))
        return self._agents[key]

    def reach(self, host: str) -> Transport:
        """The transport to `[user@]host[:port]`. Raises InputError for what is none."""
        if host not in self._transports:
            target = SshTarget.parse(host)
            self._transports[host] = LocalTransport() if target.local else self._over_ssh(target)
        return self._transports[host]

    async def accept(self, host: str, fingerprint: str) -> None:
        """Accept the host key of `[user@]host[:port]` that a person has compared. Raises HostKeyChanged when it shows
        another one by now, NodeUnreachable, OSError, InputError."""
        target = SshTarget.parse(host)
        if target.local:
            raise InputError(f"{host} has no host key", why="this machine is reached without ssh")
        await self._over_ssh(target).accept(fingerprint)

    def _over_ssh(self, target: SshTarget) -> SshTransport:
        # asyncssh takes 0.3 s to import, and a cluster of this machine alone never needs it.
        from engine.cluster.transport.ssh.transport import SshTransport

        return SshTransport(target, self.home, self._limiter)

    async def close(self) -> None:
        """Close every connection; returns when they are closed."""
        agents = list(self._agents.values())
        self._agents.clear()
        await asyncio.gather(*(agent.aclose() for agent in agents))
        transports = list(self._transports.values())
        self._transports.clear()
        await asyncio.gather(*(transport.close() for transport in transports))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
