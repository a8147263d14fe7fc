"""A job's data as a node reads it: files, lengths, and rows as the model sees them; and a copy of it here."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path, PurePosixPath

from engine.checks.context import CheckContext
from engine.checks.dataset import interpret_file
from engine.checks.obstacles import data_options, row_settings, row_warnings, rows_refused, try_rows
from engine.cluster.agent_client import each_of
from engine.cluster.file_copy import FileCopy
from engine.cluster.probe_results import (
    ConversionReport,
    ExampleCount,
    JsonlSummaries,
    JsonlSummary,
    RowsReport,
    ShownRow,
)
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, InputError
from engine.models import FrozenModel
from engine.snapshots import ResultFile

_LIMIT_S = 3600.0
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
    asked = [f"{source}/{name}.jsonl" for name in _SPLITS]
    read = await context.probe(node, "jsonl", keys, *asked, result_type=JsonlSummaries, timeout_s=_LIMIT_S)
    answers = each_of(read.files, asked, node)
    files = [interpret_file(PurePosixPath(file.path or path), file, job.mlx_lm) for path, file in answers]
    faults = [file.describe() for file in files if file.fault and (file.path.stem == "train" or not file.absent)]
    present = {file.path.stem: file for file in files if not file.absent and not faults}
    warnings = list[str]()
    if read.conversion is not None:
        warnings = [*read.conversion.warnings, *await _convert_elsewhere(context)]
    warnings += row_warnings({str(file.path): file.seen.tally for file in present.values()}, job.mlx_lm)
    lengths, rows = dict[str, dict[int, int]](), RowsReport(rows=[])
    model = context.path(node, node.model or job.model) if job.model is not None else ""
    if present and model:
        report = await try_rows(context, node, [f"{source}/{name}.jsonl" for name in present])
        warnings += row_warnings(report.tallies, job.mlx_lm)
        lengths = {PurePosixPath(name).stem: tokens for name, tokens in report.lengths.items()}
        faults = rows_refused(report, job.mlx_lm)
    if present:
        arguments = (model, row_settings(context), str(shown), asked[0])
        rows = await context.probe(node, "rows", *arguments, result_type=RowsReport, timeout_s=_LIMIT_S)
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


async def _convert_elsewhere(context: CheckContext) -> list[str]:
    """On the other nodes, so that a preflight has the time for data that is large; why some could not."""
    keys, job = json.dumps(data_options(context.config)), context.config.job

    async def convert(node: NodeConfig) -> ExampleCount:
        path = f"{context.path(node, node.data or job.data or '')}/train.jsonl"
        return await context.probe(node, "examples", path, keys, result_type=ExampleCount, timeout_s=_LIMIT_S)

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
