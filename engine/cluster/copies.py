"""Models and data sets on nodes: which copies there are, and their way onto the nodes that lack one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from engine.cluster.agent_client import AgentClient
from engine.cluster.probe_results import NodeCopies, NodeCopy
from engine.cluster.transfer import CopyManifest, Spread, TransferRefused, next_report, read_manifest
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, size_text
from engine.models import NoValue
from engine.protocol.manifest import PUSHED, REVISION, HubName
from engine.protocol.sizes import room_fault
from engine.security.sanitise import count_or_none, finite_or_none, plain
from engine.snapshots import CopyProgress

_LIMIT_S = 60.0
_COMMIT = re.compile(REVISION)
_SAMPLE_BYTES, _COMPARED_S = 4 << 20, 6.0
"""For the comparison of the ways to the Hub."""
_HOLDERS = 3
"""The most that serve a copy at once."""


async def copies_of(
    agent: AgentClient, wanted: Iterable[HubName] = (), folders: Iterable[str] = (), paths: Iterable[str] = ()
) -> NodeCopies:
    """All copies of the agent's node, also in `folders`, or those that are `wanted`; and which `paths` are `present`.
    An error is its `problem`."""
    request, name = {"names": [*wanted], "folders": [*folders], "paths": [*paths]}, agent.node.name
    try:
        report = await agent.probe("copies", json.dumps(request), result_type=NodeCopies, timeout_s=_LIMIT_S)
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
        """A repository of the Hub in the caches of all targets, from those and `others` that have it; where nobody has,
        one of them downloads it first: host → folder of its files. With `verify` also where it seems whole, each file
        is hashed, and repaired. Raises TransferRefused, LaunchError, NodeUnreachable."""
        nodes = list({**targets, **hosts_among([*others])}.values())
        answers = await asyncio.gather(*(copies_of(self.fleet.agent(node), [hub]) for node in nodes))
        copies = {node.ssh: answer.best(hub) for node, answer in zip(nodes, answers, strict=True)}
        whole = {ssh: copy for ssh, copy in copies.items() if copy is not None and copy.complete}
        if not whole and hub.name.startswith(PUSHED):
            # The Hub may have another one of that name.
            raise TransferRefused(f"no machine has {hub}", why=self._lacking(answers, hub))
        if not whole:
            free = {node.ssh: answer.free_bytes for node, answer in zip(nodes, answers, strict=True)}
            newest, path, node = await self._download(hub, nodes, targets, free, self._lacking(answers, hub))
            copy = {"kind": hub.kind, "name": hub.name, "revision": newest, "path": path, "bytes": 0, "files": 0}
            whole = {node.ssh: NodeCopy.model_validate(copy)}
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
        return {**there, **await self.files(holders, place, lacking)}

    async def files(
        self, holders: Sequence[CopyManifest], place: Mapping[str, object], to: Sequence[NodeConfig]
    ) -> dict[str, str]:
        """The files of `holders` in a `place` (Spread's) of each host. Raises as `repository`."""
        if not holders[0].files:
            raise TransferRefused(f"{holders[0].path} has no files", where=holders[0].node.name)
        same = [holder for holder in holders if set(holder.files) == set(holders[0].files)]
        return await Spread(self.fleet, same, place, self.addresses, self.report).run(to)

    async def _download(
        self,
        hub: HubName,
        nodes: Sequence[NodeConfig],
        targets: Mapping[str, NodeConfig],
        free: Mapping[str, int | None],
        lacking: str,
    ) -> tuple[str, str, NodeConfig]:
        """Onto the machine to which the Hub's files come fastest, or the next one where that fails, targets before
        others: the commit, its folder and the machine. Raises TransferRefused, naming why nobody could, or who has no
        room."""
        problems = [lacking] if lacking else []
        for group in ([*targets.values()], [node for node in nodes if node.ssh not in targets]):
            for node, answer in await self._ways_out(hub, group):
                if answer.keys() == {"rate"}:
                    # It was late, and its size is not known yet.
                    answer = await self._ask_hub(node, hub, get=False)
                if "problem" not in answer:
                    need = count_or_none(answer.get("bytes")) or 0
                    self._check_room(hub, need, {ssh: free.get(ssh) for ssh in (node.ssh, *targets)})
                    answer = await self._ask_hub(node, hub, size=need, get=True)
                path = answer.get("path")
                if isinstance(path, str) and _COMMIT.fullmatch(commit := PurePosixPath(path).name):
                    return commit, path, node
                problems.append(f"{node.name}: {plain(answer.get('problem'), 200)}")
        raise TransferRefused(f"no machine has {hub}, and none can download it", why="; ".join(problems))

    async def _ways_out(self, hub: HubName, nodes: Sequence[NodeConfig]) -> list[tuple[NodeConfig, dict[str, Any]]]:
        """The machines with the Hub's answer to each, the best way out first, as measured by the begin of a file. Once
        one has answered, the others have _COMPARED_S."""
        sample, answers = _SAMPLE_BYTES if len(nodes) > 1 else 0, dict[str, dict[str, Any]]()

        async def ask(node: NodeConfig) -> None:
            answers[node.ssh] = await self._ask_hub(node, hub, get=False, sample=sample)

        asking = [asyncio.create_task(ask(node)) for node in nodes]
        try:
            async with asyncio.timeout(None) as limit:
                for asked in asyncio.as_completed(asking):
                    await asked
                    if limit.when() is None and any("problem" not in answer for answer in answers.values()):
                        limit.reschedule(asyncio.get_running_loop().time() + _COMPARED_S)
        except TimeoutError:
            # They are tried after those that have answered.
            answers = {node.ssh: {"rate": -1.0} for node in nodes} | answers
        finally:
            for task in asking:
                task.cancel()
        rates = {ssh: finite_or_none(answer.get("rate")) or 0.0 for ssh, answer in answers.items()}
        ways = sorted(nodes, key=lambda node: ("problem" in answers[node.ssh], -rates[node.ssh]))
        if rated := [f"{node.name} {size_text(rates[node.ssh])}/s" for node in ways if rates[node.ssh] > 0]:
            self.report(CopyProgress(ways[0].name, note=f"has the best way to the Hub: {', '.join(rated)}"))
        return [(node, answers[node.ssh]) for node in ways]

    @staticmethod
    def _check_room(hub: HubName, need: int, free: Mapping[str, int | None]) -> None:
        """`free`: by host, on the disk of its cache. Raises TransferRefused."""
        for ssh, room in free.items():
            if room is not None and (fault := room_fault(need, room)):
                raise TransferRefused(f"there is no room for {hub}", where=ssh, why=fault)

    async def _ask_hub(self, node: NodeConfig, hub: HubName, *, size: int = 0, **asked: Any) -> dict[str, Any]:
        """The answer of the probe `hub` (engine.node.hub_cache.ask_hub); an error is its `problem`."""
        try:
            request = json.dumps({"repository": hub, **asked})
            with contextlib.closing(await self.fleet.agent(node).start_probe("hub", request)) as probe:
                while (report := await next_report(probe, node)).keys() == {"here"}:
                    if size:
                        here = count_or_none(report["here"]) or 0
                        self.report(CopyProgress(node.name, min(here, size), size, None, f"{hub.name} from the Hub"))
        except FlightDeckError as error:
            return {"problem": str(error).removeprefix(f"{node.name}: ")}
        return dict(report)

    @staticmethod
    def _lacking(answers: Sequence[NodeCopies], hub: HubName) -> str:
        problems = [f"{answer.node}: {answer.problem}" for answer in answers if answer.problem]
        partial = [f"{answer.node}: {copy.state}" for answer in answers if (copy := answer.best(hub)) is not None]
        return "; ".join([*problems, *partial])


def pushed_folder(path: PurePosixPath | str, kind: str) -> str:
    """Where a folder of this machine lies on the nodes it was pushed to."""
    return f"~/{'datasets' if kind == 'dataset' else 'models'}/{PurePosixPath(path).name}"
