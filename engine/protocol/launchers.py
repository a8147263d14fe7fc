"""The launchers of PyTorch that a job's command may begin with. Flight Deck takes their place: it starts every rank
itself, with the environment and arguments that the launcher would have given it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from engine.protocol.job import AUTO, TorchSettings

LAUNCHERS = {"torchrun": ("torchrun",), "accelerate": ("accelerate", "launch"), "deepspeed": ("deepspeed",)}
"""Name -> the words that a command of it begins with."""
_SPELLINGS = {
    **{words: name for name, words in LAUNCHERS.items()},
    ("accelerate-launch",): "accelerate",
    ("python", "-m", "torch.distributed.run"): "torchrun",
    ("python", "-m", "accelerate.commands.launch"): "accelerate",
    ("python", "-m", "deepspeed.launcher.runner"): "deepspeed",
}
MIXED_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
"""Accelerate's name of a precision -> that of [job]."""
LAUNCHER_OPTIONS = {
    "torchrun": ("--module", "-m"),
    "accelerate": ("--config_file", "--mixed_precision", "--module", "-m"),
    "deepspeed": ("--module",),
}
"""Options that may come before the script; all others are of nodes and processes, which the configuration has."""
FLAGS = (
    *("-h", "--help", "-m", "--module", "--no_python", "-q", "--quiet", "--standalone", "--run_path"),
    *("--virtual_local_rank", "--cpu", "--multi_gpu", "--tpu", "--tpu_cluster", "--no_tpu_cluster", "--tpu_use_sudo"),
    *("--same_network", "--use_fsdp", "--use_deepspeed", "--use_megatron_lm", "--use_parallelism_config", "--debug"),
    *("--dynamo_use_fullgraph", "--dynamo_use_dynamic", "--dynamo_use_regional_compilation", "--enable_cpu_affinity"),
    *("--downcast_bf16", "--fp8_use_autocast_during_eval", "--bind_cores_to_rank", "--no_local_rank", "--no_ssh"),
    *("--no_ssh_check", "--force_multi", "--save_pid"),
)
"""Options without a value: those of torchrun 2.13, Accelerate 1.15 and DeepSpeed 0.19 together."""


def split_launcher(command: Any) -> tuple[str | None, list[str], list[str]]:
    """(launcher, its options, the script and its arguments); without a launcher all of it is the third. Names of
    options have underscores for dashes and even places: each is followed by its value, "" if it has none."""
    words = list(command) if isinstance(command, (list, tuple)) else []
    if not words or not all(isinstance(word, str) for word in words):
        return None, [], []
    # Wherever it is, and whichever python has it.
    begun = [re.sub(r"^python3?(\.\d+)?$", "python", PurePosixPath(words[0]).name), *words[1:]]
    spelling = next((begin for begin in _SPELLINGS if tuple(begun[: len(begin)]) == begin), None)
    if spelling is None:
        return None, [], words
    launcher, options, rest = _SPELLINGS[spelling], list[str](), words[len(spelling) :]
    while rest and rest[0].startswith("-"):
        option, joined, value = rest[0].partition("=")
        name, rest = re.sub(r"(?<=\w)-", "_", option), rest[1:]
        if not joined and name not in FLAGS:
            value, rest = next(iter(rest), ""), rest[1:]
        options += [name, value]
    return launcher, options, rest


def joined_options(options: Sequence[str]) -> list[str]:
    """The options of `split_launcher` as words: "--mixed_precision=bf16", so that a value may begin with a dash."""
    return [f"{name}={value}" if value else name for name, value in zip(options[::2], options[1::2], strict=True)]


def started_program(command: Sequence[str]) -> list[str]:
    """The program that a command comes down to, whatever starts it."""
    launcher, options, program = split_launcher(command)
    return ["python", *(["-m"] if "-m" in options or "--module" in options else []), *program] if launcher else program


def with_settings(command: Sequence[str], strategy: str, keys: Mapping[str, Any]) -> list[str]:
    """An `accelerate launch` with the `strategy` and `keys` of [job] as its options (those of Accelerate 1.15), unless
    it names a configuration file, which has its own; any other command itself."""
    launcher, options, program = split_launcher(command)
    named = options[::2]
    if launcher != "accelerate" or "--config_file" in named:
        return list(command)
    settings, added = TorchSettings.from_spec(dict(keys)), list[str]()
    if strategy == "fsdp":
        added = [
            "--use_fsdp",
            "--fsdp_version=2",
            f"--fsdp_reshard_after_forward={str(settings.sharding == 'full').lower()}",
            f"--fsdp_offload_params={str(settings.offload == 'cpu').lower()}",
            "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
            "--fsdp_state_dict_type=SHARDED_STATE_DICT",
        ]
    elif strategy == "deepspeed":
        stage, device = settings.zero_stage, settings.offload
        added = ["--use_deepspeed", f"--zero_stage={stage}", f"--offload_optimizer_device={device}"]
        added += [f"--offload_param_device={device}", "--zero3_init_flag=true"] if stage == 3 else []
        if device == "nvme":
            added += [f"--offload_{what}_nvme_path={settings.nvme_path}" for what in ("optimizer", "param")]
    if keys.get("precision", AUTO) != AUTO and "--mixed_precision" not in named:
        added.append(f"--mixed_precision={settings.precision.replace('fp32', 'no')}")
    return [*LAUNCHERS[launcher], *added, *joined_options(options), *program]


def rank_command(command: Sequence[str], local_rank: int, accelerate_launch: str) -> list[str]:
    """The command of one rank in place of a launcher's; any other command itself. `accelerate_launch`: the path of
    engine/torch_trainer/accelerate_launch.py on the node."""
    launcher, options, program = split_launcher(command)
    given = joined_options(options)
    if launcher == "accelerate":
        return ["python", accelerate_launch, *given, *program]
    if launcher is None:
        return list(command)
    if launcher == "deepspeed":
        # As deepspeed.launcher.launch does.
        program = [*program[:1], f"--local_rank={local_rank}", *program[1:]]
    return started_program([*LAUNCHERS[launcher], *given, *program])
