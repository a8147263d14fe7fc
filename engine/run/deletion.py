"""The space that a run takes on this machine and on its nodes, and its deletion there. A run's folders bear its id;
what it has saved elsewhere, in folders that the configuration or a person named, is kept."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from engine.cluster.probe_results import RemovalReport
from engine.cluster.transport.fleet import Fleet
from engine.config.models import Config, NodeConfig
from engine.errors import FlightDeckError
from engine.launch.rank_environment import path_there
from engine.models import NoValue
from engine.node.probes.storage import disk_usage
from engine.run.history import RunHistory
from engine.run.run_plan import RunPlan
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


def _hosts(plan: RunPlan, history: RunHistory) -> list[_Host]:
    config, hosts = plan.config, dict[str, tuple[list[NodeConfig], set[str]]]()
    for attempt in history.attempts:
        for layout in attempt.plan.layouts:
            nodes = [node for node in config.nodes if node.ssh == layout.target]
            folders = {str(PurePosixPath(layout.root) / "runs" / plan.run_id)}
            destination = config.checkpoint.destination
            if destination and "://" not in destination:
                places = {path_there(config, node, layout, destination) for node in nodes}
                folders |= {str(PurePosixPath(place) / plan.run_id) for place in places if place is not None}
            if nodes:
                hosts.setdefault(layout.target, (nodes, set()))[1].update(folders)
    return [_Host(nodes[0], tuple(node.name for node in nodes), (*sorted(places),)) for nodes, places in hosts.values()]


def _kept(config: Config, run: str, history: RunHistory) -> Iterator[tuple[str, str]]:
    """(node, folder) of what it has saved and that is not in a folder of its own."""
    saves = [(event.node, event.saved) for event in history.weights.values()]
    saves += [(event.node, event.saved) for states in history.states.values() for event in states if event.saved]
    for node, saved in saves:
        if run not in PurePosixPath(saved.folder).parts:
            yield node, saved.folder
    for result in history.task_results:
        if isinstance(result, Fused) and result.accepted and run not in PurePosixPath(result.path).parts:
            yield config.nodes[0].name, result.path
    if (destination := config.checkpoint.destination) and "://" in destination:
        yield "", destination


async def delete_folders(fleet: Fleet, directory: RunDir, plan: RunPlan, history: RunHistory, *, go: bool) -> Deletion:
    """The space that the run takes; with `go` its folders on all nodes are deleted at once, those here are not."""
    hosts = _hosts(plan, history)
    nodes = await asyncio.gather(*(_ask(fleet, host, plan, go=go) for host in hosts))
    here = await asyncio.to_thread(disk_usage, directory.path)
    kept = tuple(dict.fromkeys(_kept(plan.config, directory.id, history)))
    return Deletion(directory.id, RunFolders("", (str(directory.path),), here), tuple(nodes), kept)


async def _ask(fleet: Fleet, host: _Host, plan: RunPlan, *, go: bool) -> RunFolders:
    asked = json.dumps({"run": plan.run_id, "nonce": plan.nonce, "folders": host.folders, "remove": go})
    name = ", ".join(host.names)
    try:
        report = await fleet.agent(host.node).probe("run_folders", asked, result_type=RemovalReport, timeout_s=_LIMIT_S)
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
