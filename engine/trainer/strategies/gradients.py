"""One rank's part of the exact gradient: sums, not means, in flat float32 buckets; and the seed of its dropout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from engine.trainer.data import Batch
from engine.trainer.weights import scalar


def dropout_seed(seed: int, iteration: int, rank: int) -> int:
    """64 bits that determine everything random in that rank's iteration: no generator state has to be saved, and a
    resumed run draws the same numbers."""
    digest = hashlib.blake2b(f"{seed} {iteration} {rank}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


_BUCKET_FLOATS = 16 * 2**20
"""64 MiB: large enough to use the ring both ways, small beside a model's gradients."""
_PIECE_FLOATS = 2**20


def loss_sum(model: Callable[[mx.array], mx.array], tokens: mx.array, bounds: mx.array, scale: mx.array) -> mx.array:
    """The sum of the targets' cross-entropies times `scale`, a float32 scalar; 0 without targets.

    Targets are the tokens from bounds[:, 0] to before bounds[:, 1].
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    position = mx.arange(1, targets.shape[1] + 1)
    mask = mx.logical_and(position >= bounds[:, 0:1], position < bounds[:, 1:])
    entropies = nn.losses.cross_entropy(model(inputs), targets)
    return mx.where(mask, entropies, 0).astype(mx.float32).sum() * scale


class Gradients:
    """Forward and backward passes of this rank's examples."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        trainable = tree_flatten(model.trainable_parameters())
        self._shapes = {name: value.shape for name, value in trainable}
        self._buckets = _buckets({name: value.size for name, value in trainable})
        self._half = any(value.dtype == mx.float16 for _, value in trainable)
        state = [model.state, mx.random.state]
        self._forward_backward = partial(mx.compile, inputs=state, outputs=state)(self._compute)
        self._forward = partial(mx.compile, inputs=[model.state])(partial(loss_sum, model))

    def of(self, batch: Batch) -> tuple[float, list[mx.array]]:
        """The sum of cross-entropies over `batch`, and of their gradients in buckets, evaluated."""
        loss, buckets = self._forward_backward(
            mx.array(batch.tokens), mx.array(batch.bounds), mx.array(self._scale(batch.targets))
        )
        mx.eval(loss, buckets)
        return scalar(loss), buckets

    def add(self, batch: Batch, sums: list[mx.array] | None) -> tuple[float, list[mx.array]]:
        """As `of`, with `sums` of earlier batches, if any, added to the gradients."""
        loss, buckets = self.of(batch)
        if sums is not None:
            buckets = [bucket + before for bucket, before in zip(buckets, sums, strict=True)]
            mx.eval(buckets)
        return loss, buckets

    def loss(self, batch: Batch) -> float:
        """The sum of cross-entropies over `batch`."""
        return scalar(self._forward(mx.array(batch.tokens), mx.array(batch.bounds), mx.array(1.0)))

    def norm(self, buckets: list[mx.array], divisor: float) -> float:
        """The norm of `buckets` over `divisor`, in pieces: the square of a whole bucket would take another bucket."""
        parts = [
            mx.square(bucket[start : start + _PIECE_FLOATS]).sum()
            for bucket in buckets
            for start in range(0, bucket.size, _PIECE_FLOATS)
        ]
        return scalar(mx.sqrt(mx.stack(parts).sum())) / divisor

    def unpack(self, buckets: list[mx.array], divisor: float) -> dict[str, mx.array]:
        """The gradients by parameter, divided."""
        gradients = {}
        for names, bucket in zip(self._buckets, buckets, strict=True):
            start = 0
            for name in names:
                end = start + math.prod(self._shapes[name])
                gradients[name] = (bucket[start:end] / divisor).reshape(self._shapes[name])
                start = end
        return gradients

    def _compute(self, tokens: mx.array, bounds: mx.array, scale: mx.array) -> Any:
        loss, gradients = nn.value_and_grad(self._model, loss_sum)(self._model, tokens, bounds, scale)
        flat = dict(tree_flatten(gradients))
        # Concatenated before the cast to float32; and a division by 1 would read and write all of it once more.
        buckets = [
            mx.concatenate([flat[name].reshape(-1) for name in names]).astype(mx.float32) for names in self._buckets
        ]
        return (loss / scale, [bucket / scale for bucket in buckets]) if self._half else (loss, buckets)

    def _scale(self, targets: int) -> float:
        return loss_scale(targets) if self._half else 1.0


def loss_scale(targets: int) -> float:
    """The factor of a float16 loss over so many targets: their sum over thousands of tokens leaves float16's range, and
    a power of two near the mean loses no bit."""
    return 2.0 ** -(max(targets, 1) - 1).bit_length()


def _buckets(sizes: dict[str, int]) -> list[list[str]]:
    """Parameters in order, packed into buckets."""
    buckets: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not buckets or size > room:
            buckets.append([])
            room = max(_BUCKET_FLOATS, size)
        buckets[-1].append(name)
        room -= size
    return buckets
