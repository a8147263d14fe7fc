"""Commands that give each Thunderbolt cable its own addresses, which RDMA and TCP over the cable both need.

They are those of MLX's `mlx.distributed_config`: a /30 network per cable, and the Thunderbolt bridge down. They last
until the Mac restarts.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.models import Cable, NodeFacts, Topology

POOL = ipaddress.IPv4Network("192.168.0.0/16")
_NETMASK = "255.255.255.252"
_BRIDGE = "bridge0"


@dataclass(frozen=True)
class CableAddresses:
    """Addresses for the two ends of a cable."""

    cable: Cable
    a_ip: str
    b_ip: str


def assign_subnets(topology: Topology, facts: Iterable[NodeFacts] = ()) -> tuple[CableAddresses, ...]:
    """A /30 for each cable whose two interfaces are known, not overlapping any network of the nodes."""
    known = {fact.node: fact for fact in facts}
    taken = {network for fact in known.values() for network in _networks(fact)}
    free = (subnet for subnet in POOL.subnets(new_prefix=30) if not any(subnet.overlaps(other) for other in taken))
    cables = [cable for cable in topology.cables if cable.a_device and cable.b_device]
    found = []
    for cable, subnet in zip(cables, free, strict=False):
        a, b = subnet.hosts()
        found.append(CableAddresses(cable, str(a), str(b)))
    return tuple(found)


def setup_commands(topology: Topology, facts: Sequence[NodeFacts] = ()) -> dict[str, list[str]]:
    """Commands to run on each node, in order; none for a node without cables, or when every cable has addresses."""
    if topology.cables and all(shared_addresses(cable, facts) for cable in topology.cables):
        return {}
    found = assign_subnets(topology, facts)
    commands: dict[str, list[str]] = {}
    for node in topology.nodes:
        lines = [line for peer in topology.nodes for line in _towards(node, peer, found)]
        if lines:
            commands[node] = [f"sudo ifconfig {_BRIDGE} down", *lines]
    return commands


def shared_addresses(cable: Cable, facts: Iterable[NodeFacts]) -> tuple[str, str] | None:
    """Addresses of the two ends of a cable in a common network, if any."""
    known = {fact.node: fact for fact in facts}
    a_ends, b_ends = (
        [ipaddress.IPv4Interface(text) for text in _of_device(known.get(node), device)]
        for node, device in ((cable.a, cable.a_device), (cable.b, cable.b_device))
    )
    for a in a_ends:
        for b in b_ends:
            if a.network == b.network and a.ip != b.ip and not a.is_link_local:
                return str(a.ip), str(b.ip)
    return None


def _of_device(fact: NodeFacts | None, device: str | None) -> tuple[str, ...]:
    interfaces = fact.interfaces if fact is not None and device is not None else ()
    return next((interface.ipv4 for interface in interfaces if interface.name == device), ())


def _towards(node: str, peer: str, found: Iterable[CableAddresses]) -> Iterator[str]:
    for link in found:
        ends = (link.cable.a, link.cable.b)
        if ends == (node, peer):
            device, own, other = link.cable.a_device, link.a_ip, link.b_ip
        elif ends == (peer, node):
            device, own, other = link.cable.b_device, link.b_ip, link.a_ip
        else:
            continue
        yield f"sudo ifconfig {device} inet {own} netmask {_NETMASK}"
        yield f"sudo route change {other} -interface {device}"


def _networks(fact: NodeFacts) -> Iterator[ipaddress.IPv4Network]:
    for interface in fact.interfaces:
        for text in interface.ipv4:
            yield ipaddress.IPv4Interface(text).network
