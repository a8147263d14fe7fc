"""From facts and cables to the backend and each rank's addresses and RDMA devices."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config.models import FlightConfig
from engine.errors import LaunchError
from engine.models import NodeFacts, Topology
from engine.planning.wiring import LaunchHost, Wiring
from engine.security.hosts import SshTarget


def wire(config: FlightConfig, facts: Sequence[NodeFacts], topology: Topology) -> Wiring:
    """How the ranks of `config` reach one another. Raises LaunchError naming each node that stands in the way."""
    backend = "ring" if config.cluster.backend == "auto" else config.cluster.backend
    hosts = []
    for node in config.nodes:
        target = SshTarget.parse(node.ssh)
        ips = node.ips or (("127.0.0.1",) if target.local else ())
        if not ips:
            raise LaunchError(
                f"{node.name} has no address for its rank", where=node.ssh, todo='set ips = ["…"] in its [[node]]'
            )
        hosts.append(LaunchHost(ssh=target.openssh, ips=ips, rdma=node.rdma))
    return Wiring(backend=backend, hosts=tuple(hosts))
