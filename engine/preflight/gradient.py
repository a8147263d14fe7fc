"""gradient_layer: a real all_sum over the real ranks, as they would be launched.

Without the right environment MLX makes a group of size 1 and says nothing: every rank would train alone. So the size is
compared with the configuration's, and every sum must be exact.
"""

from __future__ import annotations

import asyncio
import re

from engine.config.models import FlightConfig
from engine.models import CheckResult, CheckStatus
from engine.preflight import connectivity, hostfile, sync, versions
from engine.preflight.all_sum import START_ALLOWANCE_S, Summed, summed
from engine.preflight.check import Check, ranks_of, verdict
from engine.preflight.scene import Scene
from engine.security.sanitise import plain
from engine.worker.wire import AllSumResult

NAME = "gradient_layer"
_MOST_S = START_ALLOWANCE_S + 5 * 60 + 30
"""Of the longest all_sum that a configuration may ask for."""

_CONSEQUENCES = re.compile(r"connection to a peer|Couldn't connect|peer does not answer|ended with -15\b")
"""Also of TERM: that is the launcher, once another rank has left."""
ADVICE = (
    (r"Couldn't bind|error: (98|48)\b", "the port was taken in that moment: run the check again"),
    (r"error: 65\b", "allow your terminal the Local Network in System Settings, Privacy & Security"),
    (r"Couldn't connect|does not answer", "check that the nodes reach each other on `ips`, and their firewall"),
)
"""(what a rank says, what a person can do about it), the first that fits."""


async def look(scene: Scene) -> CheckResult:
    # Not the whole of versions_match: what mlx-lm takes to import, and this, take their time side by side.
    seen, backend = await asyncio.gather(scene.interpreters(), versions.backend(scene))
    if unfit := versions.without_mlx(seen, backend):
        first = next((rank, node.name) for rank, node in ranks_of(scene.config) if node.name in unfit)
        why = seen[first[1]].problem or f"no {backend} there"
        words = f"not run: no rank can begin on {', '.join(unfit)}: {why}"
        return verdict(NAME, CheckStatus.FAIL, words, blames=first)
    return judge(scene.config, await summed(scene))


def judge(config: FlightConfig, found: Summed) -> CheckResult:
    """The verdict. A rank that only lost its peers is not blamed while another has a cause of its own."""
    result = _judge(config, found)
    if found.left:
        return result.model_copy(update={"status": CheckStatus.FAIL, "summary": f"{result.summary}; {found.left}"})
    return result


def _judge(config: FlightConfig, found: Summed) -> CheckResult:
    world_size, results = len(config.nodes), found.results
    faults = {rank: _fault(results[rank], world_size, found.words[rank], found.codes.get(rank)) for rank in results}
    evidence = {
        node.name: f"rank {rank}: {faults[rank] or _measured(results[rank])}" for rank, node in ranks_of(config)
    }
    failed = {rank: fault for rank, fault in faults.items() if fault is not None}
    if failed:
        first = min(failed, key=lambda rank: (_CONSEQUENCES.search(failed[rank]) is not None, rank))
        node = config.nodes[first].name
        advice = next((text for pattern, text in ADVICE if re.search(pattern, failed[first])), None)
        summary = f"rank {first} on {node}: {failed[first]}" + (f"; {advice}" if advice else "")
        return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, blames=(first, node))
    if world_size == 1:
        return verdict(
            NAME, CheckStatus.PASS, "one rank, a group of 1 as planned: nothing is exchanged", evidence=evidence
        )
    measured = [result for result in results.values() if result is not None]
    slowest = max(result.latency_s or 0.0 for result in measured)
    narrowest = min(result.bandwidth_bytes_per_s or 0.0 for result in measured)
    summary = f"{world_size} ranks, exact, {slowest * 1e3:.2f} ms, {narrowest / 1e9:.2f} GB/s"
    return verdict(NAME, CheckStatus.PASS, summary, evidence=evidence)


def _fault(result: AllSumResult | None, world_size: int, words: str, code: int | None) -> str | None:
    if result is None:
        ended = f"ended with {code}" if code is not None else "wrote no result"
        return f"{ended}: {words}" if words else ended
    if result.error is not None:
        return plain(result.error, 300)
    if result.size != world_size:
        return f"MLX made a group of {result.size} where {world_size} are planned"
    return None if result.exact else "the sum is not exact"


def _measured(result: AllSumResult | None) -> str:
    if result is None or result.latency_s is None or result.bandwidth_bytes_per_s is None:
        return "not measured"
    if result.size == 1:
        return "alone"
    return f"exact, {result.latency_s * 1e3:.2f} ms, {result.bandwidth_bytes_per_s / 1e9:.2f} GB/s"


CHECK = Check(
    NAME,
    "a real all_sum over the real ring",
    look,
    time_limit_s=_MOST_S,
    needs=(connectivity.NAME, hostfile.NAME, sync.NAME),
)
