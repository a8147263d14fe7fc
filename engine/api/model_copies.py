"""The models and data sets on the nodes: which there are, and their copying, verification and removal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import posixpath
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from engine.api.runs import RunsApi
from engine.api.session import Session, named_nodes, stream
from engine.checks.placement import addresses, hub_names
from engine.cluster.agent_client import THIS_MACHINE, value_of
from engine.cluster.copies import Spreading, copies_of, hosts_among, pushed_folder
from engine.cluster.probe_results import NodeCopies, RemovedCopy
from engine.cluster.transfer import CopyManifest, read_manifest
from engine.config.models import Config, NodeConfig
from engine.errors import FlightDeckError, InputError, LaunchError, StateError
from engine.models import NodeFacts
from engine.protocol.manifest import PUSHED, HubName, hub_name
from engine.security.audit import audit_log
from engine.snapshots import CopyProgress

_REMOVE_S = 600.0


class ModelsApi:
    def __init__(self, session: Session, runs: RunsApi) -> None:
        self._session = session
        self._runs = runs

    async def list(self, config: Config) -> list[NodeCopies]:
        """As `each`, in the configuration's order."""
        seen = {copies.node: copies async for copies in self.each(config)}
        return [seen[node.name] for node in hosts_among(config.nodes).values()]

    def each(self, config: Config) -> AsyncGenerator[NodeCopies, None]:
        """The copies on each host of the configuration, one entry for each, as they answer; of a host that gave no
        answer the `problem`."""

        async def work(report: Callable[[NodeCopies], None]) -> None:
            async def ask(node: NodeConfig) -> None:
                report(await self._of(node))

            await asyncio.gather(*map(ask, hosts_among(config.nodes).values()))

        return stream(work, name="copies")

    async def _of(self, node: NodeConfig) -> NodeCopies:
        folders = [posixpath.dirname(node.model)] if node.model and node.model.startswith(("/", "~/")) else []
        return await copies_of(self._session.fleet.agent(node), folders=folders)

    def push(
        self, config: Config, name: str, to: Sequence[str] = (), *, dataset: bool = False, replace: bool = False
    ) -> AsyncGenerator[CopyProgress, None]:
        """Bring a model or data set onto the nodes `to`, or all: a folder of this machine, or what this machine or a
        node has in its cache. What is there is hashed, and repaired. Raises InputError, TransferRefused, LaunchError,
        NodeUnreachable."""

        async def work(report: Callable[[CopyProgress], None]) -> None:
            targets, kind = self._targets(config, to), "dataset" if dataset else "model"
            spreading = self._spreading(config, report)
            folder = Path(name).expanduser().absolute()
            if folder.is_dir():
                holder = await read_manifest(self._session.fleet, THIS_MACHINE, str(folder), note=_note(report))
                place = {"folder": pushed_folder(folder.as_posix(), kind), "replace": replace}
                await spreading.files([holder], place, [node for node in targets.values() if not node.local])
            else:
                await spreading.repository(_hub(name, kind), targets, (*config.nodes, THIS_MACHINE), verify=True)
            context = {"name": name, "nodes": [node.name for node in targets.values()]}
            audit_log("models", "pushed", context, home=self._session.home)

        return stream(work, name="push")

    def pull(
        self, config: Config, name: str, node: str | None = None, *, dataset: bool = False
    ) -> AsyncGenerator[CopyProgress, None]:
        """Bring what a node, or any of them, has in its cache into that of this machine. Raises as `push`."""

        async def work(report: Callable[[CopyProgress], None]) -> None:
            holders = self._targets(config, [node] if node else ()).values()
            spreading = self._spreading(config, report)
            here, hub = {THIS_MACHINE.ssh: THIS_MACHINE}, _hub(name, "dataset" if dataset else "model")
            await spreading.repository(hub, here, [one for one in holders if not one.local], verify=True)

        return stream(work, name="pull")

    async def verify(self, config: Config, name: str, *, dataset: bool = False) -> dict[str, Sequence[str] | str]:
        """Node → its files whose content is not what it should be, once each was hashed: of a repository what its name
        in the cache says; of a folder what the folder of this machine has that was pushed there, else what most nodes
        have. Of a node that has no copy, or gave no answer, why."""
        kind, hosts, fleet = "dataset" if dataset else "model", self._targets(config, ()), self._session.fleet
        folder = Path(name).expanduser().absolute()
        asked: HubName | str = pushed_folder(folder.as_posix(), kind) if folder.is_dir() else name
        if not name.startswith(("/", "~/")) and not folder.is_dir():
            asked = _hub(name, kind)

        async def one(node: NodeConfig, asked: HubName | str) -> CopyManifest | str:
            try:
                return await read_manifest(fleet, node, asked, verify=True)
            except FlightDeckError as error:
                return str(error).removeprefix(f"{node.name}: ")

        # Nothing is pushed to this machine: the folder is its own.
        there = [str(folder) if node.local and folder.is_dir() else asked for node in hosts.values()]
        read = await asyncio.gather(*map(one, hosts.values(), there))
        seen = dict(zip((node.name for node in hosts.values()), read, strict=True))
        if not isinstance(asked, str):
            return {node: copy if isinstance(copy, str) else copy.damaged for node, copy in seen.items()}
        ours = await one(THIS_MACHINE, str(folder)) if folder.is_dir() else None
        given = [ours] if isinstance(ours, CopyManifest) else [copy for copy in read if isinstance(copy, CopyManifest)]
        return {node: copy if isinstance(copy, str) else _differing(copy, given) for node, copy in seen.items()}

    async def remove(self, config: Config, name: str, node: str, *, dataset: bool = False) -> int:
        """Remove a repository from a node's cache, or a folder with a model; the bytes that were freed. Raises
        InputError while a run uses it, LaunchError, NodeUnreachable."""
        ((_, target),) = self._targets(config, [node]).items()
        asked = name if name.startswith(("/", "~/")) else _hub(name, "dataset" if dataset else "model")
        agent = self._session.fleet.agent(target)
        (copies,) = [await copies_of(agent, [asked] if isinstance(asked, HubName) else (), [posixpath.dirname(name)])]

        def is_there(path: str) -> bool:
            # The node tells whole paths, and its home is not known here.
            return path.endswith(name[1:]) if name.startswith("~/") else path == name

        listed = [copy for copy in copies.copies if copy.name == getattr(asked, "name", None) or is_there(copy.path)]
        if copies.problem or not listed:
            raise InputError(f"{node} has no {name}", why=copies.problem or "", todo="see `flightdeck models`")
        paths = [copy.path for copy in listed]
        for why, used in (await asyncio.to_thread(self._runs.configs_in_use)).items():
            if _reads(used, target.ssh, asked, paths):
                raise InputError(f"{name} is in use on {node}", why=why, todo="wait, or abort or cancel it")
        audit_log("models", "removed", {"name": name, "node": node}, home=self._session.home)
        request = {"repository": asked} if isinstance(asked, HubName) else {"folder": name}
        report = await agent.probe("remove_copy", json.dumps(request), result_type=RemovedCopy, timeout_s=_REMOVE_S)
        removed = value_of(report, target)
        if removed.problem is not None:
            raise LaunchError(f"{name} could not be removed", where=node, why=removed.problem)
        return removed.bytes

    def _targets(self, config: Config, names: Sequence[str]) -> dict[str, NodeConfig]:
        """The hosts of these nodes, or all. Raises InputError."""
        return hosts_among(named_nodes(config, names))

    def _spreading(self, config: Config, report: Callable[[CopyProgress], None]) -> Spreading:
        facts = list[NodeFacts]()
        with contextlib.suppress(StateError):
            facts = self._session.store.last_facts(config.cluster.name)
        return Spreading(self._session.fleet, addresses(config, facts), report)


def _reads(config: Config, ssh: str, asked: HubName | str, paths: Sequence[str]) -> bool:
    """By its path, or by a name whose copy is still looked for."""
    named = {(hub.kind, hub.name) for hub in hub_names(config).values()}
    used = {(path or "").rstrip("/") for node in config.nodes if node.ssh == ssh for path in (node.model, node.data)}
    # A file that was pushed by itself lies in its copy.
    used |= {posixpath.dirname(path) for path in used if f"/{PUSHED}" in path}
    # The node tells whole paths, and its home is not known here.
    below_home = tuple(path[1:] for path in used if path.startswith("~/"))
    here = any(node.ssh == ssh for node in config.nodes)
    in_use = not used.isdisjoint((asked, *paths)) or any(path.endswith(below_home) for path in paths)
    return here and (in_use or asked[:2] in named)


def _differing(copy: CopyManifest, given: Sequence[CopyManifest]) -> Sequence[str]:
    """Its files that are not as most of `given` have them, or, where most have no common one, as others have them; and
    those that it lacks and at least half of them have."""
    counts = Counter(file for one in given for file in one.files)
    holders = Counter(file.path for one in given for file in one.files)
    contents, files = Counter(file.path for file in counts), set(copy.files)
    right = {file for file, count in counts.items() if 2 * count > len(given)}
    disputed = {file for file in files - right if contents[file.path] > 1}
    lacking = {path for path, count in holders.items() if 2 * count >= len(given)} - {file.path for file in files}
    return sorted({*copy.damaged, *lacking, *(file.path for file in (right - files) | disputed)})


def _hub(name: str, kind: str) -> HubName:
    """Raises InputError."""
    hub = hub_name(name, kind)
    if hub is None:
        raise InputError(f"{name!r} is neither a folder of this machine nor org/name of the Hugging Face Hub")
    return hub


def _note(report: Callable[[CopyProgress], None]) -> Callable[[str], None]:
    return lambda note: report(CopyProgress(THIS_MACHINE.name, note=note))
