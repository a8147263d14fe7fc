"""Gives files and commands of a plan to the tools' own parsers; run by a node's python:

    python -m tests.torch.plan_files FOLDER...

Each FOLDER has what `flightdeck plan --write` writes, and commands.json. Prints one JSON list: for each folder what the
tools made of it. A file that its tool refuses ends the program with that tool's error.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin
from deepspeed.launcher.runner import fetch_hostfile
from deepspeed.launcher.runner import parse_args as deepspeed_arguments
from deepspeed.runtime.config import DeepSpeedConfig
from torch.distributed.run import config_from_args
from torch.distributed.run import parse_args as torchrun_arguments
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


def words(command: str) -> list[str]:
    """Without the variables before the program."""
    found = shlex.split(command)
    return found[next(place for place, word in enumerate(found) if "=" not in word) :]


def accelerated(command: str) -> dict[str, Any]:
    """As `accelerate launch` reads its configuration file and arguments."""
    options = launch_command_parser().parse_args(words(command)[2:])
    kind = load_config_from_file(options.config_file).distributed_type
    _validate_launch_command(options)
    return {
        "kind": str(kind).rpartition(".")[2],
        "processes": options.num_processes,
        "machines": options.num_machines,
        "precision": options.mixed_precision,
        "fsdp": {name: value for name, value in vars(options).items() if name.startswith("fsdp_")},
        "script": options.training_script,
    }


def filled(world_size: int) -> dict[str, Any]:
    """What becomes of "auto": (sequences per update, clipping), of ranks with 4 sequences and 2 iterations."""
    plugin = DeepSpeedPlugin(hf_ds_config="ds_config.json", zero3_init_flag=True)
    # As Accelerator.prepare does.
    plugin.fill_match("gradient_accumulation_steps", must_match=False, gradient_accumulation_steps=2)
    batch = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 8 * world_size}
    plugin.deepspeed_config_process(must_match=False, gradient_clipping=1.0, **batch)
    trainer = HfTrainerDeepSpeedConfig("ds_config.json")
    own = TrainingArguments(use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    own.max_grad_norm, own.bf16 = 0.5, True
    with (
        patch("deepspeed.comm.get_rank", lambda: 0),
        patch("deepspeed.comm.get_world_size", lambda: world_size),
        patch.object(TrainingArguments, "world_size", world_size),
    ):
        trainer.trainer_config_process(own)
        configs = {"accelerate": plugin.deepspeed_config, "transformers": trainer.config}
        read = {name: DeepSpeedConfig(each) for name, each in configs.items()}
        plugin.set_deepspeed_weakref()
        early = DeepSpeedConfig(plugin.dschf.config)
    answer: dict[str, Any] = {name: [each.train_batch_size, each.gradient_clipping] for name, each in read.items()}
    return answer | {"zero.Init": early.zero_optimization_stage}


def zero(world_size: int) -> dict[str, Any]:
    # As on a rank: the batch is checked against the number of ranks.
    with patch("deepspeed.comm.get_rank", lambda: 0), patch("deepspeed.comm.get_world_size", lambda: world_size):
        config = DeepSpeedConfig("ds_config.json")
    return {
        "stage": config.zero_optimization_stage,
        "batch": config.train_batch_size,
        "bf16": config.bfloat16_config.enabled,
        "fp16": config.float16_config.enabled,
        "communication": str(config.communication_data_type),
        "offload": str(config.zero_config.offload_optimizer and config.zero_config.offload_optimizer.device),
    }


def main() -> None:
    answers = []
    for folder in map(Path, sys.argv[1:]):
        os.chdir(folder)
        commands = json.loads(Path("commands.json").read_text())
        world_size = commands.pop("world_size")
        options = torchrun_arguments(words(commands["torchrun"])[1:])
        elastic, program, arguments = config_from_args(options)
        answer: dict[str, Any] = {
            "torchrun": [
                elastic.min_nodes,
                elastic.nproc_per_node,
                elastic.rdzv_backend,
                [str(program), *arguments][-2:],
            ]
        }
        if "accelerate" in commands:
            answer["accelerate"] = accelerated(commands["accelerate"])
        if Path("ds_config.json").exists():
            automatic = "auto" in json.loads(Path("ds_config.json").read_text()).values()
            answer |= {"filled": filled(world_size)} if automatic else {"zero": zero(world_size)}
        if "deepspeed" in commands:
            answer["hosts"] = fetch_hostfile("hostfile")
            answer["deepspeed"] = deepspeed_arguments(words(commands["deepspeed"])[1:]).user_script
        answers.append(answer)
    blocks = {}
    for kind in sorted(CONFIG_MAPPING):
        model = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], None)
        blocks[kind] = getattr(model, "_no_split_modules", None)
    print(json.dumps({"plans": answers, "blocks": {kind: sorted(names) for kind, names in blocks.items() if names}}))


if __name__ == "__main__":
    main()
