"""What `worker.calibrate` says, as the head takes it: of a known form, bounded, and safe to show."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from engine.preflight.answers import Answer, Count, Words

Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Batch = Annotated[int, Field(ge=1)]


class Progress(Answer):
    """wire.MeasureProgress"""

    phase: Words
    elapsed_s: Figure = 0.0
    steps: Count = 0
    examples_per_s: Figure | None = None


class Figures(Answer):
    """wire.Measured"""

    examples_per_s: Figure | None = None
    spread: Figure | None = None
    windows: Count = 0
    tokens_per_s: Figure | None = None
    step_s: Figure | None = None
    batch: Batch | None = None
    overhead_s: Figure | None = None
    steps: Count = 0
    measured_s: Figure = 0.0
    state_bytes: Count | None = None
    gradient_bytes: Count | None = None
    probes: Annotated[tuple[tuple[Batch, Count], ...], Field(max_length=10)] = ()
    qos: Words | None = None
    problem: Words | None = None


class Said(Answer):
    """One line: how far it has come, or what it has measured."""

    progress: Progress | None = None
    measured: Figures | None = None
