"""The commands that give each Thunderbolt cable addresses of its own, which RDMA and TCP over the cable both need.

The same as MLX's `mlx.distributed_config` prints: each cable a /30, the Thunderbolt bridge down. They last until the
Mac is restarted.
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
class Link:
    """One cable and the addresses for its ends."""

    cable: Cable
    a_ip: str
    b_ip: str


def links(topology: Topology, facts: Iterable[NodeFacts] = ()) -> tuple[Link, ...]:
    """A /30 for each cable whose two interfaces are known, clear of every network that the nodes are in already."""
    known = {fact.node: fact for fact in facts}
    taken = {network for fact in known.values() for network in _networks(fact)}
    free = (subnet for subnet in POOL.subnets(new_prefix=30) if not any(subnet.overlaps(other) for other in taken))
    cables = [cable for cable in topology.cables if cable.a_device and cable.b_device]
    found = []
    for cable, subnet in zip(cables, free, strict=False):
        a, b = subnet.hosts()
        found.append(Link(cable, str(a), str(b)))
    return tuple(found)


def setup_commands(topology: Topology, facts: Sequence[NodeFacts] = ()) -> dict[str, list[str]]:
    """Per node, what a person runs there, in this order; nothing for a node without cables, or when every cable has its
    addresses already."""
    if topology.cables and all(shared_addresses(cable, facts) for cable in topology.cables):
        return {}
    found = links(topology, facts)
    commands: dict[str, list[str]] = {}
    for node in topology.nodes:
        lines = [line for peer in topology.nodes for line in _towards(node, peer, found)]
        if lines:
            commands[node] = [f"sudo ifconfig {_BRIDGE} down", *lines]
    return commands


def shared_addresses(cable: Cable, facts: Iterable[NodeFacts]) -> tuple[str, str] | None:
    """The addresses of a cable's two ends in one network, where they have such."""
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


def _towards(node: str, peer: str, found: Iterable[Link]) -> Iterator[str]:
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
