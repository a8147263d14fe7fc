"""data_matches: the JSONL files that the job reads are there, every line is one mlx-lm can read, and all nodes agree.

mlx-lm finds a bad line only after every rank has loaded its model.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath
from typing import Any

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError
from engine.models import CheckResult, CheckStatus
from engine.preflight import connectivity
from engine.preflight.check import Check, ranks_of, trains, verdict
from engine.preflight.scene import Scene
from engine.security.sanitise import plain
from engine.transport.base import quoted

NAME = "data_matches"
_READ_LIMIT_S = 110.0
_DEFAULT_KEYS = {"prompt": "prompt", "completion": "completion", "chat": "messages", "text": "text"}
_VALIDATION_SHARE = 20
"""A missing valid.jsonl is suggested to be every 20th part of train.jsonl, the last lines."""


@dataclass(frozen=True)
class DataFile:
    """One JSONL file as one node would read it."""

    path: PurePath
    lines: int = 0
    examples: int = 0
    sha256: str = ""
    form: str | None = None
    fault: str | None = None
    fix: str | None = None
    absent: bool = False
    """Missing, or without an example."""

    def words(self) -> str:
        return self.fault or f"{self.path.name} {self.examples:,} examples, {self.form}, sha256 {self.sha256[:12]}"


async def look(scene: Scene) -> CheckResult:
    config = scene.config
    settings = config.job.mlx_lm
    wanted = {node.name: PurePosixPath(node.data or config.job.data or "") for node in config.nodes}
    names = ["train", *(["test"] if settings.get("test") else [])]
    if int(settings.get("val_batches", 25)) != 0:
        names.insert(1, "valid")
    keys = {name: str(settings.get(f"{name}_feature", default)) for name, default in _DEFAULT_KEYS.items()}

    async def read(node: NodeConfig) -> list[DataFile]:
        files = [str(wanted[node.name] / f"{name}.jsonl") for name in names]
        said = await scene.look(node, "jsonl", json.dumps(keys), *files, timeout_s=_READ_LIMIT_S)
        # In the order of the question: the answer names files as the node expands them.
        return [_interpret(path, found, settings) for path, found in zip(files, said.values(), strict=True)]

    answers = await scene.on_all(read)
    found = {
        name: [DataFile(wanted[name] / "train.jsonl", fault=str(answer))]
        if isinstance(answer, FlightDeckError)
        else answer
        for name, answer in answers.items()
    }
    return judge(config, wanted, found)


def judge(config: FlightConfig, wanted: Mapping[str, PurePath], found: Mapping[str, list[DataFile]]) -> CheckResult:
    """The verdict over all nodes; a missing valid.jsonl only warns, as mlx-lm then trains without validation."""
    failed: dict[str, str] = {}
    warned: dict[str, str] = {}
    fixes: dict[str, str] = {}
    blames: tuple[int, str] | None = None
    for rank, node in ranks_of(config):
        files = found[node.name]
        hard, soft, mends = _faults(files, int(config.job.mlx_lm.get("batch_size", 1)))
        if hard:
            failed[node.name] = "; ".join(hard)
            blames = blames or (rank, node.name)
        elif soft:
            warned[node.name] = "; ".join(soft)
        if mends:
            fixes[node.name] = " && ".join(mends)
    evidence = {
        name: f"{directory}: {'; '.join(file.words() for file in found[name])}" for name, directory in wanted.items()
    }
    if failed:
        summary = "; ".join(dict.fromkeys(failed.values()))
        return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, fixes=fixes, blames=blames)
    first = found[config.nodes[0].name]
    for rank, node in ranks_of(config):
        theirs = found[node.name]
        if [file.sha256 for file in theirs] != [file.sha256 for file in first]:
            summary = f"{node.name} holds other data than {config.nodes[0].name}: {_differing(first, theirs)}"
            fixes = {}
            if node.local and config.nodes[0].local:
                fixes = {node.name: f"cp {quoted(first[0].path.parent)}/*.jsonl {quoted(wanted[node.name])}/"}
            else:
                summary += f"; copy {wanted[config.nodes[0].name]} of {config.nodes[0].name} to it"
            return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, fixes=fixes, blames=(rank, node.name))
    if warned:
        summary = "; ".join(dict.fromkeys(warned.values()))
        return verdict(NAME, CheckStatus.WARN, summary, evidence=evidence, fixes=fixes)
    summary = ", ".join(f"{file.path.stem} {file.examples:,}" for file in first)
    return verdict(NAME, CheckStatus.PASS, f"{summary} examples, {first[0].form}", evidence=evidence)


def _faults(files: list[DataFile], batch_size: int) -> tuple[list[str], list[str], list[str]]:
    """What fails, what only warns, and what mends, of one node's files (train, valid, test)."""
    hard: list[str] = []
    soft: list[str] = []
    mends: list[str] = []
    train = files[0]
    for file in files:
        if file.fault is None:
            continue
        missing_validation = file.path.stem == "valid" and file.absent
        (soft if missing_validation else hard).append(file.fault)
        if missing_validation and not train.fault and train.lines > 1:
            mends.append(_split_off(train, file.path))
        elif file.fix:
            mends.append(file.fix)
    if train.fault is None and train.examples < batch_size:
        hard.append(f"{train.path} has fewer examples ({train.examples}) than batch_size = {batch_size}")
    return hard, soft, mends


def _split_off(train: DataFile, valid: PurePath) -> str:
    """A command that moves the last lines of train.jsonl into valid.jsonl."""
    count = max(1, train.lines // _VALIDATION_SHARE)
    source, target = quoted(train.path), quoted(valid)
    return f"tail -n {count} {source} > {target} && sed -i.bak '{train.lines - count + 1},$d' {source}"


def _differing(first: list[DataFile], theirs: list[DataFile]) -> str:
    pairs = [(one, other) for one, other in zip(first, theirs, strict=True) if one.sha256 != other.sha256]
    return ", ".join(f"{other.path.name} {other.lines:,} lines against {one.lines:,}" for one, other in pairs)


def _interpret(path: str, said: dict[str, Any], settings: Mapping[str, Any]) -> DataFile:
    if "problem" in said:
        return DataFile(PurePosixPath(path), fault=plain(said["problem"]), absent=bool(said["absent"]))
    return interpret(PurePosixPath(path), said, mask_prompt=bool(settings.get("mask_prompt")))


def interpret(path: PurePath, said: dict[str, Any], *, mask_prompt: bool) -> DataFile:
    """What `worker.looks.jsonl` said of one file, its faults in words, and a command that takes bad lines out."""
    lines, examples, form, faults = said["lines"], said["examples"], said["form"], said["faults"]
    fault = fix = None
    if examples == 0:
        fault = f"{path} is empty"
    elif faults:
        number, why = faults[0]
        more = said["fault_count"] - 1
        fault = f"{path}: line {number} {plain(why)}" + (f", and {more:,} more lines" if more else "")
        if form is not None and said["fault_count"] == len(faults) < examples:
            doomed = ";".join(f"{number}d" for number, _ in faults)
            fix = f"sed -i.bak {shlex.quote(doomed)} {quoted(path)}"
    elif mask_prompt and form == "text":
        fault = f"{path}: mask_prompt = true needs prompt/completion or chat lines, these are text"
    return DataFile(path, lines, examples, said["sha256"], form, fault, fix, absent=examples == 0)


CHECK = Check(
    NAME,
    "train, valid and test JSONL: there, readable by mlx-lm, the same on all nodes",
    look,
    time_limit_s=_READ_LIMIT_S + 30,
    needs=(connectivity.NAME,),
    not_applicable=trains,
)
