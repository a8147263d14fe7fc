"""Strategy "data": every rank holds the whole model and computes its share of each global batch.

One update is the single machine's: sums of gradients, losses and tokens go through one all_sum, then are divided.
"""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

import time
from collections.abc import Mapping

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from ..arrays import floats, number
from ..collective import Collective
from ..data import Split
from ..feed import Feed
from ..job import Job
from ..optimizer import Updater
from ..reporting import Reporter
from ..sampler import Indices
from ..streamed import Weights
from .gradients import Gradients
from .strategy import Share, State


class DataParallel:
    """One rank's copy (a Strategy)."""

    replicated = True

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        train: Split,
        *,
        collective: Collective,
        shares: list[float],
        reporter: Reporter,
    ) -> None:
        """Raises JobError when the batch is too small for the ranks or too large for the data."""
        self.model = model
        self._collective = collective
        self.feed = Feed(train, job, shares, collective.rank, reporter)
        self._gradients = Gradients(model)
        self._updater = Updater(job, model)
        self._sums: list[mx.array] | None = None

    @property
    def learning_rate(self) -> float:
        return self._updater.learning_rate

    @property
    def in_16_bits(self) -> bool:
        return self._updater.in_16_bits

    def accumulate(self, position: int) -> Share:
        """This rank's share of one global batch, added to the sums of the update under way."""
        begun = time.perf_counter()
        batch = self.feed.batch(position)
        ready = time.perf_counter()
        loss, buckets = self._gradients.of(batch)
        if self._sums is not None:
            buckets = [mine + before for mine, before in zip(buckets, self._sums, strict=True)]
            mx.eval(buckets)
        self._sums = buckets
        return Share(loss, batch.targets, ready - begun, time.perf_counter() - ready)

    def own_norm(self, tokens: int) -> float | None:
        assert self._sums is not None
        return self._gradients.norm(self._sums, tokens) if tokens else None

    def exchange(self, counters: list[float]) -> list[float]:
        assert self._sums is not None
        *buckets, last = self._sums
        # Counters of float32 are exact up to 16 million tokens an iteration.
        tail = mx.concatenate([last, mx.array(counters)])
        totals = [self._collective.sum(bucket) for bucket in [*buckets, tail]]
        self._sums = totals
        return floats(totals[-1][last.size :])

    def apply(self, tokens: float) -> float | None:
        assert self._sums is not None
        totals, self._sums = self._sums, None
        return number(self._updater.update(self._gradients.unpack(totals, tokens))) if tokens else None

    def loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        mine = self.feed.mine(indices)
        if not len(mine):
            return 0.0, 0
        batch = examples.batch(mine)
        return self._gradients.loss(batch), batch.targets

    def trained(self) -> Weights:
        return Weights.of(dict(tree_flatten(self.model.trainable_parameters())))

    def whole(self) -> Weights:
        return Weights.of(dict(tree_flatten(self.model.parameters())))

    def state(self) -> State:
        return self._updater.state()

    def fits(self, state: Mapping[str, Mapping[str, mx.array]]) -> bool:
        return self._updater.fits(state)

    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        """Raises ValueError for a state that does not fit."""
        if (part, parts) != (0, 1):
            raise ValueError(f"it is part {part} of {parts}, and this strategy's state is one")
        self._updater.restore(state)
