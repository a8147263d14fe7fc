"""worker_layer: on every node, this machine too, the ranks can begin and nothing of an earlier run is in their way.

That a node answers, with its host key known, is ssh_connectivity's; that python, mlx and mlx-lm are the same and can be
imported is versions_match's. Both come first, what they have found out is shown here, and nothing is asked twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError
from engine.models import CheckResult, NodeFacts
from engine.preflight import connectivity, versions
from engine.preflight.answers import Stale
from engine.preflight.check import Check, Findings
from engine.preflight.interpreter import Interpreter
from engine.preflight.notes import NodeNotes
from engine.preflight.scene import Scene

NAME = "worker_layer"
SKEW_LIMIT_S = 2.0
"""The logs of all ranks are read side by side by their nodes' clocks: with more between them, the consequence on one
node stands before its cause on another."""
_LOOK_LIMIT_S = 20.0
_SET_CLOCK_MAC = "sudo sntp -sS time.apple.com"
_SET_CLOCK_LINUX = "sudo chronyc makestep || sudo systemctl restart systemd-timesyncd"


async def look(scene: Scene) -> CheckResult:
    async def stale(node: NodeConfig) -> Stale:
        return await scene.look(node, "stale", said=Stale, timeout_s=_LOOK_LIMIT_S)

    left, seen, facts, backend = await asyncio.gather(
        scene.on_all(stale), versions.versions(scene), scene.facts(), versions.backend(scene)
    )
    return judge(scene.config, left, seen, facts, backend)


def judge(
    config: FlightConfig,
    left: Mapping[str, Stale | FlightDeckError],
    seen: Mapping[str, Interpreter],
    facts: Mapping[str, NodeFacts],
    backend: str,
) -> CheckResult:
    """The verdict over all nodes."""
    found = Findings(NAME, config)
    for node in config.nodes:
        notes = _of_node(node, seen[node.name], facts[node.name], backend)
        _leftovers(left[node.name], notes)
        notes.tell(found, node)
    count = len(config.nodes)
    return found.verdict(f"{count} worker{'s' * (count != 1)} ready for {backend}, nothing left of earlier runs")


def _of_node(node: NodeConfig, seen: Interpreter, facts: NodeFacts, backend: str) -> NodeNotes:
    notes = NodeNotes()
    notes.seen.append("this machine, without ssh" if node.local else "host key known")
    if words := seen.words():
        notes.seen.append(words)
    if versions.mlx_name(backend) in seen.backends:
        notes.seen.append(f"{backend} available")
    skew = facts.clock_skew_s
    if skew is None:
        # Of this machine there is nothing to know.
        if not node.local:
            notes.warn("its clock could not be compared with this machine's")
    elif abs(skew) > SKEW_LIMIT_S:
        words = f"its clock is {abs(skew):,.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
        notes.warn(words, _SET_CLOCK_MAC if facts.system == "Darwin" else _SET_CLOCK_LINUX)
    else:
        notes.seen.append(f"clock {skew:+.3f} s")
    return notes


def _leftovers(stale: Stale | FlightDeckError, notes: NodeNotes) -> None:
    if isinstance(stale, FlightDeckError):
        notes.fault(f"what earlier runs have left is not known: {stale}")
    elif stale.stale:
        pids = " ".join(str(pid) for group in stale.stale for pid in group.pids)
        words = f"a rank of an earlier run is alive: pid {pids} ({stale.stale[0].command})"
        notes.fault(words, f"kill -9 {pids}")
    else:
        notes.seen.append("nothing left of earlier runs")


CHECK = Check(
    NAME,
    "hosts, interpreters, backend and clocks; nothing of an earlier run is alive",
    look,
    time_limit_s=2 * _LOOK_LIMIT_S + 60,
    needs=(connectivity.NAME, versions.NAME),
)
