"""Validates single values from outside: each function returns its value, or raises ValueError about `what`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from engine.security.identifiers import safe_repr


def is_number(value: object) -> bool:
    """A bool is not a number."""
    return isinstance(value, Real) and not isinstance(value, bool)


def number(value: object, what: str) -> float:
    """`value` as a float, which may be NaN or infinite."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{what} = {safe_repr(value)}: must be a number")
    try:
        return float(value)
    except OverflowError:
        # An integer beyond every float.
        return math.inf if value == abs(value) else -math.inf


def finite(value: object, what: str) -> float:
    checked = number(value, what)
    if not math.isfinite(checked):
        raise ValueError(f"{what} = {safe_repr(value)}: must be finite")
    return checked


def not_negative(value: object, what: str) -> float:
    checked = finite(value, what)
    if checked < 0:
        raise ValueError(f"{what} = {safe_repr(value)}: must be at least 0")
    return checked


def whole(value: object, what: str, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} = {safe_repr(value)}: must be a whole number, at least {least}")
    return value


def check_items(value: object, kind: type, what: str) -> None:
    """Raises ValueError for anything but a sequence of instances of `kind` with one at least."""
    if not isinstance(value, Sequence) or not all(isinstance(item, kind) for item in value):
        raise ValueError(f"{what} = {safe_repr(value)}: must be a list of {kind.__name__}")
    if not value:
        raise ValueError(f"there are no {what}")


def table(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} = {safe_repr(value)}: must be a table of names and values")
    return value
