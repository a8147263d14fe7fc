"""Values from outside the file (`--set`, a form, a repeated run): read from texts, several of them as a grid of runs,
and put into the document before it is validated, so that they have the file's own faults."""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from engine.config.documents import SCALAR_FAULTS, DocumentError, read_yaml
from engine.config.faults import key_text
from engine.config.formats import path_form, resolved
from engine.config.mlx_lm_keys import SAME_KEYS
from engine.config.models import TABLES
from engine.errors import ConfigError, ConfigFault, InputError
from engine.security.identifiers import MAX_IDENTIFIER_LENGTH, make_identifier

Settings = Mapping[str, Any]
"""By key: of [job] ("lora_parameters.rank" is one key of its table), or of another table ("checkpoint.every",
"node.ultra.python")."""
MOST_RUNS: Final = 256
"""The largest grid."""
_WORDS: Final = re.compile(r"[^\s,\"'\[\]{}]+(\s*,\s*[^\s,\"'\[\]{}]+)+")
_ONE_TEXT: Final = ("layer_split", "report_to")
"""Keys whose single value has commas."""
_SHORT: Final = {"learning_rate": "lr", "batch_size": "batch", "max_seq_length": "length", "num_layers": "layers"}


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """The settings of `key=value` texts, as `grid` reads them. Raises InputError, also for a grid."""
    runs = grid(texts)
    if len(runs) > 1:
        todo = "give each key one value, or `flightdeck launch --queue` the grid; quote a text that has commas"
        raise InputError(f"--set asks for {len(runs)} runs", why="one is started at a time", todo=todo)
    return runs[0]


def grid(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The settings of each run that `key=value` texts ask for: several values, with commas between, are so many runs.
    Each value is as in TOML, or a text where it is none; a list or a quoted text is one value, and so is that of a
    variable of `env` without quotes. Raises InputError."""
    values: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(f"{text!r} is no setting", todo="give key=value, such as learning_rate=1e-5")
        key = key.strip().removeprefix("job.")
        # The value of a variable is a text, and 1.10, 0x10 and 0,1 are what they are.
        is_text = key in _ONE_TEXT or (key.startswith("env.") and not value.strip().startswith(("'", '"')))
        values[key] = [value.strip()] if is_text else _values(value.strip())
    if math.prod(map(len, values.values())) > MOST_RUNS:
        raise InputError(f"--set asks for more than {MOST_RUNS} runs", todo="give fewer values")
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _values(text: str) -> list[Any]:
    """Without repetitions."""
    try:
        several = tomllib.loads(f"values = [{text}]")["values"] or [text]
    except SCALAR_FAULTS:
        several = [parse_value(word) for word in text.split(",")] if _WORDS.fullmatch(text) else [parse_value(text)]
    return list({repr(value): value for value in several}.values())


def parse_value(text: str) -> Any:
    """As TOML reads it; a word without quotes is a text, and 1e-5 a number."""
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except SCALAR_FAULTS:
        return text.strip()


def named(jobs: Sequence[str], runs: Sequence[Settings]) -> list[dict[str, Any]]:
    """The runs of a grid, each with a `name` of its own made of its job's and of what else differs between them:
    "support-lr5e-05-seed2"."""
    in_name = ("name",) if "name" in runs[0] or len(set(jobs)) == 1 else ("name", "model", "command")
    varied = [key for key in runs[0] if key not in in_name and len({repr(run[key]) for run in runs}) > 1]
    names: list[str] = []
    for base, run in zip(jobs, runs, strict=True):
        parts = [f"{_SHORT.get(key) or key.rpartition('.')[2]}{_short(run[key])}" for key in varied]
        ending = make_identifier("-".join(["", *parts]), "")
        name = make_identifier(f"{base[: max(8, MAX_IDENTIFIER_LENGTH - len(ending) - 1)]}-{ending}", "job")
        # One that was cut may be another's.
        numbered = (f"{name[: MAX_IDENTIFIER_LENGTH - 4]}-{number}" for number in itertools.count(2))
        names.append(next(unused for unused in itertools.chain([name], numbered) if unused not in names))
    return [{**run, "name": name} for run, name in zip(runs, names, strict=True)]


def _short(value: object) -> str:
    return f"{value:g}".replace(".", "_") if isinstance(value, float) else str(value)


def path_of(key: str) -> list[str]:
    """The tables that lead to a setting, and its name there."""
    parts = key.split(".")
    return parts if len(parts) > 1 and parts[0] in TABLES else ["job", *parts]


def overridden(document: Mapping[str, Any], settings: Settings, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The tables of a file in `folder` with the settings, each in place of the one that says the same in another way,
    and the keys of the settings as faults name them. Raises ConfigError for a node that there is none of."""
    changed, keys = deepcopy(dict(document)), list[str]()
    paths = {key: path_of(key) for key in settings}
    for *tables, name in paths.values():
        if tables == ["job"] and isinstance(job := changed.get("job"), dict):
            job.pop(SAME_KEYS.get(name), None)
    for key, (*tables, name) in paths.items():
        table, place = changed, ""
        if tables[0] == "node" and isinstance(nodes := changed.get("node"), list):
            rank = _rank(nodes, key, tables[1] if len(tables) > 1 else None)
            table, place, tables = nodes[rank], f"node[{rank}]", tables[2:]
        for part in tables:
            if not isinstance(table.get(part), dict):
                table[part] = deepcopy(_yaml_table(table, part, folder)) if place == "job" else {}
            table, place = table[part], f"{place}.{part}".lstrip(".")
        table[name] = settings[key]
        keys.append(f"{place}.{key_text(name)}")
    return changed, keys


def _rank(nodes: Sequence[Any], key: str, name: str | None) -> int:
    names = [node.get("name", f"node{rank}") if isinstance(node, dict) else "" for rank, node in enumerate(nodes)]
    if name not in names:
        accepted = f"node.NAME.KEY with the name of a node: {', '.join(map(str, names))}"
        raise ConfigError([ConfigFault("--set", key_text(key), "(no such node)", accepted)])
    return names.index(name)


def _yaml_table(job: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """The table of that name in the job's YAML; empty where there is none, or the YAML has faults."""
    try:
        named = job.get("config")
        keys = read_yaml(Path(resolved(str(named), folder))) if named and path_form(named) is None else {}
    except DocumentError:
        keys = {}
    table = keys.get(name)
    return table if isinstance(table, dict) else {}


def attributed(faults: Sequence[ConfigFault], keys: Sequence[str], file: str, source: str) -> list[ConfigFault]:
    """The faults of a `file`, those of the `keys` that were set said of `source`."""

    def parts(key: str) -> str:
        return key.replace("[", ".").replace("]", "") + "."

    def is_set(key: str) -> bool:
        return any(parts(key).startswith(parts(one)) or parts(one).startswith(parts(key)) for one in keys)

    return [replace(fault, file=source) if fault.file == file and is_set(fault.key) else fault for fault in faults]
