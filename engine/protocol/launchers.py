"""The launchers of PyTorch that a job's command may begin with, whose place Flight Deck takes: it starts every rank
itself, with the environment and arguments that the launcher would have given it. And launchers inside a command, which
would start a group of their own on each rank."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from engine.protocol.job import AUTO, TorchSettings
from engine.protocol.launcher_options import IDLE, option_of

LAUNCHERS = {"torchrun": ("torchrun",), "accelerate": ("accelerate", "launch"), "deepspeed": ("deepspeed",)}
"""Name -> the words that a command of it begins with."""
_SPELLINGS = {
    **{words: name for name, words in LAUNCHERS.items()},
    ("accelerate-launch",): "accelerate",
    ("python", "-m", "torch.distributed.run"): "torchrun",
    ("python", "-m", "accelerate.commands.launch"): "accelerate",
    ("python", "-m", "deepspeed.launcher.runner"): "deepspeed",
}
_ENVIRONMENTS = frozenset({"conda", "hatch", "mamba", "micromamba", "pdm", "pipenv", "pixi", "poetry", "rye", "uv"})
"""Programs that run another one, with a python of their own."""
_WRAPPERS = _ENVIRONMENTS | {"env", "ionice", "nice", "nohup", "numactl", "stdbuf", "taskset", "time", "timeout"}
"""Programs that run another one."""
MIXED_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
"""Accelerate's name of a precision -> that of [job]."""
_OWN_STRATEGY = ("--config_file", "--use_fsdp", "--use_deepspeed", "--use_megatron_lm", "--multi_gpu", "--cpu")


def _named(words: Sequence[str], table: Mapping[tuple[str, ...], Any]) -> tuple[str, ...] | None:
    """The key of `table` that the words begin with, wherever the program is, and whichever python it has."""
    begun = (re.sub(r"^python3?(\.\d+)?$", "python", PurePosixPath(words[0]).name), *words[1:4]) if words else ()
    return next((key for key in table if begun[: len(key)] == key), None)


def _placed(words: Sequence[str], table: Mapping[tuple[str, ...], Any]) -> tuple[int, tuple[str, ...]] | None:
    """(where, which key) of `table` the words have: as the first, or behind wrappers ("uv run", "env X=1")."""
    wrapped = bool(words) and PurePosixPath(words[0]).name in _WRAPPERS
    places = range(len(words) if wrapped else 1)
    return next(((place, key) for place in places if (key := _named(words[place:], table)) is not None), None)


def _split(command: Any) -> tuple[str | None, list[str], list[str], list[str]]:
    """As `split_launcher`, and the wrappers before the launcher."""
    words = list(command) if isinstance(command, (list, tuple)) else []
    if not all(isinstance(word, str) for word in words):
        return None, [], [], []
    found = _placed(words, _SPELLINGS)
    if found is None:
        return None, [], words, []
    place, spelling = found
    launcher, options, rest = _SPELLINGS[spelling], list[str](), words[place + len(spelling) :]
    while rest and rest[0].startswith("-") and rest[0] != "--":
        written, joined, value = rest.pop(0).partition("=")
        if not written.startswith("--") and len(written) > 2:
            # -t3, as argparse takes it.
            written, joined, value = written[:2], "=", written[2:] + joined + value
        option = option_of(launcher, written)
        if not joined and option.takes_value:
            value = rest.pop(0) if rest else ""
        options += [option.name, value]
    return launcher, options, rest[rest[:1] == ["--"] :], words[:place]


def split_launcher(command: Any) -> tuple[str | None, list[str], list[str]]:
    """(launcher, its options, the script and its arguments); without a launcher all of it is the third. Options have
    their long names, with underscores, in even places: each is followed by its value, "" if it has none."""
    return _split(command)[:3]


def joined_options(options: Sequence[str]) -> list[str]:
    """The options of `split_launcher` as words: "--mixed_precision=bf16", so that a value may begin with a dash."""
    return [f"{name}={value}" if value else name for name, value in zip(options[::2], options[1::2], strict=True)]


def option_value(command: Any, name: str, default: str = "") -> str:
    """The value of an option of the command's launcher."""
    options = split_launcher(command)[1]
    return options[options.index(name) + 1] if name in options[::2] else default


def idle_options(command: Any) -> list[str]:
    """Sentences about the options that have no effect here."""
    launcher, options, _ = split_launcher(command)
    found = [option_of(launcher, name) for name in options[::2]] if launcher else []
    idle = {each.reason: [other.name for other in found if other.reason == each.reason] for each in found}
    reasons = {each.reason for each in found if each.effect == IDLE}
    return [f"{', '.join(names)}: no effect, {reason}" for reason, names in idle.items() if reason in reasons]


def own_strategy(command: Any) -> str | None:
    """The option of a command's `accelerate launch` that says how the ranks divide the training, or on what."""
    launcher, options, _ = split_launcher(command)
    return next((name for name in options[::2] if launcher == "accelerate" and name in _OWN_STRATEGY), None)


def started_program(command: Sequence[str], python: str = "python") -> list[str]:
    """The program that a command comes down to, whatever starts it. `python`: for a script behind other wrappers than
    those of environments, which have their own."""
    launcher, options, program, before = _split(command)
    if launcher is None:
        return program
    has_own = not before or PurePosixPath(before[0]).name in _ENVIRONMENTS
    return [*before, "python" if has_own else python, *(["-m"] if "--module" in options else []), *program]


def with_settings(command: Sequence[str], strategy: str, keys: Mapping[str, Any]) -> list[str]:
    """An `accelerate launch` with the `strategy` and `keys` of [job] as its options (those of Accelerate 1.15), unless
    it names a configuration file, which has its own; any other command itself."""
    launcher, options, program, before = _split(command)
    named = options[::2]
    if launcher != "accelerate" or "--config_file" in named:
        return list(command)
    settings, added = TorchSettings.from_spec(dict(keys)), list[str]()
    strategy = strategy if own_strategy(command) is None else AUTO
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
    return [*before, *LAUNCHERS[launcher], *added, *joined_options(options), *program]


def rank_command(command: Sequence[str], local_rank: int, accelerate_launch: str) -> list[str]:
    """The command of one rank in place of a launcher's; any other command itself. `accelerate_launch`: the path of
    engine/torch_trainer/accelerate_launch.py on the node."""
    launcher, options, program, before = _split(command)
    if launcher is None:
        return list(command)
    if launcher == "accelerate":
        program = [accelerate_launch, *joined_options(options), *program]
        return started_program([*before, "torchrun", *program], "{python}")
    if launcher == "deepspeed" and "--no_local_rank" not in options:
        # As deepspeed.launcher.launch does.
        program = [*program[:1], f"--local_rank={local_rank}", *program[1:]]
    module = ["--module"] if "--module" in options else []
    return started_program([*before, "torchrun", *module, *program], "{python}")


@dataclass(frozen=True)
class NestedLauncher:
    """A launcher within a job's command or its shell script, which each rank would start by itself."""

    name: str
    fix: str
    certain: bool
    """The ranks would not be one group. Else it depends on addresses, or on the machines' GPUs and configuration."""

    def __str__(self) -> str:
        does = "starts" if self.certain else "may start"
        return f"each rank {does} a group of its own by `{self.name}`, and trains a separate copy: {self.fix}"


_ALONE = "write the program that it starts alone: it is started once for each rank, with its place in the group"
_NEVER = "(?!)"
_WITH_TORCH = 'with framework = "torch" write command = [{0}, …]'
_BY_TORCHRUN = _WITH_TORCH.format('"torchrun", "<script>"')
_NESTED: dict[tuple[str, ...], tuple[str, str]] = {
    **{words: (_WITH_TORCH.format(f'"{name}", "<script>"'), "") for words, name in _SPELLINGS.items()},
    # With one process it hands the variables of a rank on.
    **dict.fromkeys(
        (("accelerate", "launch"), ("accelerate-launch",), ("python", "-m", "accelerate.commands.launch")),
        (_WITH_TORCH.format('"accelerate", "launch", "<script>"'), r"--multi.gpu|--num.processes[= ]([2-9]|1\d)"),
    ),
    ("python", "-m", "torch.distributed.launch"): (_BY_TORCHRUN, ""),
    **dict.fromkeys([(name,) for name in ("mpirun", "mpiexec", "mlx.launch", "horovodrun", "srun")], (_ALONE, "")),
    **dict.fromkeys(
        (("composer",), ("colossalai", "run"), ("fabric", "run"), ("lightning", "run"), ("torchx", "run")),
        (_BY_TORCHRUN, ""),
    ),
    # Without options of torchrun's it runs the recipe itself.
    ("tune", "run"): (f"copy the recipe by `tune cp`, and {_BY_TORCHRUN}", r"\btune run -"),
    ("trl",): (_WITH_TORCH.format('"accelerate", "launch", "-m", "trl.scripts.<sft, …>"'), "--accelerate_config"),
    ("axolotl", "train"): (_WITH_TORCH.format('"accelerate", "launch", "-m", "axolotl.cli.train"'), _NEVER),
    ("llamafactory-cli",): (_WITH_TORCH.format('"torchrun", "-m", "llamafactory.launcher"'), "FORCE_TORCHRUN=[1tT]"),
}
"""The words that a launcher begins with -> what to write instead, and a pattern of commands that surely start a group
of their own. Sources: trl 1.16, torchtune 0.6.1, axolotl 0.19, llamafactory 0.9.5, lightning 2.6.6."""
_SEPARATORS = re.compile(r"[;&|()`\n]+")
_FIRST = frozenset(
    {"exec", "if", "then", "else", "do", "!", "{", "sudo", "sh", "bash", "zsh", "dash", "-c", "-lc", "-ec"}
)
_ADDRESS = re.compile(r"--?(rdzv.endpoint|master.addr|main.process.ip|node.rank|machine.rank)[= ](?P<variable>\S*\$)?")


def nested_launcher(script: str) -> NestedLauncher | None:
    """The first launcher that a shell script starts, unless it leads all ranks into one group by their variables."""
    for line in _SEPARATORS.split(script.replace("\\\n", " ")):
        try:
            given = shlex.split(line, comments=True)
            # The script of sh -c is a word.
            inner = [bool(re.fullmatch(r"-\w*c", word)) for word in ("", *given)]
            words = [part for at, word in enumerate(given) for part in (word.split() if inner[at] else [word])]
        except ValueError:
            # The rest of a quoted script.
            words = line.replace('"', " ").replace("'", " ").split()
        words = list(itertools.dropwhile(lambda word: word in _FIRST or re.match(r"\w+=", word), words))
        found = _placed(words, _NESTED)
        if found is None or words[found[0] + len(found[1]) :] in (["--help"], ["--version"]):
            continue
        (fix, certain), address = _NESTED[found[1]], _ADDRESS.search(line)
        if address is None or not address["variable"]:
            surely = address is None and re.search(certain, " ".join(line.split())) is not None
            return NestedLauncher(" ".join(found[1]), fix, surely)
    return None


def nested_in_command(command: Sequence[str], framework: str) -> NestedLauncher | None:
    """As `nested_launcher`, in the words of a job's command, whose own launcher Flight Deck takes the place of."""
    own = framework == "torch" and split_launcher(command)[0] is not None
    return None if own else nested_launcher(shlex.join(command))
