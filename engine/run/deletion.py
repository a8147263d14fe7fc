"""The space that a run takes on this machine and on its nodes, and its deletion there. A run's folders bear its id;
what it has saved elsewhere, in folders that the configuration or a person named, is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from engine.cluster.probe_results import RemovalReport
from engine.cluster.staging import HostLayout
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, StateError
from engine.launch.rank_environment import path_there
from engine.models import NoValue
from engine.node.probes.storage import disk_usage
from engine.run.events import Attempt
from engine.run.history import RunHistory
from engine.run.journal import read_history
from engine.run.run_plan import RunPlan, read_plan
from engine.snapshots import Deletion, RunFolders
from engine.store.layout import RunDir
from engine.task_result import Fused

_LIMIT_S = 600.0
"""For the removal of many gigabytes on a slow disk."""
_ASIDE = ".deleted-"
"""Begins the name of a folder of this machine's that is being deleted, beside the runs and not among them."""


@dataclass(frozen=True)
class _Host:
    """A distinct `ssh` on which an attempt of the run was started, and the run's folders there."""

    node: NodeConfig
    names: tuple[str, ...]
    folders: tuple[str, ...]


def _hosts(history: RunHistory, plan: RunPlan | None) -> list[_Host]:
    """By the journal; where the plan can be read, with the folders of its destination for states."""
    run, hosts = history.record.id, dict[str, _Host]()
    destination = plan.config.checkpoint.destination if plan is not None else None
    for attempt in history.attempts:
        for layout in attempt.plan.layouts:
            nodes = _nodes(attempt.plan, layout, plan)
            folders = {str(PurePosixPath(layout.root) / "runs" / run)}
            if plan is not None and destination and "://" not in destination:
                places = {path_there(plan.config, node, layout, destination) for node in nodes}
                folders |= {str(PurePosixPath(place) / run) for place in places if place is not None}
            host = hosts.get(layout.target) or _Host(nodes[0], tuple(node.name for node in nodes), ())
            hosts[layout.target] = replace(host, folders=tuple(sorted({*host.folders, *folders})))
    return list(hosts.values())


def _nodes(attempt: Attempt, layout: HostLayout, plan: RunPlan | None) -> list[NodeConfig]:
    """The nodes of a host, as the plan has them, else as far as the attempt has."""
    planned = [node for node in plan.config.nodes if node.ssh == layout.target] if plan is not None else []
    names = [attempt.nodes[rank] for rank in layout.ranks if rank < len(attempt.nodes)] or [layout.target]
    return planned or [NodeConfig(name=name, ssh=layout.target, python=layout.python, workdir="~") for name in names]


def _kept(history: RunHistory, plan: RunPlan | None, hosts: Sequence[_Host]) -> Iterator[tuple[str, str]]:
    """(node, folder) of what it has saved and that is not in a folder of its own."""
    folders = {place for host in hosts for place in host.folders}
    saves = [(event.node, event.saved.folder) for event in history.weights.values()]
    states = (event for events in history.states.values() for event in events)
    saves += [(event.node, event.saved.folder) for event in states if event.saved]
    for result in history.task_results:
        if isinstance(result, Fused) and result.accepted and hosts:
            saves.append((hosts[0].names[0], result.path))
    for node, folder in saves:
        if folders.isdisjoint(map(str, (PurePosixPath(folder), *PurePosixPath(folder).parents))):
            yield node, folder
    if plan is not None and (destination := plan.config.checkpoint.destination) and "://" in destination:
        yield "", destination


async def delete_folders(fleet: Fleet, directory: RunDir, *, go: bool) -> Deletion:
    """The space that the run takes; with `go` its folders on all nodes are deleted at once, those here are not."""
    here = RunFolders("", (str(directory.path),), await asyncio.to_thread(disk_usage, directory.path))
    try:
        history, plan = await asyncio.to_thread(_read, directory)
    except StateError as error:
        unread = RunFolders("its nodes", (f"~/.flightdeck/runs/{directory.id}",), problem=str(error))
        return Deletion(directory.id, here, (unread,))
    hosts = _hosts(history, plan)
    nodes = await asyncio.gather(*(_ask(fleet, host, history, go=go) for host in hosts))
    return Deletion(directory.id, here, tuple(nodes), tuple(dict.fromkeys(_kept(history, plan, hosts))))


def _read(directory: RunDir) -> tuple[RunHistory, RunPlan | None]:
    """Raises StateError where neither journal nor plan can be read."""
    history = read_history(directory)
    with contextlib.suppress(StateError):
        return history, read_plan(directory.plan)
    return history, None


async def _ask(fleet: Fleet, host: _Host, history: RunHistory, *, go: bool) -> RunFolders:
    request = {"run": history.record.id, "nonce": history.nonce, "folders": host.folders, "remove": go}
    name = ", ".join(host.names)
    try:
        agent, asked = fleet.agent(host.node), json.dumps(request)
        report = await agent.probe("run_folders", asked, result_type=RemovalReport, timeout_s=_LIMIT_S)
    except (FlightDeckError, OSError) as error:
        return RunFolders(name, host.folders, problem=str(error))
    if isinstance(report, NoValue):
        return RunFolders(name, host.folders, problem=str(report))
    problem = f"still running there: {', '.join(report.running)}" if report.running else report.problem
    return RunFolders(name, host.folders, report.bytes, problem)


def delete_here(directory: RunDir) -> None:
    """Remove the run's directory, and what an earlier deletion that was killed has left. Raises OSError."""
    if directory.path.exists():
        # One rename: a deletion that is killed leaves nothing like a run.
        directory.path.rename(directory.home / f"{_ASIDE}{directory.id}")
    for left in directory.home.glob(f"{_ASIDE}*"):
        shutil.rmtree(left)
