"""data_matches: the JSONL files that the job reads are there, every line is one mlx-lm can read, and all nodes agree.

mlx-lm finds a bad line only after every rank has loaded its model.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.models import FlightConfig
from engine.models import CheckResult, CheckStatus
from engine.preflight import jsonl
from engine.preflight.check import Check, ranks_of, trains, verdict
from engine.preflight.model import near
from engine.transport.local import LocalTransport

NAME = "data_matches"
_READ_LIMIT_S = 110.0
_DEFAULT_KEYS = {"prompt": "prompt", "completion": "completion", "chat": "messages", "text": "text"}
_VALIDATION_SHARE = 20
"""A missing valid.jsonl is suggested to be every 20th part of train.jsonl, the last lines."""


@dataclass(frozen=True)
class DataFile:
    """One JSONL file as one node would read it."""

    path: Path
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


async def look(config: FlightConfig) -> CheckResult:
    settings = config.job.mlx_lm
    wanted = {node.name: Path(node.data or config.job.data or "") for node in config.nodes}
    directories = list(dict.fromkeys(wanted.values()))
    names = ["train", *(["test"] if settings.get("test") else [])]
    validates = int(settings.get("val_batches", 25)) != 0
    if validates:
        names.insert(1, "valid")
    files = [directory / f"{name}.jsonl" for directory in directories for name in names]
    read = dict(zip(files, await asyncio.gather(*(_read(path, settings) for path in files)), strict=True))
    found = {directory: [read[directory / f"{name}.jsonl"] for name in names] for directory in directories}
    return judge(config, wanted, found)


def judge(config: FlightConfig, wanted: dict[str, Path], found: dict[Path, list[DataFile]]) -> CheckResult:
    """The verdict over all nodes; a missing valid.jsonl only warns, as mlx-lm then trains without validation."""
    failed: dict[str, str] = {}
    warned: dict[str, str] = {}
    fixes: dict[str, str] = {}
    blames: tuple[int, str] | None = None
    for rank, node in ranks_of(config):
        files = found[wanted[node.name]]
        hard, soft, mends = _faults(files, int(config.job.mlx_lm.get("batch_size", 1)))
        if hard:
            failed[node.name] = "; ".join(hard)
            blames = blames or (rank, node.name)
        elif soft:
            warned[node.name] = "; ".join(soft)
        if mends:
            fixes[node.name] = " && ".join(mends)
    evidence = {
        name: f"{directory}: {'; '.join(file.words() for file in found[directory])}"
        for name, directory in wanted.items()
    }
    if failed:
        summary = "; ".join(dict.fromkeys(failed.values()))
        return verdict(NAME, CheckStatus.FAIL, summary, evidence=evidence, fixes=fixes, blames=blames)
    first = found[wanted[config.nodes[0].name]]
    for rank, node in ranks_of(config):
        if [file.sha256 for file in found[wanted[node.name]]] != [file.sha256 for file in first]:
            fix = f"cp {shlex.quote(str(first[0].path.parent))}/*.jsonl {shlex.quote(str(wanted[node.name]))}/"
            summary = f"{node.name} holds other data than {config.nodes[0].name}"
            return verdict(
                NAME, CheckStatus.FAIL, summary, evidence=evidence, fixes={node.name: fix}, blames=(rank, node.name)
            )
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


def _split_off(train: DataFile, valid: Path) -> str:
    """A command that moves the last lines of train.jsonl into valid.jsonl."""
    count = max(1, train.lines // _VALIDATION_SHARE)
    source, target = shlex.quote(str(train.path)), shlex.quote(str(valid))
    return f"tail -n {count} {source} > {target} && sed -i.bak '{train.lines - count + 1},$d' {source}"


async def _read(path: Path, settings: dict[str, Any]) -> DataFile:
    if not path.parent.is_dir():
        return DataFile(path, fault=f"no such directory: {path.parent}{near(path.parent, 'train.jsonl')}")
    if not path.is_file():
        return DataFile(path, fault=f"{path} is missing{near(path)}", absent=True)
    keys = {name: str(settings.get(f"{name}_feature", default)) for name, default in _DEFAULT_KEYS.items()}
    command = [sys.executable, "-I", str(Path(jsonl.__file__)), str(path), json.dumps(keys)]
    finished = await LocalTransport().run(command, timeout_s=_READ_LIMIT_S)
    if finished.code is None:
        return DataFile(path, fault=f"{path} could not be read in {_READ_LIMIT_S:.0f} s")
    if finished.code != 0:
        return DataFile(path, fault=f"{path} cannot be read: {finished.last_words}")
    return interpret(path, json.loads(finished.stdout), mask_prompt=bool(settings.get("mask_prompt")))


def interpret(path: Path, said: dict[str, Any], *, mask_prompt: bool) -> DataFile:
    """What jsonl.py printed, with its faults in words and a command that takes the bad lines out."""
    lines, examples, form, faults = said["lines"], said["examples"], said["form"], said["faults"]
    fault = fix = None
    if examples == 0:
        fault = f"{path} is empty"
    elif faults:
        number, why = faults[0]
        more = said["fault_count"] - 1
        fault = f"{path}: line {number} {why}" + (f", and {more:,} more lines" if more else "")
        if form is not None and said["fault_count"] == len(faults) < examples:
            doomed = ";".join(f"{number}d" for number, _ in faults)
            fix = f"sed -i.bak {shlex.quote(doomed)} {shlex.quote(str(path))}"
    elif mask_prompt and form == "text":
        fault = f"{path}: mask_prompt = true needs prompt/completion or chat lines, these are text"
    return DataFile(path, lines, examples, said["sha256"], form, fault, fix, absent=examples == 0)


CHECK = Check(
    NAME,
    "train, valid and test JSONL: there, readable by mlx-lm, the same on all nodes",
    look,
    time_limit_s=_READ_LIMIT_S + 10,
    not_applicable=trains,
)
