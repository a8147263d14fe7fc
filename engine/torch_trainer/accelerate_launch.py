"""Starts a script with the environment that `accelerate launch` would give it, as one rank of a group that is there
already: `python accelerate_launch.py [OPTIONS OF accelerate launch] SCRIPT [ARGUMENTS]`.

Accelerate's own functions read the options and the configuration file, and make the environment. RANK, WORLD_SIZE and
what else the ranks find each other by stay as they are: of these Accelerate would make its own, for processes that it
starts itself. It is run by its path, and imports nothing of the bundle."""

from __future__ import annotations

import os
import sys
from argparse import Namespace

_OF_THE_GROUP = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def launch_environment(arguments: list[str]) -> tuple[Namespace, dict[str, str]]:
    """The arguments of `accelerate launch` as it reads them, and the environment that it would give the script."""
    import torch
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    args = launch_command_parser().parse_args(arguments)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    # One machine, for these functions: with several they would write the files of DeepSpeed's launcher.
    args.num_processes, args.num_machines, args.machine_rank, args.main_process_port = world_size, 1, 0, 0
    args, defaults, has_precision = _validate_launch_command(args)
    args.num_processes, args.num_machines = world_size, 1
    sharded = args.use_fsdp or args.use_deepspeed or args.use_megatron_lm
    args.cpu = args.cpu or not (torch.cuda.is_available() or sharded)
    if args.use_deepspeed:
        # As its launch_command does.
        fields = [*(defaults.deepspeed_config if defaults else ()), *(["mixed_precision"] if has_precision else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        environment = dict(launch.prepare_deepspeed_cmd_env(args)[1])
    elif args.cpu:
        environment = dict(launch.prepare_simple_launcher_cmd_env(args)[1])
    else:
        environment = dict(launch.prepare_multi_gpu_env(args))
    environment.update({name: os.environ[name] for name in _OF_THE_GROUP if name in os.environ})
    return args, environment


def main() -> None:
    args, environment = launch_environment(sys.argv[1:])
    module = ["-m"] if args.module else []
    os.execve(sys.executable, [sys.executable, *module, args.training_script, *args.training_script_args], environment)


if __name__ == "__main__":
    main()
