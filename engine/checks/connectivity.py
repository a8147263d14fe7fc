"""ssh_connectivity: every node answers with the accepted host key, as the intended user, and the agent can be staged
there.

Checks that depend on this one do not run when it fails."""

from __future__ import annotations

from engine.checks.check import THIS_MACHINE, Check, Findings
from engine.checks.context import CheckContext
from engine.checks.fixes import FLIGHTDECK, Fix
from engine.config.models import NodeConfig
from engine.errors import HostKeyUnknown, LaunchError, plural
from engine.models import CheckResult

NAME = "ssh_connectivity"
TRUST_COMMAND = f"{FLIGHTDECK}nodes --trust"
"""Shows the host keys that are not known yet, and accepts them after a confirmation."""
_LIMIT_S = 75.0
"""Above the limits of a connection, of an agent's start and of one answer together."""


async def run(context: CheckContext) -> CheckResult:
    reached = await context.on_all_nodes(lambda node: _reach(context, node))
    findings = Findings(NAME, context.config)
    for node, answer in findings.answered(reached):
        findings.evidence[node.name] = answer
    for node in context.config.nodes:
        if isinstance(reached[node.name], HostKeyUnknown):
            findings.on(node).fixes.append(Fix(TRUST_COMMAND, "accepts a key once you have compared it"))
    return findings.verdict(f"{plural(len(context.config.nodes), 'node')} answer")


async def _reach(context: CheckContext, node: NodeConfig) -> str:
    taken = None
    try:
        await context.layout_of(node)
        taken = await context.agent(node).round_trip_s()
    except LaunchError:
        # A missing interpreter is reported by versions_match, which has a fix for it.
        if (await context.interpreters())[node.name].python is not None:
            raise
    if node.local:
        return THIS_MACHINE
    return "answers" if taken is None else f"answers in {taken * 1e3:.1f} ms"


CHECK = Check(
    NAME, "every node answers over SSH", run, label="SSH", time_limit_s=_LIMIT_S,
    not_applicable=lambda config: "every node is this machine" if all(node.local for node in config.nodes) else None,
)  # fmt: skip
