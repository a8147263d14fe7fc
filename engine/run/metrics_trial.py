"""The metrics that a keeper would read from a program's output, tried on a log that there is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.node.script_metrics import PrintedMetrics
from engine.protocol.events import EventWriter
from engine.security.redact import redact
from engine.security.sanitise import sanitise

_KINDS = {"report": "train", "validation": "val"}
_SPEAKS_OF_LOSS = re.compile(rb"(?i)loss[^\n]{0,80}\d")
_UNREAD_LIMIT = 5
_UNREAD_LENGTH = 160


@dataclass
class MetricsTrial:
    lines: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)
    """In order, as mlx-lm names the figures, with the `line` at which each is known, the form that it was `read_as`,
    and its `kind`, train or val."""
    unread: list[str] = field(default_factory=list)
    """The first lines that speak of a loss and give none."""


class _Collector(EventWriter):
    def __init__(self, trial: MetricsTrial, pattern: str | None) -> None:
        super().__init__(None, 0, 1)
        self._trial = trial
        # When the lines came is not known, so there is no pace.
        self.metrics = PrintedMetrics(self, elastic=False, pattern=pattern, clock=lambda: 0.0)

    def write(self, event: str, **fields: Any) -> None:
        if event in _KINDS:
            place = {"line": self._trial.lines, "read_as": self.metrics.read_as, "kind": _KINDS[event]}
            self._trial.reports.append({**place, **fields})


def try_metrics(output: Iterable[bytes], pattern: str | None) -> MetricsTrial:
    """`output`: lines of a rank's. `pattern`: the job's own, if it has one."""
    trial = MetricsTrial()
    metrics = _Collector(trial, pattern).metrics
    for line in output:
        trial.lines += 1
        before = metrics.reads
        metrics.feed(line)
        if metrics.reads == before and len(trial.unread) < _UNREAD_LIMIT and _SPEAKS_OF_LOSS.search(line):
            trial.unread.append(f"line {trial.lines}: {redact(sanitise(line, _UNREAD_LENGTH)).strip()}")
    metrics.finish()
    return trial
