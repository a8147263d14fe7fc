"""hardware_layer: each node's GPU, memory against what the job needs, macOS and RDMA where required, power,
temperature, and the ports of the ring."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from engine.checks import connectivity, ports, sync, versions
from engine.checks.check import Check, Findings, NodeFindings
from engine.checks.context import CheckContext
from engine.checks.fixes import Fix
from engine.checks.interpreter import IMPORT_LIMIT_S, Interpreter
from engine.checks.mlx_cuda import MlxNode
from engine.checks.plan_inputs import MemoryNeed, describe_memory, memory_needs, memory_share, shared_plan
from engine.checks.ports import HeldPorts
from engine.cluster.probe_results import PortHolder
from engine.cluster.transport.base import quoted
from engine.config.models import Config, NodeConfig
from engine.errors import FlightDeckError, plural
from engine.models import CheckResult, NodeFacts
from engine.plan.document import PlanIssue
from engine.plan.network import NetworkPlan, node_obstacles, ranks_of_host

NAME = "hardware_layer"
_LIMIT_S = 60.0 + 2 * IMPORT_LIMIT_S
_NETWORK = "distributed_config"
"""The plan's refusal that hostfile_valid reports."""
_MEMORY = "memory"
"""The plan's refusal whose figures are reported node by node here."""
_JACCL = ("jaccl", "jaccl-ring")


async def run(context: CheckContext) -> CheckResult:
    facts, needed, held = await asyncio.gather(context.facts(), memory_needs(context), ports.held_ports(context))
    refusals = [refusal for refusal in (await shared_plan(context)).refusals if refusal.name != _NETWORK]
    torch: Mapping[str, Interpreter] | None = None
    network: NetworkPlan | None = None
    if context.config.job.framework == "torch":
        torch = await versions.node_versions(context)
        network = await context.possible_network()
    return evaluate(context.config, facts, needed, held, refusals, torch=torch, network=network)


def evaluate(  # noqa: PLR0913
    config: Config,
    facts: Mapping[str, NodeFacts],
    needed: Mapping[str, MemoryNeed],
    held: HeldPorts,
    refusals: Sequence[PlanIssue] = (),
    *,
    torch: Mapping[str, Interpreter] | None = None,
    network: NetworkPlan | None = None,
) -> CheckResult:
    """`refusals` are the plan's; `torch` has each node's interpreter, for a PyTorch job, and `network` its backend."""
    findings = Findings(NAME, config)
    for node in config.nodes:
        on_node = findings.on(node)
        seen = facts[node.name]
        if seen.problem is not None:
            on_node.warn(f"its hardware is not known: {seen.problem}")
        else:
            if torch is not None:
                _check_torch(config, node, torch.get(node.name), network, on_node)
            else:
                _check_gpu(node, seen, on_node)
            _check_memory(config, needed[node.name], on_node)
            _check_rdma(config, seen, on_node)
            _check_power(seen, on_node)
        _check_ports(node, held.get(node.name, {}), on_node)
    reported = any((memory_share(need) or 0) > 1 for need in needed.values())
    # The plan's refusals block a launch until the job is changed or this check is skipped by its name.
    # One after the first is of the machine's own memory beside its GPUs, which no node's line has.
    shown = next((refusal for refusal in refusals if refusal.name == _MEMORY), None) if reported else None
    for refusal in refusals:
        text = refusal.todo if refusal is shown else refusal.text
        findings.overall.faults += [text] if text else []
    return findings.verdict(f"{plural(len(config.nodes), 'node')} fit for the job")


def _check_gpu(node: NodeConfig, facts: NodeFacts, findings: NodeFindings) -> None:
    name = " ".join(filter(None, (facts.chip, f"{facts.gpu_cores} GPU cores" if facts.gpu_cores else None)))
    if facts.mlx_problem is not None:
        findings.passed.append(f"{name or 'its chip'}, GPU not known: mlx cannot be imported")
    elif facts.gpu is None:
        findings.warn(f"it is not known whether MLX uses the GPU{f' of the {name}' if name else ''}")
    elif facts.system == "Darwin" and facts.gpu != "gpu":
        version = f"=={facts.mlx}" if facts.mlx else ""
        install = f"uv pip install --python {quoted(node.python)} --reinstall {quoted(f'mlx{version}')}"
        effect = "installs the same version of mlx again in this environment, and changes nothing else"
        findings.fault(f"MLX there uses the {facts.gpu} and not the GPU (Metal)", Fix(install, effect))
    elif facts.mlx_device == "CPU" and facts.gpus:
        seen = Interpreter(builds={"mlx-cpu": facts.mlx or ""}, linux=True)
        of_node = MlxNode(node.python, seen, facts, f"=={facts.mlx}" if facts.mlx else "")
        gpus = f"nvidia-smi lists {plural(len(facts.gpus), 'GPU')} ({facts.gpus[0].name})"
        findings.warn(f"MLX computes on its CPU, and {gpus}: install its CUDA build", of_node.install())
    else:
        name = facts.gpus[0].name if facts.gpus else name
        findings.passed.append(f"{name}: MLX uses its {facts.gpu}" if name else f"MLX uses its {facts.gpu}")


def _check_torch(
    config: Config, node: NodeConfig, seen: Interpreter | None, network: NetworkPlan | None, findings: NodeFindings
) -> None:
    """GPUs that PyTorch sees on a machine, against its ranks and the planned backend."""
    build = seen.build if seen is not None else None
    if build is None:
        findings.passed.append("its GPUs are not known: torch cannot be imported")
        return
    ranks = ranks_of_host(config, node.ssh)
    backend = network.backend if network is not None else config.cluster.backend
    described = f"torch sees {plural(build.gpus, 'GPU')} for {plural(ranks, 'rank')}"
    if backend == "nccl" and build.gpus < ranks:
        todo = 'fewer ranks on this machine, or backend = "gloo" in [cluster]'
        findings.fault(f"{described}, and nccl, which is planned, needs one for each: {todo}")
    elif network is not None and backend == "gloo" and config.cluster.backend == "auto" and build.gpus:
        todo = "fewer ranks on this machine would use them"
        if build.gpus >= ranks:
            todo = 'mend that, or set backend in [cluster]: "nccl", or "gloo" to train on the CPU'
        findings.warn(f"{described}, and the plan uses none of them, but gloo: {network.reasons[0]}; {todo}")
    elif build.gpus:
        findings.passed.append(described)
    elif build.nvidia_smi is not None:
        findings.warn(f"torch sees none of its NVIDIA GPUs: {build.cuda_problem or 'a build without CUDA'}")
    else:
        findings.passed.append(f"torch sees the CPU alone, for {plural(ranks, 'rank')}")


def _check_memory(config: Config, need: MemoryNeed, findings: NodeFindings) -> None:
    share, described = memory_share(need), describe_memory(need)
    if share is not None and share > 1:
        findings.fault(described)
    elif share is None and config.job.kind.own_model is None and config.job.kind.trains:
        findings.warn(described)
    else:
        findings.passed.append(described)


def _check_rdma(config: Config, facts: NodeFacts, findings: NodeFindings) -> None:
    """An obstacle is a fault where jaccl is required, a warning where "auto" falls back to TCP."""
    if facts.os:
        findings.passed.append(facts.os)
    backend = config.cluster.backend
    required = backend in _JACCL
    several = len({node.ssh for node in config.nodes}) > 1
    if not config.job.kind.framework.by_mlx_launch or config.job.kind.strategy.averages:
        return
    if not required and not (backend == "auto" and several and facts.system == "Darwin"):
        return
    obstacles = node_obstacles(facts)
    if not obstacles and not facts.rdma_devices:
        why = facts.unknown.get("ibv_devices")
        obstacles = [f"its devices are not known: {why}" if why else "ibv_devices shows no RDMA device"]
    for obstacle in obstacles:
        # No fix: RDMA is turned on by hand: System Settings or Recovery, then a restart.
        if required:
            findings.fault(f"no RDMA, which {backend} needs: {obstacle}")
        else:
            findings.warn(f"no RDMA: {obstacle}")
    if not obstacles:
        findings.passed.append(f"RDMA {', '.join(device.name for device in facts.rdma_devices)}")


def _check_power(facts: NodeFacts, findings: NodeFindings) -> None:
    if facts.power_source is not None and facts.power_source.startswith("battery"):
        findings.warn(f"runs on {facts.power_source}: plug it in")
    elif facts.power_source is not None:
        findings.passed.append(f"power {facts.power_source}")
    if facts.thermal not in (None, "nominal"):
        findings.warn(f"is throttled by heat: {facts.thermal}")
    elif facts.thermal is not None:
        findings.passed.append("heat nominal")


def _check_ports(node: NodeConfig, held: Mapping[str, PortHolder] | FlightDeckError, findings: NodeFindings) -> None:
    if isinstance(held, FlightDeckError):
        findings.warn(f"its ports are not known: {held}")
    elif held:
        findings.fault(ports.describe_held(node, held), ports.held_fix(held))


CHECK = Check(
    NAME, "GPU, memory against the need, macOS, RDMA, power, heat, the ring's ports", run, time_limit_s=_LIMIT_S,
    label="hardware", needs=(connectivity.NAME,), after=(sync.NAME,),
)  # fmt: skip
