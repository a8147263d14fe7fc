"""The hostfile that mlx.launch reads, and the ports of an attempt: how many it listens on, which rank has which, and
a fresh free block of them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.cluster.agent_client import value_of
from engine.cluster.probe_results import FreePorts
from engine.cluster.staging import gather_all, hosts_of
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import LaunchError
from engine.node.probes.network import bindable
from engine.plan.network import NetworkPlan
from engine.protocol.attempt import write_atomic

RING = "ring"
"""Where every rank listens, on each of its addresses; with every other backend rank 0 alone listens, on one port."""


def hostfile_document(network: NetworkPlan) -> dict[str, Any]:
    """The hostfile's document, with the backend, so that the file can also be given to mlx.launch by hand."""
    hosts = [host.model_dump(mode="json", exclude_none=True, exclude={"interface"}) for host in network.hosts]
    return {"backend": network.backend, "envs": [], "hosts": hosts}


def write_hostfile(path: Path, network: NetworkPlan) -> None:
    write_atomic(path, json.dumps(hostfile_document(network), indent=1) + "\n")


def port_count(network: NetworkPlan) -> int:
    """How many consecutive ports an attempt listens on, over all its hosts."""
    return sum(len(host.ips) for host in network.hosts) if network.backend == RING else 1


def ports_of(rank: int, network: NetworkPlan, starting_port: int) -> range:
    """The ports on which `rank` listens: for the ring one per rank and address, counted up as mlx.launch does."""
    if network.backend != RING:
        return range(starting_port, starting_port + (rank == 0))
    first = starting_port + sum(len(host.ips) for host in network.hosts[:rank])
    return range(first, first + len(network.hosts[rank].ips))


# Below both systems' ephemeral ports (Linux 32768, macOS 49152), above the registered ones in common use,
# and away from MLX's own default of 32323.
LOWEST, HIGHEST = 20_000, 32_000
_ROUNDS, _CANDIDATES = 3, 24
_LIMIT_S = 30.0


async def fresh_ports(
    fleet: Fleet, nodes: Sequence[NodeConfig], network: NetworkPlan, starting_port: int | None = None
) -> int:
    """The first of the consecutive TCP ports that an attempt listens on, each really free where it will be listened on.

    A given `starting_port` is taken as it is: whether it is free is preflight's question. Otherwise the block is chosen
    at random, and each host is asked, all at the same time, for the ports of its own ranks. Raises LaunchError when
    nothing is free on all hosts, and what transports raise."""
    if starting_port is not None:
        return starting_port
    listening = {
        ranks: [offset for rank in ranks for offset in ports_of(rank, network, 0)] for ranks in hosts_of(nodes).values()
    }
    for _ in range(_ROUNDS):
        firsts = [random.randrange(LOWEST, HIGHEST - port_count(network)) for _ in range(_CANDIDATES)]
        free = await gather_all(
            _free(fleet, nodes[ranks[0]], firsts, offsets) for ranks, offsets in listening.items() if offsets
        )
        if (common := next((first for first in firsts if all(first in ports for ports in free)), None)) is not None:
            return common
    raise LaunchError(
        f"no {port_count(network)} consecutive ports are free on all hosts",
        why=f"tried {_ROUNDS * _CANDIDATES} places between {LOWEST} and {HIGHEST}",
        todo="set starting_port in [cluster]",
    )


async def _free(fleet: Fleet, node: NodeConfig, firsts: Sequence[int], offsets: Sequence[int]) -> set[int]:
    """Those of `firsts` from which on a host's ranks could listen."""
    if node.local:
        # Bound for a moment each: too quick to be worth an agent.
        return {first for first in firsts if all(bindable("", first + offset) for offset in offsets)}
    request = json.dumps({"firsts": list(firsts), "offsets": list(offsets)})
    outcome = await fleet.agent(node).probe("free_ports", request, result_type=FreePorts, timeout_s=_LIMIT_S)
    return set(value_of(outcome, node).free)
