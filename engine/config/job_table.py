"""Reads [job]: a training with mlx-lm's keys, inline or in the YAML file of `config`, or a custom command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.config import mlx_lm_keys
from engine.config.documents import DocumentError, file_text, read_yaml
from engine.config.faults import FileTable
from engine.config.formats import data_form, path_form, resolved, splits_form, subset_form
from engine.config.models import JobConfig
from engine.protocol import launchers
from engine.protocol.job import AUTO, STRATEGIES, Framework, scaled_rate, scaling_rule
from engine.protocol.manifest import DATA_PREFIX, hub_name
from engine.security.identifiers import make_identifier

OWN_KEYS = (
    *("name", "framework", "command", "script", "elastic", "logging_dir", "metrics", "env", "strategy"),
    *("layer_split", "data_quality_report", "chunking", "chunk_size", "display_sleep"),
)
_TRACKER_KEYS = ("report_to", "project_name")
_TRAINING_KEYS = ("strategy", "layer_split", "chunking", "chunk_size")
HUB = "hf_dataset"
FEATURES = ("prompt_feature", "completion_feature", "chat_feature", "text_feature")
PATH_KEYS = {"model": path_form, "data": data_form, "adapter_path": path_form, "resume_adapter_file": path_form}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = (
    *("FLIGHTDECK_*", "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_WORLD_SIZE", "MLX_JACCL_*", "MASTER_ADDR"),
    *("MASTER_PORT", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_*"),
)
_REQUIRED = {
    "model": "a directory in mlx-lm's format: config.json, tokenizer, *.safetensors",
    "data": "a directory with train.jsonl, and optionally valid.jsonl and test.jsonl, or a file or folder as in [data]",
}
_EITHER = 'model = "<directory in mlx-lm\'s format>" and data, or command = ["python", "my_script.py"]'


@dataclass(frozen=True)
class ReadJob:
    """The job, and what the checks across keys need: the valid settings, and where each was found."""

    config: JobConfig | None
    """None if it has faults."""
    settings: Mapping[str, Any]
    locations: Mapping[str, FileTable]
    is_command: bool
    data: Mapping[str, Any] = field(default_factory=dict)
    """Keys of [data] that hf_dataset stands for."""


def read_job(table: FileTable, base: Path) -> ReadJob:
    """Read [job], with defaults for all mlx-lm keys. Its paths are kept as written."""
    before = len(table.faults)
    table.unknown((*OWN_KEYS, *mlx_lm_keys.KEYS), mlx_lm_keys.FORMER_KEYS)
    _check_environment(table, table.get("env"))
    framework: Framework = "torch" if table.get("framework") == "torch" else "mlx"
    table = _with_command(table)
    command, settings, locations = "command" in table, dict[str, Any](), dict[str, FileTable]()
    data = dict[str, Any]()
    unused = mlx_lm_keys.MLX_KEYS if framework == "torch" else mlx_lm_keys.TORCH_KEYS
    if not (command and framework == "torch"):
        if table.get("elastic") is True:
            table.refuse("elastic", 'false, or framework = "torch" and a command', True)
        if "logging_dir" in table:
            table.refuse("logging_dir", 'no value here: it is for framework = "torch" and a command')
    if "metrics" in table and (not command or "logging_dir" in table):
        table.refuse("metrics", "no value here: it is for a command's output, and logging_dir in place of that")
    if command:
        allowed = _check_command(table, framework)
        settings = _command_settings(table, allowed)
    else:
        settings, locations, data = _training(table, base)
        settings = {key: value for key, value in settings.items() if key not in unused}
    values = {key: table[key] for key in OWN_KEYS if key in table and (key not in _TRAINING_KEYS or not command)}
    if command and framework == "torch" and any(key in table for key in ("strategy", *mlx_lm_keys.TORCH_KEYS)):
        # The options of `accelerate launch` are made from them.
        values["strategy"] = table.get("strategy", AUTO)
        settings = {key: mlx_lm_keys.DEFAULTS[key] for key in mlx_lm_keys.TORCH_KEYS} | settings
    if framework == "torch":
        _check_torch(table, settings, locations)
    _check_framework(table, values, framework)
    if isinstance(values.get("layer_split"), str) and values.get("strategy") != "pipeline":
        table.refuse("layer_split", 'no value here, unless strategy = "pipeline"', values.pop("layer_split"))
    if not isinstance(values.get("command", []), list):
        del values["command"]
    values.setdefault("name", _name(values.get("command"), settings.get("model")))
    named = {key: settings[key] for key in ("model", "data", "fine_tune_type") if settings.get(key) is not None}
    by_rule = apply_rate_rule(settings)
    values["unused"] = sorted(key for key in unused if key in locations)
    given = sorted(key for key in locations if key not in unused)
    document = {**values, **named, "mlx_lm": settings, "given": given, "rate_by_rule": by_rule}
    config = table.validated(JobConfig, document)
    return ReadJob(config if len(table.faults) == before else None, settings, locations, command, data)


def apply_rate_rule(settings: dict[str, Any]) -> bool:
    """Put the rule's value in place of learning_rate = "auto"; False where it is another."""
    if settings.get("learning_rate") != AUTO or not {"batch_size", "optimizer"} <= settings.keys():
        return False
    total = settings["batch_size"] * settings.get("grad_accumulation_steps", 1)
    settings["learning_rate"] = scaled_rate(total, scaling_rule(settings["optimizer"]))
    return True


def _with_command(table: FileTable) -> FileTable:
    """The table with the command that its `script` stands for, if it has one."""
    if "script" not in table:
        return table
    words, rest = list[str](), {key: value for key, value in table.items() if key != "script"}
    try:
        words = shlex.split(table["script"]) if isinstance(table["script"], str) else []
    except ValueError:
        words = []
    launched = launchers.split_launcher(words)[0] is not None
    if not words or words[0].startswith("-"):
        table.refuse("script", 'a script and its arguments, such as "train.py --epochs 3"')
    elif "command" in table:
        table.refuse("script", "no value here: command is set, and it is one or the other")
    return table.at(table.name, {"command": words if launched else ["python", *words], **rest})


def _check_framework(table: FileTable, values: dict[str, Any], framework: Framework) -> None:
    """`values` gets the framework's own default strategy; one that it does not have is a fault."""
    values.setdefault("strategy", STRATEGIES[framework][0])
    if values["strategy"] not in STRATEGIES[framework]:
        other = "mlx" if framework == "torch" else "torch"
        accepted = f'one of {", ".join(map(repr, STRATEGIES[framework]))}, or framework = "{other}"'
        table.refuse("strategy", accepted, values.pop("strategy"))


def _check_torch(table: FileTable, settings: Mapping[str, Any], locations: Mapping[str, FileTable]) -> None:
    """Values of the keys that the trainer for PyTorch does not have."""
    if (optimizer := settings.get("optimizer", "adam")) not in mlx_lm_keys.TORCH_OPTIMIZERS:
        accepted = f"one of {', '.join(mlx_lm_keys.TORCH_OPTIMIZERS)} with PyTorch"
        locations["optimizer"].refuse("optimizer", accepted, optimizer)
    if "swanlab" in str(settings.get("report_to")):
        locations["report_to"].refuse("report_to", "no swanlab: with MLX alone", settings["report_to"])
    if settings.get("offload") == "nvme" and settings.get("nvme_path") is None:
        table.missing("nvme_path", 'a folder on every node, which offload = "nvme" needs')


def _check_launcher(table: FileTable) -> tuple[str, ...]:
    """Check the launcher of PyTorch that a command begins with, if any: the keys that it is given."""
    launcher, options, program = launchers.split_launcher(table["command"])
    if table.get("elastic") is True and (
        launcher not in (None, "torchrun") or launchers.started_program(table["command"])[:1] != ["python"]
    ):
        table.refuse("elastic", 'false, or a command that begins with "torchrun" or "python"', True)
    if program[1:3] == ["-m", "torch.distributed.launch"]:
        accepted = '"torchrun": torch.distributed.launch is its deprecated predecessor'
        table.refuse("command", accepted, "torch.distributed.launch")
    for option in options[::2]:
        if launcher is not None and (given := launchers.option_of(launcher, option)).effect == launchers.REFUSED:
            table.refuse("command", f"no {option}: {given.reason}", option)
    if (chosen := launchers.own_strategy(table["command"])) not in (None, "--config_file"):
        for key in ("strategy", "sharding", "zero_stage", "offload"):
            if table.get(key, AUTO) != AUTO:
                table.refuse(key, f"no value here: the command has {chosen}")
    named = launchers.MIXED_PRECISIONS.get(launchers.option_value(table["command"], "--mixed_precision"))
    if named is not None and table.get("precision", AUTO) not in (AUTO, named):
        table.refuse("precision", f"{named!r}, as the command's --mixed_precision, or only one of the two")
    if launcher is not None and not program:
        table.refuse("command", f"a script after {launcher}")
    return ("strategy", *mlx_lm_keys.TORCH_KEYS) if launcher == "accelerate" else ()


def _check_command(table: FileTable, framework: Framework) -> tuple[str, ...]:
    """The keys that may be beside the command."""
    allowed = (*_TRACKER_KEYS, *(_check_launcher(table) if framework == "torch" else ()))
    for key, value in table.items():
        if (key in mlx_lm_keys.KEYS or key in _TRAINING_KEYS) and key not in allowed:
            table.refuse(key, "no value here: a command has its own; remove this key or the command", value)
    command = table["command"]
    accepted = 'a list of strings such as ["python", "my_script.py"]'
    if not isinstance(command, list):
        table.refuse("command", accepted, command)
    elif not command or not command[0]:
        table.refuse("command", f"{accepted}, not empty", command)
    elif not isinstance(command[0], str) or command[0].startswith("-") or not command[0].isprintable():
        table.refuse("command[0]", "the name or path of a program", command[0])
    elif len(command) > 1000:
        table.refuse("command", "at most 1000 arguments", f"{len(command)} arguments")
    else:
        for number, word in enumerate(command[1:], start=1):
            if isinstance(word, str) and "\0" in word:
                table.refuse(f"command[{number}]", "a string without NUL", word)
    return allowed


def _command_settings(table: FileTable, allowed: Collection[str]) -> dict[str, Any]:
    """The valid ones of these keys beside a command, whose metrics the head alone writes to trackers."""
    valid = {}
    for key in allowed:
        if key not in mlx_lm_keys.KEYS or (value := table.get(key)) is None:
            continue
        swanlab = key == "report_to" and not set(mlx_lm_keys.services(value)) <= {*mlx_lm_keys.HEAD_TRACKERS}
        accepted = ", ".join(mlx_lm_keys.HEAD_TRACKERS) if swanlab else mlx_lm_keys.KEYS[key].form.fault(value)
        if accepted:
            table.refuse(key, accepted, value)
        else:
            valid[key] = value
    return valid


def _training(table: FileTable, base: Path) -> tuple[dict[str, Any], dict[str, FileTable], dict[str, Any]]:
    """mlx-lm's keys with defaults, where each key was set, and the keys of [data] that hf_dataset stands for."""
    given: dict[str, Any] = {}
    locations: dict[str, FileTable] = {}
    for source in (table, _yaml_keys(table, base)):
        # Keys of the table win, also as the other way to say the same.
        settled = {*given, *(mlx_lm_keys.SAME_KEYS[key] for key in given if key in mlx_lm_keys.SAME_KEYS)}
        for key, value in source.items():
            if key in mlx_lm_keys.KEYS and key != "config" and value is not None and key not in settled:
                given[key], locations[key] = value, source
    data = _hub_dataset(given, locations) if HUB in given else {}
    invalid = set()
    for key, value in given.items():
        if key == "optimizer" and isinstance(value, str):
            # mlx-lm accepts AdamW and adamw.
            given[key] = value.lower()
        elif key in mlx_lm_keys.SIZE_KEYS:
            given[key] = mlx_lm_keys.in_bytes(value)
        fault = mlx_lm_keys.KEYS[key].form.fault(given[key])
        if accepted := fault or (PATH_KEYS[key](value) if key in PATH_KEYS else None):
            locations[key].refuse(key, accepted, value)
            invalid.add(key)
    required = {"model": _EITHER} if _REQUIRED.keys().isdisjoint(locations) else _REQUIRED
    for key in [key for key in required if key not in locations]:
        table.missing(key, required[key])
    settings = mlx_lm_keys.with_defaults({key: value for key, value in given.items() if key not in invalid})
    settings["lora_parameters"] = deepcopy(mlx_lm_keys.DEFAULTS["lora_parameters"]) | settings["lora_parameters"]
    return {key: value for key, value in settings.items() if key not in invalid}, locations, data


def _hub_dataset(given: dict[str, Any], locations: dict[str, FileTable]) -> dict[str, Any]:
    """Put what hf_dataset stands for into the job's keys, in place of others as in mlx-lm; the keys of [data] that it
    stands for."""
    named, source = given.pop(HUB), locations.pop(HUB)
    for key in ("data", *FEATURES):
        given.pop(key, None)
        locations.pop(key, None)
    # For what is refused below, so that no data is asked for.
    locations["data"] = source
    if isinstance(named, list) and len(named) == 1:
        named = named[0]
    if not isinstance(named, dict):
        several = "one table: mlx_lm.lora joins several, which [job] data takes as one folder of files"
        source.refuse(HUB, several if isinstance(named, list) else mlx_lm_keys.KEYS[HUB].form.accepted, named)
        return {}
    table, before = source.at(source.key(HUB), named), len(source.faults)
    table.unknown(mlx_lm_keys.HubDataset.model_fields, {})
    arguments = table.at(table.key("config"), table.table("config"))
    accepted = "name or revision: no other argument of load_dataset is taken"
    arguments.unknown(mlx_lm_keys.LoadArguments.model_fields, dict.fromkeys(arguments, accepted))
    accepted_arguments = {key: arguments[key] for key in mlx_lm_keys.LoadArguments.model_fields if key in arguments}
    hub = table.validated(mlx_lm_keys.HubDataset, {**table, "config": accepted_arguments})
    if hub is None or len(source.faults) > before:
        return {}
    splits = {"train": hub.train_split, "valid": hub.valid_split}
    if given.get("test") and hub.test_split is None:
        table.missing("test_split", "the split of the test, as test = true")
    elif given.get("test"):
        splits["test"] = str(hub.test_split)
    # What load_dataset calls the configuration of a data set with one.
    subset = None if hub.config.name == "default" else hub.config.name
    if subset is not None and (refused := subset_form(subset)):
        arguments.refuse("name", refused)
    for key, rows in splits.items():
        if refused := splits_form({"train": rows}):
            table.refuse(f"{key}_split", refused, rows)
    text = f"{DATA_PREFIX}{hub.path}" + (f"@{hub.config.revision}" if hub.config.revision else "")
    if hub_name(text) is None:
        table.refuse("path", "a data set of the Hub, org/set, and a revision by name; a folder is named in data")
        return {}
    features = {key: value for key in FEATURES if (value := getattr(hub, key)) is not None}
    for key, value in {"data": text, **features}.items():
        given[key], locations[key] = value, source
    keys = {"splits": splits} | ({"subset": subset} if subset is not None else {})
    return keys if len(source.faults) == before else {}


def _yaml_keys(table: FileTable, base: Path) -> FileTable:
    """The keys of the file in `config`; empty if there is none, or if it cannot be read."""
    named = table.get("config")
    if named is None:
        return table.at("")
    if accepted := path_form(named):
        table.refuse("config", accepted, named)
        return table.at("")
    path = Path(resolved(named, base))
    try:
        keys = read_yaml(path)
    except DocumentError as error:
        table.faults.extend(error.faults)
        return table.at("")
    there = FileTable(file_text(path), "", keys, table.faults)
    hints = {**mlx_lm_keys.FORMER_KEYS, **dict.fromkeys(OWN_KEYS, "no value here: this key belongs in flightdeck.toml")}
    there.unknown(mlx_lm_keys.KEYS, hints)
    return there


def _check_environment(table: FileTable, env: object) -> None:
    if not isinstance(env, dict):
        return
    here = table.at(f"{table.name}.env")
    for name, value in env.items():
        if accepted := environment_fault(name, value):
            here.refuse(name, accepted, value)


def environment_fault(name: str, value: object) -> str | None:
    """Description of an accepted variable; None if this one can be set."""
    if not _VARIABLE.fullmatch(name):
        return "a variable name"
    if any(fnmatchcase(name, reserved) for reserved in _RESERVED):
        listed = f"{', '.join(_RESERVED[:-1])} and {_RESERVED[-1]}"
        return f"another name: {listed} are reserved, since a launch sets them"
    if isinstance(value, str) and ("\0" in value or any("\ud800" <= character <= "\udfff" for character in value)):
        return "a string of valid characters without NUL"
    return None


def _name(command: object, model: object) -> str:
    """The default name: that of the model's folder, or of the script, module or program."""
    if isinstance(command, list):
        words = launchers.started_program([word for word in command if isinstance(word, str)])
        python, named = False, words[:1]
        for word, after in pairwise([*words, ""]):
            python |= Path(word).name.startswith("python")
            if word.endswith((".py", ".sh")) or (python and word == "-m"):
                named = [after if word == "-m" else word]
                break
        name = "".join(named)
        return make_identifier(re.sub(r"\.(py|sh)$", "", Path(name[:4096]).name), "job")
    return make_identifier(Path(model).name, "job") if isinstance(model, str) else "job"
