"""Strategy "data": every rank holds the whole model and computes its share of each global batch.

An update equals the single machine's: gradients, losses and tokens are summed in one all_sum, then divided.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from engine.protocol.job import Job
from engine.trainer.collective import Collective
from engine.trainer.data import Batch, DataLoader, Split
from engine.trainer.sampler import Indices
from engine.trainer.strategies.base import Strategy
from engine.trainer.strategies.gradients import Gradients
from engine.trainer.weights import WeightStream, floats, scalar


class DataParallel(Strategy):
    """One rank's copy."""

    replicated = True

    def __init__(self, job: Job, model: nn.Module, loader: DataLoader, collective: Collective) -> None:
        super().__init__(job, model, loader, collective)
        self._gradients = Gradients(model)
        self._sums: list[mx.array] | None = None

    def _forward_backward(self, batch: Batch) -> tuple[float, int]:
        loss, self._sums = self._gradients.add(batch, self._sums)
        return loss, batch.targets

    def local_norm(self, tokens: int) -> float | None:
        assert self._sums is not None
        return self._gradients.norm(self._sums, tokens) if tokens else None

    def exchange(self, counters: list[float]) -> list[float]:
        assert self._sums is not None
        *buckets, last = self._sums
        # float32 counts up to 16 million tokens per iteration exactly.
        tail = mx.concatenate([last, mx.array(counters)])
        self._sums = [self._collective.all_sum(bucket) for bucket in [*buckets, tail]]
        return floats(self._sums[-1][last.size :])

    def apply(self, tokens: float) -> float | None:
        assert self._sums is not None
        totals, self._sums = self._sums, None
        return scalar(self._updater.update(self._gradients.unpack(totals, tokens))) if tokens else None

    def loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        mine = self.loader.local_share(indices)
        if not len(mine):
            return 0.0, 0
        batch = examples.batch(mine)
        return self._gradients.loss(batch), batch.targets

    def trained_weights(self) -> WeightStream:
        return WeightStream.of(dict(tree_flatten(self.model.trainable_parameters())))

    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        if (part, parts) != (0, 1):
            raise ValueError(f"it is part {part} of {parts}, and this strategy's state has only one")
        self._updater.restore(state)
