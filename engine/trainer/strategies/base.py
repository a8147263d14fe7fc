"""The interface between the loop and a strategy (the work of one update in three phases, and its state), and the
common base of the strategies whose state is partitioned over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from engine.protocol.job import Job
from engine.trainer.collective import Collective
from engine.trainer.data import DataLoader, Split
from engine.trainer.optimizer import Updater
from engine.trainer.sampler import Indices
from engine.trainer.weights import UINT_OF_SIZE, TensorSpec, WeightStream, floats, scalar

State = dict[str, dict[str, mx.array]]
"""Group → name → array: references, evaluated. MLX's arrays never change, so this is a snapshot."""


@dataclass(frozen=True)
class LocalStep:
    """One rank's part of an iteration, and the seconds of each part of the work."""

    loss_sum: float
    """Sum of cross-entropies; 0 on a rank that does not compute the loss."""
    tokens: int
    """Targets in `loss_sum`."""
    data_s: float
    compute_s: float
    communicate_s: float = 0.0
    """Before the update's own exchange."""


class Strategy(Protocol):
    """One rank's side. Methods are called by all ranks, in the same order, and may raise PeerLost, unless they are
    local.

    An update is `accumulate` for each of its iterations, `exchange`, `apply`. The state changes in `apply` only: a rank
    that loses a peer before has the complete state of the last update.
    """

    model: nn.Module
    """This rank's part of it."""
    loader: DataLoader
    replicated: bool
    """Every rank has the same, complete state; else each has a part of one."""

    @property
    def learning_rate(self) -> float:
        """The last update's rate. Local."""

    @property
    def in_16_bits(self) -> bool:
        """At least one trained parameter has only 16 bits. Local."""

    def accumulate(self, position: int) -> LocalStep:
        """Forward and backward of the `position`-th global batch, from 0, added to the update under way; evaluated."""

    def local_norm(self, tokens: int) -> float | None:
        """The norm of this rank's own gradients, as a mean over its `tokens`; None where a rank has none. Local."""

    def exchange(self, counters: list[float]) -> list[float]:
        """Sum gradients and `counters` (float32: exact for integers up to 2^24) over the ranks; returns the sums of the
        counters. Everything is evaluated; the state does not change."""

    def apply(self, tokens: float) -> float | None:
        """One optimizer step with the mean gradient over `tokens` global targets, evaluated; returns its norm before
        clipping. None, and no step, without targets. Local."""

    def loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        """This rank's part of one batch: the sum of cross-entropies, and the number of targets."""

    def trained_weights(self) -> WeightStream:
        """All trained parameters by mlx-lm's names, as they are saved; complete on rank 0. Every rank iterates over all
        of them."""

    def all_weights(self) -> WeightStream:
        """All parameters, likewise."""

    def state(self) -> State:
        """This rank's trained parameters at the optimizer's precision, and the optimizer's state, after the last
        update: the same groups, names, shapes and types at every update. Local."""

    def fits(self, state: Mapping[str, Mapping[str, mx.array]]) -> bool:
        """`state` is exactly this rank's. Local."""

    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        """Restore a result of `state`: of rank `part` of `parts`, called for all of them in order; nothing changes
        before the last. A replicated one, or one of which this rank's own part `fits`, is part 0 of 1. Raises
        ValueError for a state that does not fit this job, and changes nothing then. Local."""


@dataclass(frozen=True)
class PlacedParameter:
    """A parameter that some rank holds."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    ranks: tuple[int, ...]
    """One, or more for embeddings that are the head as well."""


@dataclass(frozen=True)
class PlacedParameters:
    """A model's parameters, on whatever rank; the same on each."""

    trained: Sequence[PlacedParameter]
    all: Sequence[PlacedParameter]


def gather_weights(parameters: Sequence[PlacedParameter], model: nn.Module, collective: Collective) -> WeightStream:
    """All `parameters`, of which each rank's `model` has its own, bit for bit on rank 0; other ranks may get
    placeholders. Iteration raises PeerLost."""

    def arrays() -> Iterator[mx.array]:
        own = dict(tree_flatten(model.parameters()))
        for parameter in parameters:
            if 0 in parameter.ranks:
                yield own[parameter.name] if collective.rank == 0 else mx.array(0)
                continue
            kind = UINT_OF_SIZE[parameter.dtype.size]
            mine = own[parameter.name] if collective.rank == parameter.ranks[0] else mx.zeros(parameter.shape, kind)
            yield collective.all_sum(mine.view(kind)).view(parameter.dtype)

    return WeightStream({entry.name: TensorSpec(entry.shape, entry.dtype) for entry in parameters}, arrays())


class OptimizerPartition:
    """The parameters that this rank trains. Its `model` has no other trainable parameters."""

    def __init__(self, job: Job, model: nn.Module, trained: Sequence[PlacedParameter], collective: Collective) -> None:
        """`trained`: of all ranks. Raises JobError for settings that the optimizer rejects."""
        self._trained = trained
        self._collective = collective
        self._updater = Updater(job, model)
        self._sums: dict[str, mx.array] = {}
        self._norm = mx.array(0.0)
        self._found: dict[str, dict[str, mx.array]] = {}

    @property
    def learning_rate(self) -> float:
        return self._updater.learning_rate

    @property
    def in_16_bits(self) -> bool:
        """At least one trained parameter has only 16 bits, on any rank."""
        return any(parameter.dtype.size < 4 for parameter in self._trained)

    @property
    def sums(self) -> dict[str, mx.array]:
        """The gradients' sums so far, float32."""
        return self._sums

    def add(self, gradients: Mapping[str, mx.array]) -> None:
        """Add gradients (float32) to the sums of the update under way, evaluated."""
        for name, gradient in gradients.items():
            self._sums[name] = self._sums[name] + gradient if name in self._sums else gradient
        mx.eval(self._sums)

    def exchange(self, counters: list[float]) -> list[float]:
        """Sum `counters` and the gradients that several ranks have, and compute the global norm. Raises PeerLost."""
        rank = self._collective.rank
        for parameter in self._trained:
            if len(parameter.ranks) > 1:
                mine = self._sums.get(parameter.name)
                total = self._collective.all_sum(mx.zeros(parameter.shape) if mine is None else mine)
                if mine is not None:
                    self._sums[parameter.name] = total
        once = [parameter.name for parameter in self._trained if parameter.ranks[0] == rank]
        squares = [mx.square(self._sums[name]).sum() for name in once if name in self._sums]
        tail = mx.concatenate([mx.array(counters), sum(squares, start=mx.array(0.0)).reshape(1)])
        *totals, square = floats(self._collective.all_sum(tail))
        self._norm = mx.sqrt(mx.array(square))
        return totals

    def apply(self, tokens: float) -> float | None:
        """One optimizer step with the mean over `tokens` targets; the global norm before clipping. None without any."""
        sums, self._sums = self._sums, {}
        if not tokens:
            return None
        norm = self._norm / tokens
        return scalar(self._updater.update({name: value / tokens for name, value in sums.items()}, norm))

    def state(self) -> State:
        return self._updater.state()

    def fits(self, state: Mapping[str, Mapping[str, mx.array]]) -> bool:
        return self._updater.fits(state)

    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        """See Strategy: this rank's own is collected from all parts, and restored with the last."""
        ours = self._updater.state()
        if part == 0:
            self._found = {group: {} for group in ours}
        for group, arrays in ours.items():
            theirs = state.get(group, {})
            self._found[group] |= {name: theirs[name] for name in arrays if name in theirs}
        if part == parts - 1:
            found, self._found = self._found, {}
            self._updater.restore(found)


class PartitionedStrategy(OptimizerPartition):
    """One rank's part: everything of a Strategy but the forward and backward passes."""

    replicated = False

    def __init__(
        self, job: Job, model: nn.Module, loader: DataLoader, collective: Collective, placed: PlacedParameters
    ) -> None:
        """`model`: this rank's part. Raises JobError for settings that the optimizer rejects."""
        super().__init__(job, model, placed.trained, collective)
        self.model = model
        self.loader = loader
        self._all = placed.all
        self._half = any(parameter.dtype == mx.float16 for parameter in placed.trained)
        self._waited_s = 0.0
        """Seconds spent waiting for other ranks in the iteration under way."""

    def local_norm(self, tokens: int) -> None:
        """None: a rank's gradients are those of its own part of the model, not of its own examples."""

    def trained_weights(self) -> WeightStream:
        return gather_weights(self._trained, self.model, self._collective)

    def all_weights(self) -> WeightStream:
        return gather_weights(self._all, self.model, self._collective)
