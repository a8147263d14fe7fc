"""Finds the cause of a failure and its fix in a run's logs: which known text, or which exception, explains the end. Of
each log only the head and the tail are read. What lines mean: engine.failures.explanation."""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Final

from engine.errors import StateError
from engine.failures.explanation import Finding, explain
from engine.failures.signature import SignatureKind
from engine.failures.signatures import BY_ID
from engine.models import Reason, RunRecord
from engine.protocol.attempt import open_regular
from engine.run.events import Verdict
from engine.run.history import RunHistory
from engine.run.journal import read_history
from engine.run.logs.line_index import LogIndex
from engine.run.run_plan import redactor_of
from engine.security.sanitise import sanitise
from engine.snapshots import Diagnosis
from engine.store.layout import LAUNCHER_SOURCE, RunDir

HEAD_BYTES: Final = 64 * 1024
"""From the attempt's beginning: a failure at the start may be followed by any amount of noise."""
TAIL_BYTES: Final = 512 * 1024
"""From the log's end."""
LINE_BYTES: Final = 4096
"""The most of one line, half from its beginning and half from its end: an error may follow on a line of dots."""


@dataclass(frozen=True)
class LogEnds:
    """Lines of one log, with what lies between its head and its tail left out."""

    lines: list[str]
    """Sanitised. A line that the tail begins in the middle of is there from that place on."""
    offsets: list[int]
    """Where each begins in the log's file, bytes."""

    @classmethod
    def of(cls, path: Path, base: int) -> LogEnds:
        """The ends of a log from offset `base` on. A log that cannot be read is empty."""
        try:
            with open_regular(path) as log:
                size = os.fstat(log.fileno()).st_size
                split = max(base, min(base + HEAD_BYTES, size - TAIL_BYTES))
                log.seek(base)
                head = _lines(log.read(split - base), base)
                start = max(split, size - TAIL_BYTES)
                log.seek(start)
                tail = _lines(log.read(TAIL_BYTES), start)
        except OSError:
            return cls([], [])
        kept = [*head, *tail]
        return cls([_text(line) for _, line in kept], [offset for offset, _ in kept])

    @property
    def last_spoken(self) -> int | None:
        """Offset of the last line that is not blank."""
        pairs = zip(reversed(self.offsets), reversed(self.lines), strict=True)
        return next((offset for offset, line in pairs if line.strip()), None)


def _lines(block: bytes, start: int) -> list[tuple[int, bytes]]:
    lines = block.removesuffix(b"\n").split(b"\n") if block else []
    return list(zip(accumulate((len(line) + 1 for line in lines), initial=start), lines, strict=False))


def _text(line: bytes) -> str:
    if len(line) > LINE_BYTES:
        line = line[: LINE_BYTES // 2] + b" \xe2\x80\xa6 " + line[-LINE_BYTES // 2 :]
    return sanitise(line)


_CRASHES: Final = frozenset({signals.SIGABRT, signals.SIGSEGV, signals.SIGBUS, signals.SIGFPE, signals.SIGILL})
"""Signals by which a program ends itself; its own output does not explain those from outside."""
Ending = RunRecord | Verdict
"""How a run or an attempt ended."""


def diagnose(run_dir: RunDir) -> Diagnosis | None:
    """The first cause of this run's end, from its journal and the ends of its logs; None when it is not known."""
    hosts: dict[int | None, str] = {}
    try:
        history = read_history(run_dir)
    except StateError:
        diagnosis = first_cause(run_dir, None, {})
    else:
        hosts = {rank: node for attempt in history.attempts for rank, node in attempt.hosts.items()}
        diagnosis = first_cause(run_dir, history.record, _bases(history))
    if diagnosis is None:
        return None
    cause = redactor_of(run_dir)(diagnosis.cause)
    return replace(diagnosis, cause=cause, host=diagnosis.host or hosts.get(diagnosis.rank))


def first_cause(
    run_dir: RunDir,
    end: Ending | None,
    bases: Mapping[int, int],
    *,
    exit_output: Iterable[str] = (),
    reported: Iterable[str] = (),
) -> Diagnosis | None:
    """The first cause of an attempt's end, from its verdict, which names the rank, and from the logs on the head,
    from `bases` on (bytes, by source); secrets are not redacted. None when it is not known.

    The logs of the verdict's rank and of the launcher count; those of other ranks only when there is no
    verdict. `exit_output` (sanitised lines) is that rank's, for when the head's copy of its log lacks it; `reported`
    are the lines of the exception that it reported, which go before its log."""
    if not _explained_by_logs(end):
        return _from_verdict(run_dir, end, bases)
    best = _best_finding(run_dir, end, bases)
    if best is None and (printed := explain(exit_output)) is not None:
        best = _Explained(printed)
    raised = explain(reported)
    if raised is not None and raised.kind is SignatureKind.CAUSE and (best is None or not best.has(raised)):
        best = _Explained(raised)
    if best is None:
        return _from_verdict(run_dir, end, bases)
    source, finding = best.source, best.finding
    rank = source if end is None or end.rank is None else end.rank
    rank = None if rank == LAUNCHER_SOURCE else rank
    cause, fix, host = finding.cause, finding.fix, None
    if end is not None:
        fix, host = fix or _fix_of(end), end.host
        cause = end.cause if end.cause is not None and _has_more_detail(end, best) else cause
    signature = finding.signature.id if finding.signature is not None else None
    return Diagnosis(cause, fix, rank, host, source, best.offset, signature)


@dataclass(frozen=True)
class _Explained:
    finding: Finding
    source: int | None = None
    offset: int | None = None
    at: int = 0

    @property
    def order(self) -> tuple[int, bool, bool, int, int]:
        finding = self.finding
        source = -1 if self.source is None else self.source
        return (finding.kind, finding.survived, finding.signature is None, self.at, source)

    def has(self, raised: Finding) -> bool:
        """The log has the exception too, perhaps with the name of its module."""
        same = raised.signature is self.finding.signature
        return same and (raised.signature is not None or self.finding.cause.endswith(raised.cause))


def _best_finding(run_dir: RunDir, end: Ending | None, bases: Mapping[int, int]) -> _Explained | None:
    sources = run_dir.sources()
    if end is not None and end.rank is not None:
        sources = [source for source in sources if source in (end.rank, LAUNCHER_SOURCE)]
    explained = (_explained(run_dir, source, bases.get(source, 0)) for source in sources)
    best = min(filter(None, explained), key=lambda candidate: candidate.order, default=None)
    if best is None or end is None or end.rank is None:
        return best
    # The rank failed first: what it printed about others before is not why.
    return None if best.finding.kind is SignatureKind.CONSEQUENCE and best.finding.survived else best


def _explained(run_dir: RunDir, source: int, base: int) -> _Explained | None:
    log = LogEnds.of(run_dir.log(source), base)
    finding = explain(log.lines)
    if finding is None:
        return None
    offset = log.offsets[finding.line]
    index = LogIndex(run_dir.index(source))
    line = index.line_at(offset)
    entries = index.entries(line, line + 1)
    return _Explained(finding, source, offset, entries[0].centiseconds if entries else 0)


def _from_verdict(run_dir: RunDir, end: Ending | None, bases: Mapping[int, int]) -> Diagnosis | None:
    """The verdict alone, with the last line of its rank."""
    if end is None or end.cause is None:
        return None
    if end.rank is None:
        return Diagnosis(end.cause, _fix_of(end), None, end.host)
    offset = LogEnds.of(run_dir.log(end.rank), bases.get(end.rank, 0)).last_spoken
    return Diagnosis(end.cause, _fix_of(end), end.rank, end.host, None if offset is None else end.rank, offset)


def _explained_by_logs(end: Ending | None) -> bool:
    """The logs can explain the end: not that of a rank that was killed, or of a run that was aborted or lost a node."""
    if end is None or end.reason is None:
        return True
    if end.reason is Reason.RANK_FAILED:
        return end.exit_code != 0
    if end.reason is Reason.RANK_KILLED:
        return end.signal in _CRASHES
    return end.reason is Reason.LAUNCH_FAILED or end.reason.traits.detailed


def _has_more_detail(end: Ending, best: _Explained) -> bool:
    if end.reason is not None and end.reason.traits.detailed:
        return True
    if end.reason is Reason.LAUNCH_FAILED and best.source != LAUNCHER_SOURCE:
        # Who holds the port, which interpreter is missing on which node.
        return True
    # An exception that it quotes already, without secrets.
    return best.finding.signature is None and best.finding.cause.partition(":")[0] in (end.cause or "")


def _fix_of(end: Ending) -> str | None:
    signature = end.reason.traits.signature if end.reason is not None else None
    return end.fix or (BY_ID[signature].fix if signature is not None else None)


def _bases(history: RunHistory) -> Mapping[int, int]:
    """Where the attempt that ended the run begins in the logs: the last one, or the one that those after it follow
    from."""
    record = history.record
    ending = record.reason, record.rank, record.host, record.cause
    for attempt in reversed(history.attempts):
        failed = attempt.status
        if failed.reason is not None and (failed.reason, failed.rank, failed.host, failed.cause) == ending:
            return attempt.plan.log_bases
    return history.attempts[-1].plan.log_bases if history.attempts else {}
