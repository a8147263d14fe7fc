"""The metrics that a keeper would read from a program's output, tried on a log that there is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
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
class MetricsTrial(EventWriter):
    """The metrics of `output`, lines of a rank's; `pattern`: the job's own, if it has one."""

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
