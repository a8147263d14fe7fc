"""What several parts of a plan need, worked out of its inputs once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.mlx_lm_keys import DEFAULTS
from engine.config.models import JobConfig
from engine.planning.inputs import PlanInputs
from engine.planning.notes import Notes
from engine.planning.prediction import Prediction, prediction
from engine.planning.shares import Shares, shares
from engine.planning.usable import unused, usable


@dataclass(frozen=True)
class Situation:
    """One plan's ground."""

    inputs: PlanInputs
    platform: str
    """ "apple", "cuda", "cpu" or "unknown"."""
    divided: Shares
    micro: Mapping[str, int] | None
    """Node → its sequences of a global batch; None for a command of the user's own, a batch that is too small, and a
    pipeline, whose every stage sees all of it."""
    predicted: Prediction

    @property
    def job(self) -> JobConfig:
        return self.inputs.config.job

    @property
    def settings(self) -> Mapping[str, Any]:
        """mlx-lm's keys; {} for a command of the user's own."""
        return {} if self.job.command is not None else self.job.mlx_lm

    @property
    def names(self) -> list[str]:
        """The nodes in rank order."""
        return [node.name for node in self.inputs.config.nodes]

    @property
    def ranks(self) -> int:
        return len(self.inputs.config.nodes)

    @property
    def full(self) -> bool:
        return bool(self.settings) and self.job.fine_tune_type == "full"

    @property
    def accumulation(self) -> int:
        return int(self.settings.get("grad_accumulation_steps") or 1)

    @property
    def total_batch(self) -> int | None:
        """Sequences of an update; None for a command of the user's own."""
        return int(self.settings["batch_size"]) * self.accumulation if self.settings else None

    @property
    def updates(self) -> int | None:
        """Of the whole run: what is left of the last accumulation is applied too."""
        return -(-int(self.settings["iters"]) // self.accumulation) if self.settings else None

    @property
    def updates_per_epoch(self) -> float | None:
        if self.total_batch is None or self.inputs.examples is None:
            return None
        return self.inputs.examples / self.total_batch

    def given(self, *keys: str) -> bool:
        """Whether the configuration names any of these keys of [job] itself, or they are at least no defaults."""
        return any(key in self.job.given or self.settings.get(key) != DEFAULTS.get(key) for key in keys)


def situation(inputs: PlanInputs, notes: Notes) -> Situation:
    """Divide the batch, and predict. A batch that cannot be divided is refused in `notes`."""
    config = inputs.config
    divided = _divided(inputs, notes)
    # A division has its own words for them.
    for name in inputs.left_out if inputs.division is None else ():
        notes.warn("hardware_calibration", f"{name} finished nothing while it was measured: it is left out")
    for name in inputs.division.excluded if inputs.division is not None else ():
        notes.warn("nodes", f"{name} is left out: a check of the launch has excluded it")
    for warning in divided.warnings:
        notes.warn("hardware_calibration", warning)
    micro = None
    if config.job.command is None and inputs.strategy != "pipeline":
        try:
            micro = divided.micro_batches(int(config.job.mlx_lm["batch_size"]))
        except ValueError as error:
            notes.refuse("batch_size", str(error))
    taken, why_not = usable(inputs), unused(inputs)
    predicted = prediction(config, taken, divided)
    if why_not is not None:
        predicted = Prediction(why_not=why_not)
    elif taken is not None and taken.stand_in:
        predicted = Prediction(why_not="a stand-in was measured: what the job's own command does is not known")
    if inputs.division is not None and inputs.division.why_not is not None:
        predicted = predicted.withheld(inputs.division.why_not)
    if inputs.strategy != "data":
        predicted = Prediction(why_not=f"what was measured is strategy data, and says nothing of {inputs.strategy}")
    return Situation(inputs, _platform(inputs), divided, micro, predicted)


def _divided(inputs: PlanInputs, notes: Notes) -> Shares:
    if inputs.division is not None:
        return Shares.of(inputs.division)
    try:
        return shares(inputs.config, inputs.calibration, now=inputs.now)
    except ValueError as error:
        notes.refuse("hardware_calibration", str(error))
        return shares(inputs.config, None)


def _platform(inputs: PlanInputs) -> str:
    facts = list(inputs.facts.values())
    if any(fact.system == "Darwin" for fact in facts):
        return "apple"
    if any(fact.gpu == "gpu" for fact in facts):
        return "cuda"
    return "cpu" if facts else "unknown"
