"""checkpoint_layer: the checkpoint directory is allowed, writable and large enough, existing checkpoints are intact,
and the adapter to resume from matches the job.

Allowed are the node's home, its workdir, ~/.flightdeck and [preflight] roots. A missing directory is created by the
trainer; the check only tests that it could be."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from dataclasses import dataclass
from typing import Any

from engine.checks import connectivity, sync
from engine.checks.check import Check, Findings, NodeFindings, first_of
from engine.checks.context import CheckContext
from engine.checks.fixes import LISTS, Fix, on_path, path_fix
from engine.checks.obstacles import TRIAL_LIMIT_S, try_adapters
from engine.checks.plan_inputs import shared_plan, shared_plan_inputs
from engine.cluster.probe_results import AdapterWeights, CheckpointStorage
from engine.cluster.transport.base import quoted
from engine.config.models import Config, NodeConfig
from engine.errors import FlightDeckError, size_text
from engine.job.traits import FRAMEWORKS
from engine.models import CheckResult
from engine.plan.document import Disabled
from engine.plan.memory.shape import ModelShape

NAME = "checkpoint_layer"
_STATE_BYTES = 12
"""Per trained parameter, at most: float32 weights and two moments."""
_LIMIT_S = 45.0
_ADAPTER_BYTES = 4
"""Per parameter: adapters are trained and saved in float32."""


@dataclass(frozen=True)
class SaveSize:
    """The size of one save, and of all that is kept."""

    saved_bytes: int | None
    """None when it is not known, for the reason in `unknown`."""
    needed_bytes: int = 0
    """All numbered adapters, and the states that are kept at a time; without the numbered ones where the iterations are
    those of epochs over an unknown number of examples."""
    layers: int | None = None
    """The model's; None when it is not known."""
    unknown: str | None = None


async def run(context: CheckContext) -> CheckResult:
    config = context.config
    state = await save_size(context)

    async def ask(node: NodeConfig) -> CheckpointStorage:
        request = json.dumps(await _request(context, node, state))
        return await context.probe(node, "storage", request, result_type=CheckpointStorage, timeout_s=_LIMIT_S)

    answers = await context.on_all_nodes(ask)
    findings = Findings(NAME, config)
    for node, storage in findings.answered(answers):
        findings.evidence[node.name] = _describe(storage, state)
        evaluate(findings.on(node), storage, state, config)
    for node, storage in itertools.islice(findings.answered(answers), 1):
        if storage.resume is not None and config.job.framework == "mlx" and not findings.on(node).faults:
            findings.on(node).faults += await _misfit(context, node, storage.resume)
    size = f"{size_text(state.saved_bytes)} a save" if state.saved_bytes is not None else "size of a save not known"
    return findings.verdict(f"every node can save, {size}")


def evaluate(findings: NodeFindings, storage: CheckpointStorage, state: SaveSize, config: Config) -> None:
    """Add one node's faults to its findings, the gravest first, each with its fix."""
    if storage.fault is not None:
        fixes = {"mkdir -p": storage.make, "chmod u+rwx": storage.permit, 'sudo chown "$USER"': storage.own}
        findings.fault(storage.fault, next(filter(None, itertools.starmap(path_fix, fixes.items())), None))
    elif storage.free is not None and storage.free < state.needed_bytes:
        largest = f"du -sk {quoted('~/.flightdeck/runs')}/* | sort -n | tail -5"
        findings.fault(_short_of(storage, state), Fix(largest, LISTS))
    if storage.not_durable is not None:
        findings.warn(
            f"the volume of {storage.not_durable} has no F_FULLFSYNC (SMB and NFS have none): after a power cut there, "
            "the newest checkpoints may be gone"
        )
    for file, why in storage.damaged:
        # Kept, but no longer found by a search for the newest.
        move, aside = on_path("mv", file), quoted(f"{file}.damaged")
        effect = "renames it to *.damaged; mv takes that back"
        fix = Fix(f"test ! -e {aside} && {move} {aside}", effect) if move else None
        findings.fault(f"{file} is damaged: {why}", fix)
    if storage.resume_fault is not None:
        findings.fault(f"resume_adapter_file: {storage.resume_fault}")
    elif storage.resume is not None:
        for why in resume_mismatches(storage.resume, config, state.layers):
            findings.fault(f"resume_adapter_file {why}")


def resume_mismatches(resume: AdapterWeights, config: Config, layers: int | None) -> list[str]:
    """How saved weights differ from those that the job trains: MLX silently ignores what fits nowhere."""
    wanted, ours = config.job.fine_tune_type, config.job.kind.framework.adapters
    theirs = "peft" if resume.peft else "mlx-lm"
    if resume.kind != wanted:
        return [f"holds weights of {resume.kind}, and the job trains {wanted}: set fine_tune_type, or leave it out"]
    if (wanted, ours) == ("full", "peft"):
        # It saves the whole model.
        return []
    if wanted != "full" and theirs != ours:
        other = next(name for name, framework in FRAMEWORKS.items() if framework.adapters == theirs)
        return [
            f"holds an adapter of {theirs}, which framework = {config.job.framework!r} cannot continue: name one that "
            f"it has saved, or set framework = {other!r}"
        ]
    faults = []
    lora = config.job.mlx_lm["lora_parameters"]
    rank = int(lora.get("rank", 8))
    if resume.ranks and resume.ranks != [rank]:
        theirs = ", ".join(map(str, resume.ranks))
        faults.append(f"has rank {theirs}, and lora_parameters say {rank}: set rank = {theirs}, or leave it out")
    keys = lora.get("keys")
    if keys is not None and resume.modules and sorted(set(keys)) != resume.modules:
        faults.append(f"adapts {first_of(resume.modules)}, and lora_parameters.keys say {first_of(sorted(set(keys)))}")
    if layers is not None and resume.layers:
        count = int(config.job.mlx_lm["num_layers"])
        trained = list(range(max(0, layers - count) if count >= 0 else 0, layers))
        if resume.layers != trained:
            ours = f"{trained[0]} to {trained[-1]}" if trained else "none"
            theirs = f"{resume.layers[0]} to {resume.layers[-1]}"
            faults.append(f"has layers {theirs}, and num_layers trains {ours} of {layers}")
    return faults


async def _misfit(context: CheckContext, node: NodeConfig, resume: AdapterWeights) -> list[str]:
    """How the weights differ from those of the job's model, as mlx-lm builds it there; [] where it cannot be tried."""
    path = (await _paths(context, node))["resume_adapter_file"]
    with contextlib.suppress(FlightDeckError):
        report = await try_adapters(context, node, path)
        if report.misfit is not None:
            return [f"resume_adapter_file does not fit: {report.misfit}"]
        if report.lacking:
            part = f"{report.trained - report.lacking:,} of the {report.trained:,} tensors that the job trains"
            layers = f"num_layers = {len(resume.layers)}"
            if not resume.modules:
                return [f"resume_adapter_file has {part}: set {layers}"]
            keys = f"lora_parameters.keys = {json.dumps(resume.modules)} and {layers}"
            return [f"resume_adapter_file adapts {first_of(resume.modules)} alone, {part}: set {keys}"]
    return []


async def save_size(context: CheckContext) -> SaveSize:
    """Estimated from what the plan knows of the model."""
    config, plan = context.config, await shared_plan(context)
    memory = plan.memory
    if isinstance(memory, Disabled):
        return SaveSize(None, unknown=memory.reason)
    trained, size = memory.trainable_parameters, _ADAPTER_BYTES
    if config.job.fine_tune_type == "full":
        size = ModelShape.from_config((await shared_plan_inputs(context)).model or {}).dtype_bytes
    settings, batch = config.job.mlx_lm, plan.batch_configuration
    iterations = (batch.updates or 0) * (batch.gradient_accumulation_steps or 1)
    saves = iterations // int(settings["save_every"]) + 2 + bool(settings.get("save_best"))
    state, part, strategy = _STATE_BYTES, 1.0, config.job.kind.strategy
    if strategy.averages:
        # Each rank's has the weights of the last averaging, too, and the outer momentum.
        state += 4 * (1 + bool(settings["outer_momentum"]))
    optimizer = [rank.optimizer_bytes for rank in memory.ranks]
    if strategy.partitioned and any(optimizer):
        # A rank writes its own part, of which the optimizer's state has the size relative to the others'.
        part = max(optimizer) / sum(optimizer)
    states = math.ceil(state * part * state_count(config) * trained)
    return SaveSize(trained * size, trained * size * saves + states, memory.layers)


def state_count(config: Config) -> int:
    """States to make room for: twice those that are kept; one, for an emergency checkpoint, where none are kept or
    they are saved elsewhere."""
    return 2 * config.checkpoint.keep if config.checkpoint.enabled and state_folder(config) is None else 1


def state_folder(config: Config) -> str | None:
    """The path that states are saved below, where [checkpoint] destination names one."""
    destination = config.checkpoint.destination if config.checkpoint.enabled else None
    return destination if destination and "://" not in destination else None


async def _request(context: CheckContext, node: NodeConfig, state: SaveSize) -> dict[str, Any]:
    layout, paths = await context.layout_of(node), await _paths(context, node)
    elsewhere = state_folder(context.config)
    workdir = layout.expanded(node.workdir)
    roots = [layout.home, layout.root, workdir, *context.config.preflight.roots]
    return {
        "workdir": workdir,
        "directory": paths["adapter_path"] or f"{layout.root}/runs", "roots": roots,
        "states": layout.expanded(context.path(node, elsewhere)) if elsewhere else None,
        "runs": f"{layout.root}/runs", "resume": paths["resume_adapter_file"], "needed": state.needed_bytes,
    }  # fmt: skip


async def _paths(context: CheckContext, node: NodeConfig) -> dict[str, str | None]:
    layout, settings = await context.layout_of(node), context.config.job.mlx_lm
    named = {key: settings.get(key) for key in ("adapter_path", "resume_adapter_file")}
    return {key: layout.expanded(context.path(node, str(path))) if path else None for key, path in named.items()}


def _short_of(storage: CheckpointStorage, state: SaveSize) -> str:
    free = size_text(storage.free or 0)
    message = f"{free} are free for {storage.directory}, and {size_text(state.needed_bytes)} are needed"
    largest = ", ".join(f"{folder} {size_text(size)}" for folder, size in storage.largest)
    return f"{message}: make room" + (f", the largest of earlier runs are {largest}" if largest else "")


def _describe(storage: CheckpointStorage, state: SaveSize) -> str:
    if storage.fault is not None:
        return storage.fault
    free = f", {size_text(storage.free)} free" if storage.free is not None else ""
    needed = f", {size_text(state.needed_bytes)} needed"
    if state.saved_bytes is None:
        needed = f", the size needed is not known: {state.unknown}"
    resumed = f", resumes {storage.resume.kind} of {len(storage.resume.layers)} layers" if storage.resume else ""
    return f"{storage.directory}{free}{needed}{resumed}"


CHECK = Check(
    NAME, "the checkpoint directory: allowed, writable, large enough; existing checkpoints are intact", run,
    label="checkpoints", time_limit_s=2 * _LIMIT_S + TRIAL_LIMIT_S, needs=(connectivity.NAME,), after=(sync.NAME,),
    not_applicable=lambda config: config.job.kind.own_model,
)  # fmt: skip
