"""How a rank's training ends: completed or stopped, or by an error with an exit code of its own."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol.exit_codes import TrainerError, TrainerExit


@dataclass(frozen=True)
class Outcome:
    completed: bool
    stopped: bool
    iteration: int
    early: str | None = None
    """Why it is complete before the job's last iteration."""


def first_line(error: BaseException) -> str:
    """The first line of its message that says anything; its type without one."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


class GroupError(TrainerError):
    """The group could not be formed as planned, or its ranks do not have the same job, model and data."""

    exit_code = TrainerExit.GROUP


class PeerLost(TrainerError):
    """Another rank is gone: a consequence of its failure, not the cause."""

    exit_code = TrainerExit.PEER_LOST


class Diverged(TrainerError):
    """The loss or the gradient is not finite."""

    exit_code = TrainerExit.DIVERGED
