"""hostfile_valid: the hostfile that would be launched parses in MLX's own parser, and its addresses are this machine's.

MLX is asked in a process of its own: the head's process never imports it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import sys
import tempfile
from pathlib import Path

from engine.config.models import FlightConfig
from engine.launch.hostfile import as_configured, write_hostfile
from engine.models import CheckResult, CheckStatus
from engine.preflight.check import Check, ranks_of, verdict
from engine.transport.local import LocalTransport

NAME = "hostfile_valid"
_PARSE_LIMIT_S = 20.0

_ASK = """
import json, sys
from mlx._distributed_utils.common import Hostfile
parsed = Hostfile.from_file(sys.argv[1])
print(json.dumps([[host.rank, host.ssh_hostname, host.ips] for host in parsed.hosts]))
"""


async def look(config: FlightConfig) -> CheckResult:
    with tempfile.TemporaryDirectory(prefix="flightdeck-") as directory:
        path = Path(directory) / "hostfile.json"
        write_hostfile(path, as_configured(config.nodes))
        finished = await LocalTransport().run([sys.executable, "-c", _ASK, str(path)], timeout_s=_PARSE_LIMIT_S)
    if finished.code != 0:
        why = "MLX's parser did not answer" if finished.code is None else finished.last_words
        return verdict(NAME, CheckStatus.FAIL, f"MLX does not accept the hostfile: {why}")
    parsed = json.loads(finished.stdout)
    expected = [[rank, node.ssh, list(node.ips)] for rank, node in ranks_of(config)]
    if parsed != expected:
        return verdict(NAME, CheckStatus.FAIL, f"MLX reads the hostfile as {parsed}, meant was {expected}")
    return await asyncio.to_thread(_addresses, config)


def _addresses(config: FlightConfig) -> CheckResult:
    faults: dict[str, str] = {}
    evidence: dict[str, str] = {}
    blames: tuple[int, str] | None = None
    for rank, node in ranks_of(config):
        problem = next((found for ip in node.ips if (found := address_problem(ip))), None)
        evidence[node.name] = problem or f"rank {rank}: {', '.join(node.ips)}"
        if problem:
            faults[node.name] = problem
            blames = blames or (rank, node.name)
    if faults:
        summary = "; ".join(f"{node}: {fault}" for node, fault in faults.items())
        summary += "; give the node's own address as `ips` in its [[node]]"
        return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, blames=blames)
    ranks = len(config.nodes)
    return verdict(NAME, CheckStatus.PASS, f"MLX reads {ranks} rank{'s' * (ranks != 1)}", evidence=evidence)


def address_problem(ip: str) -> str | None:
    """Why a rank on this machine could not listen on `ip`; None when it could."""
    try:
        version = ipaddress.ip_address(ip).version
    except ValueError:
        return f"{ip} is not an IP address: the ring takes no names"
    if version != 4:
        return f"{ip} is IPv6: MLX's ring splits an address at its first colon"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError as error:
            return f"{ip} is not an address of this machine ({error.strerror})"
    return None


CHECK = Check(NAME, "the hostfile in MLX's own parser, and its addresses", look, time_limit_s=_PARSE_LIMIT_S + 5)
