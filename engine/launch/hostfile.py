"""The hostfile that mlx.launch reads: one entry per rank, in rank order; and the ports that it counts up from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.planning.wiring import Wiring
from engine.worker.wire import write_atomic

RING = "ring"
"""Where every rank listens, on each of its addresses; with every other backend rank 0 alone listens, on one port."""


def document(wiring: Wiring) -> dict[str, Any]:
    """The hostfile's document, with the backend, so that the file can also be given to mlx.launch by hand."""
    hosts = [
        {"ssh": host.ssh, "ips": list(host.ips)} | ({"rdma": list(host.rdma)} if host.rdma is not None else {})
        for host in wiring.hosts
    ]
    return {"backend": wiring.backend, "envs": [], "hosts": hosts}


def write_hostfile(path: Path, wiring: Wiring) -> None:
    """Write the hostfile of `wiring` to `path`, atomically."""
    write_atomic(path, json.dumps(document(wiring), indent=1) + "\n")


def port_count(wiring: Wiring) -> int:
    """How many consecutive ports an attempt listens on, over all its hosts."""
    return sum(len(host.ips) for host in wiring.hosts) if wiring.backend == RING else 1


def ports_of(rank: int, wiring: Wiring, starting_port: int) -> range:
    """The ports on which `rank` listens: for the ring one per rank and address, counted up as mlx.launch does."""
    if wiring.backend != RING:
        return range(starting_port, starting_port + (rank == 0))
    first = starting_port + sum(len(host.ips) for host in wiring.hosts[:rank])
    return range(first, first + len(wiring.hosts[rank].ips))
