"""The links between the nodes: a real all_sum of each pair of neighbours, one after another, and of all ranks."""

from __future__ import annotations

from collections.abc import Callable

from engine.config.subset import only
from engine.errors import FlightDeckError
from engine.measured import CalibrationProgress, LinkMeasure
from engine.models import CheckStatus
from engine.preflight.all_sum import Summed, summed
from engine.preflight.gradient import judge
from engine.preflight.scene import Scene

EVERYONE = "all ranks"


def neighbours(nodes: tuple[str, ...]) -> list[tuple[str, str]]:
    """The pairs of a ring through the nodes in rank order, each once."""
    if len(nodes) < 3:
        return [(nodes[0], nodes[1])] if len(nodes) == 2 else []
    return list(zip(nodes, (*nodes[1:], nodes[0]), strict=True))


async def measure_links(
    scene: Scene, tell: Callable[[CalibrationProgress], None]
) -> tuple[tuple[LinkMeasure, ...], LinkMeasure | None]:
    """Each pair of neighbours, and everyone together (None for one node). What cannot be measured says why."""
    names = tuple(node.name for node in scene.config.nodes)
    pairs = tuple([await _link(scene, pair, " - ".join(pair), tell) for pair in neighbours(names)])
    if len(names) < 2:
        return (), None
    return pairs, pairs[0] if len(names) == 2 else await _link(scene, names, EVERYONE, tell)


async def _link(
    scene: Scene, names: tuple[str, ...], what: str, tell: Callable[[CalibrationProgress], None]
) -> LinkMeasure:
    tell(CalibrationProgress(what, "measuring", seconds=scene.config.preflight.all_sum_s))
    part = Scene(only(scene.config, names), scene.fleet)
    try:
        found = _measure(part, names, await summed(part))
    except (FlightDeckError, OSError) as error:
        found = LinkMeasure(nodes=names, problem=str(error))
    finally:
        await part.close()
    tell(CalibrationProgress(what, "not measured" if found.problem else "measured", note=found.problem or ""))
    return found


def _measure(scene: Scene, names: tuple[str, ...], found: Summed) -> LinkMeasure:
    verdict = judge(scene.config, found)
    measured = [result for result in found.results.values() if result is not None]
    latencies = [result.latency_s for result in measured if result.latency_s is not None]
    widths = [result.bandwidth_bytes_per_s for result in measured if result.bandwidth_bytes_per_s]
    if verdict.status is CheckStatus.FAIL or not latencies or not widths:
        return LinkMeasure(nodes=names, problem=verdict.summary)
    # A sum has ended when its slowest rank has it.
    return LinkMeasure(nodes=names, latency_s=max(latencies), bandwidth_bytes_per_s=min(widths))
