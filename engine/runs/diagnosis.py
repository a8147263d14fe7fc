"""Says from a run's logs what went wrong first, and what to do about it: the cause, not what followed from it."""

from __future__ import annotations

import re
import signal as signals
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Protocol

from engine.errors import StateError
from engine.events import Diagnosis
from engine.models import Reason, RunRecord
from engine.runs.journal import read_journal, replay
from engine.runs.layout import LAUNCHER_SOURCE, RunDir
from engine.runs.line_index import LineIndex
from engine.runs.log_ends import LogEnds
from engine.runs.log_reader import LogReader
from engine.runs.signatures import BY_ID, ERRNO_WORDS, SIGNATURES, Kind, Signature
from engine.security.redact import redact
from engine.security.sanitise import plain

CAUSE_CHARACTERS: Final = 300
LAST_WORDS_LINES: Final = 200
"""Of a log, from its end: what stands before them was survived, and explains the end only when nothing else does."""
AFTERWORDS_LINES: Final = 20
"""What libraries may say after the exception that ended their program; after more than that it was survived."""
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+(?P<error>\S.*)", re.MULTILINE)
_CHAINED = re.compile(
    r"^(?:The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:)$"
)
"""What stands between two tracebacks of which one led to the other."""
_RAISED = re.compile(r"^(?:[A-Za-z_][\w]{0,99}\.){0,9}[A-Z]\w{0,99}(?:Error|Exception)(?::|$)")
"""An exception told in a line of its own, without a traceback."""
_OF_OTHERS = re.compile(r"^(?:subprocess\.CalledProcessError\b|KeyboardInterrupt\b)")
"""Exceptions that say no more than that something else ended."""
_CRASHES: Final = frozenset({signals.SIGABRT, signals.SIGSEGV, signals.SIGBUS, signals.SIGFPE, signals.SIGILL})
"""Signals by which a program ends itself; of those from outside its own words know nothing."""
_IN_ITS_OWN_WORDS: Final = frozenset({Reason.OUT_OF_MEMORY, Reason.DISK_FULL})
"""Reasons for which the journal's cause says more (which file, which array) than a signature can."""
_FIXES: Final = {Reason.OUT_OF_MEMORY: BY_ID["memory.killed"].fix, Reason.DISK_FULL: BY_ID["disk.full"].fix}


class Ending(Protocol):
    """How a run or an attempt ended, as its judge has it: a RunRecord, or a Verdict."""

    @property
    def reason(self) -> Reason | None: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def host(self) -> str | None: ...
    @property
    def cause(self) -> str | None: ...
    @property
    def fix(self) -> str | None: ...
    @property
    def exit_code(self) -> int | None: ...
    @property
    def signal(self) -> int | None: ...


@dataclass(frozen=True)
class Finding:
    """What one line says."""

    kind: Kind
    cause: str
    fix: str | None
    line: int
    """Its place among the lines that were read."""
    signature: Signature | None = None
    """None of a Python exception that no signature knows."""
    survived: bool = False
    """Too much was said after it for it to be among the last words."""
    final: bool = True
    """Said in the exception that ended the program, or after it; of a program that ended without one, everything is."""

    @property
    def order(self) -> tuple[int, bool, bool, bool, int]:
        """Of the findings in one log, the most telling first: causes in the exception that ended the program before
        those that it went on after; of known causes the first, of exceptions the last."""
        exception = self.signature is None
        passed = self.kind is Kind.CAUSE and not self.final
        return (self.kind, self.survived, passed, exception, -self.line if exception else self.line)


def findings(lines: Iterable[str]) -> list[Finding]:
    """What is known in `lines` (sanitised text), each signature at one place, in the order of the lines. Takes time
    linear in the length of the lines, whatever they hold."""
    texts = list(lines)
    text = "\n".join(texts) + "\n"
    starts = [0, *accumulate(len(line) + 1 for line in texts)]
    last_words = _last_words(texts)
    tracebacks = [
        (bisect_right(starts, match.start()) - 1, bisect_right(starts, match.start("error")) - 1)
        for match in _TRACEBACK.finditer(text)
    ]
    bare = _bare(texts)
    end = _end(texts, tracebacks, bare)
    found = []
    explained: set[int] = set()
    for signature in SIGNATURES:
        pattern = re.compile(signature.pattern)
        places = (starts[place] for place in dict.fromkeys((end, last_words, 0)))
        match = next(filter(None, (pattern.search(text, place) for place in places)), None)
        line = -1 if match is None else bisect_right(starts, match.start()) - 1
        if match is not None and line not in explained:
            explained.add(line)
            told = _told(signature, match)
            found.append(Finding(signature.kind, *told, line, signature, line < last_words, line >= end))
    raised = {error for _, error in tracebacks}
    if bare is not None:
        raised.add(bare)
    for line in raised - explained:
        found.append(Finding(Kind.CAUSE, _cut(texts[line]), None, line, None, line < last_words, line >= end))
    return sorted(found, key=lambda finding: finding.line)


def explain(lines: Iterable[str]) -> Finding | None:
    """What went wrong first in these lines of one log; None when nothing in them is known to explain an end."""
    best = min(findings(lines), key=lambda finding: finding.order, default=None)
    return None if best is None or best.kind is Kind.NOISE else best


def diagnose(run_dir: RunDir) -> Diagnosis | None:
    """What ended this run, from its journal and the ends of its logs. None when nothing says it."""
    journal = read_journal(run_dir.journal)
    record = _record(journal)
    return first_cause(run_dir, record, _bases(journal, record), _hosts(journal))


def first_cause(
    run_dir: RunDir,
    end: Ending | None,
    bases: Mapping[int, int],
    hosts: Mapping[int, str] | None = None,
    *,
    last_words: Iterable[str] = (),
    own_end: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Diagnosis | None:
    """What ended an attempt, from its judge's verdict, which names the rank, and the logs on the head from `bases` on
    (bytes, by source). None when nothing says it.

    The rank that the verdict names is asked, and the launcher; what other ranks say is believed only when there is no
    verdict. `last_words` (sanitised lines) are that rank's, for when the head's copy of its log lacks them; `own_end`
    are the lines of the exception by which it has said that it ends, which go before all that its log says. What a log
    has said of the secrets in `environment` (by default this process's) is not repeated.
    """
    found = _most_telling(run_dir, end, bases) if _speaks_for_itself(end) else None
    if found is None and _speaks_for_itself(end) and (said := explain(last_words)) is not None:
        found = _Found(None, None, 0, said)
    own = explain(own_end) if _speaks_for_itself(end) else None
    if own is not None and own.kind is Kind.CAUSE and not (found is not None and _is_told(own, found.finding)):
        found = _Found(None, None, 0, own)
    if found is None:
        return _as_judged(run_dir, end, bases)
    rank = found.source if end is None or end.rank is None else end.rank
    rank = None if rank == LAUNCHER_SOURCE else rank
    cause, fix = redact(found.finding.cause, environment), found.finding.fix
    if end is not None:
        cause = end.cause if end.cause is not None and _says_more(end, found) else cause
        fix = fix or end.fix or _fix_of(end)
    host = end.host if end is not None and end.host is not None else (hosts or {}).get(-1 if rank is None else rank)
    signature = found.finding.signature
    return Diagnosis(cause, fix, rank, host, found.source, found.offset, signature.id if signature else None)


@dataclass(frozen=True)
class _Found:
    source: int | None
    offset: int | None
    at: int
    finding: Finding

    @property
    def order(self) -> tuple[int, bool, bool, int, int]:
        told = self.finding
        source = -1 if self.source is None else self.source
        return (told.kind, told.survived, told.signature is None, self.at, source)


def _most_telling(run_dir: RunDir, end: Ending | None, bases: Mapping[int, int]) -> _Found | None:
    sources = LogReader(run_dir).sources()
    if end is not None and end.rank is not None:
        sources = [source for source in sources if source in (end.rank, LAUNCHER_SOURCE)]
    everything = (_best(run_dir, source, bases.get(source, 0)) for source in sources)
    best = min((found for found in everything if found is not None), key=lambda found: found.order, default=None)
    if best is None or end is None or end.rank is None:
        return best
    # The rank has been found to be the first: what it said of others earlier is not why.
    return None if best.finding.kind is Kind.CONSEQUENCE and best.finding.survived else best


def _best(run_dir: RunDir, source: int, base: int) -> _Found | None:
    """The most telling line of one log."""
    log = LogEnds.of(run_dir.log(source), base)
    finding = explain(log.lines)
    if finding is None:
        return None
    offset = log.offsets[finding.line]
    index = LineIndex(run_dir.index(source))
    line = index.line_at(offset)
    entries = index.entries(line, line + 1)
    return _Found(source, offset, entries[0].centiseconds if entries else 0, finding)


def _as_judged(run_dir: RunDir, end: Ending | None, bases: Mapping[int, int]) -> Diagnosis | None:
    """The verdict alone, with the last line that its rank has said."""
    if end is None or end.cause is None:
        return None
    fix = end.fix or _fix_of(end)
    if end.rank is None:
        return Diagnosis(end.cause, fix, None, end.host)
    offset = LogEnds.of(run_dir.log(end.rank), bases.get(end.rank, 0)).last_spoken
    return Diagnosis(end.cause, fix, end.rank, end.host, None if offset is None else end.rank, offset)


def _speaks_for_itself(end: Ending | None) -> bool:
    """Whether what the logs say can be why it ended: not of a rank that was killed, and not of a run that was aborted
    or whose node was lost."""
    if end is None or end.reason is None:
        return True
    if end.reason is Reason.RANK_FAILED:
        return end.exit_code != 0
    if end.reason is Reason.RANK_KILLED:
        return end.signal in _CRASHES
    return end.reason is Reason.LAUNCH_FAILED or end.reason in _IN_ITS_OWN_WORDS


def _says_more(end: Ending, found: _Found) -> bool:
    """Whether the verdict's own cause tells more than what was found."""
    if end.reason in _IN_ITS_OWN_WORDS:
        return True
    if end.reason is Reason.LAUNCH_FAILED and found.source != LAUNCHER_SOURCE:
        # Who holds the port, which interpreter is missing on which node.
        return True
    # An exception that it quotes already, without secrets.
    return found.finding.signature is None and found.finding.cause.partition(":")[0] in (end.cause or "")


def _fix_of(end: Ending) -> str | None:
    return _FIXES.get(end.reason) if end.reason is not None else None


def _is_told(own: Finding, found: Finding) -> bool:
    """Whether the log tells of the exception too, perhaps with the name of its module."""
    return own.signature is found.signature and (own.signature is not None or found.cause.endswith(own.cause))


def _end(lines: list[str], tracebacks: list[tuple[int, int]], bare: int | None) -> int:
    """The line at which the exception that ended the program begins to be told, with those that led to it; 0 when none
    did, or one that says nothing of why. `tracebacks`: where each begins, and where its exception is named."""
    ends = [bare] if bare is not None and not _OF_OTHERS.match(lines[bare]) else []
    if tracebacks and _is_last(lines, tracebacks[-1][1]) and not _OF_OTHERS.match(lines[tracebacks[-1][1]]):
        first = len(tracebacks) - 1
        while first and _chained(lines, tracebacks[first][0]):
            first -= 1
        ends.append(tracebacks[first][0])
    return min(ends, default=0)


def _bare(lines: list[str]) -> int | None:
    """The last line that tells of an exception in one line, if little is said after it."""
    after = 0
    for place in reversed(range(len(lines))):
        if _RAISED.match(lines[place]):
            return place
        after += bool(lines[place].strip())
        if after > AFTERWORDS_LINES:
            break
    return None


def _is_last(lines: list[str], place: int) -> bool:
    """Whether little is said after this line."""
    return sum(bool(line.strip()) for line in lines[place + 1 :]) <= AFTERWORDS_LINES


def _chained(lines: list[str], place: int) -> bool:
    """Whether the traceback that begins here follows from the one before it."""
    before = next((lines[at] for at in range(place - 1, -1, -1) if lines[at].strip()), "")
    return _CHAINED.match(before) is not None


def _last_words(lines: list[str]) -> int:
    """The line at which the last words begin; empty lines do not count."""
    spoken = [place for place, line in enumerate(lines) if line.strip()]
    return spoken[-LAST_WORDS_LINES] if len(spoken) >= LAST_WORDS_LINES else 0


def _told(signature: Signature, match: re.Match[str]) -> tuple[str, str]:
    words = {name: value or "" for name, value in match.groupdict().items()}
    if "errno" in words:
        words["errno"] = f"{ERRNO_WORDS.get(words['errno'], 'unknown')} (error {words['errno']})"
    return _cut(signature.cause.format(**words)), signature.fix.format(**words)


def _cut(text: str) -> str:
    return plain(" ".join(text.split()), CAUSE_CHARACTERS)


def _record(journal: list[dict[str, Any]]) -> RunRecord | None:
    try:
        return replay(journal)
    except StateError:
        return None


def _bases(journal: list[dict[str, Any]], record: RunRecord | None) -> dict[int, int]:
    """Where the attempt that ended the run begins in the logs: the last one, or the one that those after it follow
    from."""
    attempts = {entry["attempt"]: entry for entry in journal if entry["event"] == "attempt"}
    last: dict[str, Any] = next(reversed(attempts.values()), {})
    ended = (entry for entry in reversed(journal) if entry["event"] == "attempt_ended")
    told = record and (record.reason, record.rank, record.host, record.cause)
    its = (each for each in ended if (each["reason"], each["rank"], each["host"], each["cause"]) == told)
    found = next(its, None)
    bases = (attempts.get(found["attempt"], last) if found is not None else last).get("log_bases") or {}
    return {int(source): int(base) for source, base in bases.items()}


def _hosts(journal: list[dict[str, Any]]) -> dict[int, str]:
    started = (entry for entry in journal if entry["event"] in ("rank_started", "rank_ended"))
    return {int(entry["rank"]): str(entry["host"]) for entry in started if entry.get("host") is not None}
