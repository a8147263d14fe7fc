"""ports_free: the ports of the ring can be bound; for one that is taken, which process holds it.

A process of an earlier run that still listens on a ring port makes mlx.launch hang without a message."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from engine.checks import connectivity
from engine.checks.check import Check, Findings, verdict
from engine.checks.context import CheckContext, once
from engine.checks.fixes import ENDS, Fix
from engine.cluster.agent_client import each_of
from engine.cluster.probe_results import AddressProblems, PortHolder, PortHolders
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, InputError, LaunchError, NodeUnreachable
from engine.launch.hostfile import fresh_ports, port_count, ports_of
from engine.models import CheckResult, CheckStatus
from engine.plan.network import NetworkPlan

NAME = "ports_free"
_LIMIT_S = 20.0

HeldPorts = Mapping[str, Mapping[str, PortHolder] | FlightDeckError]
"""Node → IP:PORT → who holds it, for those of its ports that are held, or why that is not known."""


async def run(context: CheckContext) -> CheckResult:
    network = await context.possible_network()
    if network is None:
        return verdict(NAME, CheckStatus.SKIP, "there is no network plan to take the ports from: see hostfile_valid")
    first = context.config.cluster.starting_port
    if first is None:
        fresh = await fresh_block(context, network)
        summary = f"each attempt takes fresh ones; {port_count(network)} from {fresh} are free now"
        return verdict(NAME, CheckStatus.PASS, summary)
    ports = await held_ports(context)
    findings = Findings(NAME, context.config)
    for node, held in findings.answered(ports):
        if held:
            findings.fault(node, describe_held(node, held), held_fix(held))
        else:
            endpoints = _endpoints(context.config.nodes.index(node), network, first)
            findings.evidence[node.name] = ", ".join(f"{endpoint} is free" for endpoint in endpoints)
    last = first + port_count(network) - 1
    advice = "or leave starting_port out of [cluster]: fresh ports are then taken"
    return findings.verdict(f"{first} to {last} are free", advice=advice)


async def fresh_block(context: CheckContext, network: NetworkPlan) -> int:
    """The first of as many consecutive ports as a launch needs, free on all hosts a moment ago; the same for all
    checks. Raises LaunchError."""
    return await context.shared("fresh ports", lambda: fresh_ports(context.fleet, context.config.nodes, network))


@once
async def held_ports(context: CheckContext) -> HeldPorts:
    """Empty where each attempt takes ports that are free then, and without a network plan (see hostfile_valid)."""
    first, network = context.config.cluster.starting_port, await context.possible_network()
    if first is None or network is None:
        return {}
    endpoints = {node.name: _endpoints(rank, network, first) for rank, node in enumerate(context.config.nodes)}

    async def probe(node: NodeConfig) -> dict[str, PortHolder]:
        wanted = endpoints[node.name]
        if not wanted:
            return {}
        holders = await context.probe(node, "ports", *wanted, result_type=PortHolders, timeout_s=_LIMIT_S)
        return {endpoint: who for endpoint, who in each_of(holders.ports, wanted, node) if who is not None}

    return await context.on_all_nodes(probe)


async def check_address(context: CheckContext, host: str, port: int) -> None:
    """Raises InputError where a server of rank 0 cannot listen there. A node that cannot be asked is preflight's."""
    node, endpoint = context.config.nodes[0], f"{host}:{port}"
    with contextlib.suppress(LaunchError, NodeUnreachable):
        named = await context.probe(node, "addresses", host, result_type=AddressProblems, timeout_s=_LIMIT_S)
        if (why := next(iter(named.problems), None)) is not None:
            todo = f"name an address of {node.name}, or 0.0.0.0 for all that it has"
            raise InputError(f"{node.name} cannot listen on {host}", why=why, todo=todo)
        if port == 0:
            return
        held = await context.probe(node, "ports", endpoint, result_type=PortHolders, timeout_s=_LIMIT_S)
        # One that nobody is seen to hold may be forbidden: the server says why.
        if (who := next(iter(held.ports), None)) is not None and who.pid is not None:
            why, todo = describe_held(node, {endpoint: who}), "--port names another one, 0 a free one"
            raise InputError(f"{node.name} cannot listen on port {port}", why=why, todo=todo)


def held_fix(held: Mapping[str, PortHolder]) -> Fix | None:
    """Ends ranks of earlier runs; any other program is its owner's to end."""
    pids = dict.fromkeys(str(who.pid) for who in held.values() if who.orphan and who.pid is not None)
    return Fix(f"kill {' '.join(pids)}", ENDS) if pids else None


def _endpoints(rank: int, network: NetworkPlan, first: int) -> list[str]:
    return [f"{ip}:{port}" for ip, port in zip(network.hosts[rank].ips, ports_of(rank, network, first), strict=False)]


def describe_held(node: NodeConfig, held: Mapping[str, PortHolder]) -> str:
    orphan = ", a rank of a Flight Deck run, perhaps an orphan"
    return "; ".join(
        f"{endpoint} on {node.name} is held by {who.holder}{orphan if who.orphan else ''}"
        for endpoint, who in held.items()
    )


CHECK = Check(
    NAME, "the ring's ports can be bound", run, label="ports", time_limit_s=_LIMIT_S + 30, needs=(connectivity.NAME,)
)
