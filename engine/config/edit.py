"""Changes a job's settings, checked as the file's own: of a configuration, or in its file; and names what differs
between two configurations."""

from __future__ import annotations

import itertools
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Final

from engine.config.documents import in_form_of, read_text
from engine.config.draft import UNSURE, toml_value
from engine.config.faults import FileTable
from engine.config.job_table import OWN_KEYS, PATH_KEYS
from engine.config.load import read_document
from engine.config.mlx_lm_keys import SAME_KEYS, with_defaults
from engine.config.models import SECTIONS, Config
from engine.config.overrides import Settings, overridden, path_of
from engine.config.sources import values_of
from engine.errors import ConfigError, InputError, StateError
from engine.protocol.attempt import replacing
from engine.protocol.job import AUTO
from engine.security.identifiers import LOCAL

EDITED_KEYS: Final = (
    *("learning_rate", "batch_size", "batch_tokens", "iters", "epochs", "lora_parameters.rank", "num_layers"),
    *("max_seq_length", "grad_accumulation_steps", "steps_per_eval", "save_every", "seed"),
)
"""Those that people change most from one run to the next; of those in SAME_KEYS a job has one or the other."""
_NODE_TABLES: Final = ("cluster", "node", "node_defaults")
_FIXED_KEYS: Final = (*PATH_KEYS, "config", "framework", "command", "script", "elastic")
"""Settings of [job] that make it another one."""
_TABLE = re.compile(r"\s*\[")
_COMMENT = re.compile(rf"(?:[^\"'#]|\"[^\"\\]*\"|'[^']*')*?(?P<comment>\s+#(?! *(?:{'|'.join(UNSURE)})).*)")


def edited_settings(config: Config) -> dict[str, Any]:
    """The values of EDITED_KEYS that the job has."""
    settings = {}
    for key in EDITED_KEYS:
        name, _, inner = key.partition(".")
        value = config.job.mlx_lm.get(name)
        value = value.get(inner) if inner and isinstance(value, dict) else value
        if value is not None and not (inner and config.job.fine_tune_type == "full"):
            settings[key] = value
    return settings


def with_settings(config: Config, changes: Settings, source: str) -> Config:
    """The configuration on the same nodes with other settings. Raises ConfigError with all faults, said of `source`."""
    paths = {key: path_of(key) for key in changes}
    refused = {
        key: "no value here: change it in the file"
        for key, path in paths.items()
        if path[0] in _NODE_TABLES or (path[0] == "job" and path[1] in _FIXED_KEYS)
    }
    if config.job.words:
        refused = dict.fromkeys(changes, "no value here: the command has its own settings, which the file says")
    document, _ = overridden(_document(config), {key: changes[key] for key in changes if key not in refused}, Path())
    table = FileTable(source, "", document)
    for key, accepted in refused.items():
        *tables, name = paths[key]
        table.at(".".join(tables)).refuse(name, accepted, changes[key])
    if config.job.words and changes:
        raise ConfigError(table.faults)
    read = read_document(table, config.folder)
    replaced = {SAME_KEYS.get(key) for key in changes} | changes.keys()
    update = {"overrides": {key: value for key, value in config.overrides.items() if key not in replaced}}
    read = read.model_copy(update={"job": read.job.model_copy(update={"unused": config.job.unused})})
    return config.model_copy(update={name: getattr(read, name) for name in ("job", *SECTIONS)} | update)


def _document(config: Config) -> dict[str, Any]:
    """The tables that a configuration was read from, as far as its job and sections go: with as many nodes."""
    job = config.job
    values = {**job.mlx_lm, "model": job.model, "data": job.data}
    if job.rate_by_rule:
        values["learning_rate"] = AUTO
    usual = with_defaults({"fine_tune_type": job.fine_tune_type})
    settings = {
        key: value
        for key, value in values.items()
        if value is not None and (key in job.given or value != usual.get(key))
    }
    rest = job.model_dump(include={*OWN_KEYS}, exclude_defaults=True, mode="json")
    nodes = [{} if node.validates is None else {"validate": node.validates} for node in config.nodes]
    sections = {name: getattr(config, name).model_dump(exclude_defaults=True, mode="json") for name in SECTIONS}
    return {"node": nodes, "job": rest | settings, **sections}


def changed_keys(before: Config, after: Config) -> list[str]:
    """Each key with another value, "learning_rate 0.001 → 0.0005"; of a list, a long text or a variable of `env` only
    that it has changed."""
    left, right = ({key: value for _, key, value in values_of(config)} for config in (before, after))
    texts = []
    for key in dict.fromkeys([*left, *right]):
        old, new = left.get(key), right.get(key)
        if old != new:
            shown = not key.startswith("env.") and all(map(_is_short, (old, new)))
            texts.append(f"{key} {_shown(old)} → {_shown(new)}" if shown else key)
    return texts


def _is_short(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _SHOWN and value.isprintable()
    return value is None or isinstance(value, bool | int | float)


def _shown(value: object) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


_SHOWN = 60


def write_settings(config: Config, changes: Settings, *, backup: bool = False) -> Path | None:
    """Write the settings into the configuration's file, each in place of its own line or at the end of its
    table; all else stays as it is. With `backup` the former text is in the file whose path is returned. Raises
    InputError where there is no file, or it has a form that is only for a person to change; ConfigError, StateError."""
    if others := [key for key in changes if path_of(key)[0] in _NODE_TABLES]:
        raise InputError(f"{', '.join(others)} cannot be written", todo=f"change it in {config.file}")
    path, before = _file_of(config)
    text, wanted = lines_of(before), overridden(tomllib.loads(before), changes, path.parent)[0]
    set_keys(text, wanted, changes)
    missing = "into [job]: " + "; ".join(f"{key} = {toml_value(value)}" for key, value in changes.items())
    names = (f"{path.name}.bak{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
    kept = next(file for name in names if not (file := path.with_name(name)).exists())
    _write(path, text, wanted, missing, {kept: before} if backup else {})
    return kept if backup else None


def set_keys(text: list[str], wanted: Mapping[str, Any], changes: Settings) -> None:
    """Set the changed keys among the lines of a file, to what the `wanted` tables have."""
    for key in changes:
        *tables, name = path_of(key)
        while len(tables) > 1 and not any(_header(".".join(tables)).fullmatch(line) for line in text):
            name = tables.pop()
        value = reduce(lambda table, part: table[part], [*tables, name], wanted)
        set_key(text, ".".join(tables), name, value)
        if other := SAME_KEYS.get(name):
            text[:] = [line for line in text if not re.match(rf"\s*{other}\s*=", line)]


def write_pythons(config: Config, pythons: Mapping[str, str]) -> Path:
    """Write the `python` of the [[node]] tables with these `ssh`; the file. Raises as `write_settings` does."""
    path, before = _file_of(config)
    text, wanted, nodes = lines_of(before), tomllib.loads(before), 0
    for rank, node in enumerate(wanted.get("node", ())):
        if (python := pythons.get(node.get("ssh", LOCAL))) is not None:
            node["python"], nodes = python, nodes + 1
            set_key(text, "node", "python", python, rank)
    missing = "into [[node]]: " + "; ".join(f"python = {toml_value(python)}" for python in pythons.values())
    _write(path, text, wanted if nodes else {}, missing)
    return path


def _file_of(config: Config) -> tuple[Path, str]:
    if config.file is None:
        raise InputError("there is no file to write to", why="this configuration was not read from one")
    path = config.file.resolve()
    return path, read_text(path, "a flightdeck.toml")


def _write(
    path: Path, text: Sequence[str], wanted: Mapping[str, Any], missing: str, before: Mapping[Path, str] = {}
) -> None:
    """Write these lines, if they are what is wanted, and first the files of `before`. Raises InputError, StateError."""
    after = "\n".join(text) + "\n"
    if not holds(after, wanted):
        why = "the file has an unusual form"
        raise InputError("the keys cannot be set", where=str(path), why=why, todo=f"write {missing}")
    try:
        for file, content in {**before, path: after}.items():
            with replacing(file, stat.S_IMODE(path.stat().st_mode)) as written:
                written.write(in_form_of(path, content).encode())
    except OSError as error:
        raise StateError("cannot be written", where=str(path), why=error) from error


def holds(text: str, wanted: Mapping[str, Any]) -> bool:
    """A TOML text has these tables and no others."""
    try:
        return tomllib.loads(text) == wanted
    except tomllib.TOMLDecodeError:
        return False


def lines_of(text: str) -> list[str]:
    """As TOML has them: it takes the other ends of str.splitlines for characters of a line."""
    return text.removesuffix("\n").split("\n")


def _header(table: str) -> re.Pattern[str]:
    names = r"\s*\.\s*".join(map(re.escape, table.split(".")))
    return re.compile(rf"\s*\[{{1,2}}\s*{names}\s*\]{{1,2}}\s*(#.*)?")


def set_key(text: list[str], table: str, key: str, value: object, rank: int = 0) -> None:
    """Set the key of [table], or of the [[table]] of this rank, among the lines of a file."""
    header, line = _header(table), f"{key} = {toml_value(value)}"
    if not any(map(header.fullmatch, text)):
        text += ["", f"[{table}]"]
    places = (number for number, line in enumerate(text, 1) if header.fullmatch(line))
    first = next(itertools.islice(places, rank, None), len(text))
    end = next((number for number in range(first, len(text)) if _TABLE.match(text[number])), len(text))
    while end > first and not (text[end - 1].strip() and text[end - 1].lstrip()[0] != "#"):
        end -= 1
    pattern = re.compile(rf"\s*{re.escape(key)}\s*=.*")
    place = next((number for number in range(first, end) if pattern.match(text[number])), None)
    if place is None:
        text.insert(end, line)
    else:
        comment = _COMMENT.fullmatch(text[place])
        text[place] = line + (comment["comment"] if comment is not None else "")
