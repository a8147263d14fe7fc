"""Which examples are in which batch, and which rank takes which of them.

The order is a function of seed and epoch, the position is one integer, and ranks take slices of the same global batch:
so the sequence of global batches is the same for every world size, and nothing else that draws random numbers moves it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_PERMUTE, _DROP, _BATCHES, _WITHIN = range(4)


class Sampler:
    """Global batches of training examples, of like length, without end.

    Examples are sorted by length and cut into batches, which saves padding; batches come in random order, and their
    examples too. What does not fill a last batch is left out of an epoch, another random choice every epoch.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        """`lengths` orders the examples and needs no unit. Raises ValueError for fewer examples than a batch."""
        if len(lengths) < batch_size:
            raise ValueError(f"{len(lengths)} examples do not fill one batch of {batch_size}")
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._order = np.empty((0, batch_size), dtype=np.int64)

    @property
    def batches_per_epoch(self) -> int:
        return len(self._lengths) // self._batch_size

    def batch(self, position: int) -> Indices:
        """The examples of the `position`-th global batch, from 0; [batch_size] indices."""
        epoch, number = divmod(position, self.batches_per_epoch)
        if epoch != self._epoch:
            self._order = self._epoch_order(epoch)
            self._epoch = epoch
        chosen: Indices = self._order[number]
        return chosen

    def _epoch_order(self, epoch: int) -> Indices:
        count, size = self.batches_per_epoch, self._batch_size
        shuffled = _permutation(len(self._lengths), self._seed, epoch, _DROP)[: count * size]
        # A stable sort of a shuffled order breaks ties of length at random.
        by_length = shuffled[np.argsort(self._lengths[shuffled], kind="stable")].reshape(count, size)
        batches = by_length[_permutation(count, self._seed, epoch, _BATCHES)]
        # Without this the last rank would always have the longest examples of a batch.
        within = _raw(count * size, self._seed, epoch, _WITHIN).reshape(count, size)
        order: Indices = np.take_along_axis(batches, np.argsort(within, axis=1, kind="stable"), axis=1)
        return order


def fixed_batches(examples: int, batch_size: int, seed: int, limit: int) -> list[Indices]:
    """Batches for validation and test: the same every time, in an order without meaning, the last one perhaps short.

    At most `limit` of them; -1 is all.
    """
    order = _permutation(examples, seed, 0, _PERMUTE)
    batches = [order[start : start + batch_size] for start in range(0, examples, batch_size)]
    return batches if limit < 0 else batches[:limit]


def share_counts(total: int, shares: Sequence[float]) -> list[int]:
    """`total` examples divided over ranks as `shares` ask, by largest remainder, at least 1 each.

    Raises ValueError for a share that is not above 0, or fewer examples than ranks.
    """
    if not shares or not all(0 < share < float("inf") for share in shares):
        raise ValueError(f"shares must be above 0: {list(shares)}")
    if total < len(shares):
        raise ValueError(f"a batch of {total} is too small for {len(shares)} ranks: batch_size must be at least that")
    whole = sum(shares)
    quotas = [total * share / whole for share in shares]
    counts = [max(1, int(quota)) for quota in quotas]
    while sum(counts) < total:
        counts[max(range(len(counts)), key=lambda rank: (quotas[rank] - counts[rank], -rank))] += 1
    while sum(counts) > total:
        able = [rank for rank in range(len(counts)) if counts[rank] > 1]
        counts[max(able, key=lambda rank: (counts[rank] - quotas[rank], rank))] -= 1
    return counts


def share_slice(length: int, counts: Sequence[int], rank: int) -> slice:
    """Rank's slice of a batch of `length`, which may be shorter than the counts' sum (the last one of a validation)."""
    start = sum(counts[:rank])
    return slice(min(start, length), min(start + counts[rank], length))


def _permutation(length: int, seed: int, epoch: int, purpose: int) -> Indices:
    return np.argsort(_raw(length, seed, epoch, purpose), kind="stable")


def _raw(length: int, seed: int, epoch: int, purpose: int) -> NDArray[np.uint64]:
    # The raw stream of a named bit generator is the same in every numpy, which Generator.permutation does not promise.
    counter = [0, 0, purpose, epoch]
    return np.random.Philox(key=seed & (2**64 - 1), counter=counter).random_raw(length)
