"""ports_free: the ring's ports can be bound, and who holds one that cannot: usually an orphan of an earlier run.

An orphan on a ring port makes mlx.launch hang without a word. Only part of preflight.md's hardware_layer, and named
for what it is.
"""

from __future__ import annotations

from typing import Any

from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, LaunchError
from engine.launch.hostfile import port_count, ports_of
from engine.launch.ports import fresh_ports
from engine.models import CheckResult, CheckStatus
from engine.planning.wiring import Wiring
from engine.preflight import connectivity
from engine.preflight.check import Check, ranks_of, verdict
from engine.preflight.scene import Scene
from engine.security.sanitise import plain

NAME = "ports_free"
_LIMIT_S = 20.0


async def look(scene: Scene) -> CheckResult:
    wiring = await scene.wiring()
    first = scene.config.cluster.starting_port
    if first is None:
        return await _fresh(scene, wiring)
    wanted = {node.name: _endpoints(rank, wiring, first) for rank, node in ranks_of(scene.config)}

    async def ask(node: NodeConfig) -> dict[str, Any]:
        endpoints = wanted[node.name]
        return (await scene.look(node, "ports", *endpoints, timeout_s=_LIMIT_S))["ports"] if endpoints else {}

    found = await scene.on_all(ask)
    evidence: dict[str, str] = {}
    fixes: dict[str, str] = {}
    faults: list[str] = []
    blames: tuple[int, str] | None = None
    for rank, node in ranks_of(scene.config):
        said = found[node.name]
        problems, pids = _held(said)
        evidence[node.name] = "; ".join(problems) or ", ".join(f"{endpoint} is free" for endpoint in wanted[node.name])
        if not problems:
            continue
        faults += [f"{problem} on {node.name}" for problem in problems]
        blames = blames or (rank, node.name)
        if pids:
            fixes[node.name] = f"kill {' '.join(map(str, pids))}"
    if faults:
        summary = "; ".join(faults) + "; or leave starting_port out of [cluster]: fresh ports are then taken"
        return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, fixes=fixes, blames=blames)
    last = first + port_count(wiring) - 1
    return verdict(NAME, CheckStatus.PASS, f"{first} to {last} are free", evidence=evidence)


def _endpoints(rank: int, wiring: Wiring, first: int) -> list[str]:
    ports = ports_of(rank, wiring, first)
    return [f"{ip}:{port}" for ip, port in zip(wiring.hosts[rank].ips, ports, strict=False)]


def _held(said: dict[str, Any] | FlightDeckError) -> tuple[list[str], list[int]]:
    """What is wrong with a node's ports in words, and whose processes hold them."""
    if isinstance(said, FlightDeckError):
        return [str(said)], []
    problems, pids = [], []
    for endpoint, holder in said.items():
        if holder is None:
            continue
        orphan = ", a rank of a Flight Deck run, perhaps an orphan" if holder["orphan"] else ""
        problems.append(f"{plain(endpoint)} is held by {plain(holder['holder'])}{orphan}")
        if isinstance(holder["pid"], int):
            pids.append(holder["pid"])
    return problems, pids


async def _fresh(scene: Scene, wiring: Wiring) -> CheckResult:
    try:
        first = await fresh_ports(scene.fleet, scene.config.nodes, wiring)
    except LaunchError as error:
        return verdict(NAME, CheckStatus.FAIL, str(error))
    words = f"each attempt takes fresh ones; {port_count(wiring)} from {first} are free now"
    return verdict(NAME, CheckStatus.PASS, words)


CHECK = Check(NAME, "the ring's ports can be bound", look, time_limit_s=_LIMIT_S + 30, needs=(connectivity.NAME,))
