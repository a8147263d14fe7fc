"""Thunderbolt topology: the ports that each Mac reports (`system_profiler SPThunderboltDataType -json`), and the
cables between nodes, found by matching each port's domain UUID with its peer's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.models import Cable, NodeFacts, ThunderboltPort, Topology
from engine.security.sanitise import json_object, json_objects, json_or_none, text_or_none

_RECEPTACLE = re.compile(r"receptacle_\d{1,2}_tag")
_DOMAIN = "domain_uuid_key"
_DEPTH = 12
"""A Thunderbolt chain has at most 6 devices."""
PORT_LIMIT = 32


def thunderbolt_ports(system_profiler: str, devices: Mapping[str, str]) -> tuple[ThunderboltPort, ...]:
    """One for each bus that can be at the end of a cable between computers; `devices` is receptacle → interface.

    A peer has a domain of its own, which displays, docks and disks do not. A hub nests it in `_items`."""
    report = json_object(json_or_none(system_profiler))
    ports = []
    for bus in json_objects(report.get("SPThunderboltDataType"), PORT_LIMIT):
        domain = text_or_none(bus.get(_DOMAIN), 64)
        if domain is None:
            continue
        tags = (json_object(bus[key]) for key in sorted(bus) if _RECEPTACLE.fullmatch(key))
        tag = next(filter(None, tags), {})
        receptacle = text_or_none(tag.get("receptacle_id_key"), 8)
        peer: dict[str, Any] = next(_computers(bus, _DEPTH), {})
        ports.append(
            ThunderboltPort(
                domain_uuid=domain,
                receptacle=receptacle,
                device=devices.get(receptacle or ""),
                peer_uuid=text_or_none(peer.get(_DOMAIN), 64),
                peer_name=text_or_none(peer.get("_name"), 64),
                speed=text_or_none(tag.get("current_speed_key"), 40),
            )
        )
    return tuple(sorted(ports, key=lambda port: (port.device or "~", port.receptacle or "", port.domain_uuid)))


def _computers(item: Mapping[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    """Nearest first."""
    inner = json_objects(item.get("_items"), PORT_LIMIT)
    yield from (entry for entry in inner if isinstance(entry.get(_DOMAIN), str))
    if depth > 0:
        for entry in inner:
            yield from _computers(entry, depth - 1)


_RING_STEPS = 200_000
"""Finding a Hamiltonian cycle is hard in general; a real cabling takes a few dozen steps."""


def topology(facts: Sequence[NodeFacts]) -> Topology:
    """The cables between these nodes, in the configuration's order.

    Several ranks on one machine are one node here, named after the first. A cable counts when its ends name each other,
    as in MLX's check of a mesh; two cables between the same nodes count as two. A node that does not report a cable
    which another one sees is unknown: its output was read wrongly, or before the cable was plugged in."""
    first: dict[str, NodeFacts] = {}
    for fact in facts:
        first.setdefault(fact.host, fact)
    machines = list(first.values())
    names = tuple(machine.node for machine in machines)
    unknown = {
        machine.node: str(machine.unknown["thunderbolt"]) for machine in machines if "thunderbolt" in machine.unknown
    }
    ends = {port.domain_uuid: (number, port) for number, machine in enumerate(machines) for port in machine.thunderbolt}
    cables, strangers = [], []
    for number, machine in enumerate(machines):
        for port in machine.thunderbolt:
            peer = ends.get(port.peer_uuid or "")
            if peer is None:
                # One that is not known may be the other end.
                if port.peer_uuid is not None and not unknown:
                    place = port.device or f"port {port.receptacle or '?'}"
                    strangers.append(f"{machine.node} {place}: {port.peer_name or 'a computer'}")
            elif peer[1].peer_uuid != port.domain_uuid:
                unknown.setdefault(names[peer[0]], f"{machine.node} sees a cable to it that it does not report")
            elif number < peer[0]:
                b, b_device = names[peer[0]], peer[1].device
                speed = port.speed or peer[1].speed
                cables.append(Cable(a=machine.node, a_device=port.device, b=b, b_device=b_device, speed=speed))
    joined = {frozenset((cable.a, cable.b)) for cable in cables}
    pairs = [(a, b) for number, a in enumerate(names) for b in names[number + 1 :]]
    missing = tuple(pair for pair in pairs if frozenset(pair) not in joined and unknown.keys().isdisjoint(pair))
    cabling = Topology(nodes=names, cables=tuple(cables), missing=missing, strangers=tuple(strangers), unknown=unknown)
    return cabling.model_copy(update={"shape": _shape(cabling)})


def ring_order(topology: Topology) -> tuple[str, ...] | None:
    """The nodes in an order in which each is cabled to the next and the last to the first; None when there is none. Of
    several the first in the configuration's order, as in MLX."""
    if len(topology.nodes) < 2:
        return None
    joined = {frozenset((cable.a, cable.b)) for cable in topology.cables}
    neighbours = {a: [b for b in topology.nodes if frozenset((a, b)) in joined] for a in topology.nodes}
    return _cycle(neighbours, topology.nodes[0])


def _cycle(neighbours: Mapping[str, Sequence[str]], start: str) -> tuple[str, ...] | None:
    """Depth first, without recursion: 64 nodes in a ring are 64 levels."""
    path, choices = [start], [iter(neighbours[start])]
    for _ in range(_RING_STEPS):
        if not choices:
            return None
        node = next(choices[-1], None)
        if node is None:
            path.pop()
            choices.pop()
        elif node not in path:
            path.append(node)
            if len(path) == len(neighbours) and start in neighbours[node]:
                return tuple(path)
            choices.append(iter(neighbours[node]))
    return None


def _shape(cabling: Topology) -> str:
    if len(cabling.nodes) == 1:
        return "single"
    if cabling.unknown:
        return "unknown"
    if not cabling.missing:
        return "mesh"
    if not cabling.cables:
        return "none"
    return "ring" if ring_order(cabling) is not None else "incomplete"
