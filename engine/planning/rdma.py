"""Which RDMA device each rank uses towards each other one, and everything that stands in RDMA's way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config.models import NodeConfig
from engine.models import Interface, NodeFacts, Topology
from engine.nodes import chips
from engine.planning.wiring import RdmaRow

LEAST_MACOS = (26, 2)
MESH_RANKS = 8
"""MLX's jaccl connects at most so many in a full mesh."""
_ENABLE = "start it into Recovery OS, and in Terminal there: rdma_ctl enable"
_PREFIX = "rdma_"
_OWN_NETWORK = "give each cable a /30 of its own, with the Thunderbolt bridge down"


@dataclass(frozen=True)
class Rdma:
    """The matrix of devices, one row per rank, when nothing is in the way."""

    rows: tuple[RdmaRow, ...]
    obstacles: tuple[str, ...]
    """One sentence each, with the node's name in front where it is one node's."""


def rdma_over_cables(
    nodes: Sequence[NodeConfig], facts: Mapping[str, NodeFacts], topology: Topology, *, ring: bool
) -> Rdma:
    """For jaccl, in which every pair is connected, or as a `ring` of neighbours in rank order. Rows that the
    configuration gives are taken as they are."""
    obstacles = _of_the_cluster(nodes, facts, ring=ring)
    for node in nodes:
        obstacles += [f"{node.name}: {fault}" for fault in node_obstacles(facts.get(node.name))]
    pairs = _pairs(len(nodes), ring=ring)
    given = all(node.rdma is not None for node in nodes)
    if given:
        unnamed = [(i, j) for i, j in pairs if not (nodes[i].rdma or ())[j] or not (nodes[j].rdma or ())[i]]
        obstacles += [f"{nodes[i].name}: its rdma row names no device towards {nodes[j].name}" for i, j in unnamed]
        rows = tuple(node.rdma or () for node in nodes)
        return Rdma(rows, tuple(obstacles))
    chosen: dict[tuple[int, int], list[tuple[str, str]]] = {}
    missing = []
    for i, j in pairs:
        usable, faults, cabled = _cables(nodes[i].name, nodes[j].name, facts, topology)
        chosen[i, j] = usable
        if not cabled:
            missing.append(f"{nodes[i].name} and {nodes[j].name}")
        elif not usable:
            obstacles += faults
    if missing:
        shape = "no ring in the order of the nodes" if ring else "no full mesh"
        obstacles.append(f"{shape}: no Thunderbolt cable between {', '.join(missing)}")
    return Rdma(_rows(nodes, chosen), tuple(dict.fromkeys(obstacles)))


def _pairs(ranks: int, *, ring: bool) -> list[tuple[int, int]]:
    if not ring:
        return [(i, j) for i in range(ranks) for j in range(i + 1, ranks)]
    around = {(min(k, (k + 1) % ranks), max(k, (k + 1) % ranks)) for k in range(ranks)}
    return sorted(pair for pair in around if pair[0] != pair[1])


def _rows(nodes: Sequence[NodeConfig], chosen: Mapping[tuple[int, int], list[tuple[str, str]]]) -> tuple[RdmaRow, ...]:
    """As many cables for each pair as the pair with the fewest has."""
    count = min((len(cables) for cables in chosen.values()), default=0)
    matrix: list[list[str | tuple[str, ...] | None]] = [[None] * len(nodes) for _ in nodes]
    for (i, j), cables in chosen.items():
        for here, there, end in ((i, j, 0), (j, i, 1)):
            devices = tuple(cable[end] for cable in cables[:count])
            matrix[here][there] = devices if count > 1 else next(iter(devices), None)
    given = [node.rdma for node in nodes]
    return tuple(own if own is not None else tuple(row) for own, row in zip(given, matrix, strict=True))


def _of_the_cluster(nodes: Sequence[NodeConfig], facts: Mapping[str, NodeFacts], *, ring: bool) -> list[str]:
    obstacles = []
    if len(nodes) > MESH_RANKS and not ring:
        obstacles.append(f"{len(nodes)} ranks, and jaccl connects {MESH_RANKS} at most in a mesh")
    hosts = [node.ssh for node in nodes]
    if shared := sorted({node.name for node in nodes if hosts.count(node.ssh) > 1}):
        obstacles.append(f"{', '.join(shared)} are one machine: RDMA goes from Mac to Mac")
    builds: dict[str, list[str]] = {}
    for node in nodes:
        if (fact := facts.get(node.name)) is not None and fact.os_build:
            builds.setdefault(f"{fact.os_version} ({fact.os_build})", []).append(node.name)
    if len(builds) > 1:
        told = "; ".join(f"{build} on {', '.join(names)}" for build, names in builds.items())
        obstacles.append(f"macOS builds differ: {told}: update them to one")
    return obstacles


def node_obstacles(fact: NodeFacts | None) -> list[str]:
    """What stands in RDMA's way on one node, its cables apart."""
    if fact is None:
        return ["not probed"]
    if fact.problem is not None:
        return [f"not known: {fact.problem}"]
    if fact.system != "Darwin":
        return [f"{fact.os or fact.system or 'its system'} has no RDMA over Thunderbolt"]
    faults = []
    version = tuple(map(int, re.findall(r"\d{1,4}", fact.os_version or "")))
    if not version:
        faults.append("its macOS version is not known")
    elif version < LEAST_MACOS:
        faults.append(f"macOS {fact.os_version}, and RDMA needs 26.2: update it")
    chip = chips.chip(fact.chip)
    if chip is not None and chip.thunderbolt < 5:
        faults.append(f"{fact.chip} has Thunderbolt {chip.thunderbolt}, and RDMA needs 5")
    elif fact.rdma_enabled is False:
        faults.append(f"RDMA is disabled: {_ENABLE}")
    elif fact.rdma_enabled is None:
        late = " did not answer" if "rdma_ctl" in fact.late else " says nothing that is known"
        faults.append(f"whether RDMA is enabled is not known: rdma_ctl{late}")
    if fact.backends and "jaccl" not in fact.backends:
        faults.append(f"its MLX {fact.mlx or ''} has no jaccl".replace("  ", " "))
    return faults


def _cables(
    a: str, b: str, facts: Mapping[str, NodeFacts], topology: Topology
) -> tuple[list[tuple[str, str]], list[str], bool]:
    """(devices of each usable cable, what is wrong with the others, whether there is any cable)."""
    usable, faults, cabled = [], [], False
    for cable in topology.cables:
        if {cable.a, cable.b} != {a, b}:
            continue
        cabled = True
        ends = {cable.a: cable.a_device, cable.b: cable.b_device}
        wrong = [f"{node}: {fault}" for node in (a, b) for fault in _of_the_port(facts.get(node), ends[node])]
        faults += wrong
        if not wrong:
            usable.append((f"{_PREFIX}{ends[a]}", f"{_PREFIX}{ends[b]}"))
    return usable, faults, cabled


def _of_the_port(fact: NodeFacts | None, device: str | None) -> list[str]:
    """What is not known is no fault: MLX says at the start what it cannot do."""
    if fact is None or device is None:
        return ["a Thunderbolt port of no known interface"]
    if chips.port_without_rdma(fact.model) == device:
        return [f"{device} is the port next to Ethernet, which does no RDMA: use another one"]
    name = f"{_PREFIX}{device}"
    rdma = next((found for found in fact.rdma_devices if found.name == name), None)
    if rdma is None and fact.rdma_devices:
        return [f"there is no {name}"]
    faults = []
    if rdma is not None and rdma.port_state not in (None, "PORT_ACTIVE"):
        faults.append(f"{name} is {rdma.port_state}: both ends need RDMA enabled and a Thunderbolt 5 cable")
    interface = next((found for found in fact.interfaces if found.name == device), None)
    if interface is not None and not interface.ipv4:
        faults.append(_no_address(interface))
    elif rdma is not None and rdma.ipv4_gid is False:
        faults.append(f"{name} has no IPv4 address in its GID table: {_OWN_NETWORK}")
    return faults


def _no_address(interface: Interface) -> str:
    member = f" (a member of {interface.bridge})" if interface.bridge else ""
    return f"{interface.name} has no IPv4 address of its own{member}: {_OWN_NETWORK}"
