"""Collects the inputs of the training plan from the nodes and the store, and makes the plan that the checks inspect.

A node that does not answer does not fail the plan: its last known facts are used, and what remains unknown is
reported."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from engine.checks.context import CheckContext, once
from engine.checks.obstacles import data_options, reporting_obstacles
from engine.cluster.agent_client import THIS_MACHINE
from engine.cluster.probe_results import ExampleCount, ModelConfiguration
from engine.cluster.topology import topology
from engine.config.formats import resolved
from engine.config.models import Config, JobConfig, NodeConfig, select_nodes
from engine.errors import FlightDeckError, InputError, LaunchError, StateError, memory_text
from engine.launch.hostfile import hostfile_document, write_hostfile
from engine.launch.manual_launch import JobSizes, manual_launch
from engine.launch.rank_environment import common_environment
from engine.measurements import Calibration
from engine.models import NodeFacts, RunRecord
from engine.plan.context import PlanInputs, Tools, make_context
from engine.plan.data_report import DataReport, read_data_report
from engine.plan.decisions import LaunchDecisions, decide_launch
from engine.plan.document import Disabled, Launching, PlannedHostfile, RankMemory, TrainingPlan
from engine.plan.fingerprint import latest_matching
from engine.plan.memory.choice import is_open
from engine.plan.memory.choice import resolved as with_chosen
from engine.plan.memory.fit import memory_fit
from engine.plan.memory.shape import ModelShape
from engine.plan.network import plan_network
from engine.plan.planner import make_plan
from engine.plan.shares import divide_batch
from engine.protocol.partition import FUSED_SINCE
from engine.security.paths import default_roots, make_home, validate_path
from engine.security.redact import REDACTED, is_public
from engine.security.sanitise import json_or_none
from engine.store.store import Store

_LIMIT_S = 20.0
Answer = TypeVar("Answer")


def load_data_report(config: Config) -> tuple[DataReport | None, str | None]:
    """(report, why it could not be read), both None where the job names none. Blocking."""
    named = config.job.data_quality_report
    if named is None:
        return None, None
    try:
        roots = (*default_roots(), config.folder, *map(Path, config.preflight.roots))
        path = validate_path(resolved(named, config.folder), "data_quality_report", roots=roots)
        return read_data_report(path), None
    except InputError as error:
        return None, str(error)


@dataclass(frozen=True)
class ClusterHistory:
    """The cluster's last known facts and calibrations, from the store."""

    facts: Sequence[NodeFacts] = ()
    calibrations: Sequence[Calibration] = ()
    runs: Sequence[RunRecord] = ()
    """Newest first."""
    problem: str | None = None
    """Why the state cannot be read; all is empty then."""


async def collect_plan_inputs(
    context: CheckContext, fresh: Mapping[str, NodeFacts], history: ClusterHistory
) -> PlanInputs:
    """`fresh` are the facts of a probe just made. The hostfile of the manual launch is written below the fleet's
    home."""
    config, name, now = context.config, context.config.job.name, datetime.now(UTC)
    problems = {name: facts.problem for name, facts in fresh.items() if facts.problem is not None}
    latest = last_known_facts(config, fresh, history.facts)
    calibration, planned, left_out = _participants(context, latest.values(), history, now)
    cabling = topology([latest[node.name] for node in planned.nodes if node.name in latest])
    network, unwired = None, None
    try:
        network = plan_network(planned, list(latest.values()), cabling)
    except LaunchError as error:
        unwired = str(error)
    report, report_problem = await asyncio.to_thread(load_data_report, config)
    answering = [node for node in planned.nodes if node.name not in problems]
    (model, model_source), (count, examples_source), obstacles = await asyncio.gather(
        read_model(context, answering),
        _examples(context, answering, report),
        reporting_obstacles(context, planned.nodes[0], problems),
    )
    gradient = calibration.gradient_bytes if calibration is not None else None
    redacted = {name: text if is_public(name) else REDACTED for name, text in config.job.env.items()}
    inputs = PlanInputs(
        config=planned,
        now=now,
        topology=cabling,
        tools=_tools(),
        facts={name: facts for name, facts in latest.items() if name not in left_out},
        problems=problems,
        network=network,
        network_problem=unwired,
        model=model,
        model_source=model_source,
        examples=count.examples,
        examples_source=examples_source,
        converted=count.converted,
        report=report,
        report_problem=report_problem,
        calibration=calibration,
        division=context.division,
        recoveries_s=tuple(run.recovery_s for run in history.runs if run.name == name and run.recovery_s is not None),
        left_out=left_out,
        rank_environment=common_environment(network, redacted, gradient_bytes=gradient),
        obstacles=obstacles,
        checks=context.planned,
    )
    return replace(inputs, launching=await asyncio.to_thread(_launching, inputs, context.fleet.home))


@once
async def cluster_history(context: CheckContext) -> ClusterHistory:
    store, cluster = Store(context.fleet.home), context.config.cluster.name
    try:
        facts = await asyncio.to_thread(store.last_facts, cluster)
        calibrations = await asyncio.to_thread(store.calibrations, cluster)
        runs = [run for run in await asyncio.to_thread(store.runs) if run.cluster == cluster]
        return ClusterHistory(facts, calibrations, runs)
    except StateError as error:
        return ClusterHistory(problem=str(error))


@once
async def shared_plan_inputs(context: CheckContext) -> PlanInputs:
    return await collect_plan_inputs(context, await context.facts(), await cluster_history(context))


def last_known_facts(
    config: Config, fresh: Mapping[str, NodeFacts], history: Iterable[NodeFacts]
) -> dict[str, NodeFacts]:
    """Those of `history` for a node that does not answer now; in order, without nodes that never answered."""
    last = {(facts.node, facts.host): facts for facts in history}
    latest = {}
    for node in config.nodes:
        seen = fresh.get(node.name)
        if seen is None or seen.problem is not None:
            seen = last.get((node.name, node.ssh))
        if seen is not None and seen.problem is None:
            latest[node.name] = seen
    return latest


def _participants(
    context: CheckContext, facts: Iterable[NodeFacts], history: ClusterHistory, now: datetime
) -> tuple[Calibration | None, Config, tuple[str, ...]]:
    """The calibration to plan with, the configuration without the nodes that it leaves out, and those."""
    config = context.config
    if context.division is not None:
        # The run's own: its calibration may be of more nodes than it has left.
        return context.calibration, config, context.division.left_out
    calibration = latest_matching(config, facts, history.calibrations)
    try:
        left_out = divide_batch(config, calibration, now=now).left_out
    except ValueError:
        return calibration, config, ()
    kept = [node.name for node in config.nodes if node.name not in left_out]
    return calibration, select_nodes(config, kept), left_out


async def _first_answer(
    context: CheckContext,
    nodes: Iterable[NodeConfig],
    named: Callable[[NodeConfig], str | None],
    read: Callable[[NodeConfig, str], Awaitable[tuple[Answer, str]]],
) -> tuple[Answer | None, str]:
    """The result and source of the node that answers first, of all asked concurrently; else the first one's
    error. Nodes of one host with the same path are asked once."""
    paths: dict[tuple[str, str], NodeConfig] = {}
    for node in nodes:
        paths.setdefault((node.ssh, context.path(node, named(node) or "")), node)

    async def ask(node: NodeConfig, path: str) -> tuple[Answer | None, str]:
        try:
            return await read(node, path)
        except FlightDeckError as error:
            return None, str(error)

    tasks = [asyncio.create_task(ask(node, path)) for (_, path), node in paths.items()]
    try:
        for answered in asyncio.as_completed(tasks):
            answer, source = await answered
            if answer is not None:
                return answer, source
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return None, next((task.result()[1] for task in tasks), "no node answers")


async def read_model(context: CheckContext, nodes: Sequence[NodeConfig]) -> tuple[dict[str, Any] | None, str]:
    """config.json, and where it was read, or why it was not."""
    job = context.config.job
    if job.kind.own_model is not None:
        return None, job.kind.own_model

    async def read(node: NodeConfig, path: str) -> tuple[dict[str, Any], str]:
        result = await context.probe(node, "configuration", path, result_type=ModelConfiguration, timeout_s=_LIMIT_S)
        if result.configuration is None:
            raise InputError(result.problem or "no model configuration", where=node.name)
        source = f"config.json of {path} on {node.name}"
        if result.dtype is None:
            return result.configuration, source
        # As the weights are stored: config.json may tell of another conversion.
        return {**result.configuration, "torch_dtype": result.dtype}, f"{source}, type of the weights from their files"

    return await _first_answer(context, nodes, lambda node: node.model or job.model, read)


async def capacity_inputs(context: CheckContext, model: str | None, mac_bytes: int | None) -> PlanInputs:
    """Those that decide how much of the job fits. Raises InputError."""
    now, config, seen = datetime.now(UTC), context.config, dict[str, NodeFacts]()
    if mac_bytes is None:
        seen = last_known_facts(config, await context.facts(), (await cluster_history(context)).facts)
    else:
        mac = NodeFacts(
            node=f"Mac, {memory_text(mac_bytes)}", host="", probed_at=now, system="Darwin", gpu="gpu",
            memory_total_bytes=mac_bytes, mlx=".".join(map(str, FUSED_SINCE)),
        )  # fmt: skip
        node, seen = THIS_MACHINE.model_copy(update={"name": mac.node}), {mac.node: mac}
        config = config.model_copy(update={"nodes": (node,)})
    cabling, network = topology(list(seen.values())), None
    with contextlib.suppress(LaunchError):
        network = plan_network(config, list(seen.values()), cabling)
    configuration, source = None, f"{model} is no JSON object"
    if model is None:
        configuration, source = await read_model(context, context.config.nodes)
    else:
        from engine.publish.hub import read_configuration

        configuration = json_or_none(await asyncio.to_thread(read_configuration, model))
    if not isinstance(configuration, dict):
        raise InputError("the model is not known", why=source, todo="name its folder or its config.json: --model")
    return PlanInputs(
        config, now, cabling, _tools(), seen, network=network, model=configuration, model_source=model or source
    )


async def _examples(
    context: CheckContext, nodes: list[NodeConfig], report: DataReport | None
) -> tuple[ExampleCount, str]:
    """The number of training examples by the report, else the lines of train.jsonl, and its source; or why it is not
    known."""
    job = context.config.job
    if job.kind.own_model is not None:
        return ExampleCount(problem=job.kind.own_model), job.kind.own_model
    if report is not None and report.ifd_score.total_examples is not None:
        return ExampleCount(examples=report.ifd_score.total_examples), "the data quality report"

    options = json.dumps(data_options(context.config))

    async def read(node: NodeConfig, folder: str) -> tuple[ExampleCount, str]:
        result = await context.probe(
            node, "examples", f"{folder}/train.jsonl", options, result_type=ExampleCount, timeout_s=_LIMIT_S
        )
        if result.examples is None:
            raise InputError(result.problem or "not counted", where=node.name)
        return result, f"counted in train.jsonl on {node.name}"

    count, source = await _first_answer(context, nodes, lambda node: node.data or job.data, read)
    return (count, source) if count is not None else (ExampleCount(problem=source), f"not counted: {source}")


def _launching(inputs: PlanInputs, home: Path) -> Launching:
    config, network = inputs.config, inputs.network
    if network is None:
        return Launching()
    if not config.job.kind.framework.by_mlx_launch:
        return Launching(launch_notes=("not MLX's: torch.commands has PyTorch's",))
    gradient = inputs.calibration.gradient_bytes if inputs.calibration is not None else None
    hosts = hostfile_document(network)
    path = home / "plans" / f"{config.cluster.name}-{config.job.name}.hostfile.json"
    try:
        make_home(home)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_hostfile(path, network)
        sizes = JobSizes(_layers(inputs.model), inputs.examples, gradient, inputs.converted)
        return manual_launch(_chosen(inputs), network, path, sizes)
    except OSError as error:
        why = f"the hostfile cannot be written: {error.strerror or error}"
        return Launching(launch_notes=(why,), hostfile=PlannedHostfile(path=None, document=hosts))
    except (LaunchError, ValueError) as error:
        return Launching(launch_notes=(str(error),), hostfile=PlannedHostfile(path=str(path), document=hosts))


def _chosen(inputs: PlanInputs) -> Config:
    """The configuration with what the plan chooses: a printed launch that recomputed nothing might not fit."""
    if not is_open(inputs.config):
        return inputs.config
    return with_chosen(inputs.config, memory_fit(make_context(inputs)).settings)


def _layers(model: Mapping[str, Any] | None) -> int | None:
    """None for an unknown kind of model."""
    try:
        return ModelShape.from_config(model).layers if model is not None else None
    except InputError:
        return None


def _tools() -> Tools:
    beside = Path(sys.executable).with_name("flightdeck")
    return Tools(python=sys.executable, flightdeck=shlex.quote(str(beside)) if beside.exists() else "flightdeck")


@once
async def chosen_job(context: CheckContext) -> JobConfig:
    """The job with what the plan of a PyTorch job chooses, as far as there is one."""
    if context.config.job.framework == "torch":
        with contextlib.suppress(FlightDeckError):
            return with_chosen(context.config, (await shared_plan(context)).settings).job
    return context.config.job


@once
async def shared_plan(context: CheckContext) -> TrainingPlan:
    """The plan of what would be launched. Raises LaunchError when none can be made."""
    try:
        return await asyncio.to_thread(make_plan, await shared_plan_inputs(context))
    except Exception as error:  # a bug in the plan is one line, and not the end of a supervisor
        raise LaunchError("the training cannot be planned", why=f"{type(error).__name__}: {error}") from error


async def launch_decisions(context: CheckContext) -> LaunchDecisions:
    """Raises LaunchError when the training cannot be planned, or the ranks not be connected."""
    return decide_launch(await shared_plan_inputs(context), await shared_plan(context))


MemoryNeed = RankMemory | str
"""The memory of one node's rank against the node's limit, or why the plan has none."""


async def memory_needs(context: CheckContext) -> dict[str, MemoryNeed]:
    """Node name → its memory, in the configuration's order."""
    memory = (await shared_plan(context)).memory
    if isinstance(memory, Disabled):
        return {node.name: memory.reason for node in context.config.nodes}
    ranks = {rank.node: rank for rank in memory.ranks}
    return {node.name: ranks.get(node.name, "the plan leaves this node out") for node in context.config.nodes}


def memory_share(need: MemoryNeed) -> float | None:
    """The share of the limit that is needed; None when either is not known."""
    if isinstance(need, str) or not need.limit_bytes:
        return None
    return need.needed_bytes / need.limit_bytes


def describe_memory(need: MemoryNeed) -> str:
    """For example "needs 8.2 GB of 12 GB (by estimate, 1.5 GB of it in reserve, limit by Metal)"."""
    if isinstance(need, str):
        return f"memory not compared: {need}"
    if need.limit_bytes is None:
        return f"memory not compared: what the node may use is not known ({need.limit_from})"
    reserve = f", {memory_text(need.reserve_bytes)} of it in reserve" if need.reserve_bytes else ""
    source = f"by {need.source}{reserve}, limit by {need.limit_from}"
    return f"needs {memory_text(need.needed_bytes)} of {memory_text(need.limit_bytes)} ({source})"
