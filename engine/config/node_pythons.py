"""Writes another `python` into the [[node]] tables of a configuration's file."""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Mapping

from engine.config.documents import read_text
from engine.config.draft import toml_value
from engine.config.models import Config
from engine.errors import InputError, StateError
from engine.protocol.attempt import replacing
from engine.security.identifiers import LOCAL

_NODE = re.compile(r"\s*\[\[\s*node\s*\]\]\s*(#.*)?")
_PYTHON = re.compile(r"\s*python\s*=\s*(\"[^\"]*\"|'[^']*')(?P<comment>\s*#.*)?\s*")


def write_pythons(config: Config, pythons: Mapping[str, str]) -> None:
    """`pythons`: by NodeConfig.ssh. All else of the file stays. Raises InputError without a file, and for one of a form
    that only a person should change; ConfigError, StateError."""
    if config.file is None:
        raise InputError("there is no file to write to", why="this configuration was not read from one")
    path = config.file.resolve()
    before = read_text(path, "a flightdeck.toml")
    text, wanted = before.splitlines(), tomllib.loads(before)
    tables = wanted.get("node", [])
    places = [number for number, line in enumerate(text) if _NODE.fullmatch(line)]
    default = wanted.get("node_defaults", {}).get("ssh", LOCAL)
    for table, place in reversed(list(zip(tables, places, strict=False))):
        if (python := pythons.get(table.get("ssh", default))) is not None:
            table["python"] = python
            ends = (number for number in range(place + 1, len(text)) if re.match(r"\s*\[", text[number]))
            lines = range(place + 1, next(ends, len(text)))
            old = next((number for number in lines if _PYTHON.fullmatch(text[number])), None)
            match = _PYTHON.fullmatch(text[old]) if old is not None else None
            comment = match["comment"] or "" if match is not None else ""
            text[slice(place + 1, place + 1) if old is None else slice(old, old + 1)] = [
                f"python = {toml_value(python)}{comment}"
            ]
    after = "\n".join(text) + "\n"
    try:
        as_wanted = len(places) == len(tables) and bool(tables) and tomllib.loads(after) == wanted
    except tomllib.TOMLDecodeError:
        as_wanted = False
    if not as_wanted:
        todo = "; ".join(f"for {ssh} write python = {toml_value(python)}" for ssh, python in pythons.items())
        raise InputError(
            "python of [[node]] cannot be set", where=str(path), why="the file has an unusual form", todo=todo
        )
    try:
        with replacing(path, stat.S_IMODE(path.stat().st_mode)) as file:
            file.write(after.encode())
    except OSError as error:
        raise StateError("cannot be written", where=str(path), why=error) from error
