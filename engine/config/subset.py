"""A configuration with some of its nodes: for a pair that is measured by itself, or when a node has to be left out."""

from __future__ import annotations

from collections.abc import Collection

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import InputError


def only(config: FlightConfig, names: Collection[str]) -> FlightConfig:
    """The same configuration with the nodes of these names, in its own order; their ranks are counted anew, and RDMA
    devices towards the others are left out, as are a pipeline's layers for another number of ranks. Raises InputError
    when no node is left."""
    kept = [rank for rank, node in enumerate(config.nodes) if node.name in names]
    if not kept:
        raise InputError("no node is left of the configuration")
    nodes = tuple(_node(config.nodes[rank], kept) for rank in kept)
    changed: dict[str, object] = {"nodes": nodes}
    if len(nodes) < len(config.nodes) and config.job.layer_split is not None:
        changed["job"] = config.job.model_copy(update={"layer_split": None})
    return config.model_copy(update=changed)


def _node(node: NodeConfig, kept: Collection[int]) -> NodeConfig:
    if node.rdma is None:
        return node
    return node.model_copy(update={"rdma": tuple(node.rdma[rank] for rank in kept)})
