"""Explains the end of a program by the lines that it printed: which known text, or which exception, was the cause. The
texts and their wording: engine.failures.signatures."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from engine.failures.signature import Signature, SignatureKind
from engine.failures.signatures import ERRNO_NAMES, SIGNATURES
from engine.security.sanitise import plain

CAUSE_CHARACTERS: Final = 300
EXIT_OUTPUT_LINES: Final = 200
"""The program survived what stands before these lines, which explains the end only when nothing else does."""
TRAILING_LINES: Final = 20
"""Lines that libraries may print after the exception that ended their program; after more it was survived."""
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+(?P<error>\S.*)", re.MULTILINE)
_CHAINED = re.compile(
    r"^(?:The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:)$"
)
"""The line between two tracebacks of which one led to the other."""
_RAISED = re.compile(r"^(?:[A-Za-z_][\w]{0,99}\.){0,9}[A-Z]\w{0,99}(?:Error|Exception)(?::|$)")
"""An exception on a line of its own, without a traceback."""
_MESSAGE_LINES: Final = 12
"""Most lines of a message that are read after its first."""
_ANNOUNCES = re.compile(r"(?:[:,;(\[]|\b(?:or|and)|validation errors? for \S{1,200})\s{0,9}$")
"""The end of a line of a message that goes on."""
_OF_OTHERS = re.compile(r"^(?:subprocess\.CalledProcessError|KeyboardInterrupt|(?:\w{1,20}\.){5}ChildFailedError)\b")
"""Exceptions that only report that something else ended."""
_WORKER = re.compile(r"\[(?:rank |default)(\d{1,6})\](?:: ?| )")
"""Before the output of a worker, by torchrun: also in the middle of a line, where another worker's has no end yet."""
_RAISED_BY_RANK = re.compile(r"^\[rank\d{1,6}\]:? ?")
"""Before each line of an exception in a process group, by torch."""
WORKER_FAILED = re.compile(r"failed \(exitcode: -?\d+\) local_rank: ")
"""torchrun's line about its workers, at the end of each round; after the last one follow its own traceback and a table,
which explain nothing."""
FRAME = re.compile(r"^(?:\[[^\]]{1,20}\]:? ?){0,2}frame #\d+: ")
"""A line of the C++ stack that torch prints below some of its errors and warnings."""
_ELSE = re.compile(rf"{_RAISED.pattern}|Traceback |{FRAME.pattern}")
"""A line that no message has, though it stands below one."""
_CONSEQUENCES: Final = [known.pattern for known in SIGNATURES if known.kind is SignatureKind.CONSEQUENCE]


@dataclass(frozen=True)
class Finding:
    """The meaning of one line."""

    kind: SignatureKind
    cause: str
    fix: str | None
    line: int
    """Its place among the lines that were read."""
    signature: Signature | None = None
    """None of a Python exception that no signature knows."""
    survived: bool = False
    """Too much was printed after it for it to belong to the exit output."""
    final: bool = True
    """Printed in the exception that ended the program, or after it; without an exception, everything is. Of torchrun's
    workers, each has its own end."""

    @property
    def order(self) -> tuple[int, bool, bool, bool, int]:
        """Sorts the findings of one log, the best explanation first: causes in the exception that ended the program,
        then those that it went on after; of known causes the first, of exceptions the last."""
        exception = self.signature is None
        passed = self.kind is SignatureKind.CAUSE and not self.final
        return (self.kind, self.survived, passed, exception, -self.line if exception else self.line)


def findings(lines: Iterable[str]) -> list[Finding]:
    """The known failures in `lines` (sanitised text), each signature once, in the order of the lines. Takes time
    linear in the length of the lines, whatever they hold."""
    lines = list(lines)
    counted = last_round(lines)
    pieces = sorted(_pieces(lines, counted.start), key=lambda piece: piece.worker)
    text = "".join(f"{piece.text}\n" for piece in pieces)
    starts = [0, *accumulate(len(piece.text) + 1 for piece in pieces)]
    ends = _Ends.of(pieces, counted.stop)
    listed = []
    taken: set[int] = set()
    for signature in SIGNATURES:
        matches = ((bisect_right(starts, match.start()) - 1, match) for match in re.finditer(signature.pattern, text))
        place, match = min(matches, key=lambda candidate: ends.order(candidate[0]), default=(-1, None))
        if match is not None and place not in taken:
            taken.add(place)
            cause, fix = _cause_and_fix(signature, match)
            listed.append(ends.finding(place, signature.kind, cause, fix, signature))
    for place in ends.raised - taken:
        # Another exception of a kind that was found: of several workers in one log, for example.
        if not any(re.search(signature.pattern, pieces[place].text) for signature in SIGNATURES):
            listed.append(ends.finding(place, SignatureKind.CAUSE, _cut(_message(pieces, place))))
    return sorted(listed, key=lambda finding: finding.line)


def _message(pieces: Sequence[_Piece], place: int) -> str:
    """An exception with the further lines of its message: those that its first lines announce, and indented ones."""
    text, worker = pieces[place].text, pieces[place].worker
    for piece in pieces[place + 1 : place + 1 + _MESSAGE_LINES]:
        announced = _ANNOUNCES.search(text) is not None or piece.text[:1].isspace()
        if piece.worker != worker or not announced or not piece.text.strip() or _ELSE.match(piece.text):
            break
        text = f"{text} {piece.text}"
    return text


def last_round(lines: Sequence[str]) -> range:
    """The lines of the last round of torchrun's workers; all those of another program."""
    reports = [place for place, line in enumerate(lines) if WORKER_FAILED.search(line)]
    if not reports or any(_WORKER.match(line) for line in lines[reports[-1] + 1 :]):
        # The workers were started again.
        reports.append(len(lines) - 1)
    begin, end = [-1, *reports][-2:]
    return range(begin + 1, end + 1)


class _Piece(NamedTuple):
    """A line, or what one worker printed of it, without its prefix."""

    worker: int
    """-1: all that torchrun did not pass on."""
    line: int
    """Its place among the lines that were read."""
    text: str


def _pieces(lines: Sequence[str], first: int) -> Iterator[_Piece]:
    for number, line in enumerate(lines[first:], first):
        parts = _WORKER.split(line) if _WORKER.match(line) else ["", "-1", line]
        for worker, text in zip(parts[1::2], parts[2::2], strict=True):
            yield _Piece(int(worker), number, _RAISED_BY_RANK.sub("", text))


@dataclass(frozen=True)
class _Ends:
    """Pieces of a log, in the order of their workers, and which of them belong to the end of the program."""

    pieces: Sequence[_Piece]
    survived: Sequence[bool]
    final: Sequence[bool]
    raised: frozenset[int]
    """Places of the exceptions."""

    @classmethod
    def of(cls, pieces: Sequence[_Piece], stop: int) -> _Ends:
        """Exceptions from line `stop` on are torchrun's own."""
        survived: list[bool] = []
        ended_at: list[int | None] = []
        raised: set[int] = set()
        for _, group in groupby(pieces, key=lambda piece: piece.worker):
            of_worker = list(group)
            texts = [piece.text for piece in of_worker]
            exceptions, end = _exceptions(texts[: sum(piece.line < stop for piece in of_worker)])
            raised |= {len(survived) + place for place in exceptions}
            exit_output = _exit_output(texts)
            survived += [place < exit_output for place in range(len(of_worker))]
            ended_at += [None if end is None else of_worker[end].line] * len(of_worker)
        # Whoever has no exception of its own, as torchrun itself, may have been ended because of another's.
        earliest = min((line for line in ended_at if line is not None), default=0)
        final = [
            piece.line >= (earliest if line is None else line) for piece, line in zip(pieces, ended_at, strict=True)
        ]
        return cls(pieces, survived, final, frozenset(raised))

    def order(self, place: int) -> tuple[bool, bool, int]:
        """Sorts the places where one text was printed, the one that explains the end best first."""
        return self.survived[place], not self.final[place], self.pieces[place].line

    def finding(
        self, place: int, kind: SignatureKind, cause: str, fix: str | None = None, signature: Signature | None = None
    ) -> Finding:
        line = self.pieces[place].line
        return Finding(kind, cause, fix, line, signature, self.survived[place], self.final[place])


def explain(lines: Iterable[str]) -> Finding | None:
    """The first failure in these lines of one log; None when nothing in them is known to explain an end."""
    best = min(findings(lines), key=lambda finding: finding.order, default=None)
    return None if best is None or best.kind is SignatureKind.NOISE else best


def explained(text: str, output: Iterable[str] = ()) -> str:
    """An error with its cause and its fix, where they are known by it or by the program's `output`."""
    finding = explain([*output, text])
    if finding is None or finding.signature is None:
        return text
    return f"{text} ({finding.cause}); {finding.fix}{', or try again' if finding.signature.transient else ''}"


def _exceptions(lines: list[str]) -> tuple[set[int], int | None]:
    """The lines that name an exception, and the line at which the one that ended the program begins, with those that
    led to it; None when none did, or one that does not explain it."""
    text = "".join(f"{line}\n" for line in lines)
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    tracebacks = [
        (bisect_right(starts, match.start()) - 1, bisect_right(starts, match.start("error")) - 1)
        for match in _TRACEBACK.finditer(text)
    ]
    bare = [(place, place) for place, line in enumerate(lines) if _RAISED.match(line)]
    ends = [end for end in (_end(lines, bare), _end(lines, tracebacks)) if end is not None]
    named = {error for _, error in tracebacks} | {error for _, error in ends}
    if bare and _spoken(lines, bare[-1][1] + 1, len(lines)) <= TRAILING_LINES:
        named.add(bare[-1][1])
    return named, min((begin for begin, _ in ends), default=None)


def _end(lines: list[str], exceptions: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Beginning and name of the exception that ended the program; it begins with those that led to it. Others, little
    apart, may follow that only report that something else ended: of other workers, for example. `exceptions`: where
    each begins, and where it is named."""
    limit, ending = len(lines), None
    place = len(exceptions) - 1
    while place >= 0:
        begin, named = exceptions[place]
        if _spoken(lines, named + 1, limit) > TRAILING_LINES:
            break
        while place and _chained(lines, begin):
            place -= 1
            begin = exceptions[place][0]
        if not _OF_OTHERS.match(lines[named]):
            ending = begin, named
            if not any(re.search(pattern, lines[named]) for pattern in _CONSEQUENCES):
                break
        limit = begin
        place -= 1
    return ending


def _spoken(lines: list[str], first: int, limit: int) -> int:
    """How many of these lines may be the program's own."""
    return sum(bool(line.strip()) and not FRAME.match(line) for line in lines[first:limit])


def _chained(lines: list[str], place: int) -> bool:
    """The traceback that begins here follows from the one before it."""
    before = next((lines[at] for at in range(place - 1, -1, -1) if lines[at].strip()), "")
    return _CHAINED.match(before) is not None


def _exit_output(lines: list[str]) -> int:
    """The line at which the exit output begins; empty lines do not count."""
    spoken = [place for place, line in enumerate(lines) if line.strip()]
    return spoken[-EXIT_OUTPUT_LINES] if len(spoken) >= EXIT_OUTPUT_LINES else 0


def _cause_and_fix(signature: Signature, match: re.Match[str]) -> tuple[str, str]:
    groups = {name: value or "" for name, value in match.groupdict().items()}
    if "errno" in groups:
        groups["errno"] = f"{ERRNO_NAMES.get(groups['errno'], 'unknown')} (error {groups['errno']})"
    return _cut(signature.cause.format(**groups)), signature.fix.format(**groups)


def _cut(text: str) -> str:
    return plain(" ".join(text.split()), CAUSE_CHARACTERS)
