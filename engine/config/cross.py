"""Faults that lie in no one key alone: names given twice, a batch too small for its ranks.

Looked for on the tables as they were read, so that a fault in one key hides none of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.config.cluster_tables import NODE_LIMIT
from engine.config.faults import Faults, Place
from engine.config.job_table import ReadJob
from engine.config.models import ClusterConfig

LAST_PORT = 65535


def cross_check(
    faults: Faults, file: str, document: Mapping[str, Any], cluster: ClusterConfig | None, job: ReadJob
) -> None:
    """Add what values, each right by itself, have against each other."""
    tables = document.get("node")
    if not isinstance(tables, list) or not 1 <= len(tables) <= NODE_LIMIT:
        return
    nodes = [table if isinstance(table, dict) else {} for table in tables]
    _names(faults, file, nodes)
    if cluster is not None and cluster.starting_port is not None:
        ports = sum(len(node["ips"]) if isinstance(node.get("ips"), list) else 1 for node in nodes)
        if cluster.starting_port + ports - 1 > LAST_PORT:
            accepted = f"a port with {ports} ports from it on, up to {LAST_PORT}"
            faults.add(Place(file, "cluster"), "starting_port", cluster.starting_port, accepted)
    table = document.get("job")
    if isinstance(table, dict) and "command" in table:
        _command(faults, file, nodes)
    else:
        _training(faults, file, len(nodes), job)


def _names(faults: Faults, file: str, nodes: Sequence[Mapping[str, Any]]) -> None:
    first: dict[str, int] = {}
    for rank, node in enumerate(nodes):
        name = node.get("name", f"node{rank}")
        if not isinstance(name, str):
            continue
        if name in first:
            accepted = f"a name of its own: node[{first[name]}] has this one"
            faults.add(Place(file, f"node[{rank}]"), "name", name, accepted)
        first.setdefault(name, rank)


def _command(faults: Faults, file: str, nodes: Sequence[Mapping[str, Any]]) -> None:
    for rank, node in enumerate(nodes):
        for key in ("model", "data", "share"):
            if key in node:
                accepted = "nothing here: the job is a command, which brings its own"
                faults.add(Place(file, f"node[{rank}]"), key, node[key], accepted)


def _training(faults: Faults, file: str, nodes: int, job: ReadJob) -> None:
    inline, settings = Place(file, "job"), job.settings
    batch_size = settings.get("batch_size")
    if batch_size is not None and batch_size < nodes:
        accepted = f"{nodes} or more: the global batch is divided over {nodes} nodes"
        faults.add(job.places.get("batch_size", inline), "batch_size", batch_size, accepted)
    iters, key = settings.get("iters"), "grad_accumulation_steps"
    if iters is not None and settings.get(key, 0) > iters:
        accepted = f"at most iters = {iters}, else the model is never updated"
        faults.add(job.places.get(key, inline), key, settings[key], accepted)
