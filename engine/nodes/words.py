"""What a node said, taken in: texts safe to show and of a bounded length, numbers that are numbers. Nothing raises."""

from __future__ import annotations

import json
import math
from typing import Any

from engine.security.sanitise import sanitise

WORD_LIMIT = 120
_LARGEST = 2**63


def word(value: object, limit: int = WORD_LIMIT) -> str | None:
    """A text on one line, without control characters; None for what is no text or empty."""
    if not isinstance(value, str):
        return None
    return sanitise(value[: 8 * limit].encode(errors="replace"), limit).strip() or None


def whole(value: object) -> int | None:
    """A count, from 0 on, given as a number or in decimal digits; None for anything else."""
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
    return value if type(value) is int and 0 <= value < _LARGEST else None


def seconds(value: object) -> float | None:
    """A moment or a duration: finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST and math.isfinite(value) else None


def document(text: object) -> Any:
    """A text as JSON; None when it is none."""
    if not isinstance(text, str | bytes):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def rows(value: object, limit: int = 256) -> list[dict[str, Any]]:
    """The objects in a JSON list."""
    return [row for row in value[:limit] if isinstance(row, dict)] if isinstance(value, list) else []
