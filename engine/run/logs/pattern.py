"""A search pattern for logs: matched on the text as it is shown, found fast in the bytes as they are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from engine.security.sanitise import sanitise

REGEX_PREFIX: Final = "re:"
"""Begins a pattern that is a regular expression; everything else is searched for literally."""
SHOWN_BYTES: Final = 64 * 1024
"""The most of one line that is made into text: in a longer one a match in its bytes counts as it is."""
_ODD: Final = b"\0"
_AS_STORED: Final = bytes((0x0A, *range(0x20, 0x7F)))
"""Bytes that are shown as they are stored."""
_ODD_OR_NOT: Final = bytes(byte if byte in _AS_STORED else 0 for byte in range(256))
"""All bytes that may be shown as something else, for bytes.translate."""
_DOTTED: Final = "İ".encode()
"""The one letter below that has an ASCII letter in its lower case."""
_LETTERS: Final = (b"\2\1", b"\3\1\1")
_KINDS: Final = bytes(
    byte if byte in _AS_STORED
    else 1 if 0x80 <= byte <= 0xBF
    else 2 if byte in (0xC3, 0xC4, 0xC5, 0xD0, 0xD1)
    else 3 if 0xE4 <= byte <= 0xE9
    else 0
    for byte in range(256)
)  # fmt: skip
"""Makes _LETTERS of U+00C0 to U+017F, U+0400 to U+047F and U+4000 to U+9FFF: shown as they are stored."""
_COLOURS: Final = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
"""Complete control sequences: a line that has no other escapes is shown without them."""


@dataclass(frozen=True)
class LogPattern:
    """A line matches when `expression` is found in its shown text. A line of plain ASCII is shown as it is stored: its
    bytes (in lower case, when `folded`) then hold one of `needles` or a match of `raw`, which is what a search goes by.
    """

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
        text = sanitise(line)
        if self.needles:
            shown = (text.lower() if self.folded else text).encode()
            if not any(needle in shown for needle in self.needles):
                return False
        return self.expression.search(text) is not None and self.expression.search(redactor(text)) is not None

    def positions(self, data: bytes, redactor: Callable[[str], str]) -> Iterator[int]:
        """In whole lines of a log: one position in each line that matches, first to last."""
        plain = b"".join(_COLOURS.split(data)) if b"\x1b[" in data else data
        if self.raw is None:
            # Of a line with returns the end is shown, and a tab as one blank or several.
            plain = plain.replace(b"\r", b" ")
            if not any(b"  " in needle for needle in self.needles):
                plain = plain.replace(b"\t", b" ")
        moved = len(plain) != len(data)
        searches = self._searches(plain.lower() if self.folded else plain)
        in_bytes = len(searches)
        if plain.translate(None, _AS_STORED):
            odd = self._odd(plain)
            searches.append(partial(odd.find, _ODD))
        upcoming = [search(0) for search in searches]
        at = begin = 0  # of the next line that may match, in `plain` and in `data`
        while (place := min((place for place in upcoming if place >= 0), default=-1)) >= 0:
            start, end = plain.rfind(b"\n", 0, place) + 1, plain.find(b"\n", place)
            begin = _lines_on(data, begin, plain.count(b"\n", at, start)) if moved else start
            line = data[begin : stop if (stop := data.find(b"\n", begin)) >= 0 else len(data)]
            at = (len(plain) if end < 0 else end) + 1
            if len(line) > SHOWN_BYTES:
                matches = any(start <= match < at for match in upcoming[:in_bytes])
            else:
                matches = self.matches(line, redactor)
            if matches:
                yield begin
            begin += len(line) + 1
            upcoming = [
                search(at) if 0 <= match < at else match for search, match in zip(searches, upcoming, strict=True)
            ]

    def _odd(self, plain: bytes) -> bytes:
        """_ODD in the place of each byte that may be shown as something else, or match as another one."""
        if self.raw is None:
            plain = plain.replace(_DOTTED, _ODD * len(_DOTTED)).translate(_KINDS)
            for letter in _LETTERS:
                plain = plain.replace(letter, b" " * len(letter))
        return plain.translate(_ODD_OR_NOT)

    def _searches(self, searched: bytes) -> list[Callable[[int], int]]:
        """Each says where the next match from a position on is, -1 without one."""
        if (raw := self.raw) is None:
            if not self.folded or all(map(bytes.isascii, self.needles)):
                return [partial(searched.find, needle) for needle in self.needles]
            raw = re.compile(b"|".join(map(_in_any_case, self.needles)))

        def search(at: int) -> int:
            match = raw.search(searched, at)
            return -1 if match is None or match.start() >= len(searched) else match.start()

        return [search]


def _in_any_case(needle: bytes) -> bytes:
    """An expression for bytes of which the ASCII letters alone are in lower case."""
    forms = ("|".join(map(re.escape, dict.fromkeys((letter, letter.upper())))) for letter in needle.decode())
    return b"".join(f"(?:{form})".encode() for form in forms)


def _lines_on(data: bytes, begin: int, lines: int) -> int:
    """Where the line begins that comes so many after that which begins at `begin`."""
    for _ in range(lines):
        begin = data.find(b"\n", begin) + 1
    return begin


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
