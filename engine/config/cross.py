"""Faults that lie in no one key alone: names given twice, an address of two hosts, a batch too small for its ranks.

Looked for on the tables as they were read, so that a fault in one key hides none of these.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from engine.config.cluster_tables import Defaults, NodeTable
from engine.config.faults import Faults, Place
from engine.config.job_table import ReadJob
from engine.config.models import ClusterConfig
from engine.config.places import address_form
from engine.security.hosts import LOCAL

LAST_PORT = 65535


def cross_check(
    faults: Faults,
    file: str,
    nodes: Sequence[NodeTable],
    *,
    defaults: Defaults,
    cluster: ClusterConfig | None,
    job: ReadJob,
) -> None:
    """Add what values, each right by itself, have against each other."""
    if not nodes:
        return
    _names(faults, nodes)
    _addresses(faults, nodes)
    if cluster is not None:
        _devices(faults, nodes, cluster.backend)
    if cluster is not None and cluster.starting_port is not None:
        ports = sum(len(_listed(node, "ips")) or 1 for node in nodes)
        if cluster.starting_port + ports - 1 > LAST_PORT:
            accepted = f"a port with {ports} ports from it on, up to {LAST_PORT}"
            faults.add(Place(file, "cluster"), "starting_port", cluster.starting_port, accepted)
    if job.command:
        _command(faults, nodes, defaults)
    else:
        _training(faults, Place(file, "job"), len(nodes), job)


def _names(faults: Faults, nodes: Sequence[NodeTable]) -> None:
    first: dict[str, int] = {}
    for rank, node in enumerate(nodes):
        name = node.known.get("name")
        if not isinstance(name, str):
            continue
        if name in first:
            accepted = f"a name of its own: node[{first[name]}] has this one"
            faults.add(node.place, "name", name, accepted)
        first.setdefault(name, rank)


def _addresses(faults: Faults, nodes: Sequence[NodeTable]) -> None:
    """Across several hosts, an address leads to one of them, and 127.0.0.1 to each by itself."""
    hosts = [str(node.known.get("ssh", LOCAL)) for node in nodes]
    if len(set(hosts)) == 1:
        return
    first: dict[str, int] = {}
    for rank, number, address in _given_addresses(nodes):
        key = f"ips[{number}]"
        if ipaddress.IPv4Address(address).is_loopback:
            accepted = "an address at which the other hosts reach this one, or none: it is then chosen from the facts"
            faults.add(nodes[rank].place, key, address, accepted)
        elif hosts[first.setdefault(address, rank)] != hosts[rank]:
            accepted = f"an address of its own: node[{first[address]}] is another host and has this one"
            faults.add(nodes[rank].place, key, address, accepted)


def _given_addresses(nodes: Sequence[NodeTable]) -> Iterator[tuple[int, int, str]]:
    """(rank, number, address) of each that is one."""
    for rank, node in enumerate(nodes):
        for number, address in enumerate(_listed(node, "ips")):
            if isinstance(address, str) and address_form(address) is None:
                yield rank, number, address


def _devices(faults: Faults, nodes: Sequence[NodeTable], backend: str) -> None:
    """Whether the matrix of RDMA devices, where all rows are given, has what the backend needs."""
    size = len(nodes)
    if backend not in ("jaccl", "jaccl-ring") or not all(len(_listed(node, "rdma")) == size for node in nodes):
        return
    for rank, node in enumerate(nodes):
        row = _listed(node, "rdma")
        peers = {(rank - 1) % size, (rank + 1) % size} if backend == "jaccl-ring" else set(range(size))
        missing = [str(peer) for peer in sorted(peers - {rank}) if row[peer] in ("", None)]
        if missing:
            accepted = f"a device towards rank {' and '.join(missing)} as well: {backend} needs it"
            faults.add(node.place, "rdma", row, accepted)


def _listed(node: NodeTable, key: str) -> list[object]:
    found = node.known.get(key)
    return found if isinstance(found, list) else []


def _command(faults: Faults, nodes: Sequence[NodeTable], defaults: Defaults) -> None:
    accepted = "nothing here: the job is a command, which brings its own"
    for key in ("model", "data", "share"):
        for node in nodes:
            if key in node.known:
                faults.add(node.place, key, node.known[key], accepted)
        if key in defaults.values:
            faults.add(defaults.place, key, defaults.values[key], accepted)


def _training(faults: Faults, inline: Place, nodes: int, job: ReadJob) -> None:
    settings, config = job.settings, job.config
    batch_size = settings.get("batch_size")
    pipeline = config is not None and config.strategy == "pipeline"
    if pipeline and nodes < 2:
        faults.add(
            inline, "strategy", "pipeline", "data or sharded: a pipeline has a stage on each of two nodes or more"
        )
    if config is not None and config.layer_split is not None and config.layer_split.count(",") + 1 != nodes:
        accepted = f"{nodes} ranges, one per node"
        faults.add(inline, "layer_split", config.layer_split, accepted)
    # In a pipeline every node sees the whole batch.
    if batch_size is not None and batch_size < nodes and not pipeline:
        accepted = f"{nodes} or more: the global batch is divided over {nodes} nodes"
        faults.add(job.places.get("batch_size", inline), "batch_size", batch_size, accepted)
    iters, key = settings.get("iters"), "grad_accumulation_steps"
    if iters is not None and settings.get(key, 0) > iters:
        accepted = f"at most iters = {iters}, else the model is never updated"
        faults.add(job.places.get(key, inline), key, settings[key], accepted)
