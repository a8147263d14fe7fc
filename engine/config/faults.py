"""Faults of a configuration: collected with where they are and what is accepted, in words of our own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from engine.errors import ConfigFault
from engine.security.identifiers import is_identifier, shown

UNKNOWN_LIMIT = 20
"""So many unknown keys of one table are named one by one; more are counted."""
_KEY_WIDTH = 60
_INDEXED = re.compile(r"[a-z_]+\[[0-9]{1,4}\]|line [0-9]{1,9}")
_NOT_SET = "(not set)"

_TYPES = {
    "string_type": "a text in quotes",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a table",
}
_BOUNDS = {
    "greater_than": ("gt", "a number above {:g}"),
    "greater_than_equal": ("ge", "{:g} or more"),
    "less_than": ("lt", "a number below {:g}"),
    "less_than_equal": ("le", "{:g} or less"),
}

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Place:
    """A table of a file: its keys are named `<table>.<key>`, those of a YAML file by themselves."""

    file: str
    table: str = ""

    def key(self, name: object) -> str:
        return f"{self.table}.{key_text(name)}" if self.table else key_text(name)


@dataclass
class Faults:
    """All the faults so far, in the order in which they were found."""

    found: list[ConfigFault] = field(default_factory=list)

    def add(self, place: Place, key: object, value: object, accepted: str) -> None:
        """A value that is not accepted. Said once, however many nodes have it from [node_defaults]."""
        fault = ConfigFault(place.file, place.key(key), value_text(value), accepted)
        if fault not in self.found:
            self.found.append(fault)

    def missing(self, place: Place, key: object, accepted: str) -> None:
        """A key that has to be there and is not."""
        self.found.append(ConfigFault(place.file, place.key(key), _NOT_SET, accepted))

    def unknown(self, place: Place, table: Mapping[Any, Any], known: Iterable[str], later: Mapping[str, str]) -> None:
        """Every key of `table` that is not one of `known`; `later` says of some why they are not."""
        names = sorted(known)
        strange = [key for key in table if key not in names]
        for key in strange[:UNKNOWN_LIMIT]:
            self.add(place, key, table[key], later.get(key) or _suggestion(key, names))
        if len(strange) > UNKNOWN_LIMIT:
            more = f"({len(strange) - UNKNOWN_LIMIT} more keys)"
            self.found.append(ConfigFault(place.file, place.table or "the file", more, "keys that are known"))

    def validated(self, place: Place, kind: type[Model], values: Mapping[str, Any]) -> Model | None:
        """`values` as a model, types taken strictly; None when there were faults. Unknown keys are passed over."""
        chosen = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in values.items()
            if key in kind.model_fields
        }
        try:
            return kind.model_validate(chosen, strict=True)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                name, *inner = problem["loc"]
                key = key_text(name) + "".join(f"[{key_text(part)}]" for part in inner)
                value = _NOT_SET if problem["type"] == "missing" else value_text(problem["input"])
                self.found.append(ConfigFault(place.file, f"{place.table}.{key}", value, accepted_form(problem)))
            return None


def accepted_form(problem: ErrorDetails) -> str:
    """What pydantic would have accepted, in plain words."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return words.format(context[name])
    if kind == "literal_error":
        return f"one of {context['expected']}"
    if kind == "missing":
        return "a value: it cannot be left out"
    return _TYPES.get(kind, problem["msg"])


def key_text(key: object) -> str:
    """A key as it is printed: itself when it is a name or an index, else quoted, printable and cut."""
    if is_identifier(key) or (isinstance(key, int) and abs(key) < 10**9):
        return str(key)
    return key if isinstance(key, str) and _INDEXED.fullmatch(key) else shown(key, _KEY_WIDTH)


def value_text(value: object) -> str:
    """A value as it is printed: printable, at most 80 characters."""
    try:
        return shown(value)
    except (ValueError, RecursionError):
        # Python refuses to print a number of more than some thousand digits.
        return "(a value that cannot be printed)"


def _suggestion(key: object, names: list[str]) -> str:
    near = get_close_matches(key[:_KEY_WIDTH], names, n=1) if isinstance(key, str) else []
    if near:
        return f"a known key; is {near[0]} meant?"
    listed = ", ".join(names) if len(names) <= 12 else "those of an mlx-lm training YAML, and our own few"
    return f"a known key: {listed}"
