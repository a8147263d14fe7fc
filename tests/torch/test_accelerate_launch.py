"""The environment that a script of `accelerate launch` gets when Flight Deck takes the launcher's place."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from engine.protocol.launchers import OPTIONS, PASSED, option_of, rank_command, split_launcher
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


_PRINT_OPTIONS = """
import argparse, contextlib, json
from unittest import mock
from accelerate.commands.launch import launch_command_parser
from deepspeed.launcher.runner import parse_args
from torch.distributed.run import get_args_parser
parsers = {"torchrun": get_args_parser(), "accelerate": launch_command_parser()}
def keep(parser, **_):
    parsers["deepspeed"] = parser
    raise SystemExit
with mock.patch.object(argparse.ArgumentParser, "parse_args", keep), contextlib.suppress(SystemExit):
    parse_args([])
print(json.dumps({
    name: [parser.allow_abbrev, [[action.option_strings, action.nargs != 0] for action in parser._actions]]
    for name, parser in parsers.items()
}))
"""


def test_every_option_of_the_launchers_own_parsers_is_in_the_table_with_its_spellings_and_arity() -> None:
    printed = subprocess.run([TORCH, "-c", _PRINT_OPTIONS], capture_output=True, text=True, check=True).stdout
    parsers = json.loads(printed.splitlines()[-1])
    assert parsers.keys() == OPTIONS.keys()
    for launcher, (abbreviated, actions) in parsers.items():
        named = {spelling: (spellings, value) for spellings, value in actions for spelling in spellings}
        for spelling, (spellings, takes_value) in named.items():
            found = option_of(launcher, spelling)
            assert found.takes_value == takes_value and (found.effect == PASSED or found.reason), (launcher, spelling)
            # All spellings are one option, and it is passed on by a name that the parser has.
            assert {option_of(launcher, other).name for other in spellings} == {found.name} <= {*spellings, *named}
            words = [launcher, *(["launch"] if launcher == "accelerate" else []), spelling]
            expected = [found.name, "7" if takes_value else ""], ["t.py", "--lr", "1"]
            given = [*words, *(["7"] if takes_value else []), *expected[1]]
            assert split_launcher(given) == (launcher, *expected), given
        # And none that it does not have.
        own = {option.name for spelling, option in OPTIONS[launcher].items() if not spelling.endswith("*")}
        known = {option_of(launcher, spelling).name for spelling in named}
        assert own <= known
        short = "--num_p" if launcher == "accelerate" else "--modu"
        assert (option_of(launcher, short).name in known) == abbreviated


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(["--cpu"], {"ACCELERATE_USE_CPU": "True"}, marks=pytest.mark.slow),
        (
            [
                "--num_cpu_threads_per_process",
                "3",
                "--use_fsdp",
                "--fsdp-offload-params=true",
                "--tee",
                "3",
                "--role=worker",
            ],
            {"OMP_NUM_THREADS": "3", "ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"},
        ),
    ],
)
def test_options_of_accelerate_launch_reach_the_script(
    tmp_path: Path, options: list[str], expected: dict[str, str]
) -> None:
    (tmp_path / "show.py").write_text("import json, os\nprint(json.dumps(dict(os.environ)))\n")
    command = rank_command(["accelerate", "launch", *options, "show.py"], 0, str(accelerate_launch.__file__))
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "2", "HF_HOME": str(tmp_path)}
    finished = subprocess.run(
        [str(TORCH), *command[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    seen = json.loads(finished.stdout.splitlines()[-1])
    assert {name: seen[name] for name in expected} == expected and seen["WORLD_SIZE"] == "2"
