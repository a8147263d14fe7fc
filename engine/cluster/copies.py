"""Models and data sets on nodes: which copies there are, and their way onto the nodes that lack one."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from engine.cluster.agent_client import AgentClient
from engine.cluster.probe_results import NodeCopies
from engine.cluster.transfer import CopyManifest, Spread, TransferRefused, read_manifest
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError
from engine.models import NoValue
from engine.protocol.manifest import HubName
from engine.snapshots import CopyProgress

_LIMIT_S = 60.0
_HOLDERS = 3
"""The most that serve a copy at once."""


async def copies_of(agent: AgentClient, wanted: Iterable[HubName] = (), folders: Iterable[str] = ()) -> NodeCopies:
    """All copies of the agent's node, also in `folders`, or those that are `wanted`. An error is its `problem`."""
    request, name = json.dumps({"names": [*wanted], "folders": [*folders]}), agent.node.name
    try:
        report = await agent.probe("copies", request, result_type=NodeCopies, timeout_s=_LIMIT_S)
    except FlightDeckError as error:
        return NodeCopies(node=name, problem=str(error))
    if isinstance(report, NoValue):
        return NodeCopies(node=name, problem=str(report))
    return report.model_copy(update={"node": name})


def hosts_among(nodes: Sequence[NodeConfig]) -> dict[str, NodeConfig]:
    """The distinct hosts of `nodes`, by NodeConfig.ssh."""
    hosts = dict[str, NodeConfig]()
    for node in nodes:
        hosts.setdefault(node.ssh, node)
    return hosts


@dataclass(frozen=True)
class Spreading:
    """Brings copies onto hosts."""

    fleet: Fleet
    addresses: Mapping[str, Sequence[str]]
    """By NodeConfig.ssh, the fastest first."""
    report: Callable[[CopyProgress], None]

    async def repository(
        self, hub: HubName, targets: Mapping[str, NodeConfig], others: Iterable[NodeConfig], *, verify: bool = False
    ) -> dict[str, str]:
        """A repository of the Hub in the caches of all targets, from those and `others` that have it: host → folder of
        its files. With `verify` also where it seems whole, each file is hashed, and repaired. Raises TransferRefused,
        LaunchError, NodeUnreachable."""
        nodes = list({**targets, **hosts_among([*others])}.values())
        answers = await asyncio.gather(*(copies_of(self.fleet.agent(node), [hub]) for node in nodes))
        copies = {node.ssh: answer.best(hub) for node, answer in zip(nodes, answers, strict=True)}
        whole = {ssh: copy for ssh, copy in copies.items() if copy is not None and copy.complete}
        if not whole:
            raise self._nobody_has(hub, answers)
        ((revision, _),) = Counter(copy.revision for copy in whole.values()).most_common(1)
        whole = {ssh: copy for ssh, copy in whole.items() if copy.revision == revision}
        lacking = [node for ssh, node in targets.items() if verify or ssh not in whole]
        there = {ssh: copy.path for ssh, copy in whole.items() if ssh in targets}
        if not lacking:
            return there
        commit = hub._replace(revision=revision)
        # Whoever needs nothing itself serves first.
        givers = sorted((node for node in nodes if node.ssh in whole), key=lambda node: node in lacking)
        holders = [await read_manifest(self.fleet, node, commit) for node in givers[:_HOLDERS]]
        place = {"repository": commit, "refs": holders[0].refs, "verify": verify}
        return {**there, **await self._spread(holders, place, lacking)}

    async def folder(
        self, holder: CopyManifest, folder: str, targets: Mapping[str, NodeConfig], *, replace: bool
    ) -> dict[str, str]:
        """A holder's files in a folder of all targets. Raises as `repository`."""
        place = {"folder": folder, "replace": replace}
        return await self._spread([holder], place, list(targets.values()))

    async def _spread(
        self, holders: Sequence[CopyManifest], place: Mapping[str, object], to: Sequence[NodeConfig]
    ) -> dict[str, str]:
        if not holders[0].files:
            raise TransferRefused(f"{holders[0].path} has no files", where=holders[0].node.name)
        same = [holder for holder in holders if set(holder.files) == set(holders[0].files)]
        return await Spread(self.fleet, same, place, self.addresses, self.report).run(to)

    @staticmethod
    def _nobody_has(hub: HubName, answers: Sequence[NodeCopies]) -> TransferRefused:
        problems = [f"{answer.node}: {answer.problem}" for answer in answers if answer.problem]
        partial = [f"{answer.node}: {copy.state}" for answer in answers if (copy := answer.best(hub)) is not None]
        return TransferRefused(f"no machine has {hub} whole", why="; ".join([*problems, *partial]))


def pushed_folder(path: PurePosixPath | str, kind: str) -> str:
    """Where a folder of this machine lies on the nodes it was pushed to."""
    return f"~/{'datasets' if kind == 'dataset' else 'models'}/{PurePosixPath(path).name}"
