"""worker_layer: on every node, including this machine, the ranks can start and no process of an earlier run is left.

Reachability and versions are the subject of ssh_connectivity and versions_match; their results are reused here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from engine.checks import connectivity, versions
from engine.checks.check import Check, Findings, NodeFindings
from engine.checks.context import CheckContext
from engine.checks.fixes import ENDS, Fix
from engine.checks.interpreter import Interpreter
from engine.cluster.probe_results import StaleProcesses
from engine.config.models import Config, NodeConfig
from engine.errors import FlightDeckError, plural
from engine.models import CheckResult, NodeFacts

NAME = "worker_layer"
SKEW_LIMIT_S = 2.0
"""The logs of all ranks are merged by their nodes' clocks: with more skew, the consequence on one node is shown before
its cause on another."""
_PROBE_LIMIT_S = 20.0
_SET_CLOCK_MAC = "sudo sntp -sS time.apple.com"
_SET_CLOCK_LINUX = "sudo chronyc makestep || sudo systemctl restart systemd-timesyncd"
_SETS_CLOCK = "sets the clock by the network's time; date sets it back"


async def run(context: CheckContext) -> CheckResult:
    stale, interpreters, facts, backend = await asyncio.gather(
        context.on_all_nodes(
            lambda node: context.probe(node, "stale", result_type=StaleProcesses, timeout_s=_PROBE_LIMIT_S)
        ),
        versions.node_versions(context),
        context.facts(),
        versions.planned_backend(context),
    )
    return evaluate(context.config, stale, interpreters, facts, backend)


def evaluate(
    config: Config,
    stale: Mapping[str, StaleProcesses | FlightDeckError],
    interpreters: Mapping[str, Interpreter],
    facts: Mapping[str, NodeFacts],
    backend: str,
) -> CheckResult:
    findings = Findings(NAME, config)
    for node in config.nodes:
        on_node = findings.on(node)
        on_node.passed.append("this machine, without ssh" if node.local else "host key known")
        interpreter = interpreters[node.name]
        if description := interpreter.describe():
            on_node.passed.append(description)
        if versions.backend_name(backend) in interpreter.backends:
            on_node.passed.append(f"{backend} available")
        if interpreter.build is not None:
            gpus = interpreter.build.gpus
            on_node.passed.append(f"torch sees {plural(gpus, 'GPU') if gpus else 'the CPU alone'}")
        _check_clock(node, facts[node.name], on_node)
        _check_leftovers(stale[node.name], on_node)
    ready = f"{plural(len(config.nodes), 'rank')} can start on {backend}"
    return findings.verdict(f"{ready}, no processes of earlier runs are left")


def _check_clock(node: NodeConfig, facts: NodeFacts, findings: NodeFindings) -> None:
    skew = facts.clock_skew_s
    if skew is None:
        # This machine has no skew against itself.
        if not node.local:
            findings.warn("its clock could not be compared with this machine's")
    elif abs(skew) > SKEW_LIMIT_S:
        message = f"its clock is {abs(skew):,.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
        findings.warn(message, Fix(_SET_CLOCK_MAC if facts.system == "Darwin" else _SET_CLOCK_LINUX, _SETS_CLOCK))
    else:
        findings.passed.append(f"clock {skew:+.3f} s")


def _check_leftovers(stale: StaleProcesses | FlightDeckError, findings: NodeFindings) -> None:
    if isinstance(stale, FlightDeckError):
        findings.fault(f"it is not known whether processes of earlier runs are left: {stale}")
    elif stale.stale:
        pids = " ".join(str(pid) for group in stale.stale for pid in group.pids)
        message = f"a rank of an earlier run is alive: pid {pids} ({stale.stale[0].command})"
        findings.fault(message, Fix(f"kill -9 {pids}", ENDS))
    else:
        findings.passed.append("no processes of earlier runs")
    if isinstance(stale, StaleProcesses) and not stale.marked_seen:
        hidden = "its system shows no environment of a process that was just started"
        findings.warn(f"{hidden}: that a run has ended is proved there only for its ranks' own sessions and children")


CHECK = Check(
    NAME, "hosts, interpreters, backend and clocks; nothing of an earlier run is alive", run,
    label="nodes ready", time_limit_s=2 * _PROBE_LIMIT_S + 60, needs=(connectivity.NAME, versions.NAME),
)  # fmt: skip
