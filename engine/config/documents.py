"""Reads flightdeck.toml, mlx-lm's YAML and hostfiles from disk into plain values, whatever lies in their place."""

from __future__ import annotations

import json
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

import yaml

from engine.config.faults import value_text
from engine.errors import ConfigFault
from engine.security.paths import MAX_LENGTH

SIZE_LIMIT = 1_000_000
"""Bytes; more is no configuration, and is not read."""
_SCALAR_FAULTS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""What the parsers let through for scalars they cannot make (a 13th month, 5,000 digits) or nest too deeply."""


class DocumentError(Exception):
    """A file that gives no table; `fault` says why."""

    def __init__(self, path: Path, key: str, value: str, accepted: str) -> None:
        super().__init__(accepted)
        self.fault = ConfigFault(file_text(path), key, value, accepted)


class _MlxLmLoader(yaml.SafeLoader):
    """mlx-lm's YAML: as PyYAML reads it, but 1e-5 is a number."""


_MlxLmLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    # From mlx_lm/lora.py, so that both read a file alike.
    re.compile(
        r"""^(?:
     [-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)
    |\.[0-9_]+(?:[eE][-+][0-9]+)?
    |[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
        re.X,
    ),
    list("-+0123456789."),
)


def file_text(path: Path) -> str:
    """A file's name for a message."""
    text = str(path)
    return text if text.isprintable() and len(text) <= MAX_LENGTH else value_text(text)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of flightdeck.toml. Raises DocumentError."""
    text = read_text(
        path,
        "a flightdeck.toml: name one with -c FILE, or begin with `flightdeck demo`, which needs none",
    )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DocumentError(path, _line_key(str(error)), str(error), "TOML (https://toml.io)") from error
    except _SCALAR_FAULTS as error:
        raise DocumentError(path, "the file", _unreadable(error), "TOML of plain values") from error


def read_yaml(path: Path) -> dict[Any, Any]:
    """The keys of an mlx-lm training YAML; none for an empty file. Raises DocumentError."""
    text = read_text(path, "the mlx-lm YAML that [job] config names, relative to the folder of flightdeck.toml")
    try:
        document = yaml.load(text, _MlxLmLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}" if mark else "the file"
        raise DocumentError(path, where, value_text(error.problem or "no YAML"), "YAML") from error
    except (yaml.YAMLError, *_SCALAR_FAULTS) as error:
        raise DocumentError(path, "the file", _unreadable(error), "YAML of plain values") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise DocumentError(path, "the file", value_text(document), "key: value lines, as mlx_lm.lora --config reads")
    return document


def read_text(path: Path, wanted: str) -> str:
    """A file's text, `wanted` being what it should have been. Raises DocumentError."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DocumentError(path, "the file", "not a regular file", wanted)
        if found.st_size > SIZE_LIMIT:
            raise DocumentError(path, "the file", f"{found.st_size:,} bytes", f"at most {SIZE_LIMIT:,} bytes")
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DocumentError(path, "the file", "(not there)", wanted) from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DocumentError(path, "the file", f"({why})", wanted) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DocumentError(path, f"line {line}", value_text(content[error.start : error.end]), "UTF-8") from error


def read_json(path: Path, text: str) -> Any:
    """The document that `text`, read from `path`, holds. Raises DocumentError."""

    def refuse(constant: str) -> None:
        raise DocumentError(path, "the file", constant, "JSON, which has no such number")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise DocumentError(path, f"line {error.lineno}", value_text(error.msg), "JSON") from error
    except _SCALAR_FAULTS as error:
        raise DocumentError(path, "the file", _unreadable(error), "JSON of plain values") from error


def _line_key(message: str) -> str:
    line = re.search(r"at line (\d+)", message)
    return f"line {line[1]}" if line else "the file"


def _unreadable(error: Exception) -> str:
    return "(nested too deeply)" if isinstance(error, RecursionError) else value_text(str(error))
