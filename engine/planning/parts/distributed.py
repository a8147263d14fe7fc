"""distributed_config: how the ranks are started, and what they have in their environment."""

from __future__ import annotations

from engine.planning.document import DistributedPart, HostfilePart
from engine.planning.notes import Notes, Source
from engine.planning.situation import Situation

_SYNC = {
    "data": "one all_sum over all ranks an update, of gradients, loss and token count in float32, on the CPU stream",
    "sharded": "an all_gather of each layer's parameters forward and again backward, and an all_sum of its gradients",
    "pipeline": "activations and their gradients between neighbouring ranks; one small all_sum an update",
}
_STOCK = "data"
"""What stock mlx-lm trains."""
_ONE = "none: one rank"


def distributed(now: Situation, notes: Notes) -> DistributedPart:
    """The command is stock mlx.launch's; for what stock mlx-lm cannot train there is none."""
    inputs = now.inputs
    command, told = inputs.launching.command, inputs.launching.notes
    if inputs.wiring is None:
        told = (f"no command and no hostfile: {inputs.unwired}",)
        if inputs.problems:
            notes.warn("distributed_config", f"how the ranks reach one another is not known: {inputs.unwired}")
        else:
            notes.refuse("distributed_config", f"the ranks cannot be wired: {inputs.unwired}")
    elif inputs.strategy != _STOCK:
        command, told = None, (f"no command: stock mlx-lm does not train strategy {inputs.strategy}",)
    key = "distributed_config.mlx_launch_command"
    if command is None:
        notes.why(key, Source.UNKNOWN, "; ".join(told) or "it was not asked for")
    else:
        notes.why(key, Source.RULE, "one program for all ranks, which picks its node's python and paths by MLX_RANK")
    notes.why("distributed_config.mlx_env_vars", Source.RULE, "set for every rank by flightdeck launch; secrets apart")
    hostfile = None
    if inputs.launching.hostfile is not None:
        hostfile = HostfilePart(path=inputs.launching.hostfile_path, document=dict(inputs.launching.hostfile))
    unified = {"apple": True, "cuda": False, "cpu": False}.get(now.platform)
    return DistributedPart(
        mlx_launch_command=command,
        gradient_sync=_SYNC[inputs.strategy] if now.ranks > 1 else _ONE,
        unified_memory=unified,
        mlx_env_vars=dict(inputs.rank_environment),
        hostfile=hostfile,
        launch_notes=told,
    )
