"""Reads flightdeck.toml, mlx-lm's YAML and hostfiles from disk into plain values."""

from __future__ import annotations

import codecs
import json
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from engine.config.faults import key_text
from engine.errors import ConfigError, ConfigFault
from engine.security.identifiers import safe_repr
from engine.security.paths import MAX_PATH_LENGTH

SIZE_LIMIT = 1_000_000
"""Bytes; larger files are not read."""
SCALAR_FAULTS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""Errors that the parsers do not wrap: for impossible scalars (a 13th month, 5,000 digits) and deep nesting."""

_KEY_PARTS = 64
_KEY_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_KEY_PART}(?:[ \t]*+\.[ \t]*+{_KEY_PART}){{{_KEY_PARTS}}}")
"""A dotted key of so many parts and more: tomllib's time for one grows with their square."""
_LARGEST = 2**63 - 1
"""TOML's own limit of whole numbers, far below the largest float."""


class DocumentError(ConfigError):
    """A file could not be read as a table."""

    def __init__(self, path: Path, value: str, accepted: str, key: str = "the file") -> None:
        super().__init__([ConfigFault(file_text(path), key, value, accepted)])


class _MlxLmLoader(yaml.SafeLoader):
    """PyYAML, except that 1e-5 is a number, as in mlx-lm."""


_MlxLmLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    # From mlx_lm/lora.py, so that both read a file the same way.
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
    return text if text.isprintable() and len(text) <= MAX_PATH_LENGTH else safe_repr(text)


def read_toml(path: Path, text: str | None = None) -> dict[str, Any]:
    """The tables of flightdeck.toml, or of a `text` that is to be there. Raises DocumentError."""
    wanted = "a flightdeck.toml: name one with -c FILE, write one with `flightdeck init`, or try `flightdeck demo`"
    text = read_text(path, wanted) if text is None else text
    if (long := _LONG_KEY.search(text)) is not None:
        where = f"line {text.count(chr(10), 0, long.start()) + 1}"
        raise DocumentError(path, safe_repr(long[0]), f"keys of at most {_KEY_PARTS} parts", where)
    tables: dict[str, Any] = _parsed(path, "TOML", lambda: tomllib.loads(text))
    return tables


def read_yaml(path: Path) -> dict[Any, Any]:
    """The keys of an mlx-lm training YAML. Raises DocumentError."""
    text = read_text(path, "the mlx-lm YAML of [job] config, relative to the folder of flightdeck.toml")
    document = _parsed(path, "YAML", lambda: yaml.load(text, _MlxLmLoader))
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise DocumentError(path, safe_repr(document), "key: value lines, as mlx_lm.lora --config reads")
    return document


def yaml_lines(path: Path) -> dict[str, int]:
    """The line of each key of an mlx-lm training YAML, from 1; of a table's "lora_parameters.rank". Raises
    DocumentError."""
    text = read_text(path, "an mlx-lm YAML")
    return dict(_key_lines(_parsed(path, "YAML", lambda: yaml.compose(text, _MlxLmLoader))))


def _key_lines(node: Any, before: str = "") -> Iterator[tuple[str, int]]:
    # An alias may be within itself.
    if isinstance(node, yaml.MappingNode) and before.count(".") < 2:
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield f"{before}{key.value}", key.start_mark.line + 1
                yield from _key_lines(value, f"{before}{key.value}.")


def read_text(path: Path, wanted: str) -> str:
    """The text of a file, its lines with "\\n"; `wanted` describes it in faults. Raises DocumentError."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DocumentError(path, "not a regular file", wanted)
        if status.st_size > SIZE_LIMIT:
            raise DocumentError(path, f"{status.st_size:,} bytes", f"at most {SIZE_LIMIT:,} bytes")
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DocumentError(path, "(not found)", wanted) from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DocumentError(path, f"({why})", wanted) from error
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DocumentError(path, safe_repr(content[error.start : error.end]), "UTF-8", f"line {line}") from error


def in_form_of(path: Path, text: str) -> str:
    """A text of `read_text` with the line ends, and the byte order mark, of the file there. Raises OSError."""
    there = path.read_bytes() if path.is_file() else b""
    return "\ufeff" * there.startswith(codecs.BOM_UTF8) + (text.replace("\n", "\r\n") if b"\r\n" in there else text)


def read_json(path: Path, text: str) -> Any:
    """Parse `text`, which was read from `path`. Raises DocumentError."""

    def refuse(constant: str) -> None:
        raise DocumentError(path, constant, "JSON, which does not have such numbers")

    return _parsed(path, "JSON", lambda: json.loads(text, parse_constant=refuse))


def _parsed(path: Path, language: str, parse: Callable[[], Any]) -> Any:
    """Raises DocumentError with the line of a fault, where the parser names it."""
    try:
        document = parse()
        _check_numbers(path, document)
        return document
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at (line \d+)", str(error))
        raise DocumentError(path, str(error), "TOML (https://toml.io)", line[1] if line else "the file") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}" if mark else "the file"
        raise DocumentError(path, safe_repr(error.problem or "not YAML"), language, where) from error
    except json.JSONDecodeError as error:
        raise DocumentError(path, safe_repr(error.msg), language, f"line {error.lineno}") from error
    except (yaml.YAMLError, *SCALAR_FAULTS) as error:
        why = "(nested too deeply)" if isinstance(error, RecursionError) else safe_repr(str(error))
        raise DocumentError(path, why, f"{language} of plain values") from error


def _check_numbers(path: Path, document: Any) -> None:
    """No whole number is too large. Raises DocumentError."""
    waiting, seen = [("", document)], set[int]()
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise DocumentError(path, safe_repr(value), f"a whole number up to {_LARGEST}", key or "the file")
        # YAML's aliases are one object in many places.
        if not isinstance(value, dict | list) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting += [(f"{key}.{key_text(name)}" if key else key_text(name), item) for name, item in value.items()]
        else:
            waiting += [(f"{key}[{number}]", item) for number, item in enumerate(value)]
