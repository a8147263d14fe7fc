"""The terminal's encoding, and what is written in place of characters that it lacks."""

from __future__ import annotations

import codecs
import io
import locale
import os
import sys
import unicodedata
from typing import Final

_ASCII: Final = {
    "→": "->",
    "←": "<-",
    "↑": "^",
    "↓": "v",
    "…": "...",
    "–": "-",
    "—": "-",
    "·": "-",
    "×": "x",
    "°": " ",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "±": "+-",
    "µ": "u",
    "«": '"',
    "»": '"',
    "“": '"',
    "”": '"',
    "’": "'",
    "�": "?",
    **dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼", "+"),
    **dict.fromkeys("─━", "-"),
    **dict.fromkeys("│┃", "|"),
    **dict.fromkeys("▁▂▃▄▅▆▇█▎▊▌▐▔", " "),
}


def locale_encoding() -> str:
    """Python itself writes UTF-8 where LC_ALL is C."""
    return "utf-8" if os.environ.get("PYTHONUTF8") == "1" else locale.getencoding()


def prepare(stream: object, *, cells: bool = False) -> None:
    """Let a stream write the locale's characters, our own signs in ASCII, and others as their escapes; with `cells` as
    wide as they are."""
    if isinstance(stream, io.TextIOWrapper):
        encoding = locale_encoding() if sys.flags.utf8_mode and "PYTHONIOENCODING" not in os.environ else None
        stream.reconfigure(encoding=encoding, errors="flightdeck.cells" if cells else "flightdeck.text")


def _text(error: UnicodeError) -> tuple[str, int]:
    lacking, end = _lacking(error)
    return "".join(_ASCII.get(sign) or sign.encode("ascii", "backslashreplace").decode() for sign in lacking), end


def _cells(error: UnicodeError) -> tuple[str, int]:
    lacking, end = _lacking(error)
    return "".join(_ASCII[sign][-1] if sign in _ASCII else "?" * _width(sign) for sign in lacking), end


def _lacking(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return error.object[error.start : error.end], error.end


def _width(sign: str) -> int:
    """In cells."""
    return 0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1


codecs.register_error("flightdeck.text", _text)
codecs.register_error("flightdeck.cells", _cells)
