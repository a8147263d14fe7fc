"""Who is cabled to whom over Thunderbolt, worked out over all nodes: each port's domain UUID against its peer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.models import Cable, NodeFacts, ThunderboltPort, Topology

_RING_STEPS = 200_000
"""Whether a graph has a cycle through all is hard in general; a cabling that people make needs a few dozen steps."""


def topology(facts: Sequence[NodeFacts]) -> Topology:
    """The cables between these nodes, in the configuration's order.

    Several ranks on one machine are one node here, named after the first. A cable counts when both ends name each
    other, as in MLX's check of a mesh; two cables between the same nodes are two.
    """
    machines = _machines(facts)
    names = tuple(machine.node for machine in machines)
    ends = {port.domain_uuid: (number, port) for number, machine in enumerate(machines) for port in machine.thunderbolt}
    cables, strangers = [], []
    for number, machine in enumerate(machines):
        for port in machine.thunderbolt:
            peer = ends.get(port.peer_uuid or "")
            if peer is None:
                if port.peer_uuid is not None:
                    strangers.append(f"{machine.node} {_named(port)}: {port.peer_name or 'a computer'}")
            elif number < peer[0] and peer[1].peer_uuid == port.domain_uuid:
                cables.append(_cable(machine.node, port, names[peer[0]], peer[1]))
    joined = {frozenset((cable.a, cable.b)) for cable in cables}
    pairs = [(a, b) for number, a in enumerate(names) for b in names[number + 1 :]]
    missing = tuple(pair for pair in pairs if frozenset(pair) not in joined)
    found = Topology(nodes=names, cables=tuple(cables), missing=missing, strangers=tuple(strangers))
    return found.model_copy(update={"shape": _shape(found)})


def ring_order(topology: Topology) -> tuple[str, ...] | None:
    """The nodes in an order in which each is cabled to the next and the last to the first; None when there is none.

    Of several the one that comes first in the configuration's order, which is also MLX's choice.
    """
    if len(topology.nodes) < 2:
        return None
    rank = {node: number for number, node in enumerate(topology.nodes)}
    neighbours: dict[str, set[str]] = {node: set() for node in topology.nodes}
    for cable in topology.cables:
        neighbours[cable.a].add(cable.b)
        neighbours[cable.b].add(cable.a)
    ordered = {node: sorted(others, key=rank.__getitem__) for node, others in neighbours.items()}
    return _cycle(ordered, topology.nodes[0])


def _cycle(neighbours: Mapping[str, Sequence[str]], start: str) -> tuple[str, ...] | None:
    """Depth first with a stack of its own: 64 nodes in a ring are 64 levels."""
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


def _shape(found: Topology) -> str:
    if len(found.nodes) == 1:
        return "single"
    if not found.missing:
        return "mesh"
    if not found.cables:
        return "none"
    return "ring" if ring_order(found) is not None else "incomplete"


def _machines(facts: Sequence[NodeFacts]) -> list[NodeFacts]:
    first: dict[str, NodeFacts] = {}
    for fact in facts:
        first.setdefault(fact.host, fact)
    return list(first.values())


def _cable(a: str, a_port: ThunderboltPort, b: str, b_port: ThunderboltPort) -> Cable:
    return Cable(a=a, a_device=a_port.device, b=b, b_device=b_port.device, speed=a_port.speed or b_port.speed)


def _named(port: ThunderboltPort) -> str:
    return port.device or f"port {port.receptacle or '?'}"
