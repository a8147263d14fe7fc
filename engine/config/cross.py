"""Faults that lie in no one table alone: names given twice, a batch too small for its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config.faults import Faults, Place
from engine.config.job_table import ReadJob
from engine.config.models import ClusterConfig, NodeConfig

LAST_PORT = 65535


def cross_check(
    faults: Faults,
    file: str,
    cluster: ClusterConfig | None,
    nodes: Sequence[NodeConfig | None],
    job: ReadJob | None,
) -> None:
    """Add what the tables, each right by itself, have against each other. None stands for a table with faults."""
    _names(faults, file, nodes)
    if cluster is not None and cluster.starting_port is not None and nodes:
        ports = sum(len(node.ips) if node else 1 for node in nodes)
        if cluster.starting_port + ports - 1 > LAST_PORT:
            accepted = f"a port with {ports} ports from it on, up to {LAST_PORT}"
            faults.add(Place(file, "cluster"), "starting_port", cluster.starting_port, accepted)
    if job is not None:
        _job(faults, file, nodes, job)


def _names(faults: Faults, file: str, nodes: Sequence[NodeConfig | None]) -> None:
    first: dict[str, int] = {}
    for rank, node in enumerate(nodes):
        if node is None:
            continue
        if node.name in first:
            accepted = f"a name of its own: node[{first[node.name]}] has this one"
            faults.add(Place(file, f"node[{rank}]"), "name", node.name, accepted)
        first.setdefault(node.name, rank)


def _job(faults: Faults, file: str, nodes: Sequence[NodeConfig | None], job: ReadJob) -> None:
    if job.config.command is not None:
        for rank, node in enumerate(nodes):
            for key in ("model", "data", "share"):
                if node is not None and getattr(node, key) is not None:
                    accepted = "nothing here: the job is a command, which brings its own"
                    faults.add(Place(file, f"node[{rank}]"), key, getattr(node, key), accepted)
        return
    inline, settings = Place(file, "job"), job.config.mlx_lm
    if settings["batch_size"] < len(nodes):
        accepted = f"{len(nodes)} or more: the global batch is divided over {len(nodes)} nodes"
        faults.add(job.places.get("batch_size", inline), "batch_size", settings["batch_size"], accepted)
    if settings["grad_accumulation_steps"] > settings["iters"]:
        accepted = f"at most iters = {settings['iters']}, else the model is never updated"
        key = "grad_accumulation_steps"
        faults.add(job.places.get(key, inline), key, settings[key], accepted)
