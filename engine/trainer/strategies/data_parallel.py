"""Strategy "data": every rank holds the whole model and computes its share of each global batch.

An update equals the single machine's: gradients, losses and tokens are summed in one all_sum, then divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from engine.protocol.job import Job
from engine.trainer.collective import Collective, packed
from engine.trainer.data import Batch, DataLoader, Split
from engine.trainer.sampler import Indices
from engine.trainer.strategies.base import Strategy
from engine.trainer.strategies.loss import Rows, loss_sum
from engine.trainer.weights import WeightStream, floats, scalar

_BUCKET_FLOATS = 16 * 2**20
"""64 MiB: large enough to use the ring both ways, small beside a model's gradients."""
_PIECE_FLOATS = 2**20


class Gradients:
    """Forward and backward passes of this rank's examples: sums, not means, in flat float32 buckets."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        trainable = tree_flatten(model.trainable_parameters())
        self._shapes = {name: value.shape for name, value in trainable}
        self._buckets = packed(self._shapes, lambda name: math.prod(self._shapes[name]), _BUCKET_FLOATS)
        self._half = any(value.dtype == mx.float16 for _, value in trainable)
        state = [model.state, mx.random.state]
        self._forward_backward = partial(mx.compile, inputs=state, outputs=state)(self._compute)
        self._forward = partial(mx.compile, inputs=[model.state])(partial(loss_sum, model))

    def add(self, batch: Batch, sums: Sequence[mx.array] = ()) -> tuple[float, list[mx.array]]:
        """The sum of cross-entropies over `batch`, and that of gradients in buckets, with `sums` added; evaluated."""
        rows = Rows.of(batch, half=self._half)
        loss, buckets = self._forward_backward(rows.tokens, rows.bounds, mx.array(rows.scale))
        mx.eval(loss, buckets)
        if sums:
            buckets = [bucket + before for bucket, before in zip(buckets, sums, strict=True)]
            mx.eval(buckets)
        return scalar(loss), buckets

    def loss(self, batch: Batch) -> float:
        """The sum of cross-entropies over `batch`."""
        rows = Rows.of(batch)
        return scalar(self._forward(rows.tokens, rows.bounds, mx.array(rows.scale)))

    def norm(self, buckets: list[mx.array], divisor: float) -> float:
        """The norm of `buckets` over `divisor`, in pieces: the square of a whole bucket would take another bucket."""
        parts = [
            mx.square(bucket[start : start + _PIECE_FLOATS]).sum()
            for bucket in buckets
            for start in range(0, bucket.size, _PIECE_FLOATS)
        ]
        return scalar(mx.sqrt(mx.stack(parts).sum())) / divisor

    def unpack(self, buckets: list[mx.array]) -> dict[str, mx.array]:
        """The gradients by parameter."""
        gradients = {}
        for names, bucket in zip(self._buckets, buckets, strict=True):
            start = 0
            for name in names:
                end = start + math.prod(self._shapes[name])
                gradients[name] = bucket[start:end].reshape(self._shapes[name])
                start = end
        return gradients

    def _compute(self, tokens: mx.array, bounds: mx.array, scale: mx.array) -> Any:
        loss, gradients = nn.value_and_grad(self._model, loss_sum)(
            self._model, tokens, bounds, scale, trained=self._shapes
        )
        flat = dict(tree_flatten(gradients))
        # Concatenated before the cast to float32; and a division by 1 would read and write all of it once more.
        buckets = [
            mx.concatenate([flat[name].reshape(-1) for name in names]).astype(mx.float32) for names in self._buckets
        ]
        return (loss / scale, [bucket / scale for bucket in buckets]) if self._half else (loss, buckets)


class DataParallel(Strategy):
    replicated = True

    def __init__(self, job: Job, model: nn.Module, loader: DataLoader, collective: Collective) -> None:
        super().__init__(job, model, loader, collective)
        self._gradients = Gradients(model)
        self._sums: list[mx.array] = []

    def _forward_backward(self, batch: Batch) -> tuple[float, int]:
        loss, self._sums = self._gradients.add(batch, self._sums)
        return loss, batch.targets

    def local_norm(self, tokens: int) -> float | None:
        return self._gradients.norm(self._sums, tokens) if tokens else None

    def exchange(self, counters: list[float]) -> list[float]:
        *buckets, last = self._sums
        # float32 counts up to 16 million tokens per iteration exactly.
        tail = mx.concatenate([last, mx.array(counters)])
        self._sums = [self._collective.all_sum(bucket) for bucket in [*buckets, tail]]
        return floats(self._sums[-1][last.size :])

    def apply(self, tokens: float) -> float | None:
        totals, self._sums = self._sums, []
        return self._updater.update([self._gradients.unpack(totals)], tokens) if tokens else None

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
