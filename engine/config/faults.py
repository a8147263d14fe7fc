"""Collects the faults of a configuration, each with its location and a description of what is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from engine.errors import ConfigFault, did_you_mean
from engine.security.identifiers import IDENTIFIER_FORM, is_identifier, safe_repr
from engine.security.redact import REDACTED, is_public, is_secret, redact

UNKNOWN_LIMIT = 20
"""Unknown keys of a table that are reported individually; the rest are only counted."""
_KEY_WIDTH, _VALUE_WIDTH, _UNCUT = 60, 80, 10_000
_INDEXED = re.compile(r"[a-z_]+\[[0-9]{1,4}\]|line [0-9]{1,9}")
_NOT_SET = "(not set)"

_TYPES = {
    "string_type": "a string in quotes", "int_type": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "finite_number": "a finite number", "bool_type": "true or false", "tuple_type": "a list",
    "dict_type": "a table",
}  # fmt: skip
_BOUNDS = {
    "greater_than": ("gt", "a number above {}"),
    "greater_than_equal": ("ge", "{} or more"),
    "less_than": ("lt", "a number below {}"),
    "less_than_equal": ("le", "{} or less"),
    "too_long": ("max_length", "a list of up to {} entries"),
}

Model = TypeVar("Model", bound=BaseModel)


class FileTable(dict[Any, Any]):
    """A table of a file, whose keys are reported as `<name>.<key>`; a YAML file's has no name. All tables have the same
    list of faults, those so far in the order in which they were found."""

    def __init__(
        self, file: str, name: str = "", values: Mapping[Any, Any] = {}, faults: list[ConfigFault] | None = None
    ) -> None:
        super().__init__(values)
        self.file, self.name, self.faults = file, name, [] if faults is None else faults

    def at(self, name: str, values: Mapping[Any, Any] = {}) -> FileTable:
        """Another table of the file."""
        return FileTable(self.file, name, values, self.faults)

    def table(self, name: str) -> FileTable:
        """The nested one of that name; an empty one where there is none."""
        values = self.get(name, {})
        if not isinstance(values, dict):
            self.refuse(name, f"a table: [{name}] on its own line, with its keys below")
        return self.at(name, values if isinstance(values, dict) else {})

    def key(self, name: object) -> str:
        return f"{self.name}.{key_text(name)}" if self.name else key_text(name)

    def refuse(self, key: object, accepted: str, *value: object) -> None:
        """Report a value that is not accepted, by default the key's own; once even if many nodes take it from
        [node_defaults]."""
        refused = value[0] if value else self.get(key)
        fault = ConfigFault(self.file, self.key(key), _shown([self.name, key], refused), accepted)
        if fault not in self.faults:
            self.faults.append(fault)

    def missing(self, key: object, accepted: str) -> None:
        """Report a required key."""
        self.faults.append(ConfigFault(self.file, self.key(key), _NOT_SET, accepted))

    def unknown(self, accepted: Iterable[str], hints: Mapping[Any, str]) -> None:
        """Report every key that is not in `accepted`; `hints` says what to use instead of some keys."""
        names = sorted(accepted)
        unknown = [key for key in self if key not in names]
        for key in unknown[:UNKNOWN_LIMIT]:
            self.refuse(key, hints.get(_plain(key)) or _suggestion(_plain(key), names))
        if len(unknown) > UNKNOWN_LIMIT:
            more = f"({len(unknown) - UNKNOWN_LIMIT} more keys)"
            self.faults.append(ConfigFault(self.file, self.name or "the file", more, "known keys"))

    def validated(self, kind: type[Model], values: Mapping[str, Any]) -> Model | None:
        """`values` as a model with strict types; None if its types are wrong. A `name` must be an identifier; unknown
        keys are ignored."""
        if isinstance(name := values.get("name"), str) and not is_identifier(name):
            self.refuse("name", IDENTIFIER_FORM, name)
        accepted = keys_of(kind)
        chosen = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in accepted
        }
        try:
            return kind.model_validate(chosen, strict=True)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                first, *inner = problem["loc"]
                parts = (f"[{part}]" if isinstance(part, int) else f".{key_text(part)}" for part in inner)
                value = (
                    _shown([self.name, *problem["loc"]], problem["input"]) if problem["type"] != "missing" else _NOT_SET
                )
                accepted_here = accepted_form(problem)
                if problem["type"] == "extra_forbidden":
                    # Of a section's key that is a list of tables.
                    (table, *_) = get_args(kind.model_fields[str(first)].annotation)
                    accepted_here = _suggestion(inner[-1], keys_of(table))
                self.faults.append(ConfigFault(self.file, self.key(first) + "".join(parts), value, accepted_here))
            return None


def keys_of(kind: type[BaseModel]) -> list[str]:
    """The fields, as a document names them."""
    return [field.alias or name for name, field in kind.model_fields.items()]


def accepted_form(problem: ErrorDetails) -> str:
    """A description of what pydantic accepts."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in _BOUNDS:
        name, template = _BOUNDS[kind]
        return template.format(bound_text(context[name]))
    if kind == "literal_error":
        return f"one of {context['expected']}"
    if kind == "missing":
        return "a value, since the key is required"
    return _TYPES.get(kind, problem["msg"])


def bound_text(bound: float) -> str:
    """A bound for printing, to 6 decimals and without an exponent: "0.000001", "0.5", "1000000"."""
    return f"{bound:f}".rstrip("0").rstrip(".")


def accepts(form: Callable[[Any], str | None]) -> Callable[[Any], Any]:
    """A validator for pydantic: `form` describes what is accepted instead of a value, or returns None."""

    def check(value: Any) -> Any:
        if (accepted := form(value)) is not None:
            raise PydanticCustomError("form", "{accepted}", {"accepted": accepted})
        return value

    return check


def key_text(key: object) -> str:
    """A key for printing: unchanged if it is a name or an index, else quoted, escaped and shortened."""
    if is_identifier(key) or (isinstance(key, int) and abs(key) < 10**9):
        return str(key)
    return key if isinstance(key, str) and _INDEXED.fullmatch(key) else safe_repr(key, _KEY_WIDTH)


def _shown(path: Sequence[object], value: object) -> str:
    """The value at that place for printing, without secrets: those go before it is cut, after which a password may have
    no form. A variable of `env` is one, whatever its name."""
    *tables, name = ".".join(map(str, path)).split(".")
    of_job = name == "env" or tables[-1:] == ["env"]
    if (of_job and not is_public(name)) or _holds_secret({name: value}):
        return REDACTED
    text = redact(safe_repr(value, _UNCUT))
    return text if len(text) <= _VALUE_WIDTH else f"{text[: _VALUE_WIDTH - 1]}…"


def _holds_secret(document: object) -> bool:
    """A text under the name of a secret, or variables of `env`, however deep. Each part is looked at once: a YAML file
    of some lines may name one a billion times."""
    parts, looked_at = [document], set[int]()
    while parts:
        part = parts.pop()
        if isinstance(part, (Mapping, list)) and id(part) not in looked_at:
            looked_at.add(id(part))
            named = part.items() if isinstance(part, Mapping) else ()
            if any(
                (is_secret(str(key)) and isinstance(value, str)) or (key == "env" and value) for key, value in named
            ):
                return True
            parts += part.values() if isinstance(part, Mapping) else part
    return False


def _plain(key: object) -> object:
    """As YAML files have it: with options as on a command line, "lora-layers" is lora_layers."""
    return key.strip("-").replace("-", "_") if isinstance(key, str) else key


def _suggestion(key: object, names: list[str]) -> str:
    if isinstance(key, str) and (near := did_you_mean(key[:_KEY_WIDTH], names)):
        return f"a known key; {near}"
    listed = ", ".join(names) if len(names) <= 12 else "see docs/configuration.md"
    return f"a known key: {listed}"
