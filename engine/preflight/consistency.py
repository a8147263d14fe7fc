"""worker_consistency: script, staged worker, job, tokenizer and model index are on every worker what they are on the
head.

The reference is what this machine has; of what it does not have (a model that only the nodes hold), what most workers
have. A job of mlx-lm's is trained by the staged worker: that is its script.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError, LaunchError
from engine.models import CheckResult, WorkerConsistency
from engine.planning.before_launch import comparison_not_applicable, comparison_switched_off, own_files
from engine.preflight import connectivity, sync
from engine.preflight.agreement import Agreement, Decision, agreement, decide
from engine.preflight.answers import Hashes
from engine.preflight.check import Check, Findings
from engine.preflight.fixes import copies, file_copies, moved_aside
from engine.preflight.scene import Scene, read
from engine.security.hosts import LOCAL
from engine.transport.local import LocalTransport

NAME = "worker_consistency"
HERE = "this machine"
_LIMIT_S = 60.0
_MODEL = "model "
"""How the names of the model's files begin."""
_SHOWN = 12
_NAMED = 3


async def look(scene: Scene) -> CheckResult:
    config = scene.config
    asked = {node.name: question(config, node, _model(scene, node)) for node in config.nodes}
    answers = await _answers(scene, asked)
    broken = {name: answer for name, answer in answers.items() if isinstance(answer, FlightDeckError)}
    if broken:
        found = Findings(NAME, config)
        for node in config.nodes:
            if node.name in broken:
                found.fault(node, str(broken[node.name]))
        return found.verdict("")
    workers = {name: answer for name, answer in answers.items() if not isinstance(answer, FlightDeckError)}
    local = next((node for node in config.nodes if node.local), None)
    head = known(workers[local.name] if local is not None else await _heads(config), workers)
    return judge(config, workers, head, {node.name: _model(scene, node) for node in config.nodes})


def question(config: FlightConfig, node: NodeConfig, model: str | None) -> dict[str, Any]:
    """What is asked of one node."""
    files = {word: _path(node, word) for word in own_files(config)}
    own = config.job.model_dump(include={"model", "data", "fine_tune_type", "strategy"})
    job = None if config.job.command else {**config.job.mlx_lm, **own}
    return {"files": files, "model": model, "job": job}


def known(head: Mapping[str, str | None], workers: Mapping[str, Mapping[str, str | None]]) -> dict[str, str | None]:
    """What this machine can be a reference for: what it has, and, where it has the model, what that lacks."""
    has = {name: value for name, value in head.items() if value is not None}
    if not any(name.startswith(_MODEL) for name in has):
        return {**has}
    lacks = {name for hashes in workers.values() for name in hashes if name.startswith(_MODEL)} - set(has)
    return {**has, **dict.fromkeys(lacks)}


def judge(
    config: FlightConfig,
    workers: Mapping[str, Mapping[str, str | None]],
    head: Mapping[str, str | None],
    models: Mapping[str, str | None],
) -> CheckResult:
    """The verdict. A divergent minority is left out when the configuration says so, and blocks otherwise."""
    settings = config.preflight
    compared = agreement(workers, head)
    decision = decide(compared, settings.consistency_threshold, exclude_divergent=settings.exclude_divergent)
    excluded = compared.divergent if decision is Decision.EXCLUDE else ()
    found = Findings(NAME, config)
    against = HERE if compared.source == "head" else "most workers"
    for node in config.nodes:
        found.evidence[node.name] = _held(workers[node.name])
        if node.name in compared.divergent:
            words_ = f"{node.name}: {_differing(workers[node.name], compared.reference, against)}"
            (found.fault if decision is Decision.BLOCK else found.warning)(node, words_)
            found.evidence[node.name] = words_
    detail = WorkerConsistency(
        enabled=True,
        threshold=settings.consistency_threshold,
        agreement=compared.ratio if compared.reference is not None else None,
        reference=compared.source,
        divergent=compared.divergent,
        excluded=excluded,
    )
    result = found.verdict(
        f"{compared.workers} workers agree with {against} on {len(compared.reference or {})} items",
        advice=_advice(compared, decision, settings.consistency_threshold),
        fix_command=_fix(config, compared, workers, models),
    )
    return result.model_copy(update={"detail": detail, "excludes": excluded})


def _advice(compared: Agreement, decision: Decision, threshold: float) -> str:
    if compared.reference is None:
        return f"{HERE} has none of it, and no more workers have one than have another: make them alike by hand"
    ratio = f"{len(compared.agreeing)} of {compared.workers} agree, {compared.ratio:.2f} against {threshold:g}"
    if decision is Decision.EXCLUDE:
        return f"{ratio}; left out of the launch: {', '.join(compared.divergent)}"
    if 2 * len(compared.divergent) > compared.workers:
        return f"{ratio}; more than half differ"
    return ratio


def _differing(theirs: Mapping[str, str | None], reference: Mapping[str, str | None] | None, against: str) -> str:
    """Both hashes of what differs."""
    if reference is None:
        return _held(theirs)
    names = sorted(name for name in {*theirs, *reference} if theirs.get(name) != reference.get(name))
    shown = [f"{name} is {_short(theirs.get(name))}, {_short(reference.get(name))} on {against}" for name in names]
    return "; ".join(shown[:_NAMED]) + (f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else "")


def _held(hashes: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in hashes.items())


def _short(value: str | None) -> str:
    return value[:_SHOWN] if value is not None else "missing"


def _fix(
    config: FlightConfig,
    compared: Agreement,
    workers: Mapping[str, Mapping[str, str | None]],
    models: Mapping[str, str | None],
) -> str | None:
    """What brings the reference to the divergent, as one line for this machine's shell; None where nobody can tell what
    the reference is."""
    if compared.reference is None:
        return None
    reference = compared.reference
    source = _source(config, compared)
    if source is None:
        return None
    lines: list[str] = []
    for node in config.nodes:
        if node.name not in compared.divergent:
            continue
        theirs = workers[node.name]
        differing = [name for name in {*theirs, *reference} if theirs.get(name) != reference.get(name)]
        wanted = [name for name in differing if reference.get(name) is not None]
        for word in own_files(config):
            if word in wanted:
                paths = {each.name: _path(each, word) for each in (*config.nodes, source)}
                lines += filter(None, [file_copies(source, [node], paths)])
        if any(name.startswith(_MODEL) for name in wanted):
            folders = {**models, source.name: models.get(source.name) or _heads_model(config)}
            there = {name: folder for name, folder in folders.items() if folder is not None}
            if {source.name, node.name} <= set(there):
                lines += filter(None, [copies(source, [node], there)])
        too_many = (_file(config, node, models[node.name], name) for name in sorted({*differing} - {*wanted}))
        lines += [moved_aside(node, file) for file in too_many if file is not None]
    return " && ".join(dict.fromkeys(lines)) or None


def _file(config: FlightConfig, node: NodeConfig, model: str | None, name: str) -> str | None:
    """Where the file of an item lies on a node; None for what is no file of the user's."""
    if name.startswith(_MODEL):
        return posixpath.join(model, name.removeprefix(_MODEL)) if model is not None else None
    return _path(node, name) if name in own_files(config) else None


def _source(config: FlightConfig, compared: Agreement) -> NodeConfig | None:
    """Who has the reference: this machine, else the first that agrees; None where everybody lacks a part of it."""
    agreeing = [node for node in config.nodes if node.name in compared.agreeing]
    if compared.source == "head":
        local = next((node for node in config.nodes if node.local), None)
        return local or NodeConfig(name=HERE, ssh=LOCAL, python=sys.executable, workdir=str(_base(config)))
    return next(iter(agreeing), None)


async def _answers(
    scene: Scene, asked: Mapping[str, dict[str, Any]]
) -> dict[str, Mapping[str, str | None] | FlightDeckError]:
    """Of each node; nodes that are one and the same in all of this are asked once."""
    texts = {node.name: (node.ssh, json.dumps(asked[node.name])) for node in scene.config.nodes}
    first = {texts[node.name]: node for node in reversed(scene.config.nodes)}

    async def one(node: NodeConfig) -> Mapping[str, str | None] | FlightDeckError:
        try:
            _, text = texts[node.name]
            return (await scene.look(node, "consistency", text, said=Hashes, timeout_s=_LIMIT_S)).hashes
        except FlightDeckError as error:
            return error

    said = dict(zip(first, await asyncio.gather(*(one(node) for node in first.values())), strict=True))
    return {name: said[text] for name, text in texts.items()}


async def _heads(config: FlightConfig) -> dict[str, str | None]:
    """What this machine has, where it is no node."""
    here = NodeConfig(name=HERE, ssh=LOCAL, python=sys.executable, workdir=str(_base(config)))
    asked = question(config, here, _heads_model(config))
    argv = [sys.executable, "-m", "engine.worker.looks.consistency", json.dumps(asked)]
    done = await LocalTransport().run(argv, timeout_s=_LIMIT_S)
    for line in reversed(done.stdout.splitlines()):
        if (answer := read(line, Hashes)) is not None:
            return answer.hashes
    raise LaunchError("this machine's own files could not be read", where=HERE, why=done.last_words[:200])


def _base(config: FlightConfig) -> Path:
    return config.file.parent if config.file is not None else Path("/")


def _heads_model(config: FlightConfig) -> str | None:
    return str(_base(config) / Path(config.job.model).expanduser()) if config.job.model else None


def _model(scene: Scene, node: NodeConfig) -> str | None:
    named = node.model or scene.config.job.model
    return scene.path(node, named) if named and not scene.config.job.command else None


def _path(node: NodeConfig, word: str) -> str:
    """A word of the command as the node's keeper reads it."""
    word = word.replace("{workdir}", node.workdir)
    return word if word.startswith(("/", "~/")) else posixpath.join(node.workdir, word)


CHECK = Check(
    NAME,
    "script, worker, job, tokenizer and model index as this machine has them",
    look,
    time_limit_s=_LIMIT_S + 30,
    needs=(connectivity.NAME,),
    after=(sync.NAME,),
    not_applicable=comparison_not_applicable,
    switched_off=comparison_switched_off,
)
