"""[job]: an mlx-lm training, whose keys stand inline or in the YAML file that `config` names, or a command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.documents import DocumentError, file_text, read_yaml
from engine.config.faults import Faults, Place
from engine.config.mlx_lm_keys import DEFAULTS, KEYS, with_defaults
from engine.config.models import JobConfig
from engine.config.places import path_form, resolved
from engine.security.identifiers import ACCEPTED as IDENTIFIER
from engine.security.identifiers import is_identifier, made_identifier
from engine.worker.layers import parse_split

OWN_KEYS = ("name", "command", "env", "strategy", "layer_split", "data_quality_report", "chunking", "chunk_size")
COMMAND_KEYS = ("name", "command", "env")
_TRAINING_KEYS = ("strategy", "layer_split", "chunking", "chunk_size")
"""Of ours, what only the trainer obeys."""
PATH_KEYS = ("model", "data", "adapter_path", "resume_adapter_file")
_LATER_KEYS = {
    "hf_dataset": 'data = "<a directory with train.jsonl>": data sets of a hub are not read',
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = ("MLX_", "FLIGHTDECK_")
_EITHER = 'model = "<a directory of mlx-lm\'s form>" and data, or command = ["python", "my_script.py"]'


@dataclass(frozen=True)
class ReadJob:
    """The job, None when it has faults; and which keys are right and where each given one was found, for the faults
    that concern more than one key."""

    config: JobConfig | None
    settings: Mapping[str, Any]
    places: Mapping[str, Place]
    command: bool
    """Whether it is a command."""


def read_job(faults: Faults, place: Place, table: Mapping[str, Any], base: Path) -> ReadJob:
    """[job], with every mlx-lm key filled in. The paths in it stay as written."""
    before = len(faults.found)
    faults.unknown(place, table, (*OWN_KEYS, *KEYS), _LATER_KEYS)
    _check_environment(faults, place, table.get("env"))
    report = table.get("data_quality_report")
    if isinstance(report, str) and (accepted := path_form(report)):
        faults.add(place, "data_quality_report", report, accepted)
    name = table.get("name")
    if isinstance(name, str) and not is_identifier(name):
        faults.add(place, "name", name, IDENTIFIER)
    command = "command" in table
    if command:
        settings, places = _command(faults, place, table), dict[str, Place]()
    else:
        settings, places = _training(faults, place, table, base)
    own = {key: table[key] for key in OWN_KEYS if key in table and (key not in _TRAINING_KEYS or not command)}
    _layer_split(faults, place, own)
    if not isinstance(own.get("command", []), list):
        del own["command"]
    own.setdefault("name", _name(own.get("command"), settings.get("model")))
    faults.validated(place, JobConfig, own)
    if len(faults.found) > before:
        return ReadJob(None, settings, places, command)
    named = {key: settings[key] for key in ("model", "data", "fine_tune_type") if settings.get(key) is not None}
    config = faults.validated(place, JobConfig, {**own, **named, "mlx_lm": settings, "given": sorted(places)})
    return ReadJob(config, settings, places, command)


def _layer_split(faults: Faults, place: Place, own: dict[str, Any]) -> None:
    """A pipeline's layers as they are written; how many there must be is seen with the nodes, and with the model."""
    written = own.get("layer_split")
    if not isinstance(written, str):
        return
    if own.get("strategy") != "pipeline":
        faults.add(place, "layer_split", own.pop("layer_split"), 'nothing here, or strategy = "pipeline"')
        return
    try:
        parse_split(written)
    except ValueError as error:
        faults.add(place, "layer_split", own.pop("layer_split"), f'one range per rank, as in "0-8,8-36": {error}')


def _command(faults: Faults, place: Place, table: Mapping[str, Any]) -> dict[str, Any]:
    """A job that is a program of the user's own: nothing of it is ours to fill in."""
    for key, value in table.items():
        if key in KEYS or key in _TRAINING_KEYS:
            faults.add(place, key, value, "nothing here: a command brings its own; leave out this key or the command")
    command = table["command"]
    accepted = 'a list of texts such as ["python", "my_script.py"]'
    if not isinstance(command, list):
        faults.add(place, "command", command, accepted)
    elif not command or not command[0]:
        faults.add(place, "command", command, f"{accepted}, not empty")
    elif not isinstance(command[0], str) or command[0].startswith("-") or not command[0].isprintable():
        faults.add(place, "command[0]", command[0], "a program's name or path")
    elif len(command) > 1000:
        faults.add(place, "command", f"{len(command)} words", "at most 1000 words")
    else:
        for number, word in enumerate(command[1:], start=1):
            if isinstance(word, str) and "\0" in word:
                faults.add(place, f"command[{number}]", word, "a text without NUL")
    return {}


def _training(
    faults: Faults, place: Place, table: Mapping[str, Any], base: Path
) -> tuple[dict[str, Any], dict[str, Place]]:
    """mlx-lm's keys with their defaults, and where each given one stands."""
    given: dict[str, Any] = {}
    places: dict[str, Place] = {}
    for file_place, keys in ((place, table), _yaml_keys(faults, place, table, base)):
        for key, value in keys.items():
            if key in KEYS and key != "config" and value is not None and key not in given:
                given[key], places[key] = value, file_place
    wrong: set[str] = set()
    for key, value in list(given.items()):
        if key == "optimizer" and isinstance(value, str):
            # mlx-lm reads AdamW and adamw alike.
            value = given[key] = value.lower()
        if not KEYS[key].check(value):
            faults.add(places[key], key, given.pop(key), KEYS[key].accepted)
            wrong.add(key)
        elif key in PATH_KEYS and (accepted := path_form(value)):
            faults.add(places[key], key, given.pop(key), accepted)
            wrong.add(key)
    if "model" not in places and "data" not in places:
        faults.missing(place, "model", _EITHER)
    elif "model" not in places:
        faults.missing(place, "model", "a directory of mlx-lm's form: config.json, tokenizer, *.safetensors")
    elif "data" not in places:
        faults.missing(place, "data", "a directory with train.jsonl, and valid.jsonl and test.jsonl where there are")
    settings = with_defaults(given)
    settings["lora_parameters"] = deepcopy(DEFAULTS["lora_parameters"]) | settings["lora_parameters"]
    return {key: value for key, value in settings.items() if key not in wrong}, places


def _yaml_keys(faults: Faults, place: Place, table: Mapping[str, Any], base: Path) -> tuple[Place, Mapping[Any, Any]]:
    """What the file that `config` names says; nothing when there is none, or none that can be read."""
    named = table.get("config")
    if named is None:
        return place, {}
    if accepted := path_form(named):
        faults.add(place, "config", named, accepted)
        return place, {}
    path = Path(resolved(named, base))
    try:
        keys = read_yaml(path)
    except DocumentError as error:
        faults.found.append(error.fault)
        return place, {}
    there = Place(file_text(path))
    later = {**_LATER_KEYS, **dict.fromkeys(OWN_KEYS, "nothing here: this key belongs into flightdeck.toml")}
    faults.unknown(there, keys, KEYS, later)
    return there, keys


def _check_environment(faults: Faults, place: Place, env: object) -> None:
    if not isinstance(env, dict):
        return
    here = Place(place.file, f"{place.table}.env")
    for name, value in env.items():
        if accepted := environment_fault(name, value):
            faults.add(here, name, value, accepted)


def environment_fault(name: str, value: object) -> str | None:
    """What is accepted in place of a variable for the ranks; None when it can be set."""
    if not _VARIABLE.fullmatch(name) or name.startswith(_RESERVED):
        return "a variable's name; those that begin with MLX_ or FLIGHTDECK_ are set for it"
    if isinstance(value, str) and ("\0" in value or any("\ud800" <= sign <= "\udfff" for sign in value)):
        return "a text without NUL, of whole characters"
    return None


def _name(command: object, model: object) -> str:
    """The job's name where none is given: of the model's folder, or of the script."""
    if isinstance(command, list):
        words = [word for word in command if isinstance(word, str)]
        script = next((word for word in words if word.endswith(".py")), words[0] if words else "")
        return made_identifier(Path(script[:4096]).stem, "job")
    return made_identifier(Path(model).name, "job") if isinstance(model, str) else "job"
