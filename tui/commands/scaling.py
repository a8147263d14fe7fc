"""calibrate --scaling: the job's real steps over 1, 2, … ranks, as a table, one JSON document, and CSV."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import sys
from collections.abc import Iterator
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from engine.api import Config, Engine, ExitCode, Scaling
from engine.errors import InputError
from tui.commands.progress import ProgressLines
from tui.commands.terminal import Lines, print_json
from tui.formatting import ago, table
from tui.scaling_text import COLUMNS, HEADERS, figures, problems, remarks, row, subject, verdict

_STDOUT = Path("-")
"""For the CSV, in place of the table."""


def scaling(options: argparse.Namespace, engine: Engine, config: Config) -> int:
    """Measure, or show what was measured last; 1 when a number of ranks could not be measured, or nothing is stored,
    130 when interrupted, with what there is so far. Raises InputError."""
    if options.json and options.csv == _STDOUT:
        raise InputError("--csv - and --json both print to stdout", todo="name a file for the CSV")
    if options.csv is not None and not options.show:
        # Before minutes of measuring.
        new = not options.csv.exists()
        with _opened(options.csv, "a"):
            pass
        if new:
            options.csv.unlink(missing_ok=True)
    code: int | None = None
    if options.show:
        latest = engine.calibrations.latest_scaling(config)
    else:
        measured: list[Scaling] = []
        try:
            asyncio.run(_measure(engine, config, options, measured))
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        latest = measured[-1] if measured else None
    if options.csv is not None and latest is not None:
        _write_csv(options.csv, latest)
    if options.json:
        shown = latest.model_dump(mode="json") if latest is not None else {}
        rows = figures(latest) if latest is not None else []
        print_json(shown | {"points": rows, "stops_paying": latest.stops_paying if latest is not None else None})
    elif latest is not None and options.csv != _STDOUT:
        _print(Lines(), latest)
    elif latest is None and code is None:
        Lines().say("no scaling is known: this job has not been measured over these nodes as they are now")
    if code is None:
        return ExitCode.OK if latest is not None and not problems(latest) else ExitCode.FAILED
    return code


async def _measure(engine: Engine, config: Config, options: argparse.Namespace, measured: list[Scaling]) -> None:
    """The scaling after each number of ranks is added to `measured`."""
    progress = ProgressLines(Lines(sys.stderr))
    async with engine:
        steps = engine.calibrations.measure_scaling(config, quick=options.quick, per_rank_batch=options.per_rank_batch)
        async with aclosing(steps):
            async for step in steps:
                if isinstance(step, Scaling):
                    measured.append(step)
                else:
                    progress.update(step)


def _print(lines: Lines, scaling: Scaling) -> None:
    lines.say(
        f"{scaling.cluster}, {scaling.job}: measured {ago(scaling.taken_at, datetime.now(UTC))}, {subject(scaling)}"
    )
    if scaling.measured:
        lines.say(table([header.upper() for header in HEADERS], [row(scaling, point) for point in scaling.points]))
    for ranks, why in problems(scaling):
        lines.say(f"{lines.ink('not measured', 'red')}: {ranks}: {why}")
    if scaling.measured:
        for note in remarks(scaling):
            lines.say(f"note: {note}")
        lines.say(verdict(scaling))


def _write_csv(path: Path, scaling: Scaling) -> None:
    with _opened(path, "w") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(values | {"nodes": " ".join(values["nodes"])} for values in figures(scaling))


@contextlib.contextmanager
def _opened(path: Path, mode: str) -> Iterator[IO[str]]:
    """Raises InputError."""
    try:
        with contextlib.nullcontext(sys.stdout) if path == _STDOUT else path.open(mode, newline="") as file:
            yield file
    except OSError as error:
        raise InputError("the CSV cannot be written", where=str(path), why=error) from error
