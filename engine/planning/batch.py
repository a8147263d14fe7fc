"""The arithmetic of one update: sequences per rank, accumulation, the learning rate for a batch, and the warm-up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Rule = Literal["linear", "sqrt"]

START_PER_RANK = {"apple": 4, "cuda": 64, "cpu": 4}
"""Sequences of a rank to begin with. Apple: measured throughput is flat in the batch there (about 340 tokens/s at 4 and
at 16 in full fine-tuning), so a larger one only costs memory; the CPU build is treated alike."""
ROBUST_TOTAL = (32, 128)
"""Sequences of an update within which fine-tuning is robust: the lower one is aimed at where the job names no batch."""
WARMUP_EPOCHS = 5
WARMUP_SHARE = (0.05, 0.10)
"""Of all updates: the least and the most that a warm-up takes."""


@dataclass(frozen=True)
class Base:
    """A learning rate that is known to work at a total batch."""

    batch: int
    learning_rate: float
    source: str


BASES: dict[Rule, Base] = {
    "linear": Base(64, 1e-3, "Goyal et al. 2017, Accurate, Large Minibatch SGD: the rate grows with the batch"),
    "sqrt": Base(1, 1e-5, "Krizhevsky 2014; Malladi et al. 2022 for Adam: the rate grows with the batch's root"),
}


def rule_for(optimizer: str) -> Rule:
    """Which rule an optimizer of mlx-lm goes by: those that divide by the gradient's size scale with the root."""
    return "linear" if optimizer.lower() == "sgd" else "sqrt"


def scaled(learning_rate: float, before: float, after: float, rule: Rule) -> float:
    """A learning rate that suits a total batch of `before` sequences, for one of `after`.

    linear: lr · after/before (64 at 0.001 → 512 at 0.008). sqrt: lr · √(after/before) (1 at 1e-5 → 8 at 2.8e-5).
    Raises ValueError for batches that are not above 0.
    """
    if not (before > 0 and after > 0):
        raise ValueError(f"a batch must be above 0: {before}, {after}")
    ratio = after / before
    return learning_rate * (ratio if rule == "linear" else math.sqrt(ratio))


def accumulation(target: int, per_rank: int, ranks: int) -> int:
    """Micro-batches of an update: ceil(target / (per_rank · ranks)). Raises ValueError for a count below 1."""
    for name, value in (("target", target), ("per_rank", per_rank), ("ranks", ranks)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1: {value}")
    return -(-target // (per_rank * ranks))


def warmup_rate(learning_rate: float, epoch: int, warmup_epochs: int = WARMUP_EPOCHS) -> float:
    """The rate of `epoch`, from 0: lr · (e + 1) / warmup_epochs, then lr. Raises ValueError for an epoch below 0."""
    if epoch < 0:
        raise ValueError(f"an epoch is counted from 0: {epoch}")
    return learning_rate if epoch >= warmup_epochs else learning_rate * (epoch + 1) / warmup_epochs


def warmup_steps(updates: int, per_epoch: float | None) -> int:
    """Updates of the warm-up: 5 epochs where their length is known, but no less than 5 % and no more than 10 % of all
    updates; 5 % where it is not."""
    least, most = (max(1, math.ceil(updates * share)) for share in WARMUP_SHARE)
    if per_epoch is None:
        return least
    return min(most, max(least, math.ceil(WARMUP_EPOCHS * per_epoch)))


@dataclass(frozen=True)
class Suggestion:
    """A batch that the rules would choose."""

    per_rank: int
    accumulation: int
    total: int
    learning_rate: float
    rule: Rule


def suggest(*, ranks: int, start: int, fits: int | None, target: int, optimizer: str) -> Suggestion:
    """A batch of `target` sequences an update, or the next above that the ranks divide: each rank begins with `start`,
    or with what its memory takes (`fits`, None when that is not known), the rest is accumulated.

    Raises ValueError when not one sequence fits.
    """
    if fits is not None and fits < 1:
        raise ValueError("not one sequence fits")
    per_rank = min(start, fits) if fits is not None else start
    # No more at once than the whole update needs.
    per_rank = min(per_rank, max(1, -(-target // ranks)))
    steps = accumulation(target, per_rank, ranks)
    total = per_rank * ranks * steps
    rule = rule_for(optimizer)
    base = BASES[rule]
    return Suggestion(per_rank, steps, total, scaled(base.learning_rate, base.batch, total, rule), rule)
