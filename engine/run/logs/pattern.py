"""A search pattern for logs: matched on the text as it is shown, found fast in the bytes as they are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from engine.security.sanitise import sanitise

REGEX_PREFIX: Final = "re:"
"""Begins a pattern that is a regular expression; everything else is searched for literally."""
SHOWN_BYTES: Final = 64 * 1024
"""The most of one line that is made into text: in a longer one a match in its bytes counts as it is."""


@dataclass(frozen=True)
class LogPattern:
    """A line matches when `expression` is found in its shown text. Its raw bytes (in lower case, when `folded`)
    then hold one of `needles`, or, when there are none, a match of `raw`: that is what a search goes by."""

    text: str
    """As it was typed."""
    expression: re.Pattern[str]
    needles: tuple[bytes, ...] = ()
    raw: re.Pattern[bytes] | None = None
    folded: bool = False

    @classmethod
    def parse(cls, text: str) -> LogPattern:
        """A literal, or a regular expression after "re:"; capitals count only when there are some.
        Raises ValueError for an empty pattern and for a regular expression that is none."""
        # The capital of an escape such as \S is none.
        typed = re.sub(r"\\.", "", text) if text.startswith(REGEX_PREFIX) else text
        folded = not any(character.isupper() for character in typed)
        flags = re.IGNORECASE if folded else 0
        if not text.startswith(REGEX_PREFIX):
            if not text:
                raise ValueError("nothing to search for")
            literal = re.compile(re.escape(text), flags)
            if folded and not text.isascii():
                # Bytes have no other case of é: each line with more than ASCII is looked at.
                return cls(text, literal, raw=re.compile(rb"[^\x00-\x7f]"))
            return cls(text, literal, needles=((text.lower() if folded else text).encode(),), folded=folded)
        expression = text.removeprefix(REGEX_PREFIX)
        try:
            raw = re.compile(expression.encode(), flags | re.MULTILINE)
            compiled = re.compile(expression, flags)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        if not expression:
            raise ValueError("nothing to search for")
        return cls(text, compiled, raw=raw)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where it is in a line's shown text, as (start, end) in characters."""
        return [match.span() for match in self.expression.finditer(text) if match.end() > match.start()]

    def matches(self, line: bytes, redactor: Callable[[str], str]) -> bool:
        """A raw line matches: what is redacted cannot be found."""
        if len(line) > SHOWN_BYTES:
            return True
        text = sanitise(line)
        return self.expression.search(text) is not None and self.expression.search(redactor(text)) is not None

    def positions(self, data: bytes, redactor: Callable[[str], str]) -> Iterator[int]:
        """In whole lines of a log: one position in each line that matches, first to last."""
        searched = data.lower() if self.folded else data
        at = 0
        upcoming = {needle: searched.find(needle) for needle in self.needles}
        while at < len(data):
            place = self._next(searched, at, upcoming)
            if place < 0:
                return
            start, end = data.rfind(b"\n", 0, place) + 1, data.find(b"\n", place)
            end = len(data) if end < 0 else end
            if self.matches(data[start:end], redactor):
                yield place
            at = end + 1

    def _next(self, searched: bytes, at: int, upcoming: dict[bytes, int]) -> int:
        if self.raw is not None:
            match = self.raw.search(searched, at)
            return -1 if match is None or match.start() >= len(searched) else match.start()
        for needle, place in upcoming.items():
            if 0 <= place < at:
                upcoming[needle] = searched.find(needle, at)
        return min((place for place in upcoming.values() if place >= 0), default=-1)


ERRORS: Final = LogPattern(
    "errors",
    re.compile(
        r"^(?!.*\[ring\] Attempt \d+ waiting)(?=.*?("
        r"\b\w*(?:error|exception)\b(?!\s*[:=]\s*0\b)|\btraceback \(most|\bfatal\b|\bkilled\b|\bsegmentation fault"
        r"|\bout of memory|\bno space left|\bconnection to a peer was lost|\bexited with code -?[1-9]"
        r"|\babort(?:ed|ing)\b))",
        re.IGNORECASE,
    ),
    needles=(
        b"error", b"exception", b"traceback (most", b"fatal", b"killed", b"segmentation fault", b"out of memory",
        b"no space left", b"connection to a peer was lost", b"exited with code", b"abort",
    ),
    folded=True,
)  # fmt: skip
"""Lines that report a failure; the ring's normal first attempts to connect are not among them."""
