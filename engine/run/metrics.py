"""The loss and throughput of a run as points for a plot, bounded however long the run becomes; and a trial of the
metrics that are read from a program's output."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from engine.node.script_metrics import PrintedMetrics
from engine.protocol.attempt import size_of
from engine.protocol.events import EventWriter
from engine.run.json_lines import LineTail, parse_json_line
from engine.security.redact import redact
from engine.security.sanitise import count_or_none, finite_or_none, number_or_none, plain, sanitise
from engine.snapshots import Series, SeriesMark

_MOST_FIGURES = 200
_NAME_LIMIT = 100
_NUMBERS = frozenset({int, float, type(None)})


def figures(report: Mapping[str, Any], without: Collection[str]) -> dict[str, int | float | None]:
    """The numbers of a report under their names, None for one that is not finite; nothing else, whatever a node or a
    program of the user's own has written there."""
    named = [(plain(name, _NAME_LIMIT), value) for name, value in report.items() if name not in without]
    return {name: number_or_none(value) for name, value in named[:_MOST_FIGURES] if type(value) in _NUMBERS}


POINT_LIMIT = 20_000
"""Points kept of one curve; above it they are thinned to half, the lowest and the highest of each four kept."""
_RECENT = 5
_REPORT = b'{"kind": "train", "attempt": '
"""How a report's row begins; the attempt's number follows."""
_MOST_PARSED = 5000
Point = tuple[int, float]
_y = itemgetter(1)


class Curve:
    """Points in ascending x, at most POINT_LIMIT of them."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.not_finite: tuple[int, int] | None = None
        """x of the first and of the last of the newest values, where all of them are no points."""

    def add(self, x: int, y: Any) -> None:
        """Append a point; what is not a finite number is no point. Going back in x (a restart) drops what was there."""
        if (value := finite_or_none(y)) is None:
            self.not_finite = (self.not_finite or (x,))[0], x
            return
        self.not_finite = None
        while self.points and self.points[-1][0] >= x:
            self.points.pop()
        self.points.append((x, value))
        if len(self.points) > POINT_LIMIT:
            first, *between, newest = self.points
            fours = (between[place : place + 4] for place in range(0, len(between), 4))
            extremes = [sorted({min(four, key=_y), max(four, key=_y)}) for four in fours]
            self.points = [first, *chain(*extremes), newest]

    @property
    def last(self) -> float | None:
        return self.points[-1][1] if self.points else None


class MetricsSeries:
    """The series of a metrics.jsonl that grows. Takes its rows in order."""

    def __init__(self, path: Path) -> None:
        self.damaged = 0
        """Lines that are no rows."""
        self.tail = LineTail(path)
        self.train, self.val, self.tokens_per_second = Curve(), Curve(), Curve()
        self.iteration: int | None = None
        self.iterations: int | None = None
        """The last one of the training, where a command prints it."""
        self.learning_rate: float | None = None
        self.test_loss: float | None = None
        self.trained_tokens: int | None = None
        self._speeds: deque[float] = deque(maxlen=_RECENT)
        self._restarts: list[SeriesMark] = []
        self._attempt: int | None = None
        self._built: Series | None = None
        self._marked: tuple[int, ...] = ()

    def poll(self) -> None:
        """Take the new rows; of a long history of reports about _MOST_PARSED, the last ones and the first of each
        attempt. Raises StateError when the file cannot be read."""
        gap = max(0, (size_of(self.tail.path) or 0) - self.tail.offset) // _MOST_PARSED
        place, due, before, passed = 0, 0, b"", deque[bytes](maxlen=_RECENT)
        for line in self.tail.lines():
            place += len(line) + 1
            start = line[: line.find(b",", len(_REPORT))]
            if place < due and start == before and line.endswith(b"}"):
                passed.append(line)
                continue
            if line.startswith(_REPORT):
                if start != before:
                    self._take(*passed)
                passed.clear()
                before, due = start, place + gap
            self._take(line)
        self._take(*passed)

    def _take(self, *lines: bytes) -> None:
        for line in lines:
            if (row := parse_json_line(line)) is not None:
                self.add(row)
            elif line.strip():
                self.damaged += 1

    def add(self, row: dict[str, Any]) -> None:
        """One row: `kind` train, val or test, mlx-lm's names, `attempt`."""
        iteration = count_or_none(row.get("iteration"))
        if iteration is None:
            return
        self._built = None
        attempt = row.get("attempt")
        if isinstance(attempt, int):
            if self._attempt is not None and attempt > self._attempt:
                self._restarts.append(SeriesMark(iteration, "restart"))
                self._speeds.clear()
                self.train.not_finite = None
            self._attempt = attempt
        if row.get("kind") == "val":
            self.val.add(iteration, row.get("val_loss"))
            return
        if row.get("kind") == "test":
            self.test_loss = finite_or_none(row.get("test_loss"))
            return
        self.iteration = iteration
        self.iterations = count_or_none(row.get("iterations")) or self.iterations
        if "train_loss" in row:
            self.train.add(iteration, row["train_loss"])
        self.tokens_per_second.add(iteration, row.get("tokens_per_second"))
        self.learning_rate = finite_or_none(row.get("learning_rate"))
        self.trained_tokens = count_or_none(row.get("trained_tokens")) or self.trained_tokens
        speed = finite_or_none(row.get("iterations_per_second"))
        if speed is not None and speed > 0:
            self._speeds.append(speed)

    def seconds_left(self, iteration: int | None, iterations: int | None) -> float | None:
        """Time to the last iteration at the pace of the recent reports; validation is not in that pace."""
        if not self._speeds or iteration is None or iterations is None:
            return None
        left = finite_or_none(max(0, iterations - iteration))
        return finite_or_none(left and left * sum(1 / speed for speed in self._speeds) / len(self._speeds))

    def build(self, checkpoints: list[int]) -> Series:
        """The same object until something has changed."""
        marked = tuple(checkpoints)
        if self._built is None or marked != self._marked:
            self._marked = marked
            # What a task has saved is of no iteration.
            marks = [SeriesMark(iteration, "checkpoint") for iteration in marked if iteration] + self._restarts
            self._built = Series(
                tuple(self.train.points),
                tuple(self.val.points),
                tuple(self.tokens_per_second.points),
                tuple(sorted(marks, key=lambda mark: mark.iteration)),
                self.train.not_finite,
            )
        return self._built


_KINDS = {"report": "train", "validation": "val"}
_SPEAKS_OF_LOSS = re.compile(rb"(?i)loss[^\n]{0,80}\d")
_UNREAD_LIMIT = 5
_UNREAD_LENGTH = 160


@dataclass
class MetricsTrial(EventWriter):
    """The metrics that a keeper would read from `output`, the lines of a rank, with the job's own `pattern`, if any."""

    output: InitVar[Iterable[bytes]]
    pattern: InitVar[str | None]
    lines: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)
    """In order, as mlx-lm names the figures, with the `line` at which each is known, the form that it was `read_as`,
    and its `kind`, train or val."""
    unread: list[str] = field(default_factory=list)
    """The first lines that speak of a loss and give none."""

    def __post_init__(self, output: Iterable[bytes], pattern: str | None) -> None:
        super().__init__(None, 0, 1)
        # When the lines came is not known, so there is no pace.
        self._metrics = PrintedMetrics(self, elastic=False, pattern=pattern, clock=lambda: 0.0)
        for self.lines, line in enumerate(output, 1):
            before = self._metrics.reads
            # The last one of a log may have no end.
            self._metrics.feed(line.rstrip(b"\n") + b"\n")
            if self._metrics.reads == before and len(self.unread) < _UNREAD_LIMIT and _SPEAKS_OF_LOSS.search(line):
                self.unread.append(f"line {self.lines}: {redact(sanitise(line, _UNREAD_LENGTH)).strip()}")
        self._metrics.finish()

    def write(self, event: str, **fields: Any) -> None:
        if event in _KINDS:
            place = {"line": self.lines, "read_as": self._metrics.read_as, "kind": _KINDS[event]}
            self.reports.append({**place, **fields})
