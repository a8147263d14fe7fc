"""The launchers of PyTorch that a job's command may begin with. Flight Deck takes their place: it starts every rank
itself, with the environment and arguments that the launcher would have given it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LAUNCHERS = {"torchrun": ("torchrun",), "accelerate": ("accelerate", "launch"), "deepspeed": ("deepspeed",)}
"""Name -> the words that a command of it begins with."""
LAUNCHER_OPTIONS = ("--config_file", "--mixed_precision", "--module", "-m")
"""Options that may come before the script; all others are of nodes and processes, which the configuration has."""
_FLAGS = ("--module", "-m")
"""Options without a value."""


def split_launcher(command: Any) -> tuple[str | None, list[str], list[str]]:
    """(launcher, its options, the script and its arguments); without a launcher all of it is the third. An option
    without a value is followed by "", so that names have even places."""
    words = list(command) if isinstance(command, (list, tuple)) else []
    if not all(isinstance(word, str) for word in words):
        return None, [], []
    launcher = next((name for name, begin in LAUNCHERS.items() if tuple(words[: len(begin)]) == begin), None)
    if launcher is None:
        return None, [], words
    options, rest = list[str](), words[len(LAUNCHERS[launcher]) :]
    while rest and rest[0].startswith("-"):
        option, rest = rest[0], rest[1:]
        value = ""
        if option not in _FLAGS and "=" not in option:
            value, rest = next(iter(rest), ""), rest[1:]
        options += [option, value]
    return launcher, options, rest


def started_program(command: Sequence[str]) -> list[str]:
    """The program that a command comes down to, whatever starts it."""
    launcher, options, program = split_launcher(command)
    return ["python", *(["-m"] if "-m" in options or "--module" in options else []), *program] if launcher else program


def rank_command(command: Sequence[str], local_rank: int, accelerate_launch: str) -> list[str]:
    """The command of one rank in place of a launcher's; any other command itself. `accelerate_launch`: the path of
    engine/torch_trainer/accelerate_launch.py on the node."""
    launcher, options, program = split_launcher(command)
    given = [word for word in options if word]
    if launcher == "accelerate":
        return ["python", accelerate_launch, *given, *program]
    if launcher is None:
        return list(command)
    if launcher == "deepspeed":
        # As deepspeed.launcher.launch does.
        program = [*program[:1], f"--local_rank={local_rank}", *program[1:]]
    return started_program([*LAUNCHERS[launcher], *given, *program])
