"""The keys of an mlx-lm training YAML: accepted values, defaults and meanings, as data.

Copied from `mlx_lm.lora.CONFIG_DEFAULTS` of mlx-lm 0.32.2, since the console's process must not import mlx_lm; a test
compares the two. Intended differences: `train` is always true, `num_layers` is -1 (all) for full fine-tuning,
`adapter_path` defaults to the run's own directory, `optimizer_precision` and `max_grad_norm` are ours, model and data
have no default, and Hugging Face data sets are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

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
"""Arguments in mlx.optimizers, except learning_rate, which is a separate key."""
FINE_TUNE_TYPES = ("lora", "dora", "full")
SCHEDULES = ("cosine_decay", "exponential_decay", "linear_schedule", "step_decay")
"""The schedules of mlx.optimizers.schedulers that take only numbers."""
REPORTERS = ("wandb", "swanlab")


@dataclass(frozen=True)
class Form:
    """The values that a key accepts: a check, and a description for error messages."""

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
    """Arguments by optimizer: numbers, booleans, or lists of numbers (betas, eps)."""

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


def one_of(choices: tuple[str, ...]) -> Form:
    return Form(lambda value: isinstance(value, str) and value in choices, "one of " + ", ".join(choices))


FLAG = Form(is_flag, "true or false")
COUNT = Form(is_integer(1), "a whole number, 1 or more")
COUNT_OR_ALL = Form(is_count_or_all, "a whole number, 1 or more, or -1 for all")
TEXT = Form(is_text, "a string that is not empty")
POSITIVE = Form(lambda value: is_number(value) and value > 0, "a finite number above 0")

_NO_DEFAULT: Final = object()


@dataclass(frozen=True)
class Key:
    """One key, as docs/configuration.md lists it."""

    form: Form
    default: Any
    meaning: str


KEYS: dict[str, Key] = {
    "model": Key(TEXT, None, "Directory of the model in mlx-lm's format, on every node."),
    "data": Key(TEXT, None, "Directory with train.jsonl and optionally valid.jsonl and test.jsonl, on every node."),
    "config": Key(
        TEXT, None, "An mlx-lm training YAML to read these keys from; keys in flightdeck.toml have priority."
    ),
    "train": Key(
        Form(lambda value: value is True, "true: flightdeck always trains"), True, "Accepted for mlx-lm's YAML files."
    ),
    "fine_tune_type": Key(one_of(FINE_TUNE_TYPES), "lora", "LoRA, DoRA or full fine-tuning."),
    "optimizer": Key(one_of(OPTIMIZERS), "adam", "Optimizer."),
    "optimizer_config": Key(
        Form(
            is_optimizer_config,
            "a table of arguments for each optimizer, such as {adamw = {weight_decay = 0.01, betas = [0.9, 0.95]}}",
        ),
        {name: {} for name in OPTIMIZERS},
        "Arguments of the optimizers.",
    ),
    "optimizer_precision": Key(
        one_of(("float32", "parameter")),
        "float32",
        "Type of the optimizer state and master weights: float32, or that of the parameters. Not in mlx-lm.",
    ),
    "seed": Key(Form(is_integer(0), "a whole number, 0 or more"), 0, "Random seed."),
    "num_layers": Key(COUNT_OR_ALL, 16, "Number of layers to train, from the last; all of them for full fine-tuning."),
    "batch_size": Key(COUNT, 4, "Sequences per iteration over all ranks (the global batch)."),
    "iters": Key(COUNT, 1000, "Training iterations."),
    "grad_accumulation_steps": Key(COUNT, 1, "Iterations whose gradients are accumulated for one update."),
    "learning_rate": Key(POSITIVE, 1e-5, "Learning rate without a schedule."),
    "lr_schedule": Key(
        Form(
            is_schedule,
            f"name (one of {', '.join(SCHEDULES)}), arguments (numbers), and optionally warmup, warmup_init",
        ),
        None,
        'Schedule, as in `{name = "cosine_decay", arguments = [1e-5, 1000], warmup = 100}`.',
    ),
    "max_grad_norm": Key(POSITIVE, None, "Clip the norm of the global gradient to this value. Not in mlx-lm."),
    "max_seq_length": Key(Form(is_integer(2), "a whole number, 2 or more"), 2048, "Longest sequence, tokens."),
    "mask_prompt": Key(FLAG, False, "Exclude the prompt from the loss."),
    "lora_parameters": Key(
        Form(
            is_lora_parameters,
            "rank (1 or more), dropout (0 to below 1), scale (mlx-lm has no alpha), and optionally keys (module names)",
        ),
        {"rank": 8, "dropout": 0.0, "scale": 20.0},
        "Parameters of LoRA and DoRA.",
    ),
    "grad_checkpoint": Key(FLAG, False, "Recompute activations in the backward pass, to save memory."),
    "clear_cache_threshold": Key(
        Form(is_integer(0), "bytes as a whole number, 0 or more"),
        0,
        "Size of MLX's cache in bytes above which it is cleared; 0 means 1 GiB.",
    ),
    "val_batches": Key(Form(is_integer(-1), "a whole number, -1 for all, 0 for none"), 25, "Batches per validation."),
    "steps_per_eval": Key(COUNT, 200, "Iterations between two validations."),
    "steps_per_report": Key(COUNT, 10, "Iterations between two reports of the loss."),
    "save_every": Key(COUNT, 100, "Iterations between two saves of the adapters or weights."),
    "test": Key(FLAG, False, "Compute the test loss after training."),
    "test_batches": Key(COUNT_OR_ALL, 500, "Batches of the test."),
    "adapter_path": Key(TEXT, None, "Directory for the adapters or weights. By default the run's own directory."),
    "resume_adapter_file": Key(TEXT, None, "Adapters or weights to start from."),
    "report_to": Key(
        Form(is_reporter_list, "wandb, swanlab, or both separated by a comma"), None, "Services to report to."
    ),
    "project_name": Key(TEXT, None, "Project at these services."),
    "trust_remote_code": Key(FLAG, False, "Allow the tokenizer's own code to run."),
    "prompt_feature": Key(TEXT, _NO_DEFAULT, "Name of the prompt's field in the data."),
    "completion_feature": Key(TEXT, _NO_DEFAULT, "Name of the completion's field in the data."),
    "chat_feature": Key(TEXT, _NO_DEFAULT, "Name of the chat messages' field in the data."),
    "text_feature": Key(TEXT, _NO_DEFAULT, "Name of the text's field in the data."),
}

DEFAULTS: dict[str, Any] = {name: key.default for name, key in KEYS.items() if key.default is not _NO_DEFAULT}
"""The `*_feature` keys have no default: mlx-lm checks whether they are present."""

FULL_DEFAULTS: dict[str, Any] = {"num_layers": -1}
"""Other defaults for full fine-tuning: mlx-lm's 16 refuses models with fewer layers."""


def with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """All keys, with defaults for those not given. null counts as not given, as in mlx-lm."""
    present = {key: value for key, value in given.items() if value is not None}
    fill = DEFAULTS | (FULL_DEFAULTS if present.get("fine_tune_type") == "full" else {})
    return deepcopy(fill) | present
