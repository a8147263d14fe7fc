"""checkpoint_layer: where a training saves can be written and holds enough, what is saved there is whole, and what is
to be resumed is what the job would train.

A node's home, its workdir and ~/.flightdeck are allowed, and what [preflight] roots names. A folder that is missing is
made by the trainer: it is tried whether it could be.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError, InputError
from engine.models import CheckResult
from engine.planning.memory.estimate import MemoryAsk, estimate
from engine.planning.memory.shape import ModelShape
from engine.preflight import connectivity, sync
from engine.preflight.answers import Configuration, Storage, Weights
from engine.preflight.check import Check, Findings, trains
from engine.preflight.scene import Scene
from engine.transport.base import quoted

NAME = "checkpoint_layer"
_STATE = 12
"""Bytes per trained parameter of the whole state, at most: float32 weights and two moments."""
_LIMIT_S = 45.0
_FLOAT32 = 4
"""Bytes of an adapter's parameter, as it is trained and saved."""


@dataclass(frozen=True)
class State:
    """What one save takes, and how often the job saves."""

    saved_bytes: int | None
    """None when it is not known."""
    saves: int
    layers: int | None
    """Of the model; None when it is not known."""
    unknown: str | None = None
    """Why."""
    states_bytes: int = 0
    """Of all states that may lie there."""

    @property
    def needed_bytes(self) -> int:
        """As many numbered adapters as there will be, for all are kept; and the states."""
        return (self.saved_bytes or 0) * (self.saves + 2) + self.states_bytes


async def look(scene: Scene) -> CheckResult:
    config = scene.config
    state = await saved_state(scene)

    async def ask(node: NodeConfig) -> Storage:
        return await scene.look(
            node, "storage", json.dumps(await _question(scene, node, state)), said=Storage, timeout_s=_LIMIT_S
        )

    answers = await scene.on_all(ask)
    found = Findings(NAME, config)
    for node in config.nodes:
        said = answers[node.name]
        if isinstance(said, FlightDeckError):
            found.fault(node, str(said))
        else:
            found.evidence[node.name] = _words(said, state)
            judge(found, node, said, state, config)
    size = f"{state.saved_bytes / 1e6:,.1f} MB a save" if state.saved_bytes is not None else "size of a save not known"
    return found.verdict(f"every node can save, {size}")


def judge(found: Findings, node: NodeConfig, said: Storage, state: State, config: FlightConfig) -> None:
    """Add what one node's answer means. Its gravest fault comes first, with its fix."""
    faults: list[str] = []
    fixes: list[str] = []
    if said.fault is not None:
        faults.append(said.fault)
        fixes += filter(None, [_fix(said)])
        if "outside of the allowed" in said.fault:
            faults.append("choose another adapter_path, or name its folder in [preflight] roots")
    elif said.free is not None and said.free < state.needed_bytes:
        faults.append(_short_of(said, state))
        fixes.append(f"du -sk {quoted('~/.flightdeck/runs')}/* | sort -n | tail -5")
    for file, why in said.damaged:
        faults.append(f"{file} is damaged: {why}")
        # Kept, and out of the way of whoever looks for the newest.
        fixes.append(f"mv {quoted(file)} {quoted(file + '.damaged')}")
    if said.resume_fault is not None:
        faults.append(f"resume_adapter_file: {said.resume_fault}")
    elif said.resume is not None:
        faults += [f"resume_adapter_file {why}" for why in mismatches(said.resume, config, state.layers)]
    if faults:
        found.fault(node, "; ".join(faults), " && ".join(fixes) or None)


def mismatches(resume: Weights, config: FlightConfig, layers: int | None) -> list[str]:
    """In what saved weights are not those that the job trains: MLX passes over what fits nowhere, and says nothing."""
    wanted = config.job.fine_tune_type
    if resume.kind != wanted:
        return [f"holds weights of {resume.kind}, and the job trains {wanted}: set fine_tune_type, or leave it out"]
    found = []
    settings = config.job.mlx_lm
    lora = settings.get("lora_parameters") or {}
    rank = int(lora.get("rank", 8))
    if resume.ranks and resume.ranks != [rank]:
        theirs = ", ".join(map(str, resume.ranks))
        found.append(f"has rank {theirs}, and lora_parameters say {rank}: set rank = {theirs}, or leave it out")
    keys = lora.get("keys")
    if keys is not None and resume.modules and sorted(set(keys)) != resume.modules:
        found.append(f"adapts {_listed(resume.modules)}, and lora_parameters.keys say {_listed(sorted(set(keys)))}")
    if layers is not None and resume.layers:
        trained = _trained_layers(config, layers)
        if resume.layers != trained:
            ours = f"{trained[0]} to {trained[-1]}" if trained else "none"
            theirs = f"{resume.layers[0]} to {resume.layers[-1]}"
            found.append(f"has layers {theirs}, and num_layers trains {ours} of {layers}")
    return found


async def saved_state(scene: Scene) -> State:
    """What the job saves, from the model's config.json as the first node has it."""
    config, first = scene.config, scene.config.nodes[0]
    settings = config.job.mlx_lm
    saves = int(settings.get("iters", 1000)) // max(1, int(settings.get("save_every", 100)))
    try:
        model = scene.path(first, first.model or config.job.model or "")
        said = await scene.look(first, "configuration", model, said=Configuration, timeout_s=_LIMIT_S)
        if said.configuration is None:
            return State(None, saves, None, said.problem)
        shape = ModelShape.of(said.configuration)
        trained = estimate(shape, _ask(config, shape.layers)).trainable_parameters
    except (FlightDeckError, InputError) as error:
        return State(None, saves, None, str(error))
    size = shape.dtype_bytes if config.job.fine_tune_type == "full" else _FLOAT32
    return State(trained * size, saves, shape.layers, states_bytes=trained * _STATE * states(config))


def states(config: FlightConfig) -> int:
    """How many of them room is wanted for: twice those that are kept; only for a rescue where none are, or where they
    lie elsewhere."""
    checkpoint = config.checkpoint
    elsewhere = checkpoint.destination is not None and "://" not in checkpoint.destination
    return 2 * checkpoint.keep if checkpoint.enabled and not elsewhere else 1


def _ask(config: FlightConfig, layers: int) -> MemoryAsk:
    lora = config.job.mlx_lm.get("lora_parameters") or {}
    keys = lora.get("keys")
    return MemoryAsk(
        fine_tune_type=config.job.fine_tune_type,
        num_layers=len(_trained_layers(config, layers)) or -1,
        lora_rank=int(lora.get("rank", 8)),
        lora_keys=tuple(keys) if keys is not None else None,
    )


def _trained_layers(config: FlightConfig, layers: int) -> list[int]:
    """As engine.worker.job has it: the last ones; all for "full" unless it is said."""
    asked = config.job.mlx_lm.get("num_layers")
    if asked is None:
        asked = -1 if config.job.fine_tune_type == "full" else 16
    count = layers if int(asked) < 0 else min(int(asked), layers)
    return list(range(layers - count, layers))


async def _question(scene: Scene, node: NodeConfig, state: State) -> dict[str, Any]:
    place = await scene.place_of(node)
    settings = scene.config.job.mlx_lm
    named = {key: settings.get(key) for key in ("adapter_path", "resume_adapter_file")}
    paths = {key: place.expanded(scene.path(node, str(path))) if path else None for key, path in named.items()}
    roots = [place.home, place.root, place.expanded(node.workdir), *scene.config.preflight.roots]
    return {
        "directory": paths["adapter_path"] or f"{place.root}/runs",
        "roots": roots,
        "runs": f"{place.root}/runs",
        "resume": paths["resume_adapter_file"],
        "needed": state.needed_bytes,
    }


def _fix(said: Storage) -> str | None:
    if said.make is not None:
        return f"mkdir -p {quoted(said.make)}"
    if said.permit is not None:
        return f"chmod u+rwx {quoted(said.permit)}"
    return f'sudo chown "$USER" {quoted(said.own)}' if said.own is not None else None


def _short_of(said: Storage, state: State) -> str:
    free = f"{(said.free or 0) / 1e6:,.1f} MB"
    words = f"{free} are free for {said.directory}, and {state.needed_bytes / 1e6:,.1f} MB are needed"
    largest = ", ".join(f"{folder} {size / 1e6:,.1f} MB" for folder, size in said.largest)
    return f"{words}: make room" + (f", the largest of earlier runs are {largest}" if largest else "")


def _words(said: Storage, state: State) -> str:
    if said.fault is not None:
        return said.fault
    free = f", {said.free / 1e9:,.1f} GB free" if said.free is not None else ""
    needed = (
        f", {state.needed_bytes / 1e6:,.1f} MB needed"
        if state.saved_bytes is not None
        else f", what is needed is not known: {state.unknown}"
    )
    resumed = f", goes on with {said.resume.kind} of {len(said.resume.layers)} layers" if said.resume else ""
    return f"{said.directory}{free}{needed}{resumed}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


CHECK = Check(
    NAME,
    "a place to save: allowed, writable, large enough; what is saved there is whole",
    look,
    time_limit_s=2 * _LIMIT_S,
    needs=(connectivity.NAME,),
    after=(sync.NAME,),
    not_applicable=trains,
)
