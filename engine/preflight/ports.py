"""ports_free: the ring's ports can be bound, and who holds one that cannot: usually an orphan of an earlier run.

An orphan on a ring port makes mlx.launch hang without a word. Only part of preflight.md's hardware_layer, and named
for what it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, LaunchError
from engine.launch.hostfile import port_count, ports_of
from engine.launch.ports import fresh_ports
from engine.models import CheckResult, CheckStatus
from engine.planning.wiring import Wiring
from engine.preflight import connectivity
from engine.preflight.answers import Holder, Ports
from engine.preflight.check import Check, Findings, ranks_of, verdict
from engine.preflight.scene import Scene

NAME = "ports_free"
_LIMIT_S = 20.0


async def look(scene: Scene) -> CheckResult:
    try:
        wiring = await scene.wiring()
    except LaunchError:
        return verdict(NAME, CheckStatus.SKIP, "not known which: hostfile_valid says why")
    first = scene.config.cluster.starting_port
    if first is None:
        return await _fresh(scene, wiring)
    wanted = {node.name: _endpoints(rank, wiring, first) for rank, node in ranks_of(scene.config)}

    async def ask(node: NodeConfig) -> list[Holder | None]:
        endpoints = wanted[node.name]
        if not endpoints:
            return []
        return (await scene.look(node, "ports", *endpoints, said=Ports, timeout_s=_LIMIT_S)).ports

    answers = await scene.on_all(ask)
    found = Findings(NAME, scene.config)
    for node in scene.config.nodes:
        said = answers[node.name]
        if isinstance(said, FlightDeckError):
            found.fault(node, str(said))
            continue
        held = {endpoint: who for endpoint, who in zip(wanted[node.name], said, strict=True) if who is not None}
        pids = [str(who.pid) for who in held.values() if who.pid is not None]
        if held:
            found.fault(node, _held(node, held), f"kill {' '.join(dict.fromkeys(pids))}" if pids else None)
        else:
            found.evidence[node.name] = ", ".join(f"{endpoint} is free" for endpoint in wanted[node.name])
    last = first + port_count(wiring) - 1
    advice = "or leave starting_port out of [cluster]: fresh ports are then taken"
    return found.verdict(f"{first} to {last} are free", advice=advice)


def _endpoints(rank: int, wiring: Wiring, first: int) -> list[str]:
    ports = ports_of(rank, wiring, first)
    return [f"{ip}:{port}" for ip, port in zip(wiring.hosts[rank].ips, ports, strict=False)]


def _held(node: NodeConfig, held: Mapping[str, Holder]) -> str:
    """Which ports of a node are held, and by whom."""
    orphan = ", a rank of a Flight Deck run, perhaps an orphan"
    return "; ".join(
        f"{endpoint} on {node.name} is held by {who.holder}{orphan if who.orphan else ''}"
        for endpoint, who in held.items()
    )


async def _fresh(scene: Scene, wiring: Wiring) -> CheckResult:
    try:
        first = await fresh_ports(scene.fleet, scene.config.nodes, wiring)
    except LaunchError as error:
        return verdict(NAME, CheckStatus.FAIL, str(error))
    words = f"each attempt takes fresh ones; {port_count(wiring)} from {first} are free now"
    return verdict(NAME, CheckStatus.PASS, words)


CHECK = Check(NAME, "the ring's ports can be bound", look, time_limit_s=_LIMIT_S + 30, needs=(connectivity.NAME,))
