"""hostfile_valid: MLX parses its hostfile; nodes own their addresses and reach each other on them.

The parser runs in a separate process: the head never imports MLX."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from engine.checks import connectivity
from engine.checks.check import Check, Findings, verdict
from engine.checks.context import CheckContext
from engine.cluster.agent_client import AgentRequest, InterpreterMissing, each_of, value_of
from engine.cluster.probe_results import AddressProblems, ListeningPorts
from engine.cluster.transport.local import LocalTransport
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, plural
from engine.job.traits import FRAMEWORKS
from engine.launch.hostfile import RING, write_hostfile
from engine.models import CheckResult, CheckStatus
from engine.plan.network import NetworkPlan
from engine.security.sanitise import json_or_none, plain

NAME = "hostfile_valid"
_PARSE_LIMIT_S = 20.0
_LIMIT_S = 20.0
_LISTEN_S = 10.0
_OWN_ADDRESS = "give the node's own address as `ips` in its [[node]]"

_PARSE_HOSTFILE = """
import json, sys
from mlx._distributed_utils.common import Hostfile
parsed = Hostfile.from_file(sys.argv[1])
print(json.dumps([[host.rank, host.ssh_hostname, host.ips, host.rdma] for host in parsed.hosts]))
"""


async def run(context: CheckContext) -> CheckResult:
    network = await context.network_plan()
    if not FRAMEWORKS[network.framework].by_mlx_launch:
        return await _check_addresses(context, network)
    problem, result = await asyncio.gather(_parse_problem(network), _check_addresses(context, network))
    return result if problem is None else verdict(NAME, CheckStatus.FAIL, problem)


async def _parse_problem(network: NetworkPlan) -> str | None:
    """How MLX's reading of the hostfile differs from the plan; None when it does not."""
    with tempfile.TemporaryDirectory(prefix="flightdeck-") as directory:
        path = Path(directory) / "hostfile.json"
        write_hostfile(path, network)
        finished = await LocalTransport().run(
            [sys.executable, "-c", _PARSE_HOSTFILE, str(path)], timeout_s=_PARSE_LIMIT_S
        )
    if finished.code != 0 or (parsed := json_or_none(finished.stdout)) is None:
        why = "MLX's parser did not answer" if finished.code is None else plain(finished.exit_output, 200)
        return f"MLX does not accept the hostfile: {why}"
    planned = [[rank, host.ssh, host.ips, host.rdma or ()] for rank, host in enumerate(network.hosts)]
    # As JSON: a pair with several cables has a list of devices.
    expected = json.loads(json.dumps(planned))
    return None if parsed == expected else f"MLX reads the hostfile as {parsed}, expected {expected}"


async def _check_addresses(context: CheckContext, network: NetworkPlan) -> CheckResult:
    nodes = context.config.nodes
    ips = {node.name: list(host.ips) for node, host in zip(nodes, network.hosts, strict=True)}
    findings = Findings(NAME, context.config)
    for rank, node in enumerate(nodes):
        findings.evidence[node.name] = f"rank {rank}: {', '.join(ips[node.name]) or 'listens nowhere'}"
    await _check_ownership(context, ips, findings)
    if findings.faulty:
        return findings.verdict()
    if not all(node.local for node in nodes):
        for targets in connections(network, local=context.config.job.kind.strategy.averages):
            if not findings.faulty:
                await _check_connections(context, targets, ips, findings)
    reads = "MLX reads " * FRAMEWORKS[network.framework].by_mlx_launch
    passed = f"{reads}{plural(len(nodes), 'rank')}, {network.backend}"
    return findings.verdict(passed, advice="check the cable and the firewall between them")


def neighbours(network: NetworkPlan, *, local: bool = False) -> dict[int, int]:
    """Rank → the rank it connects to: the next one of the ring; with other backends, and strategy "local", rank 0."""
    ranks = len(network.hosts)
    if network.backend == RING and not local:
        return {rank: (rank + 1) % ranks for rank in range(ranks) if ranks > 1}
    return dict.fromkeys(range(1, ranks), 0)


def connections(network: NetworkPlan, *, local: bool = False) -> list[dict[int, int]]:
    """Rounds of rank → the rank it connects to. Gloo and NCCL connect every pair of machines, in both directions."""
    if network.framework != "torch":
        return [neighbours(network, local=local)]
    # The first rank of each machine.
    firsts = list({host.ssh: rank for rank, host in reversed(list(enumerate(network.hosts)))}.values())[::-1]
    count = len(firsts)
    return [{rank: firsts[(place + step) % count] for place, rank in enumerate(firsts)} for step in range(1, count)]


async def _check_ownership(context: CheckContext, ips: Mapping[str, list[str]], findings: Findings) -> None:
    async def probe(node: NodeConfig) -> list[str | None]:
        addresses = ips[node.name]
        if not addresses:
            return []
        answer = await context.probe(node, "addresses", *addresses, result_type=AddressProblems, timeout_s=_LIMIT_S)
        return [problem for _, problem in each_of(answer.problems, addresses, node)]

    answers = await context.on_all_nodes(probe)
    for node in context.config.nodes:
        problems = answers[node.name]
        if isinstance(problems, InterpreterMissing):
            problem: str | None = f"its address is not checked: {problems.what}, see versions_match"
        elif isinstance(problems, FlightDeckError):
            problem = str(problems)
        else:
            problem = next((f"{why}; {_OWN_ADDRESS}" for why in problems if why), None)
        if problem is not None:
            findings.evidence[node.name] += f", but {problem}"
            findings.fault(node, problem)


async def _check_connections(
    context: CheckContext, targets: Mapping[int, int], ips: Mapping[str, list[str]], findings: Findings
) -> None:
    """Connect each rank to its target in `targets`, on ephemeral ports."""
    nodes = context.config.nodes
    listening: dict[str, list[str]] = {}
    requests: list[AgentRequest] = []

    async def listen(node: NodeConfig) -> None:
        if nodes.index(node) not in targets.values():
            return
        request = await context.agent(node).start_probe("listen", str(_LISTEN_S), *ips[node.name])
        requests.append(request)
        ports = value_of(await request.next_result("listen", ListeningPorts, _LIMIT_S), node).listening
        listening[node.name] = [f"{ip}:{port}" for ip, port in each_of(ports, ips[node.name], node)]

    async def reach(node: NodeConfig) -> str | None:
        if (rank := nodes.index(node)) not in targets:
            return None
        target = nodes[targets[rank]].name
        answer = await context.probe(node, "reach", *listening[target], result_type=AddressProblems, timeout_s=_LIMIT_S)
        bad = [f"{ip} ({why})" for ip, why in each_of(answer.problems, ips[target], node) if why]
        return f"does not reach {target} on {', '.join(bad)}" if bad else None

    try:
        answers: Mapping[str, str | FlightDeckError | None] = await context.on_all_nodes(listen)
        if not any(answers.values()):
            answers = await context.on_all_nodes(reach)
    finally:
        for request in requests:
            request.close()
    for node in nodes:
        problem = answers[node.name]
        if problem is not None:
            findings.evidence[node.name] += f", {problem}"
            findings.fault(node, f"{node.name} {problem}" if isinstance(problem, str) else str(problem))
        elif nodes.index(node) in targets:
            findings.evidence[node.name] += f", reaches {nodes[targets[nodes.index(node)]].name}"


CHECK = Check(
    NAME, "the hostfile in MLX's own parser, its addresses, and connections from rank to rank (PyTorch: of every pair)",
    run, label="hostfile", time_limit_s=60.0, needs=(connectivity.NAME,),
)  # fmt: skip
