"""Reads [cluster], [node_defaults] and [[node]]."""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.faults import FileTable, keys_of
from engine.config.formats import ON_NODE, host_form, interpreter, path_form, remote_path_form, resolved
from engine.config.models import ClusterConfig, NodeConfig
from engine.protocol.job import Framework
from engine.security.identifiers import LOCAL, SshTarget

NODE_LIMIT = 64
_EXAMPLE = '[[node]] with name = "node0"'
NODE_PATHS = ("python", "workdir", "model", "data")
"""The keys of a node that are paths; [node_defaults] may set them for all nodes."""
_MATRIX = 'one device per node in their order, "" for the node itself: rdma = ["", "rdma_en5"]'


def read_cluster(table: FileTable) -> ClusterConfig | None:
    table.unknown(ClusterConfig.model_fields, {"nodes": "[[node]] tables, one per rank"})
    return table.validated(ClusterConfig, table)


def read_defaults(table: FileTable) -> FileTable:
    """Read [node_defaults]. The form of its paths is checked for each node, since it depends on the host."""
    table.unknown(NODE_PATHS, {})
    for key, value in table.items():
        if key in NODE_PATHS and not isinstance(value, str):
            table.refuse(key, "a string in quotes")
    return table.at(table.name, {key: table[key] for key in NODE_PATHS if isinstance(table.get(key), str)})


def node_tables(document: FileTable) -> list[FileTable]:
    """The [[node]] tables in rank order, an empty one for what is none; [] when there are too few or too many."""
    tables = document.get("node")
    if tables is None or tables == []:
        document.missing("node", f"at least one node, one per rank: {_EXAMPLE}")
        return []
    if not isinstance(tables, list):
        document.refuse("node", f"one table per rank, in double brackets: {_EXAMPLE}")
        return []
    if len(tables) > NODE_LIMIT:
        document.refuse("node", f"at most {NODE_LIMIT} nodes", f"{len(tables)} nodes")
        return []
    read = []
    for rank, table in enumerate(tables):
        if not isinstance(table, dict):
            document.refuse(f"node[{rank}]", f"a table: {_EXAMPLE}", table)
        read.append(document.at(f"node[{rank}]", {"name": f"node{rank}"} | table if isinstance(table, dict) else {}))
    return read


def read_nodes(
    tables: Sequence[FileTable], defaults: FileTable, base: Path, framework: Framework
) -> tuple[NodeConfig | None, ...]:
    """All nodes, in rank order; None for one with faults, so that the others keep their ranks."""
    reader = _NodeReader(defaults, base, len(tables), framework)
    nodes = tuple(reader.read(rank, table) for rank, table in enumerate(tables))
    if all(node is not None and node.local for node in nodes):
        return tuple(node and node.model_copy(update={"ips": node.ips or (LOCAL,)}) for node in nodes)
    return nodes


@dataclass(frozen=True)
class _NodeReader:
    defaults: FileTable
    base: Path
    """The folder of the configuration."""
    size: int
    """Number of nodes."""
    framework: Framework

    def read(self, rank: int, table: FileTable) -> NodeConfig | None:
        if not table:
            return None
        values, before = dict(table), len(table.faults)
        table.unknown(keys_of(NodeConfig), {})
        host = values.get("ssh", LOCAL)
        # None if its `ssh` is invalid, as NodeConfig reports.
        local = SshTarget.parse(host).local if isinstance(host, str) and host_form(host) is None else None
        self._check_devices(table, values, rank)
        for key in NODE_PATHS:
            values[key] = self._path(table, key, local=local)
        values.setdefault("ips", [])
        node = table.validated(NodeConfig, values)
        return node if len(table.faults) == before else None

    def _check_devices(self, table: FileTable, values: dict[str, Any], rank: int) -> None:
        row = values.get("rdma")
        if not isinstance(row, list):
            return
        # TOML has no null.
        given = [None if device == "" else device for device in row]
        devices = values["rdma"] = [tuple(device) if isinstance(device, list) else device for device in given]
        if len(devices) != self.size:
            table.refuse("rdma", f"{self.size} entries, {_MATRIX}")
        elif devices[rank] is not None:
            table.refuse(f"rdma[{rank}]", f'"" for the node itself, {_MATRIX}', devices[rank])

    def _path(self, table: FileTable, key: str, *, local: bool | None) -> Any:
        """The path of `key`, absolute if the node is this machine; `local` is None if that is unknown."""
        given = table.get(key, self.defaults.get(key))
        if local is None:
            # The form depends on the host, whose fault is already reported.
            return given if isinstance(given, str) else "/"
        if given is None and key == "python" and not local:
            table.missing(key, f"the interpreter that has {self.framework}: {ON_NODE}")
            given = "/"
        if given is None:
            return {"workdir": str(self.base) if local else "~", "python": sys.executable}.get(key)
        if not isinstance(given, str):
            return given
        if accepted := (path_form(given) if local else remote_path_form(given)):
            (table if key in table else self.defaults).refuse(key, accepted, given)
            return given
        if not local:
            return posixpath.normpath(given)
        return interpreter(given, self.base) if key == "python" else resolved(given, self.base)
