"""ssh_connectivity: every node answers, with the host key that was accepted, as the user that is meant.

Of the clocks it says how far apart they are: logs of nodes an hour apart cannot be read side by side.
"""

from __future__ import annotations

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import HostKeyUnknown
from engine.models import CheckResult, CheckStatus, NodeFacts
from engine.preflight.check import Check, ranks_of, verdict
from engine.preflight.scene import Scene

NAME = "ssh_connectivity"
SKEW_LIMIT_S = 2.0
_LIMIT_S = 45.0


def _all_local(config: FlightConfig) -> str | None:
    return "every node is this machine" if all(node.local for node in config.nodes) else None


async def look(scene: Scene) -> CheckResult:
    reached = await scene.on_all(lambda node: _reach(scene, node))
    facts = await scene.facts()
    evidence: dict[str, str] = {}
    faults: dict[str, str] = {}
    fixes: dict[str, str] = {}
    skewed: list[str] = []
    blames: tuple[int, str] | None = None
    for rank, node in ranks_of(scene.config):
        answer = reached[node.name]
        if isinstance(answer, str):
            evidence[node.name] = answer + _skew(facts[node.name])
            if _is_off(facts[node.name]):
                skewed.append(node.name)
            continue
        faults[node.name] = evidence[node.name] = str(answer)
        blames = blames or (rank, node.name)
        if isinstance(answer, HostKeyUnknown):
            fixes[node.name] = f"flightdeck nodes --trust {answer.fingerprint}"
    if faults:
        summary = "; ".join(dict.fromkeys(faults.values()))
        return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, fixes=fixes, blames=blames)
    if skewed:
        summary = f"the clock of {', '.join(skewed)} is more than {SKEW_LIMIT_S:g} s off this machine's"
        return verdict(NAME, CheckStatus.WARN, summary, evidence=evidence)
    count = len(scene.config.nodes)
    return verdict(NAME, CheckStatus.PASS, f"{count} node{'s' * (count != 1)} answer", evidence=evidence)


async def _reach(scene: Scene, node: NodeConfig) -> str:
    transport = scene.transport(node)
    if node.local:
        return "this machine"
    await transport.run(["true"], timeout_s=_LIMIT_S)
    taken = await transport.round_trip_s()
    return "answers" if taken is None else f"answers in {taken * 1e3:.1f} ms"


def _is_off(facts: NodeFacts) -> bool:
    return facts.clock_skew_s is not None and abs(facts.clock_skew_s) > SKEW_LIMIT_S


def _skew(facts: NodeFacts) -> str:
    return "" if facts.clock_skew_s is None else f", clock {facts.clock_skew_s:+.3f} s"


CHECK = Check(NAME, "every node answers over SSH", look, time_limit_s=_LIMIT_S, not_applicable=_all_local)
