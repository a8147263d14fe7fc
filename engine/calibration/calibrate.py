"""A calibration from its beginning to its end: every node alone, then the links, then what it all was taken of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from engine.calibration.links import measure_links
from engine.calibration.throughput import measure_nodes
from engine.config.models import FlightConfig
from engine.config.subset import only
from engine.errors import FlightDeckError, LaunchError
from engine.launch.place import Place
from engine.measured import Calibration, CalibrationProgress, LinkMeasure, NodeMeasure
from engine.models import NodeFacts
from engine.planning.fingerprint import fingerprint, machines
from engine.preflight.scene import Scene

QUICK_S = 10.0
STAND_IN = "the job runs a command of its own: a tiny Llama was trained in its place, on every node the same"


async def calibrate(
    scene: Scene,
    *,
    quick: bool,
    known: Iterable[NodeFacts] = (),
    tell: Callable[[CalibrationProgress], None],
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Calibration:
    """Measure the scene's nodes and links. `known` is what was seen of the nodes before, for those that do not answer
    now. A node that cannot be reached is "not measured", with why; when none can, its error is raised."""
    config = scene.config
    places = await scene.on_all(scene.place_of)
    unreachable = {name: answer for name, answer in places.items() if not isinstance(answer, Place)}
    if len(unreachable) == len(config.nodes):
        raise next(iter(unreachable.values()))
    there = Scene(only(config, places.keys() - unreachable.keys()), scene.fleet) if unreachable else scene
    try:
        alone = await measure_nodes(there, QUICK_S if quick else config.calibration.seconds, tell)
        links, everyone = await measure_links(there, tell)
        backend = await _backend(there)
    finally:
        if there is not scene:
            await there.close()
    measured = {measure.node: measure for measure in alone.nodes}
    if unreachable:
        why = f"{', '.join(unreachable)} was not measured"
        everyone = LinkMeasure(nodes=tuple(node.name for node in config.nodes), problem=why)
    facts = _facts(config, (await scene.facts()).values(), known)
    return Calibration(
        cluster=config.cluster.name,
        job=config.job.name,
        fingerprint=fingerprint(config, facts),
        machines=machines(config, facts),
        taken_at=clock(),
        quick=quick,
        stand_in=config.job.command is not None,
        backend=backend,
        nodes=tuple(
            measured.get(node.name) or NodeMeasure(node=node.name, host=node.ssh, problem=str(unreachable[node.name]))
            for node in config.nodes
        ),
        links=links,
        everyone=everyone,
        gradient_bytes=alone.gradient_bytes,
        notes=_notes(config, alone.left),
    )


def complete(calibration: Calibration) -> bool:
    """Whether every node was measured: only such a one takes the place of an earlier one."""
    return all(measure.examples_per_s is not None for measure in calibration.nodes)


def _facts(config: FlightConfig, now: Iterable[NodeFacts], before: Iterable[NodeFacts]) -> list[NodeFacts]:
    """As the store will have them: of a node that does not answer, what was seen when it last did."""
    seen = {fact.node: fact for fact in now if fact.problem is None}
    last = {fact.node: fact for fact in before}
    return [fact for node in config.nodes if (fact := seen.get(node.name) or last.get(node.name)) is not None]


async def _backend(scene: Scene) -> str | None:
    try:
        return (await scene.wiring()).backend
    except (FlightDeckError, LaunchError):
        return None


def _notes(config: FlightConfig, left: str) -> tuple[str, ...]:
    notes = [STAND_IN] if config.job.command is not None else []
    hosts = [node.ssh for node in config.nodes]
    if len(set(hosts)) < len(hosts):
        notes.append("ranks of one machine were measured one after another: together they share it")
    if left:
        notes.append(left)
    return tuple(notes)
