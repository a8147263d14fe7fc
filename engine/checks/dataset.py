"""data_matches: the JSONL files of the job exist, mlx-lm can read every line, and they are the same on all nodes;
mlx-lm reports a bad line only after every rank has loaded its model. And a look at a job's data as a node reads it:
files, lengths, and rows as the model sees them; and a copy of it here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from engine.checks import connectivity, sync
from engine.checks.check import Check, Findings, NodeFindings
from engine.checks.context import CheckContext
from engine.checks.fixes import Fix, copies, copy_file, move_aside
from engine.checks.obstacles import (
    TRIAL_LIMIT_S,
    data_files,
    data_options,
    row_settings,
    row_warnings,
    rows_refused,
    try_rows,
)
from engine.checks.placement import hub_names, push_fix, takes
from engine.checks.plan_inputs import load_data_report
from engine.cluster.agent_client import each_of, value_of
from engine.cluster.copies import copies_of
from engine.cluster.file_copy import FileCopy
from engine.cluster.probe_results import (
    ConversionReport,
    ExampleCount,
    JsonlSummaries,
    JsonlSummary,
    RowsReport,
    ShownRow,
    TemplateReport,
)
from engine.cluster.transport.base import quoted
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, InputError, LaunchError, plural
from engine.models import CheckResult, FrozenModel, Late
from engine.node.probes.template import TEXT_MASKED
from engine.node.source_files import WAYS
from engine.node.standard_data import VALID_SHARE
from engine.protocol.manifest import DATA_PREFIX
from engine.snapshots import ResultFile

NAME = "data_matches"
_READ_LIMIT_S = 110.0
_CORRECTED = "-corrected"
"""Suffix of the folder that a fix makes beside the data's: the data itself is changed by nobody but its owner."""
_SHOWN_FAULTS = 5


@dataclass(frozen=True)
class DataFile:
    """One JSONL file as one node would read it."""

    path: PurePath
    seen: JsonlSummary
    fault: str | None = None

    @property
    def cleanable(self) -> bool:
        """All its bad lines are known, and it has others."""
        seen = self.seen
        return seen.form is not None and 0 < seen.fault_count == len(seen.faults) < seen.examples

    @property
    def absent(self) -> bool:
        """Missing, or without an example."""
        return self.seen.absent or (self.seen.problem is None and self.seen.examples == 0)

    def seen_at(self, source: str) -> str | None:
        """Its hash; "" where what it is made of cannot be read, None where that is not there."""
        return self.seen.sha256 or ("" if (self.seen.problem or "").startswith(source) else None)

    @property
    def unread(self) -> bool:
        """It is there and cannot be read: its own problem, not that of its folder."""
        return not self.absent and (self.seen.problem or "").startswith(str(self.path))

    def describe(self) -> str:
        """With the first bad lines, and the command that opens the file at the first of them."""
        seen = f"{plural(self.seen.examples, 'example')}, {self.seen.form}, sha256 {self.seen.sha256[:12]}"
        if not self.seen.faults:
            return self.fault or self.seen.problem or f"{self.path.name} {seen}"
        lines = [f"line {number} {why}" for number, why in self.seen.faults[:_SHOWN_FAULTS]]
        more = self.seen.fault_count - len(lines)
        lines += [f"{more:,} more"] if more else []
        editor = f'"${{EDITOR:-vi}}" +{self.seen.faults[0][0]} {quoted(self.path)}'
        return f"{self.path}: {'; '.join(lines)}; to correct them there: {editor}"


async def run(context: CheckContext) -> CheckResult:
    config = context.config
    report, problem = await asyncio.to_thread(load_data_report, config)
    blocks, warns = (report.blocks, report.warns) if report is not None else (None, problem)
    findings = Findings(NAME, config)
    if blocks is not None:
        findings.overall.fault(f"{blocks}: clean the data, then make a new report")
    elif warns is not None:
        findings.overall.warn(warns)
    if config.job.kind.own_model is None:
        lacking = [node for node in config.nodes if (node.data or "").startswith(DATA_PREFIX)]
        for node in lacking:
            findings.fault(node, f"{node.name} has no whole copy of {config.job.data}: a launch brings it there")
        return findings.verdict(fix=push_fix(config, "data")) if lacking else await _check_files(context, findings)
    return findings.verdict("the data quality report has no objection")


async def _check_files(context: CheckContext, findings: Findings) -> CheckResult:
    config, settings = context.config, context.config.job.mlx_lm
    folders = {node.name: context.path(node, node.data or config.job.data or "") for node in config.nodes}
    keys, conversions = json.dumps(data_options(config)), dict[str, ConversionReport]()

    async def read(node: NodeConfig) -> list[DataFile]:
        files, agent = data_files(settings, folders[node.name]), context.agent(node)
        reply = await agent.probe("jsonl", keys, *files, result_type=JsonlSummaries, timeout_s=_READ_LIMIT_S)
        if isinstance(reply, Late):
            todo = "`flightdeck data` takes the time to convert large data on each node, once"
            raise LaunchError("the data was not read", where=node.name, why=str(reply), todo=todo)
        read = value_of(reply, node)
        if read.conversion is not None:
            conversions[node.name] = read.conversion
        answers = each_of(read.files, files, node)
        return [interpret_file(PurePosixPath(file.path or path), file, settings) for path, file in answers]

    answers = await context.on_all_nodes(read)
    findings.evidence = {name: f"{folder}: {answers[name]}" for name, folder in folders.items()}
    read_files = {name: files for name, files in answers.items() if isinstance(files, list)}
    # Where some node has sound data, the others get a copy of that.
    sound = any(all(file.fault is None for file in files) for files in read_files.values())
    for node, files in findings.answered(answers):
        fix = None if sound or node.name in conversions else _corrected_copy(files)
        splits_off = node.name in conversions and (not config.data.splits or config.data.valid is not None)
        advice = "" if splits_off else f"; [data] valid = {VALID_SHARE} splits it off"
        _check_node(files, settings, findings.on(node), fix, advice)
        folder, shapes = folders[node.name], [conversions[node.name].describe()] if node.name in conversions else []
        described = "; ".join(dict.fromkeys([*(file.describe() for file in files), *shapes]))
        findings.evidence[node.name] = described if folder in described else f"{folder}: {described}"
    faulty = {node.name for node in findings.faulty}
    complete = {name: files for name, files in read_files.items() if name not in faulty}
    if not complete:
        return findings.verdict()
    first = next(node for node in config.nodes if node.name in complete)
    ours = complete[first.name]
    conversion = conversions.get(first.name)
    findings.overall.warnings += conversion.warnings if conversion is not None else []
    await _try_rows(context, findings, first, ours)
    for node in config.nodes:
        pairs = zip(ours, complete.get(node.name, ours), strict=True)
        differing = [(one, other) for one, other in pairs if one.seen.sha256 != other.seen.sha256]
        lines = [f"{other.path.name} {other.seen.lines:,} lines against {one.seen.lines:,}" for one, other in differing]
        if lines:
            findings.fault(node, f"the data on {node.name} differs from {first.name}: {', '.join(lines)}")
    fix = _copies(findings, read_files, first, folders, converted=bool(conversions))
    read_as = f", from {conversion.describe()}" if conversion is not None else ""
    return findings.verdict(f"{_counts(ours)}, {ours[0].seen.form}{read_as}", fix=fix)


def _counts(files: Sequence[DataFile]) -> str:
    """For example "train 40, valid 4 examples"."""
    *others, last = (file for file in files if not file.absent)
    counts = [*(f"{file.path.stem} {file.seen.examples:,}" for file in others), f"{last.path.stem} "]
    return ", ".join(counts) + plural(last.seen.examples, "example")


def _copies(
    findings: Findings,
    read_files: Mapping[str, list[DataFile]],
    first: NodeConfig,
    folders: Mapping[str, str],
    *,
    converted: bool,
) -> Fix | None:
    """Copies of the data of `first` for the nodes that differ, file by file: a folder may have others of a person's
    own. What was `converted` is copied as it was, under its name."""
    source, aside, copied = PurePosixPath(folders[first.name]), list[str | None](), list[str]()
    for node in (node for node in findings.faulty if node.name in read_files):
        files, place = read_files[node.name], folders[node.name]
        folder = PurePosixPath(place)
        if converted:
            if folder.name == source.name:
                aside.append(move_aside(node, place, files[0].seen_at(place)))
                copied.append(copy_file(first, source, node, folder.parent))
            continue
        for file, ours in zip(files, read_files[first.name], strict=True):
            differs = file.unread or file.seen.sha256 not in ("", ours.seen.sha256)
            aside.append(move_aside(node, str(file.path), file.seen.sha256 if differs else None))
            if not ours.absent:
                copied.append(copy_file(first, PurePosixPath(ours.path), node, folder))
    return copies([*aside, *copied], first, source)


async def _try_rows(context: CheckContext, findings: Findings, node: NodeConfig, files: list[DataFile]) -> None:
    """Tokenise rows of `files` on a node that has them whole, and report what was counted."""
    settings, overall = context.config.job.mlx_lm, findings.overall
    warnings = row_warnings({str(file.path): file.seen.tally for file in files}, settings)
    try:
        report = await try_rows(context, node, [str(file.path) for file in files])
        overall.faults += rows_refused(report, settings)
        warnings += row_warnings(report.tallies, settings)
    except FlightDeckError as error:
        overall.warn(str(error))
    overall.warnings += [] if overall.faults else warnings


def _check_node(
    files: list[DataFile], settings: Mapping[str, Any], findings: NodeFindings, fix: Fix | None, validation: str
) -> None:
    """`files` are train, valid and test, as far as they are used. A missing valid.jsonl only warns, as long as no key
    needs it: mlx-lm then trains without validation. `fix`: it corrects them on this node. `validation`: what to do
    where it is missing."""
    train, batch_size = files[0], int(settings.get("batch_size", 1))
    needed_by = next((key for key in ("patience", "save_best") if settings.get(key)), None)
    advice = f'set data = "{train.path.parent}{_CORRECTED}"'
    for file in files:
        if file.fault is None:
            continue
        missing_validation = file.path.stem == "valid" and file.absent
        message = f"{file.fault}, and {needed_by} needs it" if missing_validation and needed_by else file.fault
        report = findings.warn if missing_validation and needed_by is None else findings.fault
        if missing_validation:
            message += validation
        elif fix:
            message += f"; the fix writes a corrected copy, then {advice}"
        report(message, None if missing_validation else fix)
    examples = train.seen.examples
    if train.fault is None and examples < batch_size:
        findings.fault(f"{train.path} has fewer examples ({examples}) than batch_size = {batch_size}")


def _corrected_copy(files: list[DataFile]) -> Fix | None:
    """A command that writes the files, converted or without their bad lines, into a folder beside theirs, which must
    not exist. None where that is not possible."""
    target = PurePosixPath(f"{files[0].path.parent}{_CORRECTED}")
    copied, corrections = list[str](), list[str]()
    for file in files:
        source, copy = quoted(file.path), quoted(target / file.path.name)
        if file.fault is None:
            copied += [] if file.absent else [f"cp {source} {copy}"]
        elif (way := WAYS.get(file.seen.foreign or "")) is not None:
            corrections.append(f"{way} < {source} > {copy}")
        elif file.cleanable:
            lines = ";".join(f"{number}d" for number, _ in file.seen.faults)
            corrections.append(f"sed '{lines}' {source} > {copy}")
        elif file.path.stem != "valid" or not file.absent:
            return None
    line = " && ".join([f"mkdir {quoted(target)}", *copied, *corrections])
    return Fix(line, f"makes {target}, and changes no other file; rm -r removes it") if corrections else None


def interpret_file(path: PurePath, summary: JsonlSummary, settings: Mapping[str, Any]) -> DataFile:
    """The file with its fault as a message."""
    if summary.problem is not None:
        unused = summary.absent and path.stem == "valid" and settings.get("val_batches") == 0
        return DataFile(path, summary, None if unused else summary.problem)
    fault = None
    if summary.examples == 0:
        fault = f"{path} is empty"
    elif summary.faults:
        number, why = summary.faults[0]
        more = summary.fault_count - 1
        fault = f"{path}: line {number} {why}" + (f", and {plural(more, 'more line')}" if more else "")
    elif settings.get("mask_prompt") and summary.form == "text":
        fault = f"{path}: {TEXT_MASKED}"
    return DataFile(path, summary, fault)


CHECK = Check(
    NAME, "train, valid and test JSONL: there, readable by mlx-lm, taken by the chat template, the same on all nodes",
    run, label="data", time_limit_s=_READ_LIMIT_S + TRIAL_LIMIT_S + 30, needs=(connectivity.NAME,), after=(sync.NAME,),
    # A command brings its own data, but a data quality report still applies.
    not_applicable=lambda config: config.job.kind.own_model if config.job.data_quality_report is None else None,
)  # fmt: skip


_INSPECT_LIMIT_S = 3600.0
"""For a large source, which is converted first."""
_SPLITS = ("train", "valid", "test")


class DataInspection(FrozenModel):
    node: str
    source: str
    conversion: ConversionReport | None
    """None for a folder that is mlx-lm's."""
    files: dict[str, JsonlSummary]
    """By split."""
    lengths: dict[str, dict[int, int]]
    """Split → tokens → rows, of all or of some from the whole file; none without a model."""
    rows: tuple[ShownRow, ...]
    warnings: tuple[str, ...]
    faults: tuple[str, ...]


async def inspect_data(context: CheckContext, shown: int) -> DataInspection:
    """As the first node has it, with so many rows. Raises InputError, LaunchError, NodeUnreachable."""
    node, job = context.config.nodes[0], context.config.job
    if (why := job.kind.own_model) is not None:
        raise InputError("there is no data to look at", why=why)
    source, keys = context.path(node, node.data or job.data or ""), json.dumps(data_options(context.config))
    if source.startswith(DATA_PREFIX):
        fix = push_fix(context.config, "data") if context.config.file is not None else None
        command = fix.command if fix is not None else f"hf download --repo-type dataset {source[len(DATA_PREFIX) :]}"
        raise InputError(f"{node.name} has no whole copy of {source}", todo=f"`{command}` brings it there")
    asked = [f"{source}/{name}.jsonl" for name in _SPLITS]
    read = await context.probe(node, "jsonl", keys, *asked, result_type=JsonlSummaries, timeout_s=_INSPECT_LIMIT_S)
    answers = each_of(read.files, asked, node)
    files = [interpret_file(PurePosixPath(file.path or path), file, job.mlx_lm) for path, file in answers]
    faults = [file.describe() for file in files if file.fault and (file.path.stem == "train" or not file.absent)]
    present = {file.path.stem: file for file in files if not file.absent and not faults}
    warnings = list[str]()
    if read.conversion is not None:
        warnings = [*read.conversion.warnings, *await _convert_elsewhere(context)]
    warnings += row_warnings({str(file.path): file.seen.tally for file in present.values()}, job.mlx_lm)
    lengths, rows = dict[str, dict[int, int]](), RowsReport(rows=[])
    model, unmeasured = await _model_there(context, node)
    warnings += [unmeasured] if unmeasured else []
    if present and model:
        try:
            report = await try_rows(context, node, [f"{source}/{name}.jsonl" for name in present])
        except InputError as untried:
            # The rows are shown as they are.
            report, model = TemplateReport(refused=[]), ""
            warnings.append(str(untried))
        warnings += row_warnings(report.tallies, job.mlx_lm)
        lengths = {PurePosixPath(name).stem: tokens for name, tokens in report.lengths.items()}
        faults = rows_refused(report, job.mlx_lm)
    if present:
        arguments = (model, row_settings(context), str(shown), asked[0])
        rows = await context.probe(node, "rows", *arguments, result_type=RowsReport, timeout_s=_INSPECT_LIMIT_S)
        faults += [rows.problem] if rows.problem is not None else []
    return DataInspection(
        node=node.name,
        source=source,
        conversion=read.conversion,
        files={name: file.seen for name, file in present.items()},
        lengths=lengths,
        rows=tuple(rows.rows),
        warnings=tuple(warnings),
        faults=tuple(dict.fromkeys(faults)),
    )


async def _model_there(context: CheckContext, node: NodeConfig) -> tuple[str, str]:
    """The job's model as the node has it, and why no tokens are counted where it has none."""
    job, hub = context.config.job, hub_names(context.config).get("model")
    model = context.path(node, node.model or job.model) if job.model is not None else ""
    if hub is None or not takes(context.config, "model", node):
        return model, ""
    there = await copies_of(context.agent(node), [hub], (), [model])
    absent = f"{hub} is not on {node.name} yet: a launch brings it there"
    return (model, "") if there.present else ("", f"no tokens are counted: {there.problem or absent}")


async def _convert_elsewhere(context: CheckContext) -> list[str]:
    """On the other nodes, so that a preflight has the time for data that is large; why some could not."""
    keys, job = json.dumps(data_options(context.config)), context.config.job

    async def convert(node: NodeConfig) -> ExampleCount:
        path = f"{context.path(node, node.data or job.data or '')}/train.jsonl"
        return await context.probe(node, "examples", path, keys, result_type=ExampleCount, timeout_s=_INSPECT_LIMIT_S)

    answers = await context.on_all_nodes(convert, context.config.nodes[1:])
    problems = {name: str(one) if isinstance(one, FlightDeckError) else one.problem for name, one in answers.items()}
    return [f"not converted on {name}: {problem}" for name, problem in problems.items() if problem]


async def copy_data(context: CheckContext, inspection: DataInspection, folder: Path) -> None:
    """The files in a folder of this machine, which is made; none is overwritten. Raises InputError, OSError,
    LaunchError, NodeUnreachable, FileDiffers."""
    node = context.config.nodes[0]
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    for name, file in inspection.files.items():
        path = folder / f"{name}.jsonl"
        if path.exists():
            raise InputError(f"{path} is there already", todo="name another folder, or remove it")
        there = file.path or f"{inspection.source}/{path.name}"
        source = ResultFile("data", False, 0, node.name, there, path.name, file.bytes, file.sha256)
        part = path.with_name(f".{path.name}.part")
        await FileCopy(context.agent(node), source, part, 60.0, lambda _: None, lambda _: None).run()
        part.replace(path)
