"""hostfile_valid: the hostfile that would be launched parses in MLX's own parser; each node has its addresses, and
the ranks reach one another there.

MLX is asked in a process of its own: the head's process never imports it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TypeVar

from engine.config.models import NodeConfig
from engine.errors import FlightDeckError
from engine.launch.hostfile import RING, write_hostfile
from engine.models import CheckResult, CheckStatus
from engine.planning.wiring import Wiring
from engine.preflight import connectivity
from engine.preflight.answers import Listening, Problems
from engine.preflight.check import Check, Findings, ranks_of, verdict
from engine.preflight.scene import Scene, heard, look_argv
from engine.transport.base import Channel
from engine.transport.local import LocalTransport

NAME = "hostfile_valid"
_PARSE_LIMIT_S = 20.0
_LIMIT_S = 20.0
_LISTEN_S = 10.0
T = TypeVar("T")

_ASK = """
import json, sys
from mlx._distributed_utils.common import Hostfile
parsed = Hostfile.from_file(sys.argv[1])
print(json.dumps([[host.rank, host.ssh_hostname, host.ips, host.rdma] for host in parsed.hosts]))
"""


async def look(scene: Scene) -> CheckResult:
    wiring = await scene.wiring()
    unread, result = await asyncio.gather(_unread(wiring), _addresses(scene, wiring))
    return result if unread is None else verdict(NAME, CheckStatus.FAIL, unread)


async def _unread(wiring: Wiring) -> str | None:
    """Why MLX does not read the hostfile as it is meant; None when it does."""
    with tempfile.TemporaryDirectory(prefix="flightdeck-") as directory:
        path = Path(directory) / "hostfile.json"
        write_hostfile(path, wiring)
        finished = await LocalTransport().run([sys.executable, "-c", _ASK, str(path)], timeout_s=_PARSE_LIMIT_S)
    if finished.code != 0:
        why = "MLX's parser did not answer" if finished.code is None else finished.last_words
        return f"MLX does not accept the hostfile: {why}"
    parsed = json.loads(finished.stdout)
    meant = [[rank, host.ssh, host.ips, host.rdma or ()] for rank, host in enumerate(wiring.hosts)]
    # A pair with several cables has a list of devices.
    expected = json.loads(json.dumps(meant))
    return None if parsed == expected else f"MLX reads the hostfile as {parsed}, meant was {expected}"


async def _addresses(scene: Scene, wiring: Wiring) -> CheckResult:
    ips = {node.name: list(wiring.hosts[rank].ips) for rank, node in ranks_of(scene.config)}
    found = Findings(NAME, scene.config)
    for rank, node in ranks_of(scene.config):
        if (fault := _form_problem(ips[node.name])) is not None:
            found.fault(node, fault)
        else:
            found.evidence[node.name] = f"rank {rank}: {', '.join(ips[node.name]) or 'listens nowhere'}"
    if not found.faults:
        await _own(scene, ips, found)
    if found.faults:
        return found.verdict("", advice="give the node's own address as `ips` in its [[node]]")
    if scene.remote:
        await _reach(scene, neighbours(wiring), ips, found)
    ranks = len(scene.config.nodes)
    advice = "check the cable and the firewall between them"
    return found.verdict(f"MLX reads {ranks} rank{'s' * (ranks != 1)}, {wiring.backend}", advice=advice)


def _form_problem(ips: list[str]) -> str | None:
    """Why an address cannot be in a hostfile at all."""
    for ip in ips:
        try:
            version = ipaddress.ip_address(ip).version
        except ValueError:
            return f"{ip} is not an IP address: the ring takes no names"
        if version != 4:
            return f"{ip} is IPv6: MLX's ring splits an address at its first colon"
    return None


def neighbours(wiring: Wiring) -> dict[int, int]:
    """Which rank each rank makes a connection to: the next one of the ring, with other backends rank 0, where all
    meet."""
    ranks = len(wiring.hosts)
    if wiring.backend == RING:
        return {rank: (rank + 1) % ranks for rank in range(ranks) if ranks > 1}
    return dict.fromkeys(range(1, ranks), 0)


async def _own(scene: Scene, ips: Mapping[str, list[str]], found: Findings) -> None:
    """Whether each node has its addresses."""

    async def ask(node: NodeConfig) -> list[str | None]:
        if not ips[node.name]:
            return []
        said = await scene.look(node, "addresses", "own", *ips[node.name], said=Problems, timeout_s=_LIMIT_S)
        return said.problems

    for node, said in _by_node(scene, await scene.on_all(ask)):
        problem = str(said) if isinstance(said, FlightDeckError) else next(filter(None, said), None)
        if problem is not None:
            found.evidence[node.name] += f", but {problem}"
            found.fault(node, problem)


async def _reach(scene: Scene, towards: Mapping[int, int], ips: Mapping[str, list[str]], found: Findings) -> None:
    """Real connections between the addresses of the ranks, on ports of the moment."""
    nodes = scene.config.nodes
    listening: dict[str, list[str]] = {}
    channels: list[Channel] = []

    async def listen(node: NodeConfig) -> None:
        if nodes.index(node) not in towards.values():
            return
        place = await scene.place_of(node)
        argv = look_argv(place, node, "addresses", "listen", str(_LISTEN_S), *ips[node.name])
        channel = await scene.transport(node).open(argv, directory=PurePosixPath(place.bundle))
        channels.append(channel)
        ports = (await heard(channel, node.name, Listening, _LIMIT_S)).listening
        listening[node.name] = [f"{ip}:{port}" for ip, port in zip(ips[node.name], ports, strict=True)]

    async def reach(node: NodeConfig) -> str | None:
        if (rank := nodes.index(node)) not in towards:
            return None
        other = nodes[towards[rank]].name
        said = await scene.look(node, "addresses", "reach", *listening[other], said=Problems, timeout_s=_LIMIT_S)
        bad = [f"{ip} ({why})" for ip, why in zip(ips[other], said.problems, strict=True) if why]
        return f"does not reach {other} on {', '.join(bad)}" if bad else None

    try:
        answers: Mapping[str, str | FlightDeckError | None] = await scene.on_all(listen)
        if not any(answers.values()):
            answers = await scene.on_all(reach)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels), return_exceptions=True)
    for node, said in _by_node(scene, answers):
        if said is not None:
            found.evidence[node.name] += f", {said}"
            found.fault(node, f"{node.name} {said}" if isinstance(said, str) else str(said))
        elif nodes.index(node) in towards:
            found.evidence[node.name] += f", reaches {nodes[towards[nodes.index(node)]].name}"


def _by_node(scene: Scene, answers: Mapping[str, T]) -> list[tuple[NodeConfig, T]]:
    return [(node, answers[node.name]) for node in scene.config.nodes]


CHECK = Check(
    NAME,
    "the hostfile in MLX's own parser, its addresses, and connections from rank to rank",
    look,
    time_limit_s=60.0,
    needs=(connectivity.NAME,),
)
