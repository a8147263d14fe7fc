"""Checks a job's own pattern for its metrics. It is tried on every line that a rank prints, by the thread that keeps
the rank's log, where a match cannot be interrupted: so the ways in which it can try a line are bounded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final

from engine.protocol.metric_patterns import LONGEST_LINE, LONGEST_NUMBER, LOSSES, metric_name

_PARSER: Final[Any] = import_module("re._parser")
"""That of re itself."""
_MOST_WAYS: Final = 1_000_000_000
"""At one place in a line: two repeats of anything, and some of digits; there are fewer, as all share one line."""
_DIGITS: Final = frozenset("0123456789.")
_ALL: Final = frozenset(map(chr, range(129)))
"""ASCII, and one for all others."""
_CATEGORIES: Final = {"DIGIT": str.isdigit, "SPACE": str.isspace, "WORD": lambda c: c.isalnum() or c in "_\x80"}
_BOUNDED: Final = (
    "a regular expression that has few ways to try a line: no repeat of what repeats or has alternatives itself, and "
    "at most two such as .* before what must follow; bound them (.{0,40}), or repeat only what cannot follow ([^,]*,)"
)
_ACCEPTED: Final = "a regular expression with groups such as step (?P<step>[0-9]+) .* loss (?P<loss>[0-9.]+)"


def pattern_form(text: object) -> str | None:
    if not isinstance(text, str) or len(text) > LONGEST_LINE:
        return f"{_ACCEPTED}, of at most {LONGEST_LINE} characters"
    try:
        named = {metric_name(name) for name in re.compile(text).groupindex}
        ways, _ = _ways(_PARSER.parse(text), frozenset(), fails=False)
    except (re.error, RecursionError, OverflowError) as error:
        return f"{_ACCEPTED}: {error}"
    if not named & {"step", "steps"} or not named & LOSSES:
        return f"{_ACCEPTED}: step and loss (or val_loss) are needed"
    return _BOUNDED if ways > _MOST_WAYS else None


def _ways(parts: Iterable[Any], after: frozenset[str], *, fails: bool) -> tuple[float, frozenset[str]]:
    """The ways in which a sequence can be tried at one place, and the characters that it can begin with. `after`: those
    that can follow it. `fails`: what follows can fail, so that other ways are tried."""
    ways: float = 1
    for op, value in reversed(list(parts)):
        match str(op):
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                after, fails = _characters(str(op), value), True
            case "AT":
                fails = True
            case "SUBPATTERN":
                inner, after = _ways(value[-1], after, fails=fails)
                ways, fails = ways * inner, True
            case "BRANCH":
                branches = [_ways(branch, after, fails=fails) for branch in value[1]]
                ways, fails = ways * 2 * sum(inner for inner, _ in branches), True
                after = frozenset().union(*(begins for _, begins in branches))
            case "ASSERT" | "ASSERT_NOT":
                ways, fails = ways * _ways(value[1], _ALL, fails=True)[0], True
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, repeated = value
                width = repeated.getwidth()
                inner, begins = _ways(repeated, after if most <= 1 else _ALL, fails=fails)
                if most > 1 and (inner > 1 or width[0] != width[1]):
                    return float("inf"), _ALL
                if most <= 1:
                    ways *= inner + 3 * (least != most and fails and bool(begins & after))
                elif fails and begins & after:
                    ways *= max(1, min(int(most), LONGEST_NUMBER if begins <= _DIGITS else LONGEST_LINE) - least + 1)
                after, fails = (begins if least else begins | after), fails or least > 0
            case _:
                # A reference to a group, and what Python 3.9 on a node does not know.
                return float("inf"), _ALL
    return ways, after


def _characters(op: str, value: Any) -> frozenset[str]:
    """In either case, as it may not count."""
    if op == "ANY":
        return _ALL
    if op == "IN":
        some = frozenset().union(*(_characters(str(op), item) for op, item in value))
        return _ALL - some if str(value[0][0]) == "NEGATE" else some
    if op == "NEGATE":
        return frozenset()
    if op == "CATEGORY":
        some = frozenset(filter(_CATEGORIES[str(value).rpartition("_")[2]], _ALL))
        return _ALL - some if "_NOT_" in str(value) else some
    low, high = value if op == "RANGE" else (value, value)
    text = "".join(chr(min(code, 128)) for code in range(min(low, 128), min(high, 128) + 1))
    found = frozenset(text + text.lower() + text.upper()) & _ALL
    return _ALL - found if op == "NOT_LITERAL" else found
