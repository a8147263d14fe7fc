"""Places, wirings and ports for tests that need no staged worker and no facts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.config.models import NodeConfig
from engine.launch.place import Place
from engine.launch.ports import fresh_ports
from engine.planning.wiring import LaunchHost, Wiring
from engine.security.hosts import SshTarget
from engine.transport.fleet import Fleet


def local_place(root: Path, ranks: int = 1, bundle: str = "/no/bundle") -> Place:
    """This machine as the host of all `ranks`, its node root at `root`."""
    return Place("127.0.0.1", tuple(range(ranks)), str(Path.home()), str(root), bundle, sys.executable)


def as_configured(nodes: Sequence[NodeConfig], backend: str = "ring") -> Wiring:
    """The wiring that the configuration alone says, where it says all of it."""
    hosts = (LaunchHost(ssh=SshTarget.parse(node.ssh).openssh, ips=node.ips, rdma=node.rdma) for node in nodes)
    return Wiring(backend=backend, hosts=tuple(hosts))


def ring_ports(ranks: int) -> int:
    """The first of so many ports that are free on this machine."""
    nodes = [NodeConfig(name=f"n{rank}", python=sys.executable, workdir="/") for rank in range(ranks)]
    return asyncio.run(fresh_ports(Fleet((), Path("/")), nodes, as_configured(nodes)))
