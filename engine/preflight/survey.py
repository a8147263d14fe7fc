"""Gathers what a plan is made of: the nodes' facts, the model's config.json, the number of examples, what was measured.

A node that does not answer makes no plan fail: what was last seen of it is used, and what is then not known is said.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from engine.config.models import FlightConfig, NodeConfig
from engine.config.subset import only
from engine.errors import FlightDeckError, InputError, LaunchError, StateError
from engine.launch.by_hand import by_hand
from engine.launch.environment import common_environment
from engine.launch.hostfile import document, write_hostfile
from engine.measured import Calibration
from engine.models import NodeFacts
from engine.nodes.topology import topology
from engine.planning.data_report import DataReport
from engine.planning.fingerprint import matching
from engine.planning.inputs import Launching, Parallelism, PlanInputs, Tools
from engine.planning.memory.shape import ModelShape
from engine.planning.shares import shares
from engine.planning.wire import wire
from engine.planning.wiring import Wiring
from engine.preflight.answers import Answer, Configuration, Examples
from engine.preflight.quality import data_report
from engine.preflight.scene import Scene
from engine.security.home import make_home
from engine.security.redact import REDACTED, is_secret
from engine.store.store import Store

_LOOK_S = 20.0
_COUNT_S = 60.0
"""For millions of examples from a slow disk."""
_NOT_COUNTED = "not counted yet"
Said = TypeVar("Said", bound=Answer)


@dataclass(frozen=True)
class Past:
    """What the store still knows of the cluster."""

    facts: tuple[NodeFacts, ...] = ()
    calibrations: tuple[Calibration, ...] = ()
    problem: str | None = None

    @classmethod
    def of(cls, store: Store, cluster: str) -> Past:
        """Blocking. A state that cannot be read is one in which nothing is known."""
        try:
            return cls(tuple(store.last_facts(cluster)), tuple(store.calibrations(cluster)))
        except StateError as error:
            return cls(problem=str(error))


async def survey(
    scene: Scene,
    fresh: Mapping[str, NodeFacts],
    past: Past,
    *,
    strategy: Parallelism | None = None,
) -> PlanInputs:
    """What is known now, with the examples not counted yet; `fresh` is what the nodes have just said, `strategy` one
    that is asked about. The hostfile of the launch by hand is written below the fleet's home."""
    config, now = scene.config, datetime.now(UTC)
    problems = {name: facts.problem for name, facts in fresh.items() if facts.problem is not None}
    known = _known(config, fresh, past.facts)
    if scene.division is not None:
        # What the run was made with: without some of the nodes, its calibration is of another set of them.
        calibration, planned, left_out = scene.calibration, config, scene.division.left_out
    else:
        calibration = matching(config, known.values(), past.calibrations)
        planned, left_out = _taking_part(config, calibration, now)
    joined = topology([known[node.name] for node in planned.nodes if node.name in known])
    wiring, unwired = _wired(planned, known, scene)
    report, report_problem = await asyncio.to_thread(data_report, config)
    model, model_from = await _model(scene, [node for node in planned.nodes if node.name not in problems])
    examples, examples_from = _known_examples(config, report)
    gradient = calibration.gradient_bytes if calibration is not None else None
    return PlanInputs(
        config=planned,
        strategy=strategy or config.job.strategy,
        now=now,
        topology=joined,
        tools=_tools(),
        facts={name: facts for name, facts in known.items() if name not in left_out},
        problems=problems,
        wiring=wiring,
        unwired=unwired,
        model=model,
        model_from=model_from,
        examples=examples,
        examples_from=examples_from,
        report=report,
        report_problem=report_problem,
        calibration=calibration,
        division=scene.division,
        left_out=left_out,
        launching=await asyncio.to_thread(_launching, planned, wiring, scene.fleet.home, model, gradient),
        rank_environment=common_environment(wiring, _quotable(config.job.env), gradient_bytes=gradient),
    )


async def surveyed(scene: Scene) -> PlanInputs:
    """What the scene's nodes have said, surveyed once for all who ask."""

    async def look() -> PlanInputs:
        past = await asyncio.to_thread(Past.of, Store(scene.fleet.home), scene.config.cluster.name)
        return await survey(scene, await scene.facts(), past)

    return await scene.shared("survey", look)


def to_count(inputs: PlanInputs) -> bool:
    """Whether the number of examples is known only by counting them."""
    return inputs.examples is None and inputs.config.job.command is None


async def counted(scene: Scene, inputs: PlanInputs) -> PlanInputs:
    """The same with the number of examples, where it is to be counted; no verdict waits for that."""
    if not to_count(inputs):
        return inputs
    answering = [node for node in inputs.config.nodes if node.name not in inputs.problems]
    examples, examples_from = await _examples(scene, answering)
    return replace(inputs, examples=examples, examples_from=examples_from)


def _known(config: FlightConfig, fresh: Mapping[str, NodeFacts], past: Iterable[NodeFacts]) -> dict[str, NodeFacts]:
    """Each node as it was seen last; without those that were never seen."""
    last = {(facts.node, facts.host): facts for facts in past}
    found = {}
    for node in config.nodes:
        seen = fresh.get(node.name)
        if seen is None or seen.problem is not None:
            seen = last.get((node.name, node.ssh))
        if seen is not None and seen.problem is None:
            found[node.name] = seen
    return found


def _taking_part(
    config: FlightConfig, calibration: Calibration | None, now: datetime
) -> tuple[FlightConfig, tuple[str, ...]]:
    """The configuration without the nodes that have finished nothing when they were measured; and those."""
    try:
        left_out = shares(config, calibration, now=now).left_out
    except ValueError:
        return config, ()
    return only(config, [node.name for node in config.nodes if node.name not in left_out]), left_out


def _wired(config: FlightConfig, known: Mapping[str, NodeFacts], scene: Scene) -> tuple[Wiring | None, str | None]:
    facts = list(known.values())
    try:
        return wire(config, facts, topology([known[node.name] for node in config.nodes if node.name in known])), None
    except LaunchError as error:
        return None, str(error)


async def _first(
    paths: Mapping[tuple[str, str], NodeConfig], ask: Callable[[NodeConfig, str], Awaitable[Said]]
) -> tuple[NodeConfig | None, Said | None, str]:
    """The node that answers first, all asked at once, and its answer; else the first one's reason. `paths` has each
    host's path once."""
    tasks = {asyncio.ensure_future(ask(node, path)): node for (_, path), node in paths.items()}
    why: dict[str, str] = {}
    pending = set(tasks)
    try:
        while pending:
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in (task for task in tasks if task in ended):
                try:
                    return tasks[task], task.result(), ""
                except FlightDeckError as error:
                    why[tasks[task].name] = str(error)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return None, None, next((why[node.name] for node in paths.values()), "no node answers")


def _paths(
    scene: Scene, nodes: Iterable[NodeConfig], named: Callable[[NodeConfig], str]
) -> dict[tuple[str, str], NodeConfig]:
    """(Host, path) → the first node that has it so."""
    found: dict[tuple[str, str], NodeConfig] = {}
    for node in nodes:
        found.setdefault((node.ssh, scene.path(node, named(node))), node)
    return found


async def _model(scene: Scene, nodes: list[NodeConfig]) -> tuple[dict[str, Any] | None, str]:
    """The model's config.json, and where it was read, or why not."""
    job = scene.config.job
    if job.command is not None:
        return None, "the job runs a command of its own, with a model of its own"

    async def ask(node: NodeConfig, path: str) -> Configuration:
        said = await scene.look(node, "configuration", path, said=Configuration, timeout_s=_LOOK_S)
        if said.configuration is None:
            raise InputError(said.problem or "no model configuration", where=node.name)
        return said

    node, said, why = await _first(_paths(scene, nodes, lambda node: node.model or job.model or ""), ask)
    if node is None or said is None:
        return None, why
    return said.configuration, f"config.json of {scene.path(node, node.model or job.model or '')} on {node.name}"


def _known_examples(config: FlightConfig, report: DataReport | None) -> tuple[int | None, str]:
    """How many examples there are to train on, where that need not be counted, and who says so."""
    if config.job.command is not None:
        return None, "the job runs a command of its own, with data of its own"
    if report is not None and report.ifd_score.total_examples is not None:
        return report.ifd_score.total_examples, "the data quality report"
    return None, _NOT_COUNTED


async def _examples(scene: Scene, nodes: list[NodeConfig]) -> tuple[int | None, str]:
    """How many lines train.jsonl has, and where they were counted, or why not."""
    job = scene.config.job

    async def ask(node: NodeConfig, folder: str) -> Examples:
        said = await scene.look(node, "examples", f"{folder}/train.jsonl", said=Examples, timeout_s=_COUNT_S)
        if said.examples is None:
            raise InputError(said.problem or "not counted", where=node.name)
        return said

    node, said, why = await _first(_paths(scene, nodes, lambda node: node.data or job.data or ""), ask)
    if node is None or said is None:
        return None, f"not counted: {why}"
    return said.examples, f"counted in train.jsonl on {node.name}"


def _quotable(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: REDACTED if is_secret(name) else text for name, text in environment.items()}


def _launching(
    config: FlightConfig, wiring: Wiring | None, home: Path, model: Mapping[str, Any] | None, gradient: int | None
) -> Launching:
    if wiring is None:
        return Launching()
    hosts = document(wiring)
    path = home / "plans" / f"{config.cluster.name}-{config.job.name}.hostfile.json"
    try:
        make_home(home)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_hostfile(path, wiring)
        line = by_hand(config, wiring, path, layers=_layers(model), gradient_bytes=gradient)
    except OSError as error:
        return Launching(None, (f"the hostfile cannot be written: {error.strerror or error}",), hosts)
    except (LaunchError, ValueError) as error:
        return Launching(None, (str(error),), hosts, str(path))
    return Launching(line.command, line.notes, hosts, str(path))


def _layers(model: Mapping[str, Any] | None) -> int | None:
    """None for a kind of model that is not known."""
    try:
        return ModelShape.of(model).layers if model is not None else None
    except InputError:
        return None


def _tools() -> Tools:
    beside = Path(sys.executable).with_name("flightdeck")
    return Tools(python=sys.executable, flightdeck=shlex.quote(str(beside)) if beside.exists() else "flightdeck")
