"""The copied keys match the installed mlx-lm."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.mlx_lm_keys import (
    DEFAULTS,
    FORMER_KEYS,
    KEYS,
    LOCAL_KEYS,
    SAMPLE_KEYS,
    SCHEDULE_ARGUMENTS,
    TORCH_KEYS,
    OptimizerConfig,
    in_bytes,
)
from engine.protocol.job import Job

_ASK = """
import inspect, json
import mlx.optimizers as optim
from mlx.optimizers import schedulers
from mlx_lm.lora import CONFIG_DEFAULTS
from mlx_lm.utils import _parse_size
kinds = {"adam": optim.Adam, "adamw": optim.AdamW, "muon": optim.Muon, "sgd": optim.SGD, "adafactor": optim.Adafactor}
arguments = {name: list(inspect.signature(kind.__init__).parameters) for name, kind in kinds.items()}
sizes = {size: _parse_size(size) for size in ("2GB", "500MB", "1.5g", "7 M", "12")}
schedules = {name: [value.default is value.empty for value in inspect.signature(each).parameters.values()]
             for name, each in vars(schedulers).items() if inspect.isfunction(each)}
print(json.dumps({"defaults": CONFIG_DEFAULTS, "schedules": schedules, "arguments": arguments,
                  "sizes": sizes}))
"""
OURS = {
    *("optimizer_precision", "moments", "max_grad_norm", "wire", *LOCAL_KEYS),
    *("batch_tokens", "epochs", "save_best", "patience", "compile_on_cpu", *SAMPLE_KEYS),
}
OF_PLAN = {"sequence_tiling"}
"""Ours, too, but 0 for the trainer, where no plan has resolved "auto"."""
DIFFERENT = {"model", "data", "train", "adapter_path", "grad_checkpoint"}


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True)
    reported: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reported


def test_defaults_are_mlx_lms_but_for_those_that_differ_on_purpose(installed: dict[str, Any]) -> None:
    theirs = {key: value for key, value in installed["defaults"].items() if key not in DIFFERENT}
    others = {*OURS, *OF_PLAN, *DIFFERENT, *TORCH_KEYS}
    assert {key: value for key, value in DEFAULTS.items() if key not in others} == theirs
    assert installed["defaults"].keys() > DIFFERENT


def test_every_default_but_none_is_accepted() -> None:
    assert [key for key, value in DEFAULTS.items() if value is not None and KEYS[key].form.fault(value)] == []


def test_defaults_of_ours_are_the_trainers() -> None:
    theirs = {field.name: field.default for field in fields(Job)}
    assert {key: DEFAULTS[key] for key in OURS} == {key: theirs[key] for key in OURS}


def test_optimizers_take_the_arguments_that_are_accepted(installed: dict[str, Any]) -> None:
    for name, field in OptimizerConfig.model_fields.items():
        arguments, _ = get_args(field.annotation)
        accepted = {value for each in get_args(arguments) for value in get_args(each) or (each,)}
        assert {"self", "learning_rate", *accepted} == set(installed["arguments"][name])


def test_schedules_are_mlxs(installed: dict[str, Any]) -> None:
    """Each takes as many arguments as are accepted, of which cosine_decay's last one alone has a default."""
    accepted = {
        name: [(name, argument) != ("cosine_decay", "last rate") for argument in arguments]
        for name, arguments in SCHEDULE_ARGUMENTS.items()
    }
    assert accepted == {name: installed["schedules"][name] for name in accepted}


@pytest.mark.parametrize(
    ("name", "arguments", "accepted"),
    [
        ("cosine_decay", [1e-5, 1000], True),
        ("cosine_decay", [1e-5, 1000, 1e-7], True),
        ("cosine_decay", [1e-5], False),
        ("cosine_decay", [1e-5, 0], False),
        ("exponential_decay", [1e-5, 0.9], True),
        ("exponential_decay", [1e-5, 0.9, 10], False),
        ("linear_schedule", [0, 1e-5, 100], True),
        ("linear_schedule", [0, 1e-5], False),
        ("step_decay", [1e-5, 0.9, 0.5], False),
        ("step_decay", [1e-5, 0.9, 10], True),
    ],
)
def test_a_schedule_is_accepted_with_arguments_that_mlx_takes(
    name: str, arguments: list[float], accepted: bool
) -> None:
    assert (KEYS["lr_schedule"].form.fault({"name": name, "arguments": arguments}) is None) is accepted


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("sample_prompts", ["Hello"] * 8, True),
        ("sample_prompts", ["x" * 2000], True),
        ("sample_prompts", ["Hello"] * 9, False),
        ("sample_prompts", ["x" * 2001], False),
        ("sample_prompts", [""], False),
        ("sample_prompts", [], False),
        ("sample_prompts", "Hello", False),
        ("sample_every", 0, False),
        ("sample_tokens", 257, False),
    ],
)
def test_sample_prompts_are_few_and_short(key: str, value: object, *, accepted: bool) -> None:
    assert (KEYS[key].form.fault(value) is None) is accepted


def test_sizes_are_those_of_mlx_lms_option(installed: dict[str, Any]) -> None:
    assert {size: in_bytes(size) for size in installed["sizes"]} == installed["sizes"]


@given(st.integers(0, 10**6), st.sampled_from(["K", "M", "G", "T"]), st.sampled_from(["", "B", "b"]))
def test_a_size_is_a_number_of_its_unit(number: int, unit: str, byte: str) -> None:
    expected = number * 1000 ** (1 + "KMGT".index(unit))
    assert in_bytes(f"{number}{unit}{byte}") == in_bytes(f"{number} {unit.lower()}{byte}") == expected


@given(st.one_of(st.integers(), st.none(), st.text(alphabet="xyz-é. ")))
def test_what_is_no_size_stays(value: object) -> None:
    assert in_bytes(value) == value


def test_no_key_of_today_is_a_former_one() -> None:
    assert not FORMER_KEYS.keys() & KEYS.keys()
