"""[cluster], [node_defaults] and [[node]]: what to run on."""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.faults import Faults, Place
from engine.config.models import ClusterConfig, NodeConfig
from engine.config.places import (
    ON_NODE,
    address_form,
    device_form,
    host_form,
    interpreter,
    path_form,
    remote_path_form,
    resolved,
)
from engine.security.hosts import LOCAL, SshTarget
from engine.security.identifiers import ACCEPTED as IDENTIFIER
from engine.security.identifiers import is_identifier

NODE_LIMIT = 64
SHARES = (1e-6, 1e6)
EXAMPLE = '[[node]] with name = "node0"'
PATHS = ("python", "workdir", "model", "data")
"""The keys of a node that are paths, and those that [node_defaults] may set for all."""
_MATRIX = 'one device per node in their order, "" for the node itself: rdma = ["", "rdma_en5"]'


@dataclass(frozen=True)
class NodeTable:
    """One node as it was read, from a [[node]] or from a hostfile."""

    place: Place
    values: Mapping[str, Any] | None
    """None for what is no table, which has been said by then."""

    @property
    def known(self) -> Mapping[str, Any]:
        return self.values or {}


@dataclass(frozen=True)
class Defaults:
    """[node_defaults]: what a node has that says nothing else."""

    place: Place
    values: Mapping[str, str]


def read_cluster(faults: Faults, place: Place, table: Mapping[str, Any]) -> ClusterConfig | None:
    """[cluster]; all of it may be left out."""
    faults.unknown(place, table, ClusterConfig.model_fields, {"nodes": "[[node]] tables, one per rank"})
    name = table.get("name")
    if isinstance(name, str) and not is_identifier(name):
        faults.add(place, "name", name, IDENTIFIER)
    return faults.validated(place, ClusterConfig, table)


def read_defaults(faults: Faults, place: Place, table: Mapping[str, Any]) -> Defaults:
    """[node_defaults]. The form of its paths is looked at node by node: it depends on where the node is."""
    faults.unknown(place, table, PATHS, {})
    for key, value in table.items():
        if key in PATHS and not isinstance(value, str):
            faults.add(place, key, value, "a text in quotes")
    return Defaults(place, {key: table[key] for key in PATHS if isinstance(table.get(key), str)})


def node_tables(faults: Faults, file: str, tables: object) -> list[NodeTable]:
    """Every [[node]], in rank order; none when there are too few or too many."""
    here = Place(file)
    if tables is None or tables == []:
        faults.missing(here, "node", f"at least one node, one per rank: {EXAMPLE}")
        return []
    if not isinstance(tables, list):
        faults.add(here, "node", tables, f"a table of its own for each rank, in double brackets: {EXAMPLE}")
        return []
    if len(tables) > NODE_LIMIT:
        faults.add(here, "node", f"{len(tables)} nodes", f"at most {NODE_LIMIT} nodes")
        return []
    read = []
    for rank, table in enumerate(tables):
        if isinstance(table, dict):
            read.append(NodeTable(Place(file, f"node[{rank}]"), {"name": f"node{rank}"} | table))
        else:
            faults.add(here, f"node[{rank}]", table, f"a table: {EXAMPLE}")
            read.append(NodeTable(Place(file, f"node[{rank}]"), None))
    return read


def read_nodes(
    faults: Faults, tables: Sequence[NodeTable], defaults: Defaults, base: Path
) -> tuple[NodeConfig | None, ...]:
    """Every node, in rank order; None for one with faults, so that the others keep their numbers."""
    nodes = tuple(
        _read_node(faults, rank, table, defaults, base=base, size=len(tables)) for rank, table in enumerate(tables)
    )
    if all(node is not None and node.local for node in nodes):
        return tuple(node and node.model_copy(update={"ips": node.ips or (LOCAL,)}) for node in nodes)
    return nodes


def _read_node(
    faults: Faults, rank: int, table: NodeTable, defaults: Defaults, *, base: Path, size: int
) -> NodeConfig | None:
    if table.values is None:
        return None
    place, values, before = table.place, dict(table.values), len(faults.found)
    faults.unknown(place, values, NodeConfig.model_fields, {})
    name = values["name"]
    if isinstance(name, str) and not is_identifier(name):
        faults.add(place, "name", name, IDENTIFIER)
    local = _check_host(faults, place, values)
    _check_addresses(faults, place, values)
    _check_devices(faults, place, values, rank, size)
    for key in PATHS:
        _place_path(faults, table, defaults, values, key, base=base, local=local)
    values.setdefault("ips", [])
    share = values.get("share")
    if isinstance(share, int | float) and type(share) is not bool and share > 0 and not SHARES[0] <= share <= SHARES[1]:
        faults.add(place, "share", share, f"a number from {SHARES[0]:g} to {SHARES[1]:g}, relative to the other nodes'")
    node = faults.validated(place, NodeConfig, values)
    return node if len(faults.found) == before else None


def _check_host(faults: Faults, place: Place, values: Mapping[str, Any]) -> bool | None:
    """Whether the node is this machine; None when it cannot be told."""
    host = values.get("ssh", LOCAL)
    if not isinstance(host, str):
        return None
    if accepted := host_form(host):
        faults.add(place, "ssh", host, accepted)
        return None
    return SshTarget.parse(host).local


def _check_addresses(faults: Faults, place: Place, values: Mapping[str, Any]) -> None:
    addresses = values.get("ips")
    if not isinstance(addresses, list):
        return
    if len(addresses) > 8:
        faults.add(place, "ips", addresses, "a list of up to 8 addresses; without any they are chosen from the facts")
        return
    for number, address in enumerate(addresses):
        if isinstance(address, str) and (accepted := address_form(address)):
            faults.add(place, f"ips[{number}]", address, accepted)


def _check_devices(faults: Faults, place: Place, values: dict[str, Any], rank: int, size: int) -> None:
    row = values.get("rdma")
    if not isinstance(row, list):
        return
    # TOML has no null.
    devices = values["rdma"] = [None if device == "" else device for device in row]
    if len(devices) != size:
        faults.add(place, "rdma", row, f"{size} entries, {_MATRIX}")
    elif devices[rank] is not None:
        faults.add(place, f"rdma[{rank}]", devices[rank], f'"" for the node itself, {_MATRIX}')
    else:
        for number, device in enumerate(devices):
            if device is not None and (accepted := device_form(device)):
                faults.add(place, f"rdma[{number}]", device, accepted)
                values["rdma"] = None


def _place_path(
    faults: Faults,
    table: NodeTable,
    defaults: Defaults,
    values: dict[str, Any],
    key: str,
    *,
    base: Path,
    local: bool | None,
) -> None:
    """Make the path absolute where the node is this machine; elsewhere only its form can be looked at."""
    place = table.place if key in values else defaults.place
    given = values.get(key, defaults.values.get(key))
    if local is None:
        # Without a host it is not known which form is right, and that has been said.
        values[key] = given if isinstance(given, str) else "/"
    elif isinstance(given, str):
        if accepted := (path_form(given) if local else remote_path_form(given)):
            faults.add(place, key, given, accepted)
            values[key] = given
        elif local:
            values[key] = interpreter(given, base) if key == "python" else resolved(given, base)
        else:
            values[key] = posixpath.normpath(given)
    elif given is None and key == "workdir":
        values[key] = str(base) if local else "~"
    elif given is None and key == "python":
        if local:
            values[key] = sys.executable
        else:
            faults.missing(table.place, key, f"the interpreter that has mlx: {ON_NODE}")
            values[key] = "/"
