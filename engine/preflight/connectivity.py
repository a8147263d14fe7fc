"""ssh_connectivity: every node answers, with the host key that was accepted, as the user that is meant, and takes what
a launch puts there. What a node that does not answer cannot tell is not asked again by the checks that need this one.
"""

from __future__ import annotations

import asyncio

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError, HostKeyUnknown, LaunchError, NodeUnreachable
from engine.models import CheckResult
from engine.preflight.check import Check, Findings
from engine.preflight.fixes import OURS
from engine.preflight.scene import Scene

NAME = "ssh_connectivity"
TRUST = f"{OURS}nodes --trust"
"""Shows the keys that nobody has accepted yet, and accepts them once a person has said so."""
_LIMIT_S = 45.0
_ANSWER_S = 10.0
"""As long as for a new connection: one that was open before a node went away breaks no earlier by itself."""


def _all_local(config: FlightConfig) -> str | None:
    return "every node is this machine" if all(node.local for node in config.nodes) else None


async def look(scene: Scene) -> CheckResult:
    reached = await scene.on_all(lambda node: _reach(scene, node))
    found = Findings(NAME, scene.config)
    for node in scene.config.nodes:
        answer = reached[node.name]
        if isinstance(answer, FlightDeckError):
            found.fault(node, str(answer), TRUST if isinstance(answer, HostKeyUnknown) else None)
        else:
            found.evidence[node.name] = answer
    count = len(scene.config.nodes)
    return found.verdict(f"{count} node{'s' * (count != 1)} answer")


async def round_trip_s(scene: Scene, node: NodeConfig) -> float | None:
    """Seconds of one exchange with a node now; None for this machine. Raises NodeUnreachable."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await scene.transport(node).round_trip_s()
    except TimeoutError:
        why = f"no answer within {_ANSWER_S:g} s"
        raise NodeUnreachable("does not answer", where=node.ssh, why=why, todo="is it on and awake?") from None


async def _reach(scene: Scene, node: NodeConfig) -> str:
    """What a node has answered."""
    taken = await round_trip_s(scene, node)
    try:
        await scene.place_of(node)
    except LaunchError:
        if (await scene.interpreters())[node.name].python is not None:
            raise
        # It is versions_match that has words and a fix for this.
    if node.local:
        return "this machine"
    return "answers" if taken is None else f"answers in {taken * 1e3:.1f} ms"


CHECK = Check(NAME, "every node answers over SSH", look, time_limit_s=_LIMIT_S, not_applicable=_all_local)
