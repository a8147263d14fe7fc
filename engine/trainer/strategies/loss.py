"""The loss of a batch, a sum and not a mean, and the seed of its dropout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
from mlx import nn

from engine.trainer.data import Batch


@dataclass(frozen=True)
class Rows:
    """Some rows of a batch, as a model's input."""

    tokens: mx.array
    """[rows, length], including the last target."""
    bounds: mx.array
    """[rows, 2]"""
    scale: float
    """Factor of the loss, 1 unless it is float16."""

    @classmethod
    def of(cls, batch: Batch, chosen: slice = slice(None), *, half: bool = False) -> Rows:
        # A sum over thousands of tokens leaves float16's range; a power of two near the mean loses no bit.
        scale = 2.0 ** -(max(batch.targets, 1) - 1).bit_length() if half else 1.0
        return cls(mx.array(batch.tokens[chosen]), mx.array(batch.bounds[chosen]), scale)


def loss_sum(model: Callable[[mx.array], mx.array], tokens: mx.array, bounds: mx.array, scale: mx.array) -> mx.array:
    """The sum of the targets' cross-entropies times `scale`, a float32 scalar; 0 without targets.

    Targets are the tokens from bounds[:, 0] to before bounds[:, 1].
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    position = mx.arange(1, targets.shape[1] + 1)
    mask = mx.logical_and(position >= bounds[:, 0:1], position < bounds[:, 1:])
    entropies = nn.losses.cross_entropy(model(inputs), targets)
    return mx.where(mask, entropies, 0).astype(mx.float32).sum() * scale


def dropout_seed(seed: int, iteration: int, rank: int) -> int:
    """64 bits that determine everything random in that rank's iteration: no generator state has to be saved, and a
    resumed run draws the same numbers."""
    digest = hashlib.blake2b(f"{seed} {iteration} {rank}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
