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
        found = engine.calibrations.latest_scaling(config)
    else:
        measured: list[Scaling] = []
        try:
            asyncio.run(_measure(engine, config, options, measured))
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        found = measured[-1] if measured else None
    if options.csv is not None and found is not None:
        _write_csv(options.csv, found)
    if options.json:
        shown = found.model_dump(mode="json") if found is not None else {}
        rows = figures(found) if found is not None else []
        print_json(shown | {"points": rows, "stops_paying": found.stops_paying if found is not None else None})
    elif found is not None and options.csv != _STDOUT:
        _print(Lines(), found)
    elif found is None and code is None:
        Lines().say("no scaling is known: this job has not been measured over these nodes as they are now")
    if code is None:
        return ExitCode.OK if found is not None and not problems(found) else ExitCode.FAILED
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


def _print(lines: Lines, found: Scaling) -> None:
    lines.say(f"{found.cluster}, {found.job}: measured {ago(found.taken_at, datetime.now(UTC))}, {subject(found)}")
    if found.measured:
        lines.say(table([header.upper() for header in HEADERS], [row(found, point) for point in found.points]))
    for ranks, why in problems(found):
        lines.say(f"{lines.ink('not measured', 'red')}: {ranks}: {why}")
    if found.measured:
        for note in remarks(found):
            lines.say(f"note: {note}")
        lines.say(verdict(found))


def _write_csv(path: Path, found: Scaling) -> None:
    with _opened(path, "w") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(values | {"nodes": " ".join(values["nodes"])} for values in figures(found))


@contextlib.contextmanager
def _opened(path: Path, mode: str) -> Iterator[IO[str]]:
    """Raises InputError."""
    try:
        with contextlib.nullcontext(sys.stdout) if path == _STDOUT else path.open(mode, newline="") as file:
            yield file
    except OSError as error:
        raise InputError("the CSV cannot be written", where=str(path), why=error) from error
