"""The task of a run that takes another run's result instead of training, as each of its ranks reads it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any, Literal

TaskKind = Literal["evaluate", "lm_eval", "fuse", "generate", "serve"]
KEEP = 0.95
"""Least share of the gain that a fused model keeps, where no other is given."""
SERVE_PORT = 8080
"""The same of a server's port."""
ANSWER_TOKENS = 512
"""The most that an answer has, where no other number is given."""
BASE = "base"
"""The model that a server's clients name for the base model; all other names are what was trained."""
API_TOKEN_ENV = "FLIGHTDECK_API_TOKEN"
"""The token that a server's clients need; none where it is not set."""


@dataclass(frozen=True)
class Task:
    """AttemptSpec.task. Beside it, AttemptSpec.job is the source's job as launched."""

    kind: TaskKind
    source: str
    """The id of the run whose result is used."""
    weights: str | None = None
    """The path, on the node of rank 0, of a safetensors file that the source saved, or of a whole model. None: the base
    model alone."""
    fused: str | None = None
    """A fused model's directory, on the node of rank 0."""
    options: dict[str, Any] = field(default_factory=dict)
    """Those of the kind."""
    parts: list[list[str]] = field(default_factory=list)
    """In place of `weights`, the parts of a saved state, in order: of each a node of the task that has it, its folder
    there, and the SHA-256 of its manifest."""


def is_loopback(host: str) -> bool:
    """Only this machine can reach a server that listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
