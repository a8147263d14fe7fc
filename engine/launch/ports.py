"""Ports: a fresh consecutive block for each attempt, and who holds a port that turned out to be busy."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from engine.config.models import NodeConfig
from engine.errors import LaunchError
from engine.launch.asking import ask, at_once
from engine.launch.hostfile import port_count, ports_of
from engine.launch.ports_script import bindable
from engine.launch.staging import Ways, hosts_of
from engine.planning.wiring import Wiring
from engine.worker.looks.ports import look as look_at_port

# Below both systems' ephemeral ports (Linux 32768, macOS 49152), above the registered ones in common use,
# and away from MLX's own default of 32323.
LOWEST, HIGHEST = 20_000, 32_000
_ROUNDS, _CANDIDATES = 3, 24
SCRIPT = Path(__file__).with_name("ports_script.py")


async def fresh_ports(
    fleet: Ways,
    nodes: Sequence[NodeConfig],
    wiring: Wiring,
    starting_port: int | None = None,
    *,
    rng: random.Random | None = None,
) -> int:
    """The first of the consecutive TCP ports that an attempt listens on, each really free where it will be listened on.

    A given `starting_port` is taken as it is: whether it is free is preflight's question. Otherwise the block is chosen
    at random, and each host is asked, all at the same time, for the ports of its own ranks. Raises LaunchError when
    nothing is free on all hosts, and what transports raise.
    """
    if starting_port is not None:
        return starting_port
    chooser = rng or random.SystemRandom()
    listening = {
        ranks: [offset for rank in ranks for offset in ports_of(rank, wiring, 0)] for ranks in hosts_of(nodes).values()
    }
    for _ in range(_ROUNDS):
        firsts = [chooser.randrange(LOWEST, HIGHEST - port_count(wiring)) for _ in range(_CANDIDATES)]
        free = await at_once(
            _free(fleet, nodes[ranks[0]], firsts, offsets) for ranks, offsets in listening.items() if offsets
        )
        if (common := next((first for first in firsts if all(first in each for each in free)), None)) is not None:
            return common
    raise LaunchError(
        f"no {port_count(wiring)} consecutive ports are free on all hosts",
        why=f"tried {_ROUNDS * _CANDIDATES} places between {LOWEST} and {HIGHEST}",
        todo="set starting_port in [cluster]",
    )


async def _free(fleet: Ways, node: NodeConfig, firsts: Sequence[int], offsets: Sequence[int]) -> set[int]:
    """Those of `firsts` from which on a host's ranks could listen."""
    if node.local:
        # Bound for a moment each: too quick to be worth a thread.
        return {first for first in firsts if all(bindable("", first + offset) for offset in offsets)}
    question = json.dumps({"firsts": list(firsts), "offsets": list(offsets)})
    answer = await ask(fleet.to(node), node, SCRIPT, question, "free")
    free = answer["free"]
    return {first for first in firsts if first in free} if isinstance(free, list) else set()


def holder(port: int) -> str | None:
    """Who listens on TCP `port` of this machine, as "pid 12 (command)"; None when nobody does."""
    held = look_at_port("", port)
    return str(held["holder"]) if held is not None else None
