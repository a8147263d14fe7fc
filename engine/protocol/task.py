"""The task of a run that takes another run's result instead of training, as each of its ranks reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

TaskKind = Literal["evaluate", "fuse", "generate", "serve"]


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
