"""Puts the node bundle on every host of a cluster, and says where everything lies there (HostLayout).

The agent's bootstrap does the staging. Earlier bundles stay: they are a few hundred kilobytes each, and a run that was
launched with one may import from it days later."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeVar

from engine.cluster.agent_client import AgentClient, AgentHome, open_session
from engine.cluster.bundle import node_bundle
from engine.cluster.probe_results import FileHashes
from engine.cluster.transport.base import expanded
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import LaunchError, size_text
from engine.models import NoValue
from engine.node.bootstrap import ROOT, node_root

_ENOUGH_BYTES = 1_000_000
"""Several times what the bundle takes."""
_VERIFY_LIMIT_S = 30.0

Answer = TypeVar("Answer")


async def gather_all(asked: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """All the answers, in order. Raises the first error in that order, when all have come to their end: what one host
    lacks cuts nothing off in the middle on another."""
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


@dataclass(frozen=True)
class HostLayout:
    """One host (a distinct `ssh` of the configuration) with the worker staged. All paths are absolute on it."""

    target: str
    """NodeConfig.ssh."""
    ranks: tuple[int, ...]
    home: str
    root: str
    """The node root: `~/.flightdeck` there."""
    bundle: str
    """The folder that holds `engine/`; programs of the bundle run with it as their directory."""
    python: str
    """Interpreter of the first of its ranks: runs what belongs to the host and not to a rank."""

    def expanded(self, path: str) -> str:
        """A path of this host's configuration, absolute."""
        return expanded(path, self.home)


def hosts_of(nodes: Sequence[NodeConfig]) -> dict[str, tuple[int, ...]]:
    """The distinct `ssh` of `nodes`, and the ranks of each."""
    ranks: dict[str, tuple[int, ...]] = {}
    for rank, node in enumerate(nodes):
        ranks[node.ssh] = (*ranks.get(node.ssh, ()), rank)
    return ranks


async def prepare(fleet: Fleet, nodes: Sequence[NodeConfig]) -> tuple[HostLayout, ...]:
    """One HostLayout for each distinct `ssh` of `nodes`, in their order, all prepared at the same time.

    Raises LaunchError, naming node, path and what to do, for the first host that cannot be prepared, and
    NodeUnreachable for one that cannot be reached."""
    return tuple(await gather_all(_prepare_host(fleet, nodes, ranks) for ranks in hosts_of(nodes).values()))


async def _prepare_host(fleet: Fleet, nodes: Sequence[NodeConfig], ranks: tuple[int, ...]) -> HostLayout:
    node = nodes[ranks[0]]
    agent = fleet.agent(node)
    verified_now = not agent.connected
    home = (await agent.session()).home
    if not verified_now:
        # One that has gone away is noticed by this first: its limit is that of a short answer.
        await agent.round_trip_s()
    if not verified_now and (home.staging_problem is not None or not await _is_staged(agent)):
        # A bootstrap stages it; the agent that is there goes on serving its other requests.
        session = await open_session(node, fleet.to(node))
        await session.aclose()
        home = session.home
    if home.staging_problem is not None:
        raise _not_staged(node, home)
    # A node is not asked where on it we are to write.
    root = node_root() if node.local else PurePosixPath(home.home) / ROOT
    bundle = str(root / "bundles" / node_bundle().name)
    return HostLayout(node.ssh, ranks, home.home, str(root), bundle, expanded(node.python, home.home))


async def _is_staged(agent: AgentClient) -> bool:
    """The bundle of an agent that was started before is still there, with its hash."""
    asked = json.dumps({"files": {}, "model": None, "job": None})
    outcome = await agent.probe("hashes", asked, result_type=FileHashes, timeout_s=_VERIFY_LIMIT_S)
    if isinstance(outcome, NoValue):
        where = agent.node.name
        raise LaunchError(f"the node bundle on {where} could not be verified", where=where, why=str(outcome))
    return outcome.hashes.get("node bundle") == node_bundle().name


def _not_staged(node: NodeConfig, home: AgentHome) -> LaunchError:
    """Not every file system names a full disk as such, so the free space decides."""
    if home.free_bytes is not None and home.free_bytes < _ENOUGH_BYTES:
        why, todo = f"{size_text(home.free_bytes)} are free on its disk", "make room there"
    else:
        why, todo = home.staging_problem or "", "make room or fix the permissions there"
    where = f"{node.ssh}:{home.staging_path}"
    return LaunchError(f"the node bundle could not be staged on {node.name}", where=where, why=why, todo=todo)
