"""Says from a run's logs what went wrong first, and what to do about it: the cause, not what followed from it."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from engine.errors import StateError
from engine.events import Diagnosis
from engine.models import RunRecord
from engine.runs.journal import read_journal, replay
from engine.runs.layout import LAUNCHER_SOURCE, RunDir
from engine.runs.line_index import LineIndex
from engine.runs.log_reader import LogReader
from engine.runs.signatures import ERRNO_WORDS, SIGNATURES, Kind, Signature
from engine.security.sanitise import sanitise

TAIL_BYTES = 512 * 1024
"""Of each log, read from its end."""
_LINE_CHARACTERS = 2_000
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+(?P<error>\S.*)", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """What one line says."""

    kind: Kind
    cause: str
    fix: str | None
    line: int
    """Its place among the lines that were read."""
    exception: bool = False
    """A Python exception that no signature knows."""


def findings(lines: Iterable[str]) -> list[Finding]:
    """What is known in `lines` (sanitised text), each signature at its first place, in the order of the lines."""
    texts = list(lines)
    text = "\n".join(texts) + "\n"
    starts = [0, *accumulate(len(line) + 1 for line in texts)]
    found = []
    explained: set[int] = set()
    for signature in SIGNATURES:
        match = re.search(signature.pattern, text)
        line = -1 if match is None else bisect_right(starts, match.start()) - 1
        if match is not None and line not in explained:
            explained.add(line)
            found.append(Finding(signature.kind, *_told(signature, match), line))
    for match in _TRACEBACK.finditer(text):
        line = bisect_right(starts, match.start("error")) - 1
        if line not in explained:
            found.append(Finding(Kind.CAUSE, match["error"], None, line, exception=True))
    return sorted(found, key=lambda finding: finding.line)


def explain(lines: Iterable[str]) -> tuple[str, str | None] | None:
    """(cause, fix) of what went wrong first in these lines of one log; None when nothing in them is known."""
    best = min(findings(lines), key=_in_one_log, default=None)
    return None if best is None or best.kind is Kind.REMARK else (best.cause, best.fix)


def diagnose(run_dir: RunDir) -> Diagnosis | None:
    """What ended this run's last attempt, from its journal and the ends of its logs. None when nothing says it.

    The rank that the journal names is asked first, then the launcher; what other ranks say is believed only when the
    journal names nobody.
    """
    journal = read_journal(run_dir.journal)
    record = _record(journal)
    bases, hosts = _bases(journal), _hosts(journal)
    logs = {source: _Tail(run_dir, source, bases.get(source, 0)) for source in LogReader(run_dir).sources()}
    culprit = record.rank if record is not None else None
    asked = [source for source in (culprit, LAUNCHER_SOURCE) if source in logs] if culprit is not None else list(logs)
    best = min((found for source in asked if (found := logs[source].best())), key=_Found.order, default=None)
    if culprit is not None and best is not None and best.finding.kind is not Kind.CAUSE:
        best = None
    if best is not None:
        rank = culprit if best.source == LAUNCHER_SOURCE else best.source
        host = hosts.get(rank) if rank is not None else None
        cause, fix = best.finding.cause, best.finding.fix
        if fix is None and record is not None:
            fix = record.fix
        return Diagnosis(cause, fix, rank, host, best.source, best.offset)
    if record is None or record.cause is None:
        return None
    log = logs.get(culprit) if culprit is not None else None
    last = log.last_offset() if log is not None else None
    source = culprit if last is not None else None
    return Diagnosis(record.cause, record.fix, record.rank, record.host, source, last)


@dataclass(frozen=True)
class _Found:
    source: int
    offset: int
    at: int
    finding: Finding

    def order(self) -> tuple[int, bool, int, int]:
        return (self.finding.kind, self.finding.exception, self.at, self.source)


class _Tail:
    """The end of one log, of its last attempt alone."""

    def __init__(self, run_dir: RunDir, source: int, base: int) -> None:
        self._source = source
        self._index = LineIndex(run_dir.index(source))
        with run_dir.log(source).open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            start = max(base, size - TAIL_BYTES)
            log.seek(start)
            lines = log.read(size - start).split(b"\n")
        self._offsets = [start, *(start + length for length in accumulate(len(line) + 1 for line in lines))]
        self._lines = [sanitise(line, _LINE_CHARACTERS) for line in lines]

    def best(self) -> _Found | None:
        """The most telling line, the earliest of its kind."""
        finding = min(findings(self._lines), key=_in_one_log, default=None)
        if finding is None or finding.kind is Kind.REMARK:
            return None
        offset = self._offsets[finding.line]
        line = self._index.line_at(offset)
        entries = self._index.entries(line, line + 1)
        return _Found(self._source, offset, entries[0].centiseconds if entries else 0, finding)

    def last_offset(self) -> int | None:
        """Where the last line that says anything begins."""
        spoken = (place for place in range(len(self._lines) - 1, -1, -1) if self._lines[place].strip())
        place = next(spoken, None)
        return None if place is None else self._offsets[place]


def _in_one_log(finding: Finding) -> tuple[int, bool, int]:
    # Of exceptions the last one is what ended the program; of known causes the first.
    return (finding.kind, finding.exception, -finding.line if finding.exception else finding.line)


def _told(signature: Signature, match: re.Match[str]) -> tuple[str, str]:
    words = {name: value or "" for name, value in match.groupdict().items()}
    if "errno" in words:
        words["errno"] = f"{ERRNO_WORDS.get(words['errno'], 'unknown')} (error {words['errno']})"
    return signature.cause.format(**words), signature.fix.format(**words)


def _record(journal: list[dict[str, Any]]) -> RunRecord | None:
    try:
        return replay(journal)
    except StateError:
        return None


def _bases(journal: list[dict[str, Any]]) -> dict[int, int]:
    attempts = [entry for entry in journal if entry["event"] == "attempt"]
    bases = (attempts[-1].get("log_bases") or {}) if attempts else {}
    return {int(source): int(base) for source, base in bases.items()}


def _hosts(journal: list[dict[str, Any]]) -> dict[int, str]:
    started = (entry for entry in journal if entry["event"] in ("rank_started", "rank_ended"))
    return {int(entry["rank"]): str(entry["host"]) for entry in started if entry.get("host") is not None}
