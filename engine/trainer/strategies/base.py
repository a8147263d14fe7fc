"""One rank's side of a training (the work of one update in three phases, and its state), and the common base of the
strategies whose state is partitioned over the ranks.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from engine.protocol.job import Job
from engine.trainer.collective import Collective, TensorSpec
from engine.trainer.data import Batch, DataLoader, Split
from engine.trainer.optimizer import Updater
from engine.trainer.sampler import Indices
from engine.trainer.weights import UINT_OF_SIZE, WeightStream, floats

State = dict[str, dict[str, mx.array]]
"""Group → name → array: references, evaluated. MLX's arrays never change, so this is a snapshot."""


@dataclass(frozen=True)
class LocalStep:
    """One rank's part of an iteration, and the seconds of each part of the work."""

    loss_sum: float
    """Sum of cross-entropies; 0 on a rank that does not compute the loss, and before a late one is known."""
    tokens: int
    """Targets in `loss_sum`."""
    data_s: float
    compute_s: float
    communicate_s: float
    update_s: float = 0.0
    """With one rank, of the backward pass too."""


class Strategy(ABC):
    """Methods are called by all ranks, in the same order, and may raise PeerLost, unless they are local.

    An update is `accumulate` for each of its iterations, `exchange`, `apply`. The state changes in `apply` only: a rank
    that loses a peer before has the complete state of the last update. What can be exchanged in the last `accumulate`
    already is, beside its computation.
    """

    replicated: bool
    """Every rank has the same, complete state; else each has a part of one."""

    def __init__(self, job: Job, model: nn.Module, loader: DataLoader, collective: Collective) -> None:
        """`model`: this rank's part. Raises JobError for settings that the optimizer rejects."""
        self.model = model
        self.loader = loader
        self._collective = collective
        self._updater = Updater(job, model)
        self._waited_s = 0.0
        """Seconds spent waiting for other ranks in the iteration under way."""

    @property
    def late_loss(self) -> float | None:
        """The last iteration's `loss_sum`, where only `apply` computes it. Local."""
        return None

    @property
    def learning_rate(self) -> float:
        """The last update's rate. Local."""
        return self._updater.learning_rate

    def accumulate(self, position: int, *, last: bool, exact: bool = False) -> LocalStep:
        """Forward and backward of the `position`-th global batch, from 0, added to the update under way, whose `last`
        it may be. `exact`: a checkpoint is due after the update, so no part of its gradient may be left to the next."""
        started = time.perf_counter()
        batch = self.loader.batch(position)
        ready, self._waited_s = time.perf_counter(), 0.0
        loss, tokens = self._forward_backward(batch, last=last, exact=exact)
        seconds = time.perf_counter() - ready
        return LocalStep(loss, tokens, ready - started, seconds - self._waited_s, self._waited_s)

    @abstractmethod
    def _forward_backward(self, batch: Batch, *, last: bool, exact: bool) -> tuple[float, int]:
        """Add the gradients of this rank's `batch`; `loss_sum` and `tokens` of a LocalStep."""

    @abstractmethod
    def local_norm(self, tokens: int) -> float | None:
        """The norm of this rank's own gradients of the last update, as a mean over its `tokens`; None where a rank has
        none. Local."""

    @abstractmethod
    def exchange(self, counters: list[float]) -> list[float]:
        """Finish summing the gradients, and sum `counters` (float32: exact for integers up to 2^24) over the ranks;
        returns the sums of the counters. The state does not change."""

    @abstractmethod
    def apply(self, tokens: float) -> float | None:
        """One optimizer step with the mean gradient over `tokens` global targets, evaluated; returns its norm before
        clipping. None, and no step, without targets. Local."""

    @abstractmethod
    def loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        """This rank's part of one batch: the sum of cross-entropies, and the number of targets."""

    @abstractmethod
    def trained_weights(self) -> WeightStream:
        """All trained parameters by mlx-lm's names, complete on rank 0. Every rank iterates over all of them."""

    def state(self) -> State:
        """This rank's trained parameters at the optimizer's precision, and the optimizer's state, after the last
        update: the same groups, names, shapes and types at every update. Local."""
        return self._updater.state()

    def fits(self, state: Mapping[str, Mapping[str, mx.array]]) -> bool:
        """`state` is exactly this rank's. Local."""
        return self._updater.fits(state)

    @abstractmethod
    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        """Restore a result of `state`: of rank `part` of `parts`, called for all of them in order; nothing changes
        before the last. A replicated one, or one of which this rank's own part `fits`, is part 0 of 1. Raises
        ValueError for a state that does not fit this job, and changes nothing then. Local."""


@dataclass(frozen=True)
class PlacedParameter(TensorSpec):
    """A parameter that some rank holds."""

    name: str
    ranks: tuple[int, ...]
    """One, or more for embeddings that are the head as well."""
    trained: bool = True


class PartitionedStrategy(Strategy):
    """A rank that holds and trains a part of the model: everything but the forward and backward passes."""

    replicated = False

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        loader: DataLoader,
        collective: Collective,
        placed: Sequence[PlacedParameter],
    ) -> None:
        """`model`: this rank's part, with no trainable parameters but its own; `placed`: the whole model's parameters,
        the same on each rank. Raises JobError for settings that the optimizer rejects."""
        super().__init__(job, model, loader, collective)
        self._placed = placed
        self._trained = [parameter for parameter in placed if parameter.trained]
        self._half = any(parameter.dtype == mx.float16 for parameter in self._trained)
        self._norm = 0.0
        self._found: State = {}
        self.sums: dict[str, mx.array] = {}
        """The gradients' sums so far, float32."""

    def add(self, gradients: Mapping[str, mx.array]) -> None:
        """Add gradients (float32) to the sums of the update under way, evaluated."""
        for name, gradient in gradients.items():
            self.sums[name] = self.sums[name] + gradient if name in self.sums else gradient
        mx.eval(self.sums)

    def local_norm(self, tokens: int) -> None:
        """None: a rank's gradients are those of its own part of the model, not of its own examples."""

    def exchange(self, counters: list[float]) -> list[float]:
        """Also sums the gradients that several ranks have, and computes the global norm."""
        rank = self._collective.rank
        for parameter in self._trained:
            if len(parameter.ranks) > 1:
                mine = self.sums.get(parameter.name)
                total = self._collective.all_sum(mx.zeros(parameter.shape) if mine is None else mine)
                if mine is not None:
                    self.sums[parameter.name] = total
        once = [parameter.name for parameter in self._trained if parameter.ranks[0] == rank]
        squares = [mx.square(self.sums[name]).sum() for name in once if name in self.sums]
        tail = mx.concatenate([mx.array(counters), sum(squares, start=mx.array(0.0)).reshape(1)])
        *totals, square = floats(self._collective.all_sum(tail))
        self._norm = math.sqrt(square)
        return totals

    def apply(self, tokens: float) -> float | None:
        sums, self.sums = self.sums, {}
        if not tokens:
            return None
        return self._updater.update([sums], tokens, self._norm / tokens)

    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        """This rank's own is collected from all parts, and restored with the last."""
        ours = self._updater.state()
        if part == 0:
            self._found = {group: {} for group in ours}
        for group, arrays in ours.items():
            theirs = state.get(group, {})
            self._found[group] |= {name: theirs[name] for name in arrays if name in theirs}
        if part == parts - 1:
            found, self._found = self._found, {}
            self._updater.restore(found)

    def trained_weights(self) -> WeightStream:
        return self._gather_weights(self._trained)

    def all_weights(self) -> WeightStream:
        """All parameters, as `trained_weights`."""
        return self._gather_weights(self._placed)

    def _gather_weights(self, parameters: Sequence[PlacedParameter]) -> WeightStream:
        """`parameters` bit for bit on rank 0; other ranks may get placeholders. Iteration raises PeerLost."""
        return WeightStream({parameter.name: parameter for parameter in parameters}, self._gathered(parameters))

    def _gathered(self, parameters: Sequence[PlacedParameter]) -> Iterator[mx.array]:
        own = dict(tree_flatten(self.model.parameters()))
        for parameter in parameters:
            if 0 in parameter.ranks:
                yield own[parameter.name] if self._collective.rank == 0 else mx.array(0)
                continue
            kind = UINT_OF_SIZE[parameter.dtype.size]
            holds = self._collective.rank == parameter.ranks[0]
            mine = own[parameter.name] if holds else mx.zeros(parameter.shape, kind)
            yield self._collective.all_sum(mine.view(kind)).view(parameter.dtype)
