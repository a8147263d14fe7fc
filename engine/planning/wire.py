"""From facts and cables to the backend and each rank's addresses and RDMA devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import LaunchError
from engine.models import NodeFacts, Topology
from engine.nodes.topology import ring_order
from engine.planning import nccl
from engine.planning.addresses import Addresses, choose_addresses
from engine.planning.rdma import Rdma, rdma_over_cables
from engine.planning.wiring import LaunchHost, RdmaRow, Wiring
from engine.security.hosts import SshTarget

Facts = Mapping[str, NodeFacts]


def wire(config: FlightConfig, facts: Sequence[NodeFacts], topology: Topology) -> Wiring:
    """How the ranks of `config` reach one another; rank k is the k-th node.

    `auto` takes RDMA where it can be had and TCP where not, and then warns of what is in RDMA's way. A backend that the
    configuration demands is that one or a LaunchError, which names each node in its way.
    """
    known = {fact.node: fact for fact in facts}
    nodes, demanded = config.nodes, config.cluster.backend
    if demanded in ("jaccl", "jaccl-ring"):
        rdma = rdma_over_cables(nodes, known, topology, ring=demanded == "jaccl-ring")
        if rdma.obstacles:
            todo = 'mend that, or set backend = "ring" in [cluster]'
            raise LaunchError(f"{demanded} is not possible", why="; ".join(rdma.obstacles), todo=todo)
        return _wired(demanded, (f"{demanded} is the configuration's",), nodes, known, topology, rows=rdma.rows)
    if demanded != "auto":
        return _wired(demanded, (f"{demanded} is the configuration's",), nodes, known, topology)
    return _chosen(nodes, known, topology)


def _chosen(nodes: Sequence[NodeConfig], facts: Facts, topology: Topology) -> Wiring:
    if len({node.ssh for node in nodes}) == 1:
        return _wired("ring", ("all ranks are on one machine",), nodes, facts, topology)
    fields = [facts.get(node.name) for node in nodes]
    if all(fact is not None and fact.gpu == "gpu" and "nccl" in fact.backends for fact in fields):
        return _wired("nccl", ("every node has CUDA", _infiniband(nodes, facts)), nodes, facts, topology)
    if not any(fact is not None and fact.system == "Darwin" for fact in fields):
        return _wired("ring", ("no node is known to be a Mac with RDMA, nor all to have CUDA",), nodes, facts, topology)
    mesh = rdma_over_cables(nodes, facts, topology, ring=False)
    if not mesh.obstacles:
        reason = f"every pair of the {len(nodes)} Macs is cabled, and RDMA is on everywhere"
        return _wired("jaccl", (reason,), nodes, facts, topology, rows=mesh.rows)
    ring = rdma_over_cables(nodes, facts, topology, ring=True)
    if not ring.obstacles:
        reason = f"the {len(nodes)} Macs are cabled as a ring in rank order, and RDMA is on everywhere"
        return _wired("jaccl-ring", (reason, *mesh.obstacles), nodes, facts, topology, rows=ring.rows)
    wiring = _wired("ring", ("TCP, since RDMA is not possible",), nodes, facts, topology)
    return wiring.model_copy(update={"warnings": wiring.warnings + _without_rdma(mesh, ring, nodes, topology)})


def _without_rdma(mesh: Rdma, ring: Rdma, nodes: Sequence[NodeConfig], topology: Topology) -> tuple[str, ...]:
    """What is in the way of both ways of wiring it is said once."""
    found = list(dict.fromkeys(f"no RDMA: {obstacle}" for obstacle in (*mesh.obstacles, *ring.obstacles)))
    order = ring_order(topology)
    names = [node.name for node in nodes]
    if order is not None and len(order) == len(names) and topology.shape == "ring" and not _follows(order, names):
        found.append(f"the cables make a ring in the order {', '.join(order)}: put the [[node]] tables in that order")
    return tuple(found)


def _follows(order: Sequence[str], names: Sequence[str]) -> bool:
    at = order.index(names[0])
    turned = [*order[at:], *order[:at]]
    return turned == [*names] or [turned[0], *reversed(turned[1:])] == [*names]


def _infiniband(nodes: Sequence[NodeConfig], facts: Facts) -> str:
    active = {
        node.name: [device.name for device in facts[node.name].rdma_devices if device.port_state == "PORT_ACTIVE"]
        for node in nodes
    }
    if all(active.values()):
        return "InfiniBand: " + ", ".join(f"{name} {devices[0]}" for name, devices in active.items())
    without = ", ".join(name for name, devices in active.items() if not devices)
    return f"TCP and no InfiniBand: {without} has no active device"


def _wired(
    backend: str,
    reasons: Sequence[str],
    nodes: Sequence[NodeConfig],
    facts: Facts,
    topology: Topology,
    *,
    rows: Sequence[RdmaRow] | None = None,
) -> Wiring:
    addresses = choose_addresses(nodes, facts, topology, ring=backend == "ring")
    return Wiring(
        backend=backend,
        infiniband=backend == "nccl" and nccl.infiniband([node.name for node in nodes], facts),
        hosts=_hosts(nodes, addresses, rows),
        reasons=(*reasons, *addresses.reasons),
        warnings=addresses.warnings,
    )


def _hosts(nodes: Sequence[NodeConfig], addresses: Addresses, rows: Sequence[RdmaRow] | None) -> tuple[LaunchHost, ...]:
    return tuple(
        LaunchHost(ssh=SshTarget.parse(node.ssh).openssh, ips=ips, rdma=rows[rank] if rows is not None else None)
        for rank, (node, ips) in enumerate(zip(nodes, addresses.ips, strict=True))
    )
