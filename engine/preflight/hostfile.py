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

from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, LaunchError
from engine.launch.hostfile import write_hostfile
from engine.models import CheckResult, CheckStatus
from engine.planning.wiring import Wiring
from engine.preflight import connectivity
from engine.preflight.check import Check, ranks_of, verdict
from engine.preflight.scene import Scene
from engine.security.sanitise import plain
from engine.transport.base import Channel
from engine.transport.local import LocalTransport

NAME = "hostfile_valid"
_PARSE_LIMIT_S = 20.0
_LIMIT_S = 20.0
_LISTEN_S = 15.0

_ASK = """
import json, sys
from mlx._distributed_utils.common import Hostfile
parsed = Hostfile.from_file(sys.argv[1])
print(json.dumps([[host.rank, host.ssh_hostname, host.ips, host.rdma] for host in parsed.hosts]))
"""


async def look(scene: Scene) -> CheckResult:
    wiring = await scene.wiring()
    with tempfile.TemporaryDirectory(prefix="flightdeck-") as directory:
        path = Path(directory) / "hostfile.json"
        write_hostfile(path, wiring)
        finished = await LocalTransport().run([sys.executable, "-c", _ASK, str(path)], timeout_s=_PARSE_LIMIT_S)
    if finished.code != 0:
        why = "MLX's parser did not answer" if finished.code is None else finished.last_words
        return verdict(NAME, CheckStatus.FAIL, f"MLX does not accept the hostfile: {why}")
    parsed = json.loads(finished.stdout)
    meant = [[rank, host.ssh, host.ips, host.rdma or ()] for rank, host in enumerate(wiring.hosts)]
    # A pair with several cables has a list of devices.
    expected = json.loads(json.dumps(meant))
    if parsed != expected:
        return verdict(NAME, CheckStatus.FAIL, f"MLX reads the hostfile as {parsed}, meant was {expected}")
    return await _addresses(scene, wiring)


async def _addresses(scene: Scene, wiring: Wiring) -> CheckResult:
    ips = {node.name: list(wiring.hosts[rank].ips) for rank, node in ranks_of(scene.config)}
    problems = {name: found for name, each in ips.items() if (found := _form_problem(each))}

    async def own(node: NodeConfig) -> str | None:
        said = (await scene.look(node, "addresses", "own", *ips[node.name], timeout_s=_LIMIT_S))["own"]
        return next((plain(problem) for problem in said.values() if problem), None)

    if not problems:
        answers = await scene.on_all(own)
        problems = {name: str(answer) for name, answer in answers.items() if answer}
    reached: dict[str, str] = {}
    if not problems and scene.remote:
        problems, reached = await _reach(scene, ips)
    evidence: dict[str, str] = {}
    blames: tuple[int, str] | None = None
    for rank, node in ranks_of(scene.config):
        evidence[node.name] = problems.get(node.name) or f"rank {rank}: {', '.join(ips[node.name])}" + reached.get(
            node.name, ""
        )
        if node.name in problems:
            blames = blames or (rank, node.name)
    if problems:
        summary = "; ".join(f"{node}: {fault}" for node, fault in problems.items())
        if not reached:
            summary += "; give the node's own address as `ips` in its [[node]]"
        return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, blames=blames)
    ranks = len(scene.config.nodes)
    words = f"MLX reads {ranks} rank{'s' * (ranks != 1)}, {wiring.backend}"
    return verdict(NAME, CheckStatus.PASS, words, evidence=evidence)


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


async def _reach(scene: Scene, ips: Mapping[str, list[str]]) -> tuple[dict[str, str], dict[str, str]]:
    """Real connections from every rank to the next on the ring's addresses: (node → what is wrong, node → words)."""
    listening: dict[str, dict[str, int]] = {}
    channels: list[Channel] = []

    async def listen(node: NodeConfig) -> None:
        place = await scene.place_of(node)
        argv = [place.expanded(node.python), "-m", "worker.looks.addresses", "listen", str(_LISTEN_S), *ips[node.name]]
        channel = await scene.transport(node).open(argv, directory=PurePosixPath(place.bundle))
        channels.append(channel)
        line = b""
        while b"\n" not in line:
            if not (block := await channel.read(4096)):
                raise LaunchError("nobody can listen there", where=node.name, why=channel.last_words)
            line += block
        listening[node.name] = json.loads(line)["listening"]

    nodes = scene.config.nodes

    async def reach(node: NodeConfig) -> str | None:
        following = nodes[(nodes.index(node) + 1) % len(nodes)]
        endpoints = [f"{ip}:{port}" for ip, port in listening[following.name].items()]
        said = (await scene.look(node, "addresses", "reach", *endpoints, timeout_s=_LIMIT_S))["reach"]
        bad = [f"{endpoint.rsplit(':', 1)[0]} ({plain(why)})" for endpoint, why in said.items() if why]
        return f"does not reach {following.name} on {', '.join(bad)}" if bad else None

    try:
        answers: Mapping[str, str | FlightDeckError | None] = await scene.on_all(listen)
        if not any(answers.values()):
            answers = await scene.on_all(reach)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels), return_exceptions=True)
    problems = {name: str(answer) for name, answer in answers.items() if answer}
    return problems, {node.name: ", reaches the next rank" for node in nodes}


CHECK = Check(
    NAME,
    "the hostfile in MLX's own parser, its addresses, and connections from rank to rank",
    look,
    time_limit_s=60.0,
    needs=(connectivity.NAME,),
)
