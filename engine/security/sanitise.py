"""Makes untrusted input safe: output of a program as one line for the display, and values of a node's JSON as bounded
strings and finite numbers. Nothing here raises. Sanitised text has no control characters, no invisible or
direction-changing characters and no piles of combining marks. Stored bytes are not changed."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

TAB_COLUMNS: Final = 8
MARKS_PER_CHARACTER: Final = 3
"""Combining marks kept in a row: real scripts need up to three, more draw over the neighbouring lines."""

_PLAIN: Final = re.compile(rb"[\x20-\x7e]*")
# The payload of a control string excludes what begins or ends one, so that a hostile line is scanned at most twice.
# One that never ends loses only its introducer: its text is harmless then, and may matter.
# It begins with one class of characters, which `re` skips to ten times as fast.
_SEQUENCE: Final = re.compile(
    r"[\x1b\x90\x98\x9b\x9d-\x9f]"
    r"(?:(?:(?<=\x1b)\[|(?<=\x9b))[0-?]*[ -/]*[@-~]?"
    r"|(?:(?<=\x1b)[\]PX^_]|(?<=[\x90\x98\x9d-\x9f]))[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|(?<=\x1b)[ -/]*[0-~]?)"
)
_SGR: Final = re.compile(r"\x1b\[([\d;]{0,80})m")
_LEADING_ZEROS: Final = re.compile(r"\b0+(?=\d)")
_SGR_CODE: Final = re.compile(r"([34]8;5;\d{1,3}|[34]8;2(?:;\d{1,3}){3}|\d*);")
_SHOWN_CODE: Final = re.compile(r"2?[1-479]|[34][0-79]|9[0-7]|10[0-7]|[34]8;.+")
"""All but what hides text (8) or blinks (5, 6)."""
_COLOURED_BYTES: Final = 4096
_INVISIBLE: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0")
_LINE_BREAKS: Final = frozenset("\n\v\f\x1c\x1d\x1e\x85\u2028\u2029")
_CACHED_CHARACTERS: Final = 8192


class _Visible(dict[int, str | None]):
    """str.translate table, filled with each code point when it is first seen."""

    def __missing__(self, code: int) -> str | None:
        if len(self) >= _CACHED_CHARACTERS:
            self.clear()
        shown = self[code] = _visible(chr(code))
        return shown


def _visible(character: str) -> str | None:
    if character in "\t\r":
        return character
    if character in _LINE_BREAKS:
        return " "
    category = unicodedata.category(character)
    if category == "Cs":
        return "\ufffd"
    selects_variation = "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"
    if category in ("Cc", "Cf") or character in _INVISIBLE or selects_variation:
        return None
    return " " if category == "Zs" and character != "\u3000" else character


_VISIBLE: Final = _Visible()


def sanitise(data: bytes, limit: int | None = None) -> str:
    """One line of output, with or without its newline, as plain text for one line of a display.

    Escape sequences, C0 and C1 controls, bidi controls and invisible characters are removed, tabs expanded, invalid
    UTF-8 becomes U+FFFD, and of a progress bar (`\\r`) only what a terminal would show last is kept. `limit` bounds
    the result in characters; a longer line ends in "…" and the number of characters cut. Linear in time; idempotent."""
    if limit is None and _PLAIN.fullmatch(data):
        return data.decode("ascii")
    text = data.decode("utf-8", "replace").rstrip("\r\n")
    text = _SEQUENCE.sub("", text).translate(_VISIBLE).rstrip("\r")
    text = text[text.rfind("\r") + 1 :]
    if not text.isascii():
        text = _without_piled_marks(text)
    return text.expandtabs(TAB_COLUMNS) if limit is None else _cut(text, max(0, limit))


class SgrSpan(NamedTuple):
    """Characters `start` to `end` of a sanitised line, and the SGR parameters (ECMA-48 8.3.117) that they had."""

    start: int
    end: int
    parameters: str
    """"1;31", "38;2;255;0;0", without what hides text or blinks."""


def sgr_spans(data: bytes, text: str) -> list[SgrSpan]:
    """The colours and styles of a line of output that is shown as `text`: none where that is not what it printed last,
    as after a redaction, and of a line of more than _COLOURED_BYTES."""
    line = data.rstrip(b"\r\n")
    line = line[line.rfind(b"\r") + 1 :]
    if b"\x1b[" not in line or len(line) > _COLOURED_BYTES:
        return []
    printed, runs = line.decode(errors="replace"), list[tuple[str, str]]()
    at, parameters = 0, ""
    for match in _SEQUENCE.finditer(printed):
        runs.append((printed[at : match.start()].translate(_VISIBLE), parameters))
        at = match.end()
        if (sgr := _SGR.fullmatch(match[0])) is not None:
            parameters = _sgr_after(parameters, sgr[1])
    runs.append((printed[at:].translate(_VISIBLE), parameters))
    shown, spans = "", list[SgrSpan]()
    for run, parameters in runs:
        start, column = len(shown), len(shown) % TAB_COLUMNS
        shown += (" " * column + run).expandtabs(TAB_COLUMNS)[column:]
        if parameters and len(shown) > start:
            joins = bool(spans) and spans[-1][1:] == (start, parameters)
            spans.append(SgrSpan(spans.pop().start if joins else start, len(shown), parameters))
    return spans if shown == text else []


@lru_cache(maxsize=1024)
def _sgr_after(parameters: str, codes: str) -> str:
    """The parameters in force after some more: a code replaces those that set the same."""
    style: dict[str, str] = {}
    for code in _SGR_CODE.findall(_LEADING_ZEROS.sub("", f"{parameters or 0};{codes};")):
        if code in ("", "0"):
            style.clear()
        elif _SHOWN_CODE.fullmatch(code) is not None and len(code) == 2 and code[0] == "2":
            for reset in ("1", "2") if code == "22" else (code[1],):
                style.pop(reset, None)
        elif _SHOWN_CODE.fullmatch(code) is not None:
            style[code if len(code) == 1 else "colour" if code[0] in "39" else "background"] = code
    return ";".join(style.values())


def sanitise_text(text: str) -> str:
    """`sanitise` of each line, also of a part that begins or ends in the middle of one."""
    return "\n".join(sanitise(line.encode(errors="replace")) for line in text.split("\n"))


def _without_piled_marks(text: str) -> str:
    if max(text) < "\u0300":
        return text
    kept = []
    marks = 0
    for character in text:
        marks = marks + 1 if character >= "\u0300" and unicodedata.category(character) in ("Mn", "Me") else 0
        if marks <= MARKS_PER_CHARACTER:
            kept.append(character)
    return "".join(kept)


def _cut(text: str, limit: int) -> str:
    # Cut before the tabs are expanded: a line of tabs alone would otherwise grow eightfold first.
    beginning = text[:limit].expandtabs(TAB_COLUMNS)
    length = len(beginning) + max(0, len(text) - limit)
    if length <= limit:
        return beginning
    for keep in range(limit, max(-1, limit - 40), -1):
        note = f"… +{length - keep:,} characters"
        if keep + len(note) <= limit:
            return beginning[:keep] + note
    return "…"[:limit]


def plain(text: object, limit: int = 500) -> str:
    """Text from a node, safe to show, at most `limit` characters. A byte of a file name that is not UTF-8 stays
    distinct, as `\\udcff`."""
    return sanitise(str(text).encode(errors="backslashreplace"), limit)


def last_line(text: str) -> str:
    """The last line that is not blank, without the blanks around it; "" without one."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


TEXT_LIMIT = 120
_LARGEST = 2**63


def text_or_none(value: object, limit: int = TEXT_LIMIT) -> str | None:
    """A string on one line, without control characters; None for anything else, or when it is empty."""
    if not isinstance(value, str):
        return None
    return sanitise(value[: 8 * limit].encode(errors="replace"), limit).strip() or None


def count_or_none(value: object) -> int | None:
    """A count, from 0 on, given as a number or in decimal digits; None for anything else."""
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
    return value if type(value) is int and 0 <= value < _LARGEST else None


def finite_or_none(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST and math.isfinite(value) else None


def number_or_none(value: object) -> int | float | None:
    """A finite number of ordinary size, as it is; None for anything else."""
    return value if type(value) is int and abs(value) < _LARGEST else finite_or_none(value)


def moment_or_none(value: object) -> datetime | None:
    """Seconds since the epoch as a UTC time; None for anything else, or beyond the year 9999."""
    try:
        return datetime.fromtimestamp(value, UTC) if (value := finite_or_none(value)) is not None else None
    except (OverflowError, OSError, ValueError):
        return None


def json_or_none(text: object) -> Any:
    """Parsed JSON; None when it is invalid."""
    if not isinstance(text, str | bytes):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def json_object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def json_objects(value: object, limit: int = 256) -> list[dict[str, Any]]:
    return [row for row in value[:limit] if isinstance(row, dict)] if isinstance(value, list) else []
