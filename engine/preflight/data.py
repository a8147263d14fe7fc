"""data_matches: the JSONL files that the job reads are there, every line is one mlx-lm can read, and all nodes agree.

mlx-lm finds a bad line only after every rank has loaded its model.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError
from engine.models import CheckResult, CheckStatus
from engine.planning.data_report import DataReport
from engine.preflight import connectivity, sync
from engine.preflight.answers import Jsonl, JsonlFile
from engine.preflight.check import Check, Findings, trains
from engine.preflight.fixes import copies
from engine.preflight.quality import data_report
from engine.preflight.scene import Scene
from engine.transport.base import quoted

NAME = "data_matches"
_READY = "the data quality report holds nothing against it"
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
    report, problem = await asyncio.to_thread(data_report, config)
    result = await _files(scene) if config.job.command is None else Findings(NAME, config).verdict(_READY)
    return with_report(result, report, problem)


def with_report(result: CheckResult, report: DataReport | None, problem: str | None) -> CheckResult:
    """What was found in the files, and what the report says of them: nobody trains on poisoned data unawares."""
    blocks, warns = (report.blocks, report.warns) if report is not None else (None, problem)
    words, status = warns, CheckStatus.WARN
    if blocks is not None:
        words, status = f"{blocks}: a person must clean the data, and have the report made anew", CheckStatus.FAIL
    if words is None:
        return result
    worst = CheckStatus.FAIL if CheckStatus.FAIL in (status, result.status) else status
    told = [words, *([] if result.status is CheckStatus.PASS else [result.summary])]
    # What mends a warning is not what mends the failure beside it.
    fix = result.fix_command if result.status is worst else None
    return result.model_copy(update={"status": worst, "summary": "; ".join(told), "fix_command": fix})


async def _files(scene: Scene) -> CheckResult:
    config = scene.config
    settings = config.job.mlx_lm
    wanted = {node.name: scene.path(node, node.data or config.job.data or "") for node in config.nodes}
    names = ["train", *(["test"] if settings.get("test") else [])]
    if int(settings.get("val_batches", 25)) != 0:
        names.insert(1, "valid")
    keys = {name: str(settings.get(f"{name}_feature", default)) for name, default in _DEFAULT_KEYS.items()}

    async def read(node: NodeConfig) -> list[DataFile]:
        files = [f"{wanted[node.name]}/{name}.jsonl" for name in names]
        said = await scene.look(node, "jsonl", json.dumps(keys), *files, said=Jsonl, timeout_s=_READ_LIMIT_S)
        mask_prompt = bool(settings.get("mask_prompt"))
        return [
            interpret(PurePosixPath(path), file, mask_prompt=mask_prompt)
            for path, file in zip(files, said.files, strict=True)
        ]

    answers = await scene.on_all(read)
    return judge(config, wanted, answers)


def judge(
    config: FlightConfig, wanted: Mapping[str, str], answers: Mapping[str, list[DataFile] | FlightDeckError]
) -> CheckResult:
    """The verdict over all nodes; a missing valid.jsonl only warns, as mlx-lm then trains without validation."""
    found = Findings(NAME, config)
    whole: dict[str, list[DataFile]] = {}
    for node in config.nodes:
        files = answers[node.name]
        if isinstance(files, FlightDeckError):
            found.evidence[node.name] = f"{wanted[node.name]}: {files}"
            found.fault(node, str(files))
            continue
        found.evidence[node.name] = f"{wanted[node.name]}: {'; '.join(file.words() for file in files)}"
        hard, soft, mends = _faults(files, int(config.job.mlx_lm.get("batch_size", 1)))
        fix = " && ".join(mends) or None
        if hard:
            found.fault(node, "; ".join(hard), fix)
        else:
            whole[node.name] = files
            if soft:
                found.warning(node, "; ".join(soft), fix)
    if not whole:
        return found.verdict("")
    first = next(node for node in config.nodes if node.name in whole)
    _compare(config, found, whole, first)
    lacking = [node for node in config.nodes if node.name in found.faults and isinstance(answers[node.name], list)]
    summary = ", ".join(f"{file.path.stem} {file.examples:,}" for file in whole[first.name])
    return found.verdict(f"{summary} examples, {whole[first.name][0].form}", fix_command=copies(first, lacking, wanted))


def _compare(config: FlightConfig, found: Findings, whole: Mapping[str, list[DataFile]], first: NodeConfig) -> None:
    """Every node whose files are good is compared with the first of them."""
    ours = whole[first.name]
    for node in config.nodes:
        theirs = whole.get(node.name, ours)
        if [file.sha256 for file in theirs] != [file.sha256 for file in ours]:
            found.fixes.pop(node.name, None)
            found.fault(node, f"{node.name} holds other data than {first.name}: {_differing(ours, theirs)}")


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


def interpret(path: PurePath, said: JsonlFile, *, mask_prompt: bool) -> DataFile:
    """What `worker.looks.jsonl` said of one file, its faults in words, and a command that takes bad lines out."""
    if said.problem is not None:
        return DataFile(path, fault=said.problem, absent=said.absent)
    fault = fix = None
    if said.examples == 0:
        fault = f"{path} is empty"
    elif said.faults:
        number, why = said.faults[0]
        more = said.fault_count - 1
        fault = f"{path}: line {number} {why}" + (f", and {more:,} more lines" if more else "")
        if said.form is not None and said.fault_count == len(said.faults) < said.examples:
            doomed = ";".join(f"{number}d" for number, _ in said.faults)
            fix = f"sed -i.bak {shlex.quote(doomed)} {quoted(path)}"
    elif mask_prompt and said.form == "text":
        fault = f"{path}: mask_prompt = true needs prompt/completion or chat lines, these are text"
    return DataFile(path, said.lines, said.examples, said.sha256, said.form, fault, fix, absent=said.examples == 0)


def _applies(config: FlightConfig) -> str | None:
    """A command's data is its own, unless a report is named that speaks of it."""
    return trains(config) if config.job.data_quality_report is None else None


CHECK = Check(
    NAME,
    "train, valid and test JSONL: there, readable by mlx-lm, the same on all nodes",
    look,
    time_limit_s=_READ_LIMIT_S + 30,
    needs=(connectivity.NAME,),
    after=(sync.NAME,),
    not_applicable=_applies,
)
