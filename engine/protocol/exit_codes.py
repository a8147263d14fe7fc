"""The exit codes of our own programs, and those that stand for one that did not run."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The `flightdeck` command."""

    OK = 0
    FAILED = 1
    """A run or a check failed."""
    USAGE = 2
    """Bad usage or configuration."""
    INTERRUPTED = 130
    """128 + SIGINT."""


class TrainerExit(IntEnum):
    """The trainer (engine.trainer.main)."""

    OK = 0
    """Completed, or stopped on request."""
    EXCEPTION = 1
    GROUP = 3
    """The group is not the planned one."""
    DIVERGED = 4
    PEER_LOST = 5
    """The state of the last finished update has been saved where possible."""
    KEEPER_GONE = 6
    CORRUPTED = 7
    """This rank's parameters differ from the other ranks'."""


FINAL_EXITS = frozenset({TrainerExit.GROUP, TrainerExit.DIVERGED, TrainerExit.CORRUPTED})
"""Failures that the same trainer would have again if it were started again."""


class ShellExit(IntEnum):
    """A shell, ssh or one of our shell scripts, in place of the program that it was to run."""

    NOT_PREPARED = 125
    """Our script lacks what it needs first: its folder, MLX's file, or an output that can be written."""
    CANNOT_RUN = 126
    """The program cannot be run, or start.sh has none for the rank."""
    NOT_FOUND = 127
    SSH_FAILED = 255
    """ssh's own; all others are the command's."""


class TrainerError(RuntimeError):
    """An end of the trainer that has an exit code of its own."""

    exit_code = TrainerExit.EXCEPTION


class KeeperExit(IntEnum):
    """The keeper (engine.node.keeper), where it has no exit code of the program to pass on."""

    STARTUP_UNKNOWN = 125
    """A detached keeper ended before it reported that its rank had started."""
    CANNOT_START = ShellExit.NOT_FOUND
    """As a shell reports a missing program."""
