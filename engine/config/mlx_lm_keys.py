"""The keys of an mlx-lm training YAML: defaults and accepted values, as data.

Copied from `mlx_lm.lora.CONFIG_DEFAULTS` of mlx-lm 0.32.2, since the console's process must not import mlx_lm; a test
compares the two. Differences, on purpose: `train` is always true, `num_layers` is -1 (all) for full fine-tuning,
`adapter_path` is by default the run's own directory, `optimizer_precision` and `max_grad_norm` are ours, model and data
have no default, and Hugging Face data sets are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Check = Callable[[Any], bool]

OPTIMIZERS = ("adam", "adamw", "muon", "sgd", "adafactor")
OPTIMIZER_ARGUMENTS = {
    "adam": ("betas", "eps", "bias_correction"),
    "adamw": ("betas", "eps", "weight_decay", "bias_correction"),
    "muon": ("momentum", "weight_decay", "nesterov", "ns_steps"),
    "sgd": ("momentum", "weight_decay", "dampening", "nesterov"),
    "adafactor": (
        *("eps", "clip_threshold", "decay_rate", "beta_1", "weight_decay"),
        *("scale_parameter", "relative_step", "warmup_init"),
    ),
}
"""What mlx.optimizers takes besides learning_rate, which is a key of its own."""
FINE_TUNE_TYPES = ("lora", "dora", "full")
SCHEDULES = ("cosine_decay", "exponential_decay", "linear_schedule", "step_decay")
"""Those of mlx.optimizers.schedulers that take numbers only."""
REPORTERS = ("wandb", "swanlab")


@dataclass(frozen=True)
class Key:
    """One key: when a value is right, and the words for that."""

    check: Check
    accepted: str


def is_integer(least: int) -> Check:
    return lambda value: type(value) is int and least <= value < 2**63


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_count_or_all(value: Any) -> bool:
    return type(value) is int and (value == -1 or 1 <= value < 2**63)


def is_optimizer_config(value: Any) -> bool:
    """Per optimizer, its arguments: numbers, flags, or lists of numbers (betas, eps)."""

    def argument(found: Any) -> bool:
        if isinstance(found, list):
            return len(found) <= 8 and all(is_number(item) for item in found)
        return is_number(found) or is_flag(found)

    return isinstance(value, dict) and all(
        name in OPTIMIZERS
        and isinstance(arguments, dict)
        and all(key in OPTIMIZER_ARGUMENTS[name] and argument(found) for key, found in arguments.items())
        for name, arguments in value.items()
    )


def is_schedule(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() - {"name", "arguments", "warmup", "warmup_init"}:
        return False
    arguments = value.get("arguments")
    return (
        value.get("name") in SCHEDULES
        and isinstance(arguments, list)
        and 1 <= len(arguments) <= 8
        and all(is_number(argument) for argument in arguments)
        and is_integer(0)(value.get("warmup", 0))
        and is_number(value.get("warmup_init", 0.0))
    )


def is_lora_parameters(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() - {"rank", "dropout", "scale", "keys"}:
        return False
    names = value.get("keys", [])
    return (
        is_integer(1)(value.get("rank", 8))
        and is_share(value.get("dropout", 0.0))
        and is_number(value.get("scale", 20.0))
        and isinstance(names, list)
        and len(names) <= 1000
        and all(is_text(name) for name in names)
    )


def is_reporter_list(value: Any) -> bool:
    return isinstance(value, str) and all(name.strip() in REPORTERS for name in value.split(","))


def one_of(choices: tuple[str, ...]) -> Key:
    return Key(lambda value: isinstance(value, str) and value in choices, "one of " + ", ".join(choices))


FLAG = Key(is_flag, "true or false")
COUNT = Key(is_integer(1), "a whole number, 1 or more")
COUNT_OR_ALL = Key(is_count_or_all, "a whole number, 1 or more, or -1 for all")
TEXT = Key(is_text, "a text that is not empty")

KEYS: dict[str, Key] = {
    "model": TEXT,
    "train": Key(lambda value: value is True, "true (flightdeck trains; mlx_lm.lora alone tests)"),
    "fine_tune_type": one_of(FINE_TUNE_TYPES),
    "optimizer": one_of(OPTIMIZERS),
    "optimizer_config": Key(
        is_optimizer_config,
        "per optimizer a table of its own arguments, such as {adamw = {weight_decay = 0.01, betas = [0.9, 0.95]}}",
    ),
    "data": TEXT,
    "seed": Key(is_integer(0), "a whole number, 0 or more"),
    "num_layers": COUNT_OR_ALL,
    "batch_size": COUNT,
    "iters": COUNT,
    "val_batches": Key(is_integer(-1), "a whole number, -1 for all, 0 for none"),
    "learning_rate": Key(lambda value: is_number(value) and value > 0, "a finite number above 0"),
    "steps_per_report": COUNT,
    "steps_per_eval": COUNT,
    "resume_adapter_file": TEXT,
    "adapter_path": TEXT,
    "save_every": COUNT,
    "test": FLAG,
    "test_batches": COUNT_OR_ALL,
    "max_seq_length": Key(is_integer(2), "a whole number, 2 or more"),
    "config": TEXT,
    "grad_checkpoint": FLAG,
    "grad_accumulation_steps": COUNT,
    "clear_cache_threshold": Key(is_integer(0), "bytes as a whole number, 0 or more"),
    "lr_schedule": Key(
        is_schedule,
        f"name (one of {', '.join(SCHEDULES)}), arguments (numbers), and at will warmup, warmup_init",
    ),
    "lora_parameters": Key(
        is_lora_parameters,
        "rank (1 or more), dropout (0 to below 1), scale (mlx-lm has no alpha), and at will keys (module names)",
    ),
    "mask_prompt": FLAG,
    "report_to": Key(is_reporter_list, "wandb, swanlab, or both with a comma"),
    "project_name": TEXT,
    "trust_remote_code": FLAG,
    "prompt_feature": TEXT,
    "completion_feature": TEXT,
    "chat_feature": TEXT,
    "text_feature": TEXT,
    "optimizer_precision": one_of(("float32", "parameter")),
    "max_grad_norm": Key(lambda value: is_number(value) and value > 0, "a finite number above 0"),
}

DEFAULTS: dict[str, Any] = {
    "model": None,
    "train": True,
    "fine_tune_type": "lora",
    "optimizer": "adam",
    "optimizer_config": {"adam": {}, "adamw": {}, "muon": {}, "sgd": {}, "adafactor": {}},
    "data": None,
    "seed": 0,
    "num_layers": 16,
    "batch_size": 4,
    "iters": 1000,
    "val_batches": 25,
    "learning_rate": 1e-5,
    "steps_per_report": 10,
    "steps_per_eval": 200,
    "resume_adapter_file": None,
    "adapter_path": None,
    "save_every": 100,
    "test": False,
    "test_batches": 500,
    "max_seq_length": 2048,
    "config": None,
    "grad_checkpoint": False,
    "grad_accumulation_steps": 1,
    "clear_cache_threshold": 0,
    "lr_schedule": None,
    "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0},
    "mask_prompt": False,
    "report_to": None,
    "project_name": None,
    "trust_remote_code": False,
    "optimizer_precision": "float32",
    "max_grad_norm": None,
}
"""The `*_feature` keys have no default here: mlx-lm looks whether they are there at all."""

FULL_DEFAULTS: dict[str, Any] = {"num_layers": -1}
"""What differs for full fine-tuning: mlx-lm's 16 refuses models with fewer layers."""


def with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Every key with its default filled in. A null is a key not given, as in mlx-lm."""
    present = {key: value for key, value in given.items() if value is not None}
    fill = DEFAULTS | (FULL_DEFAULTS if present.get("fine_tune_type") == "full" else {})
    return deepcopy(fill) | present
