"""ssh_connectivity: every node answers, with the host key that was accepted, as the user that is meant, and takes what
a launch puts there.

It also says how far apart the clocks are, since logs of nodes an hour apart cannot be read side by side, and what an
earlier run has left running.
"""

from __future__ import annotations

import asyncio

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError, HostKeyUnknown, LaunchError
from engine.models import CheckResult, NodeFacts
from engine.preflight.answers import Stale
from engine.preflight.check import Check, Findings
from engine.preflight.fixes import OURS
from engine.preflight.scene import Scene

NAME = "ssh_connectivity"
SKEW_LIMIT_S = 2.0
TRUST = f"{OURS}nodes --trust"
"""Shows the keys that nobody has accepted yet, and accepts them once a person has said so."""
_LIMIT_S = 45.0
_LOOK_LIMIT_S = 20.0


def _all_local(config: FlightConfig) -> str | None:
    return "every node is this machine" if all(node.local for node in config.nodes) else None


async def look(scene: Scene) -> CheckResult:
    reached, facts = await asyncio.gather(scene.on_all(lambda node: _reach(scene, node)), scene.facts())
    found = Findings(NAME, scene.config)
    for node in scene.config.nodes:
        answer = reached[node.name]
        if isinstance(answer, FlightDeckError):
            found.fault(node, str(answer), TRUST if isinstance(answer, HostKeyUnknown) else None)
            continue
        words, stale = answer
        found.evidence[node.name] = words + _skew(facts[node.name])
        if stale.stale:
            pids = " ".join(str(pid) for group in stale.stale for pid in group.pids)
            left = f"an earlier run has left pid {pids} ({stale.stale[0].command})"
            found.evidence[node.name] += f", {left}"
            found.warning(node, left, f"kill -9 {pids}")
        elif _is_off(facts[node.name]):
            found.warning(node, f"its clock is more than {SKEW_LIMIT_S:g} s off this machine's")
    count = len(scene.config.nodes)
    return found.verdict(f"{count} node{'s' * (count != 1)} answer")


async def _reach(scene: Scene, node: NodeConfig) -> tuple[str, Stale]:
    """What a node has answered, and what is left there of earlier runs."""
    taken = await scene.transport(node).round_trip_s()
    try:
        stale = await scene.look(node, "stale", said=Stale, timeout_s=_LOOK_LIMIT_S)
    except LaunchError:
        if (await scene.interpreters())[node.name].python is not None:
            raise
        # It is versions_match that has words and a fix for this.
        stale = Stale(stale=[])
    if node.local:
        return "this machine", stale
    return "answers" if taken is None else f"answers in {taken * 1e3:.1f} ms", stale


def _is_off(facts: NodeFacts) -> bool:
    return facts.clock_skew_s is not None and abs(facts.clock_skew_s) > SKEW_LIMIT_S


def _skew(facts: NodeFacts) -> str:
    return "" if facts.clock_skew_s is None else f", clock {facts.clock_skew_s:+.3f} s"


CHECK = Check(NAME, "every node answers over SSH", look, time_limit_s=_LIMIT_S, not_applicable=_all_local)
