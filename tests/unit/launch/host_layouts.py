"""Layouts, networks and ports for tests that need no staged worker and no facts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.cluster.staging import HostLayout
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.launch.hostfile import fresh_ports
from engine.plan.network import LaunchHost, NetworkPlan
from engine.security.identifiers import SshTarget


def local_layout(root: Path, ranks: int = 1, bundle: str = "/no/bundle") -> HostLayout:
    """This machine as the host of all `ranks`, its node root at `root`."""
    return HostLayout("127.0.0.1", tuple(range(ranks)), str(Path.home()), str(root), bundle, sys.executable)


def configured_network(nodes: Sequence[NodeConfig], backend: str = "ring") -> NetworkPlan:
    """The network of a configuration that states all of it."""
    hosts = (LaunchHost(ssh=SshTarget.parse(node.ssh).openssh, ips=node.ips, rdma=node.rdma) for node in nodes)
    return NetworkPlan(backend=backend, hosts=tuple(hosts))


def ring_ports(ranks: int) -> int:
    """The first of so many ports that are free on this machine."""
    nodes = [NodeConfig(name=f"n{rank}", python=sys.executable, workdir="/") for rank in range(ranks)]
    return asyncio.run(fresh_ports(Fleet(Path("/")), nodes, configured_network(nodes)))
