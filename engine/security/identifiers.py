"""Names that become parts of paths, ids and command lines: letters, digits, - and _ alone."""

from __future__ import annotations

import re
import reprlib

from engine.errors import InputError

MAX_LENGTH = 64
ACCEPTED = f"letters, digits, - and _, {MAX_LENGTH} at most, not beginning with -"
_IDENTIFIER = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_-]{{0,{MAX_LENGTH - 1}}}")


def shown(value: object, limit: int = 80) -> str:
    """Any value, however large or hostile, as at most `limit` printable characters for a message."""
    cutter = reprlib.Repr()
    cutter.maxstring = cutter.maxother = cutter.maxlong = limit
    cutter.maxlevel = 3
    try:
        text = cutter.repr(value)
    except (ValueError, RecursionError):
        # An integer of more digits than Python prints, or a nesting deeper than it walks.
        text = f"<{type(value).__name__}>"
    printable = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
    return printable if len(printable) <= limit else printable[: limit - 1] + "…"


def is_identifier(text: object) -> bool:
    return isinstance(text, str) and _IDENTIFIER.fullmatch(text) is not None


def validate_identifier(text: str, what: str) -> str:
    """`text` itself when all of it is a name (no trailing newline either). Raises InputError, saying `what` it is."""
    if not is_identifier(text):
        raise InputError(f"{what} {shown(text)}", why="not a name that can be used", todo=ACCEPTED)
    return text


def made_identifier(text: str, fallback: str) -> str:
    """A name made of what is usable in `text`: "Qwen3.5 4B (mlx)" gives "Qwen3-5-4B-mlx"."""
    name = re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")[:MAX_LENGTH].strip("-")
    return name or fallback
