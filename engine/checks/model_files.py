"""model_present: config.json, the tokenizer and all safetensors shards are whole on each node and the same, and mlx-lm
can load and adapt the model."""

from __future__ import annotations

import posixpath

from engine.checks import connectivity, sync
from engine.checks.check import Check, Findings, differing_items, first_of
from engine.checks.context import CheckContext
from engine.checks.fixes import Fix, copies, copy_folder, move_aside, posix
from engine.checks.obstacles import TRIAL_LIMIT_S, adapter_obstacles, depends_on_matrices
from engine.checks.placement import push_fix, takes
from engine.checks.plan_inputs import shared_plan_inputs
from engine.cluster.probe_results import LoadingReport, ModelFiles
from engine.cluster.transport.base import quoted
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError
from engine.failures.explanation import explained
from engine.models import CheckResult
from engine.plan.memory.model_types import MODEL_TYPES

NAME = "model_present"
_LIMIT_S = 60.0
_DOWNLOADED = "-downloaded"
"""Suffix of the folder that a download makes beside the model's."""
_DOWNLOAD = (
    'd={folder}; test -d "$d"/.cache/huggingface || {{ mkdir -p "$d" && rmdir "$d"; }} && '
    'hf download {repository} --local-dir "$d"'
)
"""Into a folder that is new or empty, or of a download that was cut short, which hf resumes."""
_SET_UNQUANTIZED = "set `model` in [job] to the model that it was made from"
_OWN_CODE = "it comes with code of its own, which is not run: set trust_remote_code = true in [job] if you trust it"
_SET_ANOTHER = "set `model` in [job] to a directory with an mlx-lm model"


async def run(context: CheckContext) -> CheckResult:
    nodes = context.config.nodes
    folders = {node.name: context.path(node, node.model or context.config.job.model or "") for node in nodes}
    answers = await context.on_all_nodes(
        lambda node: context.probe(node, "model", folders[node.name], result_type=ModelFiles, timeout_s=_LIMIT_S)
    )
    findings = Findings(NAME, context.config)
    push = push_fix(context.config, "model")
    findings.evidence = {node.name: f"{folders[node.name]}: {answers[node.name]}" for node in nodes}
    complete = {name: files for name, files in answers.items() if isinstance(files, ModelFiles) and not files.faults}
    if any(node.name in complete and takes(context.config, "model", node) for node in nodes):
        # A folder that is only called like a repository.
        push = None
    for node, files in findings.answered(answers):
        findings.evidence[node.name] = f"{folders[node.name]}: {files.describe()}"
        if files.quantized and context.config.job.framework == "torch":
            findings.fault(
                node, f"{folders[node.name]} is quantized by MLX, which PyTorch cannot read: {_SET_UNQUANTIZED}"
            )
        if files.faults:
            brought = context.config.job.model if push is not None and takes(context.config, "model", node) else None
            findings.fault(node, *_fault(node, folders[node.name], files, copied=bool(complete), brought=brought))
    if not complete:
        return findings.verdict(
            advice="" if any(findings.on(node).fixes for node in nodes) or push else _SET_ANOTHER, fix=push
        )
    first = next(node for node in nodes if node.name in complete)
    findings.overall.warnings += complete[first.name].warnings
    try:
        findings.overall.faults += await _unloadable(context, first, folders[first.name], complete[first.name])
        needed = depends_on_matrices(context.config.job)
        configuration = (await shared_plan_inputs(context)).model if needed else None
        obstacles = await adapter_obstacles(context, first, configuration)
        findings.overall.faults += [refusal.text for refusal in obstacles.refusals]
        findings.overall.warnings += [warning.text for warning in obstacles.warnings]
    except FlightDeckError as error:
        findings.overall.warn(str(error))
    reference, aside = complete[first.name].hashes, list[str | None]()
    for node in nodes:
        if not isinstance(model_files := answers[node.name], ModelFiles):
            continue
        differing = differing_items(model_files.hashes, reference)
        if differing and node.name in complete:
            findings.fault(node, f"the model on {node.name} differs from {first.name}: {first_of(differing)}")
        folder = folders[node.name]
        aside += [move_aside(node, posixpath.join(folder, name), model_files.hashes.get(name)) for name in differing]
    lacking = [node for node in findings.faulty if isinstance(answers[node.name], ModelFiles)]
    fix = push or copies([*aside, copy_folder(first, lacking, folders)], first, folders[first.name])
    return findings.verdict(complete[first.name].describe(), fix=fix)


def _fault(
    node: NodeConfig, folder: str, files: ModelFiles, *, copied: bool, brought: str | None
) -> tuple[str, Fix | None]:
    """`copied`: some node has the model, of which the others get a copy. `brought`: its name where a launch copies it
    there."""
    if brought is not None:
        return f"{node.name} has no whole copy of {brought}: a launch brings it there", None
    message = f"{folder}: {files.describe()}"
    if not files.repository or copied:
        return message, None
    # Beside it: config.json may name the model that this one was made from, and hf overwrites.
    beside = f"{folder}{_DOWNLOADED}"
    download = _DOWNLOAD.format(folder=quoted(beside), repository=files.repository)
    fix = Fix(posix(download), f"makes {beside}, or resumes its download; rm -r removes it")
    return f'{message}; the fix downloads {files.repository} beside it, then set model = "{beside}"', fix


async def _unloadable(context: CheckContext, node: NodeConfig, folder: str, files: ModelFiles) -> list[str]:
    """Why the framework cannot load the model, tried where its files leave a doubt. Raises FlightDeckError."""
    job = context.config.job
    if not files.doubts and (job.framework == "torch" or files.kind in MODEL_TYPES):
        return []
    asked = context.probe(node, "loading", folder, job.framework, result_type=LoadingReport, timeout_s=TRIAL_LIMIT_S)
    report = await asked
    if report.own_code and not job.mlx_lm.get("trust_remote_code"):
        return [f"{folder}: {_OWN_CODE}"]
    return [f"{folder}: it cannot be loaded: {explained(report.problem)}"] if report.problem is not None else []


CHECK = Check(
    NAME, "config.json, tokenizer and all safetensors shards, whole, fit to load and the same on all nodes", run,
    label="model", time_limit_s=_LIMIT_S + 2 * TRIAL_LIMIT_S + 30, needs=(connectivity.NAME,), after=(sync.NAME,),
    not_applicable=lambda config: config.job.kind.own_model,
)  # fmt: skip
