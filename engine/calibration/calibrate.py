"""Runs a whole calibration: every node alone, then the links by a real all_sum, and the fingerprint of both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Literal

from engine.calibration.group import GROUP_S, measure_group, nodes_too_small
from engine.calibration.throughput import measure_nodes
from engine.checks.context import CheckContext
from engine.checks.gradient import AllSumOutcome, evaluate, run_all_sum
from engine.checks.plan_inputs import last_known_facts, shared_plan, shared_plan_inputs
from engine.cluster.staging import HostLayout
from engine.cluster.topology import topology
from engine.config.models import Config, select_nodes
from engine.errors import FlightDeckError, LaunchError
from engine.measurements import Calibration, CalibrationProgress, LinkMeasure, NodeMeasure
from engine.models import CheckStatus, NodeFacts
from engine.plan.context import PlanInputs
from engine.plan.document import ChosenSettings
from engine.plan.fingerprint import fingerprint, node_fingerprints
from engine.plan.memory.choice import is_open, resolved
from engine.plan.memory.shape import trained_element_bytes
from engine.plan.network import NetworkPlan, plan_network

QUICK_S = 10.0
ALL_RANKS = "all ranks"
SYNTHETIC_MODEL = "the job runs a command of its own: the same tiny Llama was trained on every node instead"


async def calibrate(
    context: CheckContext,
    *,
    quick: bool,
    before: Iterable[NodeFacts] = (),
    on_progress: Callable[[CalibrationProgress], None],
) -> Calibration:
    """Measure the nodes and their links. `before` are the last known facts, for nodes that do not answer now. A node
    that cannot be reached is "not measured", with the reason; when none can, its error is raised."""
    config, unreachable = context.config, await _unreachable(context)
    kept = select_nodes(config, {node.name for node in config.nodes} - unreachable.keys())
    async with CheckContext(kept, context.fleet) if unreachable else contextlib.nullcontext(context) as reachable:
        seconds = QUICK_S if quick else config.calibration.seconds
        chosen = (await shared_plan(reachable)).settings if is_open(kept) else None
        measured_job = resolved(kept, chosen) if chosen is not None else kept
        inputs = replace(await shared_plan_inputs(reachable), config=measured_job)
        too_large = await asyncio.to_thread(nodes_too_small, whole_job_on_each(inputs))
        nodes, gradient_bytes, leftovers = await measure_nodes(reachable, measured_job, seconds, on_progress, too_large)
        links, all_ranks = await measure_links(reachable, on_progress)
        group = await measure_group(reachable, measured_job, min(seconds, GROUP_S), on_progress)
        network = None
        with contextlib.suppress(FlightDeckError):
            network = await reachable.network_plan()
        probed = tuple((await reachable.facts()).values())
    measured = {measure.node: measure for measure in nodes} | unreachable
    if unreachable:
        why = f"{', '.join(unreachable)} was not measured"
        all_ranks = LinkMeasure(nodes=tuple(node.name for node in config.nodes), problem=why)
    # As the store will have them.
    facts = last_known_facts(config, await context.facts(), before).values()
    return Calibration(
        cluster=config.cluster.name,
        job=config.job.name,
        fingerprint=fingerprint(config, facts),
        machines=node_fingerprints(config, facts),
        taken_at=datetime.now(UTC),
        quick=quick,
        synthetic_model=config.job.kind.own_model is not None,
        backend=network.backend if network is not None else None,
        connected_as=connected_as(kept, probed, network) if network is not None else (),
        nodes=tuple(measured[node.name] for node in config.nodes),
        links=links,
        all_ranks=all_ranks,
        group=group,
        gradient_bytes=gradient_bytes,
        element_bytes=trained_element_bytes(inputs.model, config.job.fine_tune_type),
        settings=chosen.model_dump() if isinstance(chosen, ChosenSettings) else {},
        notes=_notes(config, leftovers),
    )


async def _unreachable(context: CheckContext) -> dict[str, NodeMeasure]:
    """Each node that cannot be reached, with the reason; raised when none can."""
    layouts = await context.on_all_nodes(context.layout_of)
    hosts = {node.name: node.ssh for node in context.config.nodes}
    errors = {name: answer for name, answer in layouts.items() if not isinstance(answer, HostLayout)}
    if len(errors) == len(hosts):
        raise next(iter(errors.values()))
    return {name: NodeMeasure(node=name, host=hosts[name], problem=str(error)) for name, error in errors.items()}


def connected_as(
    config: Config, facts: Sequence[NodeFacts], network: NetworkPlan
) -> tuple[Literal["data", "local"], ...]:
    """The strategies that connect the ranks as `network` does."""
    same: list[Literal["data", "local"]] = []
    strategies: tuple[Literal["data", "local"], ...] = ("data", "local")
    for strategy in strategies:
        with contextlib.suppress(LaunchError):
            planned = plan_network(config, facts, topology(facts), strategy)
            if (planned.backend, planned.hosts) == (network.backend, network.hosts):
                same.append(strategy)
    return tuple(same)


def whole_job_on_each(inputs: PlanInputs) -> PlanInputs:
    """Every node trains the whole model, as `measure_nodes` has it do."""
    job = inputs.config.job.model_copy(update={"strategy": "data", "layer_split": None})
    return replace(inputs, config=inputs.config.model_copy(update={"job": job}))


def is_complete(calibration: Calibration) -> bool:
    """A complete calibration replaces an earlier one in the store."""
    if calibration.group is not None and calibration.group.step_s is not None:
        return True
    return all(measure.examples_per_s is not None for measure in calibration.nodes)


def _notes(config: Config, leftovers: str) -> tuple[str, ...]:
    notes = [SYNTHETIC_MODEL] if config.job.kind.own_model is not None else []
    hosts = [node.ssh for node in config.nodes]
    if len(set(hosts)) < len(hosts):
        notes.append("ranks of one machine were measured one after another: together they share it")
    if leftovers:
        notes.append(leftovers)
    return tuple(notes)


def ring_pairs(nodes: tuple[str, ...]) -> list[tuple[str, str]]:
    """The pairs of a ring through the nodes in rank order, each once."""
    pairs = list(pairwise(nodes))
    return [*pairs, (nodes[-1], nodes[0])] if len(nodes) > 2 else pairs


async def measure_links(
    context: CheckContext, on_progress: Callable[[CalibrationProgress], None]
) -> tuple[tuple[LinkMeasure, ...], LinkMeasure | None]:
    """Each pair of neighbours, and all ranks together (None for one node); with the problem where there was one."""
    names = tuple(node.name for node in context.config.nodes)
    pairs = tuple([await _measure_link(context, pair, " - ".join(pair), on_progress) for pair in ring_pairs(names)])
    if len(names) < 2:
        return (), None
    return pairs, pairs[0] if len(names) == 2 else await _measure_link(context, names, ALL_RANKS, on_progress)


async def _measure_link(
    context: CheckContext, names: tuple[str, ...], label: str, on_progress: Callable[[CalibrationProgress], None]
) -> LinkMeasure:
    on_progress(CalibrationProgress(label, "measuring", seconds=context.config.preflight.all_sum_s))
    try:
        async with CheckContext(select_nodes(context.config, names), context.fleet) as subset:
            link = _link_measure(subset, names, await run_all_sum(subset))
    except (FlightDeckError, OSError) as error:
        link = LinkMeasure(nodes=names, problem=str(error))
    on_progress(CalibrationProgress(label, "not measured" if link.problem else "measured", note=link.problem or ""))
    return link


def _link_measure(context: CheckContext, names: tuple[str, ...], outcome: AllSumOutcome) -> LinkMeasure:
    result = evaluate(context.config, outcome)
    measured = [answer for answer in outcome.results.values() if answer is not None]
    latencies = [answer.latency_s for answer in measured if answer.latency_s is not None]
    bandwidths = [answer.bandwidth_bytes_per_s for answer in measured if answer.bandwidth_bytes_per_s]
    if result.status is CheckStatus.FAIL or not latencies or not bandwidths:
        return LinkMeasure(nodes=names, problem=result.summary)
    # An all_sum has ended when its slowest rank has the result.
    return LinkMeasure(nodes=names, latency_s=max(latencies), bandwidth_bytes_per_s=min(bandwidths))
