"""data_matches: the JSONL files of the job exist, mlx-lm can read every line, and they are the same on all nodes.

mlx-lm reports a bad line only after every rank has loaded its model.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath
from typing import Any

from engine.checks import connectivity, sync
from engine.checks.check import Check, Findings, NodeFindings, skip_for_command
from engine.checks.context import CheckContext
from engine.checks.fixes import copy_folder
from engine.checks.obstacles import TRIAL_LIMIT_S, data_features, data_files, describe_refused, refused_rows
from engine.checks.plan_inputs import load_data_report
from engine.cluster.probe_results import JsonlSummaries, JsonlSummary
from engine.cluster.transport.base import quoted
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError
from engine.models import CheckResult

NAME = "data_matches"
_READ_LIMIT_S = 110.0
_VALIDATION_SHARE = 20
"""For a missing valid.jsonl the fix takes every 20th part of train.jsonl, the last lines."""


@dataclass(frozen=True)
class DataFile:
    """One JSONL file as one node would read it."""

    path: PurePath
    seen: JsonlSummary
    fault: str | None = None
    fix: str | None = None

    @property
    def absent(self) -> bool:
        """Missing, or without an example."""
        return self.seen.absent or (self.seen.problem is None and self.seen.examples == 0)

    def describe(self) -> str:
        seen = f"{self.seen.examples:,} examples, {self.seen.form}, sha256 {self.seen.sha256[:12]}"
        return self.fault or f"{self.path.name} {seen}"


async def run(context: CheckContext) -> CheckResult:
    config = context.config
    report, problem = await asyncio.to_thread(load_data_report, config)
    blocks, warns = (report.blocks, report.warns) if report is not None else (None, problem)
    found = Findings(NAME, config)
    if blocks is not None:
        found.overall.fault(f"{blocks}: clean the data, then make a new report")
    elif warns is not None:
        found.overall.warn(warns)
    if config.job.command is None:
        return await _check_files(context, found)
    return found.verdict("the data quality report has no objection")


async def _check_files(context: CheckContext, found: Findings) -> CheckResult:
    config = context.config
    settings = config.job.mlx_lm
    folders = {node.name: context.path(node, node.data or config.job.data or "") for node in config.nodes}
    keys = json.dumps(data_features(settings))

    async def read(node: NodeConfig) -> list[DataFile]:
        files = data_files(settings, folders[node.name])
        read = await context.probe(node, "jsonl", keys, *files, result_type=JsonlSummaries, timeout_s=_READ_LIMIT_S)
        mask_prompt = bool(settings.get("mask_prompt"))
        return [
            interpret_file(PurePosixPath(path), file, mask_prompt=mask_prompt)
            for path, file in zip(files, read.files, strict=True)
        ]

    answers = await context.on_all_nodes(read)
    found.evidence = {name: f"{folder}: {answers[name]}" for name, folder in folders.items()}
    complete: dict[str, list[DataFile]] = {}
    for node, files in found.answered(answers):
        _check_node(files, settings, found.on(node))
        found.evidence[node.name] = f"{folders[node.name]}: {'; '.join(file.describe() for file in files)}"
        if not found.on(node).faults:
            complete[node.name] = files
    if not complete:
        return found.verdict()
    first = next(node for node in config.nodes if node.name in complete)
    ours = complete[first.name]
    if any(file.seen.form not in (None, "text") for file in ours):
        try:
            for rows in await refused_rows(context, first, [str(file.path) for file in ours]):
                found.overall.fault(describe_refused(rows))
        except FlightDeckError as error:
            found.overall.warn(str(error))
    for node in config.nodes:
        if differing := _differing(ours, complete.get(node.name, ours)):
            found.fault(node, f"the data on {node.name} differs from {first.name}: {differing}")
    lacking = [node for node in found.faulty if isinstance(answers[node.name], list)]
    summary = ", ".join(f"{file.path.stem} {file.seen.examples:,}" for file in ours)
    return found.verdict(f"{summary} examples, {ours[0].seen.form}", fix_command=copy_folder(first, lacking, folders))


def _check_node(files: list[DataFile], settings: Mapping[str, Any], findings: NodeFindings) -> None:
    """`files` are train, valid and test, as far as they are used. A missing valid.jsonl only warns, as long as no key
    needs it: mlx-lm then trains without validation."""
    train, batch_size = files[0], int(settings.get("batch_size", 1))
    needed_by = next((key for key in ("patience", "save_best") if settings.get(key)), None)
    for file in files:
        if file.fault is None:
            continue
        missing_validation = file.path.stem == "valid" and file.absent
        fix = file.fix
        if missing_validation and not train.fault and train.seen.lines > 1:
            fix = _split_off(train, file.path)
        if missing_validation and needed_by is not None:
            findings.fault(f"{file.fault}, and {needed_by} needs it", fix)
        else:
            (findings.warn if missing_validation else findings.fault)(file.fault, fix)
    examples = train.seen.examples
    if train.fault is None and examples < batch_size:
        findings.fault(f"{train.path} has fewer examples ({examples}) than batch_size = {batch_size}")


def _split_off(train: DataFile, valid: PurePath) -> str:
    """A command that moves the last lines of train.jsonl into valid.jsonl."""
    lines = train.seen.lines
    count = max(1, lines // _VALIDATION_SHARE)
    source, target = quoted(train.path), quoted(valid)
    return f"tail -n {count} {source} > {target} && sed -i.bak '{lines - count + 1},$d' {source}"


def _differing(first: list[DataFile], theirs: list[DataFile]) -> str:
    return ", ".join(
        f"{other.path.name} {other.seen.lines:,} lines against {one.seen.lines:,}"
        for one, other in zip(first, theirs, strict=True)
        if one.seen.sha256 != other.seen.sha256
    )


def interpret_file(path: PurePath, summary: JsonlSummary, *, mask_prompt: bool) -> DataFile:
    """The file with its fault as a message, and a command that takes bad lines out."""
    if summary.problem is not None:
        return DataFile(path, summary, summary.problem)
    fault = fix = None
    if summary.examples == 0:
        fault = f"{path} is empty"
    elif summary.faults:
        number, why = summary.faults[0]
        more = summary.fault_count - 1
        fault = f"{path}: line {number} {why}" + (f", and {more:,} more lines" if more else "")
        if summary.form is not None and summary.fault_count == len(summary.faults) < summary.examples:
            deletions = ";".join(f"{number}d" for number, _ in summary.faults)
            fix = f"sed -i.bak {shlex.quote(deletions)} {quoted(path)}"
    elif mask_prompt and summary.form == "text":
        fault = f"{path}: mask_prompt = true needs prompt/completion or chat lines, these are text"
    return DataFile(path, summary, fault, fix)


CHECK = Check(
    NAME,
    "train, valid and test JSONL: there, readable by mlx-lm, taken by the chat template, the same on all nodes",
    run,
    time_limit_s=_READ_LIMIT_S + TRIAL_LIMIT_S + 30,
    needs=(connectivity.NAME,),
    after=(sync.NAME,),
    # A command brings its own data, but a data quality report still applies.
    not_applicable=lambda config: skip_for_command(config) if config.job.data_quality_report is None else None,
)
