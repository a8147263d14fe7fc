"""[cluster] and [[node]]: what to run on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config.faults import Faults, Place
from engine.config.models import ClusterConfig, NodeConfig
from engine.config.places import host_form, interpreter, path_form, resolved
from engine.security.identifiers import ACCEPTED as IDENTIFIER
from engine.security.identifiers import is_identifier

NODE_LIMIT = 64
SHARES = (1e-6, 1e6)
_EXAMPLE = '[[node]] with name = "node0"'
_LATER = "nothing here: this comes with a later release"


def read_cluster(faults: Faults, place: Place, table: Mapping[str, Any]) -> ClusterConfig | None:
    """[cluster]; all of it may be left out."""
    faults.unknown(place, table, ClusterConfig.model_fields, {"nodes": "[[node]] tables, one per rank"})
    name = table.get("name")
    if isinstance(name, str) and not is_identifier(name):
        faults.add(place, "name", name, IDENTIFIER)
    return faults.validated(place, ClusterConfig, table)


def read_nodes(faults: Faults, file: str, tables: object, base: Path) -> tuple[NodeConfig | None, ...]:
    """Every [[node]], in rank order; None for one with faults, so that the others keep their numbers."""
    here = Place(file)
    if tables is None or tables == []:
        faults.missing(here, "node", f"at least one node, one per rank: {_EXAMPLE}")
        return ()
    if not isinstance(tables, list):
        faults.add(here, "node", tables, f"a table of its own for each rank, in double brackets: {_EXAMPLE}")
        return ()
    if len(tables) > NODE_LIMIT:
        faults.add(here, "node", f"{len(tables)} nodes", f"at most {NODE_LIMIT} nodes")
        return ()
    return tuple(_read_node(faults, file, rank, table, base) for rank, table in enumerate(tables))


def _read_node(faults: Faults, file: str, rank: int, table: object, base: Path) -> NodeConfig | None:
    if not isinstance(table, dict):
        faults.add(Place(file), f"node[{rank}]", table, f"a table: {_EXAMPLE}")
        return None
    place = Place(file, f"node[{rank}]")
    before = len(faults.found)
    faults.unknown(place, table, NodeConfig.model_fields, {"rdma": _LATER})
    values = dict(table)
    name = values.setdefault("name", f"node{rank}")
    if isinstance(name, str) and not is_identifier(name):
        faults.add(place, "name", name, IDENTIFIER)
    _check_hosts(faults, place, values)
    for key in ("python", "workdir", "model", "data"):
        given = values.get(key)
        if not isinstance(given, str):
            continue
        if accepted := path_form(given):
            faults.add(place, key, given, accepted)
        else:
            values[key] = interpreter(given, base) if key == "python" else resolved(given, base)
    values.setdefault("python", sys.executable)
    values.setdefault("workdir", str(base))
    share = values.get("share")
    if isinstance(share, int | float) and type(share) is not bool and share > 0 and not SHARES[0] <= share <= SHARES[1]:
        faults.add(place, "share", share, f"a number from {SHARES[0]:g} to {SHARES[1]:g}, relative to the other nodes'")
    node = faults.validated(place, NodeConfig, values)
    return node if len(faults.found) == before else None


def _check_hosts(faults: Faults, place: Place, values: Mapping[str, Any]) -> None:
    host, addresses = values.get("ssh"), values.get("ips")
    if isinstance(host, str) and (accepted := host_form(host)):
        faults.add(place, "ssh", host, accepted)
    if not isinstance(addresses, list):
        return
    if not 1 <= len(addresses) <= 8:
        faults.add(place, "ips", addresses, "a list of 1 to 8 addresses")
        return
    for number, address in enumerate(addresses):
        if isinstance(address, str) and (accepted := host_form(address)):
            faults.add(place, f"ips[{number}]", address, accepted)
