"""Reads the nodes of a cluster from an existing hostfile: MLX's JSON, or lines of `host:slots`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from engine.config.cluster_tables import NODE_LIMIT
from engine.config.documents import DocumentError, file_text, read_json, read_text
from engine.config.faults import FileTable
from engine.config.job_table import environment_fault
from engine.config.models import MAX_ADDRESSES, ClusterConfig
from engine.errors import ConfigFault, InputError
from engine.security.identifiers import MAX_IDENTIFIER_LENGTH, SshTarget, make_identifier

_WANTED = "a hostfile: MLX's JSON, or lines of host:slots; relative to the folder of flightdeck.toml"
_ENTRY = '{"ssh": "ana@ultra.local", "ips": ["192.168.0.1"]}'
_BACKENDS = tuple(name for name in get_args(ClusterConfig.model_fields["backend"].annotation) if name != "auto")
_SLOTS = re.compile(r"(?P<host>[^\s:]+)(?::(?P<count>[0-9]{1,9})|\s+slots\s*=\s*(?P<slots>[0-9]{1,9}))?")


@dataclass
class ImportedHosts:
    tables: list[FileTable] = field(default_factory=list)
    """One per rank, with keys of [[node]]."""
    backend: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    """Variables for the ranks."""


def read_hostfile(path: Path, faults: list[ConfigFault]) -> ImportedHosts:
    """Read `path`; at most one fault is added for each of its entries."""
    try:
        text, here = read_text(path, _WANTED), FileTable(file_text(path), faults=faults)
        if text.lstrip()[:1] in ("[", "{"):
            return _from_json(here, read_json(path, text))
        return _from_lines(here, text)
    except DocumentError as error:
        faults += error.faults
        return ImportedHosts()


def _from_json(here: FileTable, document: Any) -> ImportedHosts:
    table = document if isinstance(document, dict) else {"hosts": document}
    hosts, backend, repeats = (table.get(key) for key in ("hosts", "backend", "connections_per_ip"))
    if backend not in (None, "", *_BACKENDS):
        here.refuse("backend", f"one of {', '.join(_BACKENDS)}", backend)
        backend = None
    imported = ImportedHosts(backend=backend or None, env=_environment(here, table.get("envs")))
    # The ring makes so many connections to each address (mlx.launch's option --connections-per-ip).
    if "connections_per_ip" in table and (type(repeats) is not int or not 1 <= repeats <= MAX_ADDRESSES):
        here.refuse("connections_per_ip", f"a number of connections, 1 to {MAX_ADDRESSES}", repeats)
        repeats = 1
    if not isinstance(hosts, list) or not hosts:
        here.refuse("hosts", f"a list with one entry per rank: [{_ENTRY}, …]", hosts)
    elif len(hosts) > NODE_LIMIT:
        here.refuse("hosts", f"at most {NODE_LIMIT} ranks", f"{len(hosts)} hosts")
    else:
        names: set[str] = set()
        imported.tables = [_entry(here, rank, entry, names) for rank, entry in enumerate(hosts)]
        for ips in (node.get("ips") for node in imported.tables):
            if isinstance(ips, list):
                # Each connection to an address has a port of its own.
                ips[:] = [ip for ip in ips for _ in range(repeats or 1)]
    return imported


def _entry(here: FileTable, rank: int, entry: Any, names: set[str]) -> FileTable:
    if not isinstance(entry, dict) or "ssh" not in entry:
        here.refuse(f"hosts[{rank}]", f"an entry such as {_ENTRY}", entry)
        return here.at(f"hosts[{rank}]")
    values = {"name": _name(entry["ssh"], rank, names), "ssh": entry["ssh"], "ips": entry.get("ips") or []}
    if isinstance(rdma := entry.get("rdma"), list):
        rdma = [tuple(devices) if isinstance(devices, list) else devices for devices in rdma]
    return here.at(f"hosts[{rank}]", values | ({"rdma": rdma} if rdma else {}))


def _environment(here: FileTable, lines: Any) -> dict[str, str]:
    if lines in (None, []):
        return {}
    if not isinstance(lines, list) or len(lines) > 1000:
        here.refuse("envs", 'a list of "NAME=value"', lines)
        return {}
    variables = {}
    for number, line in enumerate(lines):
        name, equals, value = line.partition("=") if isinstance(line, str) else ("", "", "")
        accepted = environment_fault(name, value) if equals else 'a string "NAME=value"'
        if accepted:
            here.refuse(f"envs[{number}]", accepted, line)
        else:
            variables[name] = value
    return variables


def _from_lines(here: FileTable, text: str) -> ImportedHosts:
    imported, names = ImportedHosts(), set[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _SLOTS.fullmatch(entry)
        if match is None:
            here.refuse(f"line {number}", "a line such as ultra.local:1, host:slots", entry)
            # A file of another kind is one fault, not a thousand.
            return ImportedHosts()
        slots = int(match["count"] or match["slots"] or 1)
        if not 1 <= slots <= NODE_LIMIT - len(imported.tables):
            here.refuse(f"line {number}", f"1 slot or more, and at most {NODE_LIMIT} ranks in total", entry)
            return ImportedHosts()
        for rank in range(len(imported.tables), len(imported.tables) + slots):
            values: dict[str, Any] = {"name": _name(match["host"], rank, names), "ssh": match["host"], "ips": []}
            imported.tables.append(here.at(f"line {number}", values))
    if not imported.tables:
        here.faults.append(ConfigFault(here.file, "the file", "(no hosts)", _WANTED))
    return imported


def _name(host: Any, rank: int, names: set[str]) -> str:
    """The first label of the host, or "node<rank>" for an address; unique."""
    name = f"node{rank}"
    try:
        label = SshTarget.parse(host).host if isinstance(host, str) else ""
        ipaddress.ip_address(label)
    except InputError:
        pass
    except ValueError:
        name = make_identifier(label.partition(".")[0], "")[: MAX_IDENTIFIER_LENGTH // 2] or name
    while name in names:
        name = f"{name}-{rank}"
    names.add(name)
    return name
