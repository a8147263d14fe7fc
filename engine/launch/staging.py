"""Prepares the hosts of a cluster for a launch: the worker's bundle below each node root, proved by its hash.

Bundles of earlier versions stay where they are: they are a few hundred kilobytes each, and a run that was launched with
one may go on for days and import from it late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from engine.config.models import NodeConfig
from engine.errors import LaunchError
from engine.launch.asking import ask, at_once
from engine.launch.bundle import SOURCE, stage_bundle
from engine.launch.place import Place
from engine.launch.staging_script import PACKAGE, ROOT, bundle_hash, python_files
from engine.runs.layout import node_root
from engine.security.identifiers import shown
from engine.security.paths import path_fault
from engine.security.sanitise import sanitise
from engine.transport.base import Transport

SCRIPT = Path(__file__).with_name("staging_script.py")
_ENOUGH_BYTES = 1_000_000
"""Several times what the worker takes."""


class Ways(Protocol):
    """What gives the way to each node: engine.transport.fleet.Fleet."""

    def to(self, node: NodeConfig) -> Transport: ...


async def prepare(fleet: Ways, nodes: Sequence[NodeConfig]) -> tuple[Place, ...]:
    """One Place for each distinct `ssh` of `nodes`, in their order, all prepared at the same time.

    A host that has the bundle costs one round trip. Raises LaunchError, naming node, path and what to do, for the first
    host that cannot be prepared, and NodeUnreachable for one that cannot be reached.
    """
    expected = await asyncio.to_thread(bundle_hash, SOURCE)
    return tuple(
        await at_once(
            _local(nodes, ranks) if nodes[ranks[0]].local else _remote(fleet, nodes, ranks, expected)
            for ranks in hosts_of(nodes).values()
        )
    )


def hosts_of(nodes: Sequence[NodeConfig]) -> dict[str, tuple[int, ...]]:
    """The distinct `ssh` of `nodes`, and the ranks of each."""
    found: dict[str, tuple[int, ...]] = {}
    for rank, node in enumerate(nodes):
        found[node.ssh] = (*found.get(node.ssh, ()), rank)
    return found


async def _local(nodes: Sequence[NodeConfig], ranks: tuple[int, ...]) -> Place:
    node, root = nodes[ranks[0]], node_root()
    bundle = await asyncio.to_thread(stage_bundle, root)
    return Place(node.ssh, ranks, str(Path.home()), str(root), str(bundle), node.python)


async def _remote(fleet: Ways, nodes: Sequence[NodeConfig], ranks: tuple[int, ...], expected: str) -> Place:
    node = nodes[ranks[0]]
    transport = fleet.to(node)
    answer = await _look(transport, node, expected)
    if not answer["whole"]:
        refused = await _put(transport, PurePosixPath(answer["bundle"]))
        # Also after a refusal: somebody else may have staged the same at the same time, which is as good.
        answer = await _look(transport, node, expected)
        if not answer["whole"]:
            raise _not_staged(node, refused, answer)
    place = Place(node.ssh, ranks, answer["home"], answer["root"], answer["bundle"], node.python)
    return Place(node.ssh, ranks, place.home, place.root, place.bundle, place.expanded(node.python))


async def _look(transport: Transport, node: NodeConfig, expected: str) -> dict[str, Any]:
    answer = await ask(transport, node, SCRIPT, expected, "whole")
    if "problem" in answer:
        raise LaunchError(
            f"there is no place for the worker on {node.name}",
            where=node.ssh,
            why=sanitise(f"{answer.get('path')}: {answer['problem']}".encode(errors="replace"), 300),
            todo="make room or mend the permissions there",
        )
    home = answer.get("home")
    if not isinstance(home, str) or path_fault(home) or not home.startswith("/") or ".." in home.split("/"):
        raise LaunchError(
            f"the home on {node.name} cannot be used", where=node.ssh, why=f"it is said to be {shown(home)}"
        )
    # Where the rest lies follows from that: a node is not asked where on it we are to write.
    root = PurePosixPath(home) / ROOT
    return {**answer, "root": str(root), "bundle": str(root / "bundles" / expected)}


async def _put(transport: Transport, bundle: PurePosixPath) -> OSError | None:
    """Put the worker's files there; why they could not be, if so."""
    files = await asyncio.to_thread(
        lambda: {f"{PACKAGE}/{path.relative_to(SOURCE).as_posix()}": path.read_bytes() for path in python_files(SOURCE)}
    )
    try:
        await transport.put_tree(bundle, files)
    except OSError as error:
        return error
    return None


def _not_staged(node: NodeConfig, refused: OSError | None, answer: dict[str, Any]) -> LaunchError:
    """SFTP says no more of a full disk than "Failure", so that what is free tells."""
    free_bytes = answer.get("free_bytes")
    if isinstance(free_bytes, int) and free_bytes < _ENOUGH_BYTES:
        why, todo = f"{free_bytes // 1000} kB are free on its disk", "make room there"
    else:
        why = (refused.strerror or str(refused)) if refused is not None else "what arrived is not what was sent"
        todo = "make room or mend the permissions there"
    where = f"{node.ssh}:{answer['bundle']}"
    return LaunchError(f"the worker could not be staged on {node.name}", where=where, why=why, todo=todo)
