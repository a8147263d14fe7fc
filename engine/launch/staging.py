"""Prepares the hosts of a cluster for a launch: the worker's bundle below each node root, proved by its hash."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from engine.config.models import NodeConfig
from engine.launch.bundle import stage_bundle
from engine.launch.place import Place
from engine.runs.layout import node_root
from engine.security.hosts import SshTarget
from engine.transport.base import Transport


class Ways(Protocol):
    """What gives the way to each node: engine.transport.fleet.Fleet."""

    def to(self, node: NodeConfig) -> Transport: ...


async def prepare(fleet: Ways, nodes: Sequence[NodeConfig]) -> tuple[Place, ...]:
    """One Place for each distinct `ssh` of `nodes`, in their order, all prepared at the same time.

    Raises LaunchError, naming the node, for the first that cannot be prepared.
    """
    return tuple([await _local(target, ranks, nodes) for target, ranks in hosts_of(nodes).items()])


def hosts_of(nodes: Sequence[NodeConfig]) -> dict[str, tuple[int, ...]]:
    """The distinct `ssh` of `nodes`, and the ranks of each."""
    found: dict[str, tuple[int, ...]] = {}
    for rank, node in enumerate(nodes):
        found[node.ssh] = (*found.get(node.ssh, ()), rank)
    return found


async def _local(target: str, ranks: tuple[int, ...], nodes: Sequence[NodeConfig]) -> Place:
    assert SshTarget.parse(target).local
    root = node_root()
    bundle = await asyncio.to_thread(stage_bundle, root)
    return Place(target, ranks, str(Path.home()), str(root), str(bundle), nodes[ranks[0]].python)
