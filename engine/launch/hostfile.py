"""The hostfile that mlx.launch reads: one entry per rank, in rank order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from engine.config.models import NodeConfig
from engine.worker.wire import write_atomic


def ring_hostfile(nodes: Iterable[NodeConfig]) -> list[dict[str, Any]]:
    """The hostfile's document for the ring backend; rank k is the k-th node."""
    return [{"ssh": node.ssh, "ips": list(node.ips)} for node in nodes]


def write_hostfile(path: Path, nodes: Iterable[NodeConfig]) -> None:
    """Write the ring hostfile of `nodes` to `path`, atomically."""
    write_atomic(path, json.dumps(ring_hostfile(nodes), indent=1) + "\n")


def port_count(nodes: Iterable[NodeConfig]) -> int:
    """How many ring ports mlx.launch counts up from --starting-port: one per rank and IP."""
    return sum(len(node.ips) for node in nodes)


def ports_of(rank: int, nodes: Sequence[NodeConfig], starting_port: int) -> range:
    """The ports on which `rank` listens."""
    first = starting_port + port_count(nodes[:rank])
    return range(first, first + len(nodes[rank].ips))
