"""The distributed_config, rdma_config and verification_steps sections: how the ranks are started and connected, and the
shell commands that verify it."""

from __future__ import annotations

import json
import shlex

from engine.cluster.transport.base import quoted
from engine.config.models import NodeConfig
from engine.errors import ENABLE_RDMA
from engine.plan import network
from engine.plan.addresses import setup_commands
from engine.plan.context import PlanContext, usable_calibration
from engine.plan.document import DistributedSection, RdmaSection, Source
from engine.security.identifiers import SshTarget

_SYNC = {
    "data": "one all_sum of gradients, loss and token count per update over all ranks, in float32, on the {0} stream",
    "sharded": "an all_gather of each layer's parameters in both passes, and an all_sum of its gradients",
    "pipeline": "activations and their gradients between neighbouring ranks; one small all_sum per update",
    "local": "no gradients: the change of the weights to rank 0 and its average back every local_steps updates, and a "
    "small message after each update, over TCP connections of its own",
    "auto": "the script's own",
    "ddp": "an all_reduce of the gradients in buckets, beside the backward pass",
    "fsdp": "an all_gather of each block's parameters, and a reduce_scatter of its gradients",
    "deepspeed": "a reduce_scatter of the gradients, and an all_gather of the updated parameters",
}


def distributed_section(context: PlanContext) -> DistributedSection:
    """The command uses stock mlx.launch; there is none for strategies that stock mlx-lm cannot train."""
    command, notes = context.launching.mlx_launch_command, context.launching.launch_notes
    if context.network is None:
        notes = (f"no command and no hostfile: {context.network_problem}",)
        if context.problems:
            context.warn("distributed_config", f"the network between the ranks is not known: {context.network_problem}")
        else:
            context.refuse("distributed_config", f"the ranks cannot be connected: {context.network_problem}")
    elif context.strategy != "data" and (command is not None or not notes):
        command, notes = None, (f"no command: stock mlx-lm does not train strategy {context.strategy}",)
    source, reason = Source.RULE, "one program for all ranks, which selects its node's python and paths by MLX_RANK"
    if command is None:
        source, reason = Source.UNKNOWN, "; ".join(notes) or "not requested"
    context.explain("distributed_config.mlx_launch_command", source, reason)
    reason = "set for every rank by flightdeck launch; secrets are not shown"
    context.explain("distributed_config.mlx_env_vars", Source.RULE, reason)
    device = "GPU's" if context.backend == "nccl" else "CPU"
    return DistributedSection(
        mlx_launch_command=command,
        gradient_sync=_SYNC[context.strategy].format(device) if context.ranks > 1 else "none: one rank",
        unified_memory={"apple": True, "cuda": False, "cpu": False}.get(context.platform),
        mlx_env_vars=dict(context.rank_environment),
        hostfile=context.launching.hostfile,
        launch_notes=notes,
    )


_OVER_RDMA = ("jaccl", "jaccl-ring")
_RDMA_GAIN = "users report about 50 µs instead of 300 µs with TCP, and about 5 GB/s"
_FAST_SYNCH = "MLX_METAL_FAST_SYNCH"
_DEADLOCK = "MLX documents that it can deadlock the GPU, until the Mac is restarted"


def rdma_section(context: PlanContext) -> RdmaSection:
    plan, backend = context.network, context.backend
    infiniband = plan is not None and plan.infiniband
    enabled = backend in _OVER_RDMA or infiniband
    network_name = None if backend is None else "InfiniBand" if infiniband else "Thunderbolt" if enabled else "TCP"
    if plan is None:
        reason = f"no backend: {context.network_problem}"
    elif context.ranks == 1:
        reason = "one node needs no network"
    else:
        reason = "; ".join(plan.reasons)
        for warning in plan.warnings:
            context.warn("rdma_config", warning)
    source = Source.USER if context.config.cluster.backend != "auto" else Source.FACT
    context.explain("rdma_config.backend", source if backend else Source.UNKNOWN, reason)
    speed_up = context.throughput.speed_up if enabled else None
    source, why = Source.CALIBRATION, "all ranks compared with the fastest node alone"
    if speed_up is None:
        source, why = Source.UNKNOWN, "no RDMA" if not enabled else context.throughput.why_not or "not predicted"
    context.explain("rdma_config.expected_speedup", source, why)
    calibration = usable_calibration(context)
    measured = calibration.all_ranks if calibration is not None else None
    # The gradient's size does not change with the calibration's age.
    gradient = context.calibration.gradient_bytes if context.calibration is not None else None
    wanted = network.nccl_environment(infiniband=infiniband, gradient_bytes=gradient) if backend == "nccl" else {}
    of_mlx = {name: value for name, value in context.job.env.items() if name.startswith("MLX_")}
    if _sets_fast_synch(context):
        context.warn("rdma_config", f"[job] env sets {_FAST_SYNCH}={of_mlx[_FAST_SYNCH]}: {_DEADLOCK}")
    return RdmaSection(
        enabled=enabled,
        platform=context.platform,
        backend=backend if context.ranks > 1 else "none",
        network=network_name if context.ranks > 1 else "none",
        expected_speedup=speed_up,
        env_vars={name: context.rank_environment.get(name, value) for name, value in wanted.items()} | of_mlx,
        setup=_setup(context, enabled=enabled),
        reason=reason,
        latency_s=measured.latency_s if measured is not None else None,
        bandwidth_bytes_per_s=measured.bandwidth_bytes_per_s if measured is not None else None,
    )


def _setup(context: PlanContext, *, enabled: bool) -> tuple[str, ...]:
    if context.ranks == 1 or context.strategy == "local":
        return ()
    if context.backend == "nccl":
        steps = ["flightdeck launch sets env_vars for every rank; [job] env overrides them"]
        if len({node.ssh for node in context.config.nodes}) > 1:
            steps.append(f"InfiniBand for training is supported from {network.INFINIBAND_PLATFORM}")
            steps += [] if enabled else ["not every node has active InfiniBand: NCCL uses TCP"]
        return tuple(steps)
    if context.platform != "apple" or not context.job.kind.framework.by_mlx_launch:
        return ()
    steps = [] if enabled else [f"once per Mac: {ENABLE_RDMA} ({_RDMA_GAIN})"]
    facts = [fact for name in context.names if (fact := context.facts.get(name)) is not None]
    for node, commands in setup_commands(context.topology, facts).items():
        steps.append(f"{node}: {' && '.join(commands)}")
    if not _sets_fast_synch(context):
        steps.append(f"{_FAST_SYNCH}=1 is not set: {_DEADLOCK}; [job] env can set it")
    return tuple(steps)


def _sets_fast_synch(context: PlanContext) -> bool:
    return context.job.env.get(_FAST_SYNCH, "0") not in ("", "0")


_MLX_VERSIONS = "import mlx.core as mx, mlx_lm; print(mx.__version__, mlx_lm.__version__, mx.default_device())"
_PARSES = "from mlx._distributed_utils.common import Hostfile; print(Hostfile.from_file({path}).hosts)"


def _torch_versions(context: PlanContext) -> str:
    packages = context.job.model_copy(update={"strategy": context.strategy}).kind.packages(context.job.words)
    versions = ", ".join(f"{name}.__version__" for name in packages)
    return f"import {', '.join(packages)}; print({versions}, torch.version.cuda, torch.cuda.device_count())"


_VERSIONS = {"mlx": lambda _: _MLX_VERSIONS, "torch": _torch_versions}
"""Programs that print the packages' versions, and what the framework computes on."""


def verification_steps(context: PlanContext) -> tuple[str, ...]:
    """Shell commands in the order to run them."""
    deck, file = context.tools.flightdeck, context.config.file
    config = f" -c {shlex.quote(str(file))}" if file is not None else ""
    steps = [f"{deck} nodes{config}"]
    hostfile = context.launching.hostfile
    if hostfile is not None and (path := hostfile.path) is not None:
        steps.append(f"{shlex.quote(context.tools.python)} -c {shlex.quote(_PARSES.format(path=json.dumps(path)))}")
    versions = _VERSIONS[context.job.framework](context)
    for node in context.config.nodes:
        steps.append(_on(node, f"{quoted(node.python)} -c {shlex.quote(versions)}"))
    hosts = {node.ssh: node for node in context.config.nodes}.values()
    if context.backend in _OVER_RDMA:
        for node in hosts:
            steps += [_on(node, "rdma_ctl status"), _on(node, "ibv_devices")]
        steps += [_on(node, "system_profiler SPThunderboltDataType -json") for node in hosts]
    elif context.backend == "nccl":
        steps += [_on(node, "nvidia-smi") for node in hosts]
        steps += [_on(node, "ibstat") for node in hosts]
    # PyTorch commands are not measured.
    scaling_alone = context.job.kind.framework.unmeasured is not None
    calibrate = [f"calibrate{' --scaling' * scaling_alone} --quick"] if context.settings or not scaling_alone else []
    steps += [f"{deck} {command}{config}" for command in ("preflight", *calibrate, "launch --follow")]
    if context.backend == "nccl":
        steps.append(f'{deck} logs last | grep "Using network"')
    return (*dict.fromkeys(steps), f"{deck} show last")


def _on(node: NodeConfig, command: str) -> str:
    """A shell command that runs `command` on a node from this machine."""
    return command if node.local else f"ssh -- {shlex.quote(SshTarget.parse(node.ssh).openssh)} {shlex.quote(command)}"
