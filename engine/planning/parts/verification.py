"""verification_steps: commands that show that this cluster is as the plan takes it to be. Each runs as it is printed,
in a shell on this machine."""

from __future__ import annotations

import json
import shlex

from engine.config.models import NodeConfig
from engine.planning.situation import Situation
from engine.security.hosts import SshTarget
from engine.transport.base import quoted

_VERSIONS = "import mlx.core as mx, mlx_lm; print(mx.__version__, mlx_lm.__version__, mx.default_device())"
_PARSES = "from mlx._distributed_utils.common import Hostfile; print(Hostfile.from_file({path}).hosts)"


def verification(now: Situation) -> tuple[str, ...]:
    """In the order in which one would run them."""
    inputs = now.inputs
    deck, file = inputs.tools.flightdeck, inputs.config.file
    config = f" -c {shlex.quote(str(file))}" if file is not None else ""
    steps = [f"{deck} nodes{config}"]
    path = inputs.launching.hostfile_path
    if path is not None:
        steps.append(f"{shlex.quote(inputs.tools.python)} -c {shlex.quote(_PARSES.format(path=json.dumps(path)))}")
    for node in inputs.config.nodes:
        steps.append(_on(node, f"{quoted(node.python)} -c {shlex.quote(_VERSIONS)}"))
    hosts = {node.ssh: node for node in inputs.config.nodes}.values()
    backend = inputs.wiring.backend if inputs.wiring is not None else None
    if backend in ("jaccl", "jaccl-ring"):
        for node in hosts:
            steps += [_on(node, "rdma_ctl status"), _on(node, "ibv_devices")]
        steps += [_on(node, "system_profiler SPThunderboltDataType -json") for node in hosts]
    elif backend == "nccl":
        steps += [_on(node, "ibstat") for node in hosts]
    steps += [f"{deck} preflight{config}", f"{deck} calibrate --quick{config}", f"{deck} launch --follow{config}"]
    if backend == "nccl":
        steps.append(f'{deck} logs last | grep "Using network"')
    return (*dict.fromkeys(steps), f"{deck} show last")


def _on(node: NodeConfig, command: str) -> str:
    """A shell's command on a node, from this machine."""
    return command if node.local else f"ssh -- {shlex.quote(SshTarget.parse(node.ssh).openssh)} {shlex.quote(command)}"
