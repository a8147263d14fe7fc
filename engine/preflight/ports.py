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
    seen = await held_ports(scene, wiring, first)
    found = Findings(NAME, scene.config)
    for rank, node in ranks_of(scene.config):
        held = seen[node.name]
        if isinstance(held, FlightDeckError):
            found.fault(node, str(held))
        elif held:
            found.fault(node, held_words(node, held), held_fix(held))
        else:
            endpoints = _endpoints(rank, wiring, first)
            found.evidence[node.name] = ", ".join(f"{endpoint} is free" for endpoint in endpoints)
    last = first + port_count(wiring) - 1
    advice = "or leave starting_port out of [cluster]: fresh ports are then taken"
    return found.verdict(f"{first} to {last} are free", advice=advice)


async def fresh_block(scene: Scene, wiring: Wiring) -> int:
    """The first of as many ports as a launch needs, free everywhere a moment ago; once for all checks. Raises
    LaunchError."""
    return await scene.shared("fresh ports", lambda: fresh_ports(scene.fleet, scene.config.nodes, wiring))


async def held_ports(scene: Scene, wiring: Wiring, first: int) -> dict[str, dict[str, Holder] | FlightDeckError]:
    """Node name → who holds those of its IP:PORT that are held, or why that is not known; once for all checks."""
    wanted = {node.name: _endpoints(rank, wiring, first) for rank, node in ranks_of(scene.config)}

    async def ask(node: NodeConfig) -> dict[str, Holder]:
        endpoints = wanted[node.name]
        if not endpoints:
            return {}
        said = (await scene.look(node, "ports", *endpoints, said=Ports, timeout_s=_LIMIT_S)).ports
        return {endpoint: who for endpoint, who in zip(endpoints, said, strict=True) if who is not None}

    return await scene.shared(NAME, lambda: scene.on_all(ask))


def held_fix(held: Mapping[str, Holder]) -> str | None:
    """What frees them, where it is known who holds them."""
    pids = dict.fromkeys(str(who.pid) for who in held.values() if who.pid is not None)
    return f"kill {' '.join(pids)}" if pids else None


def _endpoints(rank: int, wiring: Wiring, first: int) -> list[str]:
    ports = ports_of(rank, wiring, first)
    return [f"{ip}:{port}" for ip, port in zip(wiring.hosts[rank].ips, ports, strict=False)]


def held_words(node: NodeConfig, held: Mapping[str, Holder]) -> str:
    """Which ports of a node are held, and by whom."""
    orphan = ", a rank of a Flight Deck run, perhaps an orphan"
    return "; ".join(
        f"{endpoint} on {node.name} is held by {who.holder}{orphan if who.orphan else ''}"
        for endpoint, who in held.items()
    )


async def _fresh(scene: Scene, wiring: Wiring) -> CheckResult:
    try:
        first = await fresh_block(scene, wiring)
    except LaunchError as error:
        return verdict(NAME, CheckStatus.FAIL, str(error))
    words = f"each attempt takes fresh ones; {port_count(wiring)} from {first} are free now"
    return verdict(NAME, CheckStatus.PASS, words)


CHECK = Check(NAME, "the ring's ports can be bound", look, time_limit_s=_LIMIT_S + 30, needs=(connectivity.NAME,))
