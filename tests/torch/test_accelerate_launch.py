"""The environment that a script of `accelerate launch` gets when Flight Deck takes the launcher's place."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from engine.protocol.launchers import FLAGS, split_launcher
from engine.torch_trainer import accelerate_launch
from tests.needs import TORCH

pytestmark = pytest.mark.needs("torch")


def test_a_configuration_with_deepspeed_is_passed_on_and_the_group_stays_ours(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: 'no'\nnum_processes: 1\n"
        "num_machines: 1\nuse_cpu: false\ndeepspeed_config:\n  zero_stage: 3\n  gradient_accumulation_steps: 1\n"
    )
    (tmp_path / "show.py").write_text("import json, os\nprint(json.dumps(dict(os.environ)))\n")
    group = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29999"}
    command = [str(TORCH), str(accelerate_launch.__file__), "--config_file", "deepspeed.yaml", "show.py"]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", **group}
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    seen = json.loads(finished.stdout.splitlines()[-1])
    assert {name: seen[name] for name in group} == group
    assert (seen["ACCELERATE_USE_DEEPSPEED"], seen["ACCELERATE_DEEPSPEED_ZERO_STAGE"]) == ("true", "3")
    assert "zero_stage" in seen["ACCELERATE_CONFIG_DS_FIELDS"].split(",")


_PRINT_FLAGS = """
import argparse, contextlib, json
from unittest import mock
from accelerate.commands.launch import launch_command_parser
from deepspeed.launcher.runner import parse_args
from torch.distributed.run import get_args_parser
parsers = [launch_command_parser(), get_args_parser()]
def keep(parser, **_):
    parsers.append(parser)
    raise SystemExit
with mock.patch.object(argparse.ArgumentParser, "parse_args", keep), contextlib.suppress(SystemExit):
    parse_args([])
flags = [action for parser in parsers for action in parser._actions if action.nargs == 0]
names = [name for action in flags for name in action.option_strings]
print(json.dumps(names))
"""


def test_the_options_without_a_value_are_those_of_the_three_launchers() -> None:
    printed = subprocess.run([TORCH, "-c", _PRINT_FLAGS], capture_output=True, text=True, check=True).stdout
    names = json.loads(printed.splitlines()[-1])
    options = [split_launcher(["torchrun", name, "t.py"])[1] for name in names]
    assert {option for option, _ in options} == {*FLAGS}
    assert {value for _, value in options} == {""}
