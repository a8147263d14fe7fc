"""Chooses the address at which the other ranks reach each rank, from the nodes' interfaces, and gives each Thunderbolt
cable addresses of its own.

In order of preference: addresses on the Thunderbolt cables between neighbours of the ring, a Thunderbolt bridge that
all nodes are in, a network that all nodes share. Addresses in the configuration are used as they are."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.config.models import NodeConfig
from engine.errors import LaunchError, spans
from engine.models import Cable, Interface, NodeFacts, Topology
from engine.security.identifiers import LOCAL, SshTarget

Network = ipaddress.IPv4Network
_SET_IPS = 'set ips = ["…"] in its [[node]]'
_NO_CABLE_ADDRESSES = "their ends have no addresses in a common network: `flightdeck nodes --setup` gives them some"
_POINT_TO_POINT = 31
"""Networks with this prefix length or a longer one have no room for two hosts."""
_WIFI_NAMES = frozenset({"Wi-Fi", "WLAN", "AirPort"})
_VPN_NAMES = ("utun", "tun", "tap", "wg", "tailscale", "ppp", "ipsec")
"""How the names of a VPN's interfaces begin."""


@dataclass(frozen=True)
class Addresses:
    ips: tuple[tuple[str, ...], ...]
    """By rank."""
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Address:
    ip: ipaddress.IPv4Address
    network: Network
    interface: str
    thunderbolt: bool
    slow: Literal["", "Wi-Fi", "a VPN"]


def choose_addresses(
    nodes: Sequence[NodeConfig], facts: Mapping[str, NodeFacts], topology: Topology, *, backend: str
) -> Addresses:
    """In a ring every rank listens, on the cables to its neighbours if possible; with the other backends all ranks
    connect to rank 0. Raises LaunchError that names each node without a known address."""
    ring = backend == "ring"
    if len({node.ssh for node in nodes}) == 1:
        reasons = () if all(node.ips for node in nodes) else (f"all ranks run on one machine, at {LOCAL}",)
        return Addresses(tuple(node.ips or (LOCAL,) for node in nodes), reasons)
    given = [() if _loopback_alone(node) else node.ips for node in nodes]
    warnings = tuple(f"{node.name}: the other nodes cannot reach {LOCAL}" for node in nodes if _loopback_alone(node))
    if all(given):
        return Addresses(_equally_many(nodes, given, ring=ring), ("the configuration sets the addresses",), warnings)
    if ring and not any(given) and (cables := _over_cables(nodes, facts, topology)) is not None:
        return Addresses(cables, ("each rank listens on the Thunderbolt cable from the previous rank",), warnings)
    problems: dict[str, list[str]] = {}
    for node, ips in zip(nodes, given, strict=True):
        fact = facts.get(node.name)
        if not ips and (problem := "not probed" if fact is None else fact.problem):
            problems.setdefault(problem, []).append(node.name)
    if problems:
        why = "; ".join(f"{spans(names)}: {problem}" for problem, names in problems.items())
        raise LaunchError("no address is known", why=why, todo=_SET_IPS)
    chosen = _shared_network(nodes, facts, topology, given, backend)
    return Addresses(_equally_many(nodes, chosen.ips, ring=ring), chosen.reasons, warnings + chosen.warnings)


def _loopback_alone(node: NodeConfig) -> bool:
    return bool(node.ips) and all(ipaddress.IPv4Address(ip).is_loopback for ip in node.ips)


def _address_of(host: str) -> ipaddress.IPv4Address | None:
    """None for a name."""
    try:
        return ipaddress.IPv4Address(host)
    except ValueError:
        return None


def _equally_many(
    nodes: Sequence[NodeConfig], ips: Sequence[tuple[str, ...]], *, ring: bool
) -> tuple[tuple[str, ...], ...]:
    """MLX's ring does not start when a rank has more connections on one side than on the other."""
    counts = {len(addresses) for addresses in ips}
    if ring and len(counts) > 1:
        why = ", ".join(f"{node.name} has {len(addresses)}" for node, addresses in zip(nodes, ips, strict=True))
        todo = "give every node the same number of ips"
        raise LaunchError("the ring needs the same number of addresses on every node", why=why, todo=todo)
    return tuple(ips)


def _over_cables(
    nodes: Sequence[NodeConfig], facts: Mapping[str, NodeFacts], topology: Topology
) -> tuple[tuple[str, ...], ...] | None:
    """Addresses of rank k on the cables to rank k-1, which connects to it; None unless every rank has some."""
    if len({node.ssh for node in nodes}) < len(nodes):
        return None
    rows = []
    for rank, node in enumerate(nodes):
        before = nodes[rank - 1].name
        on_cables = []
        for cable in topology.cables:
            if {cable.a, cable.b} != {node.name, before}:
                continue
            if (ends := shared_addresses(cable, facts.values())) is not None:
                on_cables.append(ends[0] if cable.a == node.name else ends[1])
        rows.append(tuple(on_cables))
    count = min(map(len, rows))
    return tuple(row[:count] for row in rows) if count else None


def _shared_network(
    nodes: Sequence[NodeConfig],
    facts: Mapping[str, NodeFacts],
    topology: Topology,
    given: Sequence[tuple[str, ...]],
    backend: str,
) -> Addresses:
    ring = backend == "ring"
    by_host: dict[str, list[_Address]] = {}
    for node in nodes:
        by_host.setdefault(node.ssh, list(_addresses(facts.get(node.name))))
    named = {node.ssh: [*map(ipaddress.IPv4Address, ips)] for node, ips in zip(nodes, given, strict=True) if ips}
    shared = _common(by_host, named)
    if not shared:
        _check_known(nodes, facts, given)
        raise _nothing_shared(nodes, by_host, named, cabled=bool(topology.cables))
    targets = [_address_of(SshTarget.parse(node.ssh).host) for node in nodes]
    reached = [ip for ip in targets if ip is not None and not ip.is_loopback]

    def worse(network: Network) -> tuple[bool, bool, int, bool]:
        addresses = shared[network].values()
        vpn = any(address.slow == "a VPN" for address in addresses)
        thunderbolt = all(address.thunderbolt for address in addresses)
        far = sum(ip not in network for ip in reached)
        # With RDMA the bridge is down and a cable reaches only one peer, so any other network is better.
        return thunderbolt != ring, vpn, far, any(address.slow for address in addresses)

    best, *others = sorted(shared, key=lambda network: (worse(network), network))
    chosen = shared[best]
    warnings = []
    # Through RDMA go the gradients themselves: the ranks only find each other on this network.
    slow = next((address.slow for address in chosen.values() if address.slow), None)
    if slow is not None and not backend.startswith("jaccl"):
        warnings.append(f"{best} is {slow}, which is slow for training")
    if ring and topology.cables and not all(address.thunderbolt for address in chosen.values()):
        addressed = all(shared_addresses(cable, facts.values()) for cable in topology.cables)
        why = "they do not join each rank with the next" if addressed else _NO_CABLE_ADDRESSES
        warnings.append(f"the Thunderbolt cables are not used: {why}")
    ips = tuple(ips or (str(chosen[node.ssh].ip),) for node, ips in zip(nodes, given, strict=True))
    equally_good = [str(network) for network in others if worse(network) == worse(best)]
    return Addresses(ips, _reasons(best, chosen, equally_good, nodes), tuple(warnings))


def _check_known(nodes: Sequence[NodeConfig], facts: Mapping[str, NodeFacts], given: Sequence[tuple[str, ...]]) -> None:
    """Raises LaunchError when some node's own addresses are not known, whatever the reason: they may be shared."""
    unknown = {
        node.name: why
        for node, ips in zip(nodes, given, strict=True)
        if not ips and (fact := facts.get(node.name)) is not None
        for name in ("ifconfig", "ip")
        if (why := fact.unknown.get(name)) is not None
    }
    if unknown:
        reasons = "; ".join(f"{name}: {why}" for name, why in unknown.items())
        todo = f"probe again, or {_SET_IPS}"
        raise LaunchError("the addresses are not known", where=", ".join(unknown), why=reasons, todo=todo)


def _common(
    by_host: Mapping[str, Sequence[_Address]], named: Mapping[str, Sequence[ipaddress.IPv4Address]]
) -> dict[Network, dict[str, _Address]]:
    """The networks in which every host has an address, with that address; `named` hosts, whose addresses are
    configured, must have one of those there and are not in the result."""
    networks = {address.network for addresses in by_host.values() for address in addresses}
    shared = {}
    for network in networks:
        if not all(any(ip in network for ip in ips) for ips in named.values()):
            continue
        inside = {
            host: [address for address in addresses if address.network == network]
            for host, addresses in by_host.items()
            if host not in named
        }
        chosen = {host: addresses[0] for host, addresses in inside.items() if addresses}
        # A network local to each machine, such as Docker's, has the same address everywhere.
        if len(chosen) == len(inside) and len({address.ip for address in chosen.values()}) == len(chosen):
            shared[network] = chosen
    return shared


def _reasons(
    network: Network, chosen: Mapping[str, _Address], equally_good: Sequence[str], nodes: Sequence[NodeConfig]
) -> tuple[str, ...]:
    kind = "the Thunderbolt network" if all(address.thunderbolt for address in chosen.values()) else "the network"
    on = {node.ssh: node.name for node in reversed(nodes)}
    where = ", ".join(f"{on[host]} {address.interface}" for host, address in chosen.items())
    shared = f"all nodes share {kind} {network} ({where})"
    if not equally_good:
        return (shared,)
    also = ", ".join(equally_good)
    return shared, f"{also} would work as well; which is faster is unknown: set ips in each [[node]] to choose"


def _nothing_shared(
    nodes: Sequence[NodeConfig],
    by_host: Mapping[str, Sequence[_Address]],
    named: Mapping[str, Sequence[ipaddress.IPv4Address]],
    *,
    cabled: bool,
) -> LaunchError:
    ips = {host: {address.ip for address in addresses} for host, addresses in by_host.items()}
    same = [node for node in nodes if ips[node.ssh] and list(ips.values()).count(ips[node.ssh]) > 1]
    if same:
        return LaunchError(
            f"{', '.join(node.name for node in same)} have the same addresses",
            why=f"they are one machine, reached as {' and as '.join(dict.fromkeys(node.ssh for node in same))}",
            todo="write the same ssh, letter for letter, for all ranks on one machine",
        )
    lines = []
    for node in nodes:
        networks = [f"{address.network} ({address.interface})" for address in by_host[node.ssh]]
        networks = [str(ip) for ip in named.get(node.ssh, ())] or networks
        lines.append(f"{node.name}: {', '.join(dict.fromkeys(networks)) or 'only loopback and link-local addresses'}")
    where = ", ".join(node.name for node in nodes if node.ssh not in named)
    todo = f"`flightdeck nodes --setup` gives each Thunderbolt cable one; else {_SET_IPS}" if cabled else _SET_IPS
    return LaunchError("the nodes have no network in common", where=where, why="; ".join(lines), todo=todo)


def _addresses(fact: NodeFacts | None) -> Iterator[_Address]:
    if fact is None:
        return
    ports = {port.device for port in fact.thunderbolt}
    bridges = {interface.bridge for interface in fact.interfaces if interface.name in ports}
    for interface in fact.interfaces:
        if interface.active is False:
            continue
        for text in interface.ipv4:
            address = ipaddress.IPv4Interface(text)
            if address.is_loopback or address.is_link_local or address.network.prefixlen >= _POINT_TO_POINT:
                continue
            yield _Address(
                ip=address.ip,
                network=address.network,
                interface=interface.name,
                thunderbolt=interface.name in ports or interface.name in bridges,
                slow=_slow(interface),
            )


def _slow(interface: Interface) -> Literal["", "Wi-Fi", "a VPN"]:
    if interface.name.startswith(_VPN_NAMES):
        return "a VPN"
    return "Wi-Fi" if interface.port_name in _WIFI_NAMES or interface.name.startswith("wl") else ""


POOL = ipaddress.IPv4Network("192.168.0.0/16")
_NETMASK = "255.255.255.252"
_BRIDGE = "bridge0"


def assign_subnets(topology: Topology, facts: Iterable[NodeFacts] = ()) -> list[tuple[Cable, str, str]]:
    """The two addresses, of a /30 of its own, for each cable whose two interfaces are known; not overlapping any
    network of the nodes."""
    by_node = {fact.node: fact for fact in facts}
    taken = {
        ipaddress.IPv4Interface(text).network
        for fact in by_node.values()
        for interface in fact.interfaces
        for text in interface.ipv4
    }
    free = (subnet for subnet in POOL.subnets(new_prefix=30) if not any(subnet.overlaps(other) for other in taken))
    cables = [cable for cable in topology.cables if cable.a_device and cable.b_device]
    return [(cable, str(a), str(b)) for cable, (a, b) in zip(cables, (subnet.hosts() for subnet in free), strict=False)]


def setup_commands(topology: Topology, facts: Sequence[NodeFacts] = ()) -> dict[str, list[str]]:
    """Commands to run on each node, in order, that give each cable its own addresses, which RDMA and TCP over the cable
    both need; none for a node without cables, when every cable has addresses, or where some node's addresses are not
    known. They are those of MLX's `mlx.distributed_config`, and last until the Mac restarts."""
    if topology.cables and all(shared_addresses(cable, facts) for cable in topology.cables):
        return {}
    if any(fact.problem or "ifconfig" in fact.unknown for fact in facts):
        return {}
    ends = [
        end
        for cable, a_ip, b_ip in assign_subnets(topology, facts)
        for end in (
            (cable.a, cable.b, cable.a_device, a_ip, b_ip),
            (cable.b, cable.a, cable.b_device, b_ip, a_ip),
        )
    ]
    commands: dict[str, list[str]] = {}
    for node in topology.nodes:
        lines = [
            line
            for peer in topology.nodes
            for here, there, device, ip, other in ends
            if (here, there) == (node, peer)
            for line in (
                f"sudo ifconfig {device} inet {ip} netmask {_NETMASK}",
                f"sudo route change {other} -interface {device}",
            )
        ]
        if lines:
            commands[node] = [f"sudo ifconfig {_BRIDGE} down", *lines]
    return commands


def setup_script(commands: Sequence[str]) -> str:
    """Set-up commands as one that asks for a password once. It goes on when the connection that it came over is cut,
    as one over the bridge is, and past `route change`, which fails where there is no such route yet."""
    lines = ["trap '' HUP", *(line.removeprefix("sudo ") for line in commands)]
    return f"sudo /bin/sh -c {shlex.quote('; '.join(lines))}"


def shared_addresses(cable: Cable, facts: Iterable[NodeFacts]) -> tuple[str, str] | None:
    """Addresses of the two ends of a cable in a common network, if any."""
    by_node = {fact.node: fact for fact in facts}
    a_ends, b_ends = (
        [
            ipaddress.IPv4Interface(text)
            for interface in (by_node[node].interfaces if node in by_node else ())
            if interface.name == device
            for text in interface.ipv4
        ]
        for node, device in ((cable.a, cable.a_device), (cable.b, cable.b_device))
    )
    for a in a_ends:
        for b in b_ends:
            if a.network == b.network and a.ip != b.ip and not a.is_link_local:
                return str(a.ip), str(b.ip)
    return None
