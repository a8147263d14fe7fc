"""What the loop asks of a strategy: the work of one update, in three parts, and its state."""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
from mlx import nn

from ..data import Split
from ..feed import Feed
from ..sampler import Indices
from ..streamed import Weights

State = dict[str, dict[str, mx.array]]
"""Group → name → array: references, evaluated. MLX's arrays never change, so that this is a snapshot."""


@dataclass(frozen=True)
class Share:
    """One rank's part of an iteration: the loss of its target tokens, and how long each part of the work took."""

    loss_sum: float
    """Of cross-entropies; 0 on a rank that does not see the loss."""
    tokens: int
    """Targets in that sum."""
    data_s: float
    compute_s: float
    communicate_s: float = 0.0
    """Before the update's own exchange."""


class Strategy(Protocol):
    """One rank's side. Every method that is not said to be local is called by all ranks, in the same order; each may
    raise PeerLost.

    An update is `accumulate` for each of its iterations, `exchange`, `apply`. Until `apply` nothing of the state has
    changed: who loses a peer before it has the whole state of the last update.
    """

    model: nn.Module
    """What this rank holds of it."""
    feed: Feed
    replicated: bool
    """Whether every rank has the same, whole state; else each has its part, and all parts together are one."""

    @property
    def learning_rate(self) -> float:
        """Of the last update. Local."""

    @property
    def in_16_bits(self) -> bool:
        """Whether any trained parameter has only 16 bits. Local."""

    def accumulate(self, position: int) -> Share:
        """Forward and backward of the `position`-th global batch, from 0, added to the update under way; evaluated."""

    def own_norm(self, tokens: int) -> float | None:
        """The norm of what this rank alone has accumulated, as a mean over its `tokens`; None where a rank has no
        gradient of its own. Local."""

    def exchange(self, counters: list[float]) -> list[float]:
        """Sum gradients and `counters` (exact in float32: whole numbers up to 2^24) over the ranks; the sums of the
        counters. Everything is evaluated; the state is untouched."""

    def apply(self, tokens: float) -> float | None:
        """One optimizer step with the mean gradient over `tokens` global targets, evaluated; its norm before clipping.
        None, and no step, when there was no target. Local."""

    def loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        """This rank's part of the sum of cross-entropies of one batch, and of the targets in it."""

    def trained(self) -> Weights:
        """All trained parameters by mlx-lm's names, as they are saved; whole on rank 0, others may get less. Every rank
        takes all of them."""

    def whole(self) -> Weights:
        """All parameters, likewise."""

    def state(self) -> State:
        """What this rank needs to go on after the last update: trained parameters at the optimizer's precision, the
        optimizer's state. The same groups, names, shapes and types at every update. Local."""

    def fits(self, state: Mapping[str, Mapping[str, mx.array]]) -> bool:
        """Whether `state` is just what this rank needs. Local."""

    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        """Put back a state that `state` gave once: of rank `part` of `parts`, with all of them in order; nothing
        changes before the last. One that is replicated, or of which the rank's own part `fits`, is part 0 of 1. Raises
        ValueError for a state that does not fit this job: nothing has changed then. Local."""
