"""worker_consistency: script, trainer bundle, job, tokenizer and model index are the same on every worker and on the
head.

The reference is what this machine has; for what it does not have (a model that only the nodes hold), it is what most
workers have. For an mlx-lm job the trainer bundle counts as the script."""

from __future__ import annotations

import json
import posixpath
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from engine.checks import connectivity, sync
from engine.checks.check import THIS_MACHINE, Check, Findings, differing_items, this_machine
from engine.checks.context import CheckContext
from engine.checks.fixes import Fix, copies, copy_file, copy_folder, move_aside
from engine.cluster.probe_results import FileHashes
from engine.config.models import Config, NodeConfig
from engine.errors import plural
from engine.models import CheckResult, WorkerConsistency
from engine.plan.preflight import command_files, comparison_not_applicable, comparison_switched_off

NAME = "worker_consistency"
_LIMIT_S = 60.0
_MODEL = "model "
"""Prefix of the names of the model's files."""
_SCRIPT = "node bundle"
"""The probe's name for the bundle, in which the trainer is."""
_SHOWN = 12
"""Characters of a hash in a message."""
_NAMED = 3

ItemHashes = Mapping[str, str | None]
"""Item → its SHA-256; None where it does not exist. An item that is not in the mapping is not known."""


Decision = Literal["agree", "tolerate", "exclude", "block"]
"""The consequence for a launch. "tolerate": some differ, within the threshold, a warning. "exclude": the divergent are
left out and the plan is made again."""


@dataclass(frozen=True)
class Agreement:
    """How far the workers agree."""

    reference: dict[str, str | None] | None
    """None when no value is more frequent than every other."""
    source: Literal["head", "plurality"] | None
    agreeing: tuple[str, ...]
    divergent: tuple[str, ...]

    @property
    def workers(self) -> int:
        return len(self.agreeing) + len(self.divergent)

    @property
    def ratio(self) -> float:
        """Agreeing over all, 0 to 1."""
        return len(self.agreeing) / self.workers


def agreement(workers: Mapping[str, ItemHashes], head: ItemHashes) -> Agreement:
    """Compare the workers with the head, and in the items the head does not know with the plurality of the workers.
    Raises ValueError when there are no workers."""
    if not workers:
        raise ValueError("there are no workers to compare")
    items = sorted({item for hashes in (*workers.values(), head) for item in hashes})
    unknown = [item for item in items if item not in head]
    reference = {item: head[item] for item in items if item in head}
    if unknown:
        most = _plurality([tuple(hashes.get(item) for item in unknown) for hashes in workers.values()])
        if most is None:
            return Agreement(None, None, (), tuple(workers))
        reference |= dict(zip(unknown, most, strict=True))
    agreeing = tuple(name for name, hashes in workers.items() if not differing_items(hashes, reference))
    divergent = tuple(name for name in workers if name not in agreeing)
    return Agreement(reference, "plurality" if unknown else "head", agreeing, divergent)


def decide(compared: Agreement, threshold: float, *, exclude_divergent: bool) -> Decision:
    """`threshold` is inclusive. More than half divergent always blocks, as does a missing reference."""
    if not compared.divergent:
        return "agree"
    if compared.reference is None or 2 * len(compared.divergent) > compared.workers:
        return "block"
    if exclude_divergent:
        return "exclude"
    return "tolerate" if compared.ratio >= threshold else "block"


def _plurality(values: list[tuple[str | None, ...]]) -> tuple[str | None, ...] | None:
    """The most frequent value; None when two are."""
    (most, count), *others = Counter(values).most_common(2)
    return None if others and others[0][1] == count else most


async def run(context: CheckContext) -> CheckResult:
    config = context.config
    here = this_machine(str(config.folder))
    models = {node.name: _model(context, node) for node in (*config.nodes, here)}
    answers = await context.on_all_nodes(lambda node: _hashes(context, node, models[node.name]))
    findings = Findings(NAME, config)
    workers = {node.name: hashes for node, hashes in findings.answered(answers)}
    if findings.faulty:
        return findings.verdict()
    local = next((node.name for node in config.nodes if node.local), None)
    head = workers[local] if local is not None else await _hashes(context, here, models[here.name])
    return evaluate(config, workers, head_reference(head, workers), models)


def head_reference(head: ItemHashes, workers: Mapping[str, ItemHashes]) -> dict[str, str | None]:
    """The items that this machine is the reference for: those it has, and, where it has the model, the model's files
    that it does not have."""
    has = {name: value for name, value in head.items() if value is not None}
    if not any(name.startswith(_MODEL) for name in has):
        return {**has}
    lacks = {name for hashes in workers.values() for name in hashes if name.startswith(_MODEL)} - set(has)
    return {**has, **dict.fromkeys(lacks)}


def evaluate(
    config: Config, workers: Mapping[str, ItemHashes], head: ItemHashes, models: Mapping[str, str | None]
) -> CheckResult:
    """A divergent minority is left out when the configuration allows it, and blocks otherwise. `models` is each node's
    path of the model, and this machine's."""
    settings = config.preflight
    compared = agreement(workers, head)
    decision = decide(compared, settings.consistency_threshold, exclude_divergent=settings.exclude_divergent)
    excluded = compared.divergent if decision == "exclude" else ()
    findings = Findings(NAME, config)
    against = THIS_MACHINE if compared.source == "head" else "most nodes"
    for node in config.nodes:
        findings.evidence[node.name] = _list_hashes(workers[node.name])
        if node.name in compared.divergent:
            message = f"{node.name}: {_describe_difference(workers[node.name], compared.reference, against)}"
            (findings.fault if decision == "block" else findings.warn)(node, message)
            findings.evidence[node.name] = message
    detail = WorkerConsistency(
        enabled=True,
        consistency_threshold=settings.consistency_threshold,
        is_consistent=set(compared.divergent) <= set(excluded),
        script_hash=(compared.reference or {}).get(next(iter(command_files(config)), _SCRIPT)),
        agreement=compared.ratio if compared.reference is not None else None,
        reference=compared.source,
        divergent=compared.divergent,
        excluded=excluded,
    )
    result = findings.verdict(
        f"{compared.workers} nodes agree with {against} on {plural(len(compared.reference or {}), 'item')}",
        advice=_advice(compared, decision, settings.consistency_threshold),
        fix=_fix(config, compared, workers, models),
    )
    return result.model_copy(update={"detail": detail, "excludes": excluded})


def _advice(compared: Agreement, decision: Decision, threshold: float) -> str:
    if compared.reference is None:
        nobody = f"{THIS_MACHINE} has none of them, and there is no majority among the nodes"
        return f"{nobody}: make them the same by hand"
    ratio = f"{len(compared.agreeing)} of {compared.workers} agree, {compared.ratio:.2f} against {threshold:g}"
    if decision == "exclude":
        return f"{ratio}; left out of the launch: {', '.join(compared.divergent)}"
    if 2 * len(compared.divergent) > compared.workers:
        return f"{ratio}; more than half differ"
    return ratio


def _describe_difference(hashes: ItemHashes, reference: ItemHashes | None, against: str) -> str:
    if reference is None:
        return _list_hashes(hashes)
    names = differing_items(hashes, reference)
    shown = [f"{name} is {_short(hashes.get(name))}, {_short(reference.get(name))} on {against}" for name in names]
    return "; ".join(shown[:_NAMED]) + (f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else "")


def _list_hashes(hashes: ItemHashes) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in hashes.items())


def _short(value: str | None) -> str:
    return value[:_SHOWN] if value is not None else "missing"


def _fix(
    config: Config, compared: Agreement, workers: Mapping[str, ItemHashes], models: Mapping[str, str | None]
) -> Fix | None:
    """A line for this machine's shell that moves what differs aside and copies the reference to the divergent nodes;
    None where there is none."""
    reference, source = compared.reference, _source(config, compared)
    if reference is None or source is None:
        return None
    folders = {name: folder for name, folder in models.items() if folder is not None}
    lines: list[str | None] = []
    for node in config.nodes:
        if node.name not in compared.divergent:
            continue
        differing = differing_items(workers[node.name], reference)
        files = {name: _file(config, node, models[node.name], name) for name in differing}
        lines += [move_aside(node, file, workers[node.name].get(name)) for name, file in files.items() if file]
        wanted = [name for name in differing if reference.get(name) is not None]
        for word in command_files(config):
            if word in wanted:
                here, there = (PurePosixPath(_path(end, word)) for end in (source, node))
                lines.append(copy_file(source, here, node, there.parent))
        if {source.name, node.name} <= folders.keys() and any(name.startswith(_MODEL) for name in wanted):
            lines.append(copy_folder(source, [node], folders))
    return copies(lines, source, folders.get(source.name, source.workdir))


def _file(config: Config, node: NodeConfig, model: str | None, name: str) -> str | None:
    """The path of an item on a node; None for an item that is not a file of the user's."""
    if name.startswith(_MODEL):
        return posixpath.join(model, name.removeprefix(_MODEL)) if model is not None else None
    return _path(node, name) if name in command_files(config) else None


def _source(config: Config, compared: Agreement) -> NodeConfig | None:
    """Who has the reference: this machine, else the first that agrees; None where nobody has all of it."""
    if compared.source == "head":
        return next((node for node in config.nodes if node.local), None) or this_machine(str(config.folder))
    return next((node for node in config.nodes if node.name in compared.agreeing), None)


async def _hashes(context: CheckContext, node: NodeConfig, model: str | None) -> ItemHashes:
    """Nodes of one host with the same request are probed once."""
    config = context.config
    files = {word: _path(node, word) for word in command_files(config)}
    keys = config.job.model_dump(include={"model", "data", "fine_tune_type", "strategy"})
    job = None if config.job.kind.own_model else {**config.job.mlx_lm, **keys}
    request = json.dumps({"files": files, "model": model, "job": job})
    answer = await context.shared(
        f"hashes of {node.ssh}: {request}",
        lambda: context.probe(node, "hashes", request, result_type=FileHashes, timeout_s=_LIMIT_S),
    )
    return answer.hashes


def _model(context: CheckContext, node: NodeConfig) -> str | None:
    named = node.model or context.config.job.model
    return context.path(node, named) if named and not context.config.job.kind.own_model else None


def _path(node: NodeConfig, word: str) -> str:
    """A word of the job's command as a path on the node, expanded as its keeper does."""
    word = word.replace("{workdir}", node.workdir)
    return word if word.startswith(("/", "~/")) else posixpath.join(node.workdir, word)


CHECK = Check(
    NAME, "script, trainer bundle, job, tokenizer and model index are the same as on this machine", run,
    label="same files", time_limit_s=_LIMIT_S + 30, needs=(connectivity.NAME,), after=(sync.NAME,),
    not_applicable=comparison_not_applicable, switched_off=comparison_switched_off,
)  # fmt: skip
