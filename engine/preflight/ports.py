"""ports_free: the ring's ports can be bound, and who holds one that cannot: usually an orphan of an earlier run.

An orphan on a ring port makes mlx.launch hang without a word. Only part of preflight.md's hardware_layer, and named
for what it is.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from engine.config.models import FlightConfig
from engine.errors import LaunchError
from engine.launch.hostfile import as_configured, port_count
from engine.launch.ports import holder
from engine.launch.ports import ring_ports as fresh_ports
from engine.launch.ports_script import bindable
from engine.models import CheckResult, CheckStatus
from engine.preflight.check import Check, ranks_of, verdict
from engine.worker.wire import NONCE_ENV

NAME = "ports_free"


async def look(config: FlightConfig) -> CheckResult:
    return await asyncio.to_thread(_look, config)


def ring_ports(config: FlightConfig) -> Iterator[tuple[int, str, int]]:
    """(rank, IP, port) as mlx.launch counts them up from starting_port: one per rank and IP."""
    port = config.cluster.starting_port or 0
    for rank, node in ranks_of(config):
        for ip in node.ips:
            yield rank, ip, port
            port += 1


def _look(config: FlightConfig) -> CheckResult:
    if config.cluster.starting_port is None:
        return _fresh(port_count(as_configured(config.nodes)))
    evidence: dict[str, str] = {}
    fixes: dict[str, str] = {}
    faults: list[str] = []
    blames: tuple[int, str] | None = None
    for rank, ip, port in ring_ports(config):
        node = config.nodes[rank].name
        if bindable(ip, port):
            evidence.setdefault(node, f"{ip}:{port} is free")
            continue
        found = holder(port)
        who = f"held by {found}" if found else "held by a process that cannot be seen"
        pid = holder_pid(found)
        orphan = ", a rank of a Flight Deck run, perhaps an orphan" if pid and _has_nonce(pid) else ""
        evidence[node] = f"{ip}:{port} is {who}{orphan}"
        faults.append(f"port {port} of {node} is {who}{orphan}")
        blames = blames or (rank, node)
        if pid:
            fixes[node] = f"kill {pid}"
    if faults:
        summary = "; ".join(faults) + "; or leave starting_port out of [cluster]: fresh ports are then taken"
        return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, fixes=fixes, blames=blames)
    ports = [port for _, _, port in ring_ports(config)]
    return verdict(NAME, CheckStatus.PASS, f"{ports[0]} to {ports[-1]} are free", evidence=evidence)


def _fresh(count: int) -> CheckResult:
    try:
        first = fresh_ports(count)
    except LaunchError as error:
        return verdict(NAME, CheckStatus.FAIL, str(error))
    return verdict(NAME, CheckStatus.PASS, f"each attempt takes fresh ones; {count} from {first} are free now")


def holder_pid(found: str | None) -> int | None:
    """The pid in what `engine.launch.ports.holder` says, "pid 12 (command)"."""
    match = re.match(r"pid (\d+) ", found or "")
    return int(match[1]) if match else None


def _has_nonce(pid: int) -> bool:
    if sys.platform.startswith("linux"):
        try:
            return f"{NONCE_ENV}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
    return re.search(rf" {NONCE_ENV}=", _said("ps", "-Eww", "-o", "command=", "-p", str(pid))) is not None


def _said(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=5, check=False, errors="replace").stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


CHECK = Check(NAME, "the ring's ports can be bound", look, time_limit_s=15)
