"""Where a job's model and data are that are named as on the Hugging Face Hub, or pushed: in each node's cache, or in a
folder of Flight Deck's own. A launch brings them there first; whatever else looks at the nodes takes what is there."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.checks.fixes import Fix, flightdeck_command
from engine.cluster.agent_client import THIS_MACHINE
from engine.cluster.copies import Spreading, copies_of, hosts_among
from engine.cluster.topology import topology
from engine.cluster.transfer import read_manifest
from engine.cluster.transport.fleet import Fleet
from engine.config.formats import resolved
from engine.config.models import Config, NodeConfig, on_node
from engine.errors import LaunchError
from engine.models import NodeFacts
from engine.plan.network import plan_network
from engine.protocol.attempt import read_regular
from engine.protocol.manifest import DATA_PREFIX, PUSHED, REVISION, HubName, hub_name
from engine.security.identifiers import make_identifier
from engine.snapshots import CopyProgress
from engine.store.layout import RunDir, run_names

Report = Callable[[CopyProgress], None]


def hub_names(config: Config) -> dict[str, HubName]:
    """`model` and `data` of the job, where they are written as names of the Hub; a model's may be a path, too."""
    job, names = config.job, dict[str, HubName]()
    if job.task is None and job.kind.own_model is None:
        if job.model is not None and (hub := hub_name(job.model)) is not None:
            names["model"] = hub
        if (job.data or "").startswith(DATA_PREFIX) and (hub := hub_name(job.data or "")) is not None:
            names["data"] = hub
    return names


def addresses(config: Config, facts: Sequence[NodeFacts]) -> Mapping[str, Sequence[str]]:
    """By host, the fastest first, as far as the facts tell."""
    by_host = {node.ssh: [ip for ip in node.ips if ip != "127.0.0.1"] for node in config.nodes}
    with contextlib.suppress(LaunchError, ValueError):
        plan = plan_network(config, facts, topology(facts))
        for node, host in zip(config.nodes, plan.hosts, strict=True):
            by_host[node.ssh] = [*host.ips, *by_host[node.ssh]]
    return by_host


async def located(config: Config, fleet: Fleet, spreading: Spreading | None = None) -> Config:
    """The configuration with the paths of the whole copies that the nodes have of what the job names, where the name is
    no folder there; with `spreading` every node is brought one first. Raises TransferRefused, LaunchError,
    NodeUnreachable, and without `spreading` nothing."""
    for key, hub in hub_names(config).items():
        hosts = hosts_among([node for node in config.nodes if takes(config, key, node)])
        asked = [copies_of(fleet.agent(node), [hub], (), [str(getattr(node, key))]) for node in hosts.values()]
        answers = await asyncio.gather(*asked)
        if not hosts or any(answer.present for answer in answers):
            continue
        if spreading is not None:
            paths = await spreading.repository(hub, hosts, [THIS_MACHINE])
        else:
            copies = {ssh: answer.best(hub) for ssh, answer in zip(hosts, answers, strict=True)}
            paths = {ssh: copy.path for ssh, copy in copies.items() if copy is not None and copy.complete}
        config = _with_paths(config, key, paths)
    return config


async def placed(config: Config, fleet: Fleet, facts: Sequence[NodeFacts], report: Report) -> Config:
    """The same once every node has what it lacks, also the data of this machine that `[data] push` sends. Raises
    TransferRefused, LaunchError, NodeUnreachable."""
    spreading = Spreading(fleet, addresses(config, facts), report)
    config = await located(config, fleet, spreading)
    if config.data.push and not (config.job.data or DATA_PREFIX).startswith(DATA_PREFIX):
        targets = hosts_among([node for node in config.nodes if not node.local and takes(config, "data", node)])
        if targets:
            config = _with_paths(config, "data", await _push(spreading, config, targets))
    return config


async def _push(spreading: Spreading, config: Config, targets: Mapping[str, NodeConfig]) -> dict[str, str]:
    """The data of this machine in a folder of Flight Deck's own on each target, named by its content: what a run reads
    never changes under it, and a file that is there from an earlier push is not sent again."""
    source = Path(resolved(str(config.job.data), config.folder))
    holder = await read_manifest(spreading.fleet, THIS_MACHINE, str(source))
    content = hashlib.sha256(repr(sorted(holder.files)).encode()).hexdigest()[:40]
    pushed = HubName("dataset", f"{PUSHED}{make_identifier(source.stem, 'data')}", content)
    named = await asyncio.to_thread(_named_revisions, spreading.fleet.home, pushed)
    folders = await spreading.files([holder], {"repository": pushed, "named": named}, [*targets.values()])
    return {ssh: posixpath.join(folder, source.name) if source.is_file() else folder for ssh, folder in folders.items()}


def _named_revisions(home: Path, pushed: HubName) -> list[str]:
    """Those that the plans of runs here name. On a node nothing names one before the run's first attempt there."""
    pattern, named = re.compile(rf"/{re.escape(pushed.folder)}/snapshots/({REVISION})"), set[str]()
    for run in run_names(home):
        with contextlib.suppress(OSError):
            named.update(pattern.findall(read_regular(RunDir(home / "runs" / run).plan).decode(errors="replace")))
    return sorted(named)


def push_fix(config: Config, key: str) -> Fix | None:
    """The command that brings what the job names onto the nodes; None where it is no name of the Hub."""
    hub = hub_names(config).get(key)
    if hub is None:
        return None
    named = shlex.quote(f"{DATA_PREFIX * (hub.kind == 'dataset')}{hub}")
    effect = (
        f"downloads it once where no machine has it, copies and repairs it; flightdeck models rm {named} removes it"
    )
    return Fix(flightdeck_command(config, f"models push {named}"), effect)


def takes(config: Config, key: str, node: NodeConfig) -> bool:
    """It has the job's `model` or `data`, and none of its own."""
    return bool(getattr(node, key) == on_node(str(getattr(config.job, key)), node, config.folder))


def _with_paths(config: Config, key: str, paths: Mapping[str, str]) -> Config:
    """`paths`: by host, for the nodes that take it from the job."""
    nodes = [
        node.model_copy(update={key: paths[node.ssh]}) if node.ssh in paths and takes(config, key, node) else node
        for node in config.nodes
    ]
    return config.model_copy(update={"nodes": tuple(nodes)})
