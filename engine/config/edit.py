"""Changes a job's settings: read from `key=value` texts, checked as the file's own, applied to a configuration or
written into its file; and names the settings in which two configurations differ."""

from __future__ import annotations

import itertools
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from engine.config.documents import SCALAR_FAULTS, read_text
from engine.config.draft import toml_value
from engine.config.faults import FileTable
from engine.config.job_table import PATH_KEYS, ReadJob, apply_rate_rule
from engine.config.load import check_training
from engine.config.mlx_lm_keys import KEYS, SAME_KEYS, with_defaults
from engine.config.models import Config
from engine.errors import ConfigError, InputError, StateError
from engine.protocol.attempt import replacing
from engine.protocol.job import AUTO

EDITED_KEYS: Final = (
    *("learning_rate", "batch_size", "batch_tokens", "iters", "epochs", "lora_parameters.rank", "num_layers"),
    *("max_seq_length", "grad_accumulation_steps", "steps_per_eval", "save_every", "seed"),
)
"""Those that people change most from one run to the next; of those in SAME_KEYS a job has one or the other."""
_TABLE = re.compile(r"\s*\[")
_COMMENT = re.compile(r"[^\"'#]*(?P<comment>\s+#.*)")
Settings = Mapping[str, Any]
"""By key of [job]; "lora_parameters.rank" is one key of that table."""


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """The settings of `key=value` texts, each value as in TOML, or a text where it is none. Raises InputError."""
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(f"{text!r} is no setting", todo="give key=value, such as learning_rate=1e-5")
        settings[key.strip()] = parse_value(value)
    return settings


def parse_value(text: str) -> Any:
    """As TOML reads it; a word without quotes is a text, and 1e-5 a number."""
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except SCALAR_FAULTS:
        return text.strip()


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
    """The configuration with other settings of its training. Raises ConfigError, its faults said of `source`, with all
    of them, as for a file."""
    table, job = FileTable(source, "job", _whole(config, changes)), config.job
    if job.words:
        for key in table:
            table.refuse(key, "no value here: the command has its own settings, which the file says")
        raise ConfigError(table.faults)
    accepted = [key for key in KEYS if key not in (*PATH_KEYS, "config", *job.unused)]
    table.unknown(accepted, dict.fromkeys((*PATH_KEYS, "config"), "no value here: change it in the file"))
    for key in accepted:
        if key in table and (fault := KEYS[key].form.fault(table[key])):
            table.refuse(key, fault)
    replaced = [SAME_KEYS[key] for key in table if key in SAME_KEYS]
    settings = {key: value for key, value in job.mlx_lm.items() if key not in replaced} | table
    if "fine_tune_type" in table and "num_layers" not in {*job.given, *table}:
        settings["num_layers"] = with_defaults({"fine_tune_type": table["fine_tune_type"]})["num_layers"]
    if table.faults:
        raise ConfigError(table.faults)
    if job.rate_by_rule and "learning_rate" not in table:
        settings["learning_rate"] = AUTO
    by_rule = apply_rate_rule(settings)
    fields = {"mlx_lm": settings, "given": tuple(sorted({*job.given, *table})), "rate_by_rule": by_rule}
    changed = job.model_copy(update={**fields, "fine_tune_type": settings["fine_tune_type"]})
    locations = dict.fromkeys(changed.given, table)
    nodes = [table.at(f"node[{rank}]", {"validate": node.validates}) for rank, node in enumerate(config.nodes)]
    check_training(table, nodes, ReadJob(changed, settings, locations, is_command=False))
    if table.faults:
        raise ConfigError(table.faults)
    return config.model_copy(update={"job": changed})


def _whole(config: Config, changes: Settings) -> dict[str, Any]:
    """With whole tables in place of single keys of theirs."""
    whole: dict[str, Any] = {}
    for key, value in changes.items():
        name, _, inner = key.partition(".")
        if not inner:
            whole[name] = value
        else:
            base = whole.get(name, config.job.mlx_lm.get(name))
            whole[name] = {**(base if isinstance(base, dict) else {}), inner: value}
    return whole


def line_of(path: Path, key: str) -> tuple[int, str] | None:
    """The line, from 1, and the text there of a ConfigFault's key in a TOML file; None where it has none."""
    try:
        lines = read_text(path, "").splitlines()
    except ConfigError:
        return None
    if number := re.fullmatch(r"line ([0-9]+)", key):
        place = int(number[1])
        return (place, lines[place - 1]) if place <= len(lines) else None
    table, count = "", Counter[str]()
    for place, text in enumerate(lines, 1):
        if header := re.match(r"\s*(\[\[?)\s*([\w. -]+?)\s*\]", text):
            table = header[2] if header[1] == "[" else f"{header[2]}[{count[header[2]]}]"
            count[header[2]] += 1
        name = re.match(r"\s*([\w-]+)\s*=", text)
        if name is not None and re.fullmatch(rf"{re.escape(f'{table}.{name[1]}'.lstrip('.'))}(\[.*|\..*)?", key):
            return place, text
    return None


def changed_keys(before: Config, after: Config) -> list[str]:
    """Each key with another value, "learning_rate 0.001 → 0.0005"; of a list, a long text or a variable of `env` only
    that it has changed."""
    left, right = dict(_leaves(before)), dict(_leaves(after))
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


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The settings by key, as the file names them; credentials are only compared."""
    if isinstance(value, Config):
        for field in ("cluster", "nodes", *(name for name in type(value).model_fields if name not in _NO_SETTINGS)):
            yield from _leaves(getattr(value, field), "" if field == "job" else field)
    elif isinstance(value, BaseModel | dict):
        items = (
            value.items()
            if isinstance(value, dict)
            else ((key, getattr(value, key)) for key in type(value).model_fields)
        )
        for key, inner in items:
            if key not in ("given", "unused", "digest"):
                yield from _leaves(inner, name if key == "mlx_lm" else f"{name}.{key}".lstrip("."))
    elif name == "nodes":
        for node in value:
            yield from _leaves(node, f"node {node.name}")
    else:
        yield name, value


_NO_SETTINGS = ("file", "digest", "cluster", "nodes")
_SHOWN = 60


def write_settings(config: Config, changes: Settings, *, backup: bool = False) -> Path | None:
    """Write the settings into [job] of the configuration's file, each in place of its own line or at the end of its
    table; all else stays as it is. With `backup` the former text is in the file whose path is returned. Raises
    InputError where there is no file, or it has a form that is only for a person to change; ConfigError, StateError."""
    if config.file is None:
        raise InputError("there is no file to write to", why="this configuration was not read from one")
    path = config.file.resolve()
    before = read_text(path, "a flightdeck.toml")
    text, wanted = before.splitlines(), tomllib.loads(before)
    job = wanted.setdefault("job", {})
    for key, value in changes.items():
        name, _, inner = key.partition(".")
        if inner and any(_header(f"job.{name}").fullmatch(line) for line in text):
            job[name][inner] = value
            _set(text, f"job.{name}", inner, value)
        else:
            job[name] = _whole(config, {key: value})[name]
            _set(text, "job", name, job[name])
        if (other := SAME_KEYS.get(key)) in job:
            del job[other]
            text[:] = [line for line in text if not re.match(rf"\s*{other}\s*=", line)]
    after = "\n".join(text) + "\n"
    try:
        as_wanted = tomllib.loads(after) == wanted
    except tomllib.TOMLDecodeError:
        as_wanted = False
    if not as_wanted:
        todo = "write into [job]: " + "; ".join(f"{key} = {toml_value(value)}" for key, value in changes.items())
        raise InputError("the keys cannot be set", where=str(path), why="[job] has an unusual form", todo=todo)
    names = (f"{path.name}.bak{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
    kept = next(file for name in names if not (file := path.with_name(name)).exists())
    try:
        for file, content in [(kept, before)] * backup + [(path, after)]:
            with replacing(file, stat.S_IMODE(path.stat().st_mode)) as written:
                written.write(content.encode())
    except OSError as error:
        raise StateError("cannot be written", where=str(path), why=error) from error
    return kept if backup else None


def _header(table: str) -> re.Pattern[str]:
    names = r"\s*\.\s*".join(map(re.escape, table.split(".")))
    return re.compile(rf"\s*\[\s*{names}\s*\]\s*(#.*)?")


def _set(text: list[str], table: str, key: str, value: object) -> None:
    """Set the key of [table] among the lines of a file."""
    header, line = _header(table), f"{key} = {toml_value(value)}"
    first = next((number for number, line in enumerate(text, 1) if header.fullmatch(line)), len(text))
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
