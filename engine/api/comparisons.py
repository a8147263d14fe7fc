"""Runs beside one another: what differs and why, and their metrics for other programs."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TextIO

from engine.api.runs import RunsApi
from engine.api.session import Session
from engine.errors import InputError, StateError
from engine.protocol.attempt import open_regular, replacing
from engine.run.compare import ComparedRun, Comparison, compare
from engine.run.journal import read_history
from engine.run.json_lines import LineTail
from engine.run.metrics import figures
from engine.run.run_plan import read_plan
from engine.run.tracker import write_tensorboard
from engine.security.sanitise import plain
from engine.store.layout import RunDir

ExportFormat = Literal["csv", "jsonl", "tensorboard"]
MOST_COMPARED = 50
_HEAT = re.compile(rb'"node": "([^"]{1,60})"[^\n]*"thermal": "([^"]{1,40})"')
_BLOCK_BYTES = 1 << 22


class ComparisonsApi:
    def __init__(self, session: Session, runs: RunsApi) -> None:
        self._session = session
        self._runs = runs

    def compare(self, runs: Sequence[str]) -> Comparison:
        """Blocking. Raises RunNotFound, StateError, InputError for fewer than two runs."""
        directories = list({(directory := self._runs.find(run)).id: directory for run in runs}.values())
        if not 2 <= len(directories) <= MOST_COMPARED:
            raise InputError("there is nothing to compare", why=f"it takes 2 to {MOST_COMPARED} runs")
        # Each reading of the state is of all of it, whatever is asked for.
        chips = cache(self._chips)
        return compare([self._compared(directory, chips) for directory in directories])

    def _chips(self, cluster: str) -> dict[str, str]:
        return {facts.node: facts.chip for facts in self._session.store.last_facts(cluster) if facts.chip}

    def _compared(self, directory: RunDir, chips: Callable[[str], dict[str, str]]) -> ComparedRun:
        plan, history = read_plan(directory.plan), read_history(directory)
        listed = self._runs.listed(directory.id)
        record = history.record.model_copy(update={"tags": listed.tags, "note": listed.note})
        series = self._runs.series(directory.id)
        try:
            series.refresh(ended=record.state.ended)
        except OSError as error:
            raise StateError("its series cannot be read", where=directory.id, why=error) from error
        return ComparedRun(
            record=record,
            plan=plan,
            history=history,
            series=series.figures(),
            chips=chips(plan.config.cluster.name),
            throttled=_throttled(directory.telemetry),
        )

    def export(
        self,
        runs: Sequence[str],
        format: ExportFormat,
        *,
        folder: Path | None = None,
        output: TextIO | Path | None = None,
    ) -> list[str]:
        """Write the reports of the runs, each with its run: as rows to `output`, or for TensorBoard to a folder of each
        below `folder`. A file that is there already stays until the new one is whole. The ids. Blocking. Raises
        RunNotFound, InputError, StateError, OSError."""
        directories = [self._runs.find_trained(run) for run in runs]
        if output is not None:
            with _writable(output) as file:
                _write_rows(directories, format, file)
        elif folder is not None:
            for directory in directories:
                write_tensorboard(directory, folder / directory.id)
        return [directory.id for directory in directories]


@contextlib.contextmanager
def _writable(output: TextIO | Path) -> Iterator[TextIO]:
    if not isinstance(output, Path):
        yield output
    elif output.exists() and not output.is_file():
        # A device or a pipe.
        with output.open("w", encoding="utf-8") as file:
            yield file
    else:
        with replacing(output.resolve()) as binary:
            text = io.TextIOWrapper(binary, encoding="utf-8")
            yield text
            text.detach()


def _rows(directories: Iterable[RunDir]) -> Iterator[dict[str, Any]]:
    for directory in directories:
        for row in LineTail(directory.metrics).objects():
            about: dict[str, Any] = {name: plain(row[name], 100) for name in ("kind", "attempt", "at") if name in row}
            yield {"run": directory.id, **about, **figures(row, about)}


def _write_rows(directories: Sequence[RunDir], format: ExportFormat, output: TextIO) -> None:
    if format == "jsonl":
        for row in _rows(directories):
            output.write(json.dumps(row) + "\n")
        return
    # Their names first: runs report different figures, and not all at once fit into memory. A run that goes on may
    # report another one by the second reading.
    names = dict.fromkeys(name for row in _rows(directories) for name in row)
    writer = csv.DictWriter(output, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(_rows(directories))


def _throttled(telemetry: Path) -> Mapping[str, tuple[str, float]]:
    """ComparedRun.throttled."""
    samples = Counter[tuple[bytes, bytes]]()
    try:
        with open_regular(telemetry) as file:
            rest = b""
            while block := file.read(_BLOCK_BYTES):
                whole, _, rest = (rest + block).rpartition(b"\n")
                samples.update(_HEAT.findall(whole))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StateError("the telemetry cannot be read", where=str(telemetry), why=error) from error
    throttled = {}
    for node in dict.fromkeys(node for node, _ in samples):
        counts = {pressure: count for (where, pressure), count in samples.items() if where == node}
        hot = {pressure: count for pressure, count in counts.items() if pressure != b"nominal"}
        if hot:
            worst = max(hot, key=lambda pressure: hot[pressure]).decode(errors="replace")
            throttled[node.decode(errors="replace")] = plain(worst, 40), sum(hot.values()) / sum(counts.values())
    return throttled
