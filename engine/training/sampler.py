"""Which examples are in which global batch, of which ranks take slices (protocol.partition), and what seeds a
rank's dropout.

The order is a function of seed and epoch (and of the chunk size, where a dataset is streamed), and the position is one
integer. So the sequence of global batches is the same for every world size, and no other use of random numbers
changes it."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.protocol.partition import ChunkPlan, budget_edges

Indices = NDArray[np.int64]

_PERMUTE, _DROP, _BATCHES, _WITHIN, _CHUNKS, _SAMPLE = range(6)


class _Stream(NamedTuple):
    """Random numbers of one epoch: of the whole dataset (part 0), or of one of its chunks (from 1)."""

    seed: int
    epoch: int = 0
    part: int = 0


def _stream_part(plan: ChunkPlan, chunk: int) -> int:
    return 1 + chunk if plan.enabled else 0


class Sampler:
    """Endless global batches of training examples of similar length.

    Examples are sorted by length and cut into batches, which saves padding; batches come in random order, and their
    examples too. Examples that do not fill a last batch are left out, other ones in each epoch.

    Of a streamed dataset only one chunk's order and lengths are in memory. Every epoch takes the chunks in another
    order, and shuffles the examples within each. The sequence of all examples is cut into one window of batches per
    chunk; what does not fill a window's last batch moves to the next one, so that an epoch leaves out no more than
    without chunks."""

    def __init__(self, plan: ChunkPlan, lengths: Callable[[int, int], Indices], batch_size: int, seed: int) -> None:
        """`lengths`: of a half-open range of examples, in any unit. Raises ValueError for fewer than a batch."""
        if plan.dataset_size < batch_size:
            raise ValueError(f"{plan.dataset_size} examples do not fill one batch of {batch_size}")
        self._plan = plan
        self._lengths = lengths
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._chunks: list[int] = []
        self._starts: list[int] = []
        """Each chunk's offset in the epoch's sequence of examples, and the end of the last one."""
        self._windows: list[int] = []
        """The number of the first batch of each chunk's window, and the end of the last one."""
        self._window = -1
        self._order: Sequence[Indices] = ()

    @property
    def batches_per_epoch(self) -> int:
        return self._plan.dataset_size // self._batch_size

    def batch(self, position: int) -> Indices:
        """The examples of the `position`-th global batch, from 0."""
        epoch, number = divmod(position, self.batches_per_epoch)
        self._begin_epoch(epoch)
        window = bisect_right(self._windows, number) - 1
        if window != self._window:
            self._order = self._window_order(window)
            self._window = window
        return self._order[number - self._windows[window]]

    def chunk_end(self, position: int) -> tuple[int, int] | None:
        """Epoch (from 0) and number in it (from 1) of the last chunk that ends with the batch at `position`, if any."""
        if not self._plan.enabled:
            return None
        epoch, number = divmod(position, self.batches_per_epoch)
        self._begin_epoch(epoch)
        chunk = bisect_right(self._windows, number + 1) - 1
        return (epoch, chunk) if self._windows[chunk] == number + 1 else None

    def _begin_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._chunks = _permutation(self._plan.num_chunks, _Stream(self._seed, epoch), _CHUNKS).tolist()
        self._windows = self._window_edges()
        self._epoch, self._window = epoch, -1

    def _window_edges(self) -> list[int]:
        sizes = (end - start for start, end in map(self._plan.bounds, self._chunks))
        self._starts = list(accumulate(sizes, initial=0))
        return [start // self._batch_size for start in self._starts]

    def _window_order(self, window: int) -> Sequence[Indices]:
        first, last = (self._windows[edge] * self._batch_size for edge in (window, window + 1))
        examples, lengths = [], []
        # A window starts with what remains of the chunks before it.
        chunk = bisect_right(self._starts, first) - 1
        while chunk <= window:
            start, end = self._plan.bounds(self._chunks[chunk])
            started = self._starts[chunk]
            stream = _Stream(self._seed, self._epoch, _stream_part(self._plan, self._chunks[chunk]))
            shuffled = _permutation(end - start, stream, _DROP)
            taken = shuffled[max(0, first - started) : max(0, last - started)]
            examples.append(start + taken)
            lengths.append(self._lengths(start, end)[taken])
            chunk += 1
        together = np.concatenate(examples), np.concatenate(lengths)
        return [
            *_batched(*together, self._batch_size, _Stream(self._seed, self._epoch, _stream_part(self._plan, window)))
        ]


class BudgetSampler(Sampler):
    """As Sampler, with batches of at most so many padded inputs, or of one example, each the longest examples first.
    Each epoch has every example once, and as many batches; of a streamed dataset a batch is of one chunk."""

    def __init__(
        self, plan: ChunkPlan, lengths: Callable[[int, int], Indices], budget: tuple[int, int], seed: int
    ) -> None:
        """`lengths`: in tokens. `budget`: padded inputs of a batch, and the longest example's tokens. Raises ValueError
        without examples."""
        super().__init__(plan, lengths, 1, seed)
        self._budget = budget
        pieces = (lengths(*plan.bounds(chunk)) for chunk in range(plan.num_chunks))
        self._counts = [len(budget_edges(np.sort(piece)[::-1].tolist(), *budget)) - 1 for piece in pieces]

    @property
    def batches_per_epoch(self) -> int:
        return sum(self._counts)

    def fixed(self, limit: int) -> Iterator[Indices]:
        """At most `limit` batches (-1: all) for validation and test, from the whole: the same every time."""
        count = self.batches_per_epoch
        chosen = _permutation(count, _Stream(self._seed), _SAMPLE)[: count if limit < 0 else limit]
        return map(self.batch, np.sort(chosen).tolist())

    def _window_edges(self) -> list[int]:
        return list(accumulate((self._counts[chunk] for chunk in self._chunks), initial=0))

    def _window_order(self, window: int) -> Sequence[Indices]:
        chunk = self._chunks[window]
        start, end = self._plan.bounds(chunk)
        stream = _Stream(self._seed, self._epoch, _stream_part(self._plan, chunk))
        shuffled = _permutation(end - start, stream, _DROP)
        # A stable sort of a shuffled order breaks ties of length at random.
        lengths = self._lengths(start, end)[shuffled]
        descending = np.argsort(-lengths, kind="stable")
        edges = budget_edges(lengths[descending].tolist(), *self._budget)
        batches = np.split(start + shuffled[descending], edges[1:-1])
        return [batches[number] for number in _permutation(len(batches), stream, _BATCHES).tolist()]


def fixed_batches(plan: ChunkPlan, batch_size: int, seed: int, limit: int) -> Iterator[Indices]:
    """At most `limit` batches (-1: all) for validation and test: the same every time, in random order, the last one
    perhaps short. A limited number of a streamed dataset samples the whole, one example from each of as many equal
    parts; an unlimited number goes chunk by chunk."""
    size = plan.dataset_size
    wanted = size if limit < 0 else min(size, limit * batch_size)
    left = np.empty(0, dtype=np.int64)
    for pool in _sample(size, wanted, seed) if plan.enabled and wanted < size else _whole(plan, seed):
        left = np.concatenate([left, pool])[:wanted]
        whole = len(left) // batch_size * batch_size
        yield from left[:whole].reshape(-1, batch_size)
        left = left[whole:]
    if len(left):
        yield left


def _whole(plan: ChunkPlan, seed: int) -> Iterator[Indices]:
    """Every example, in pieces: the shuffled chunks in random order."""
    for chunk in _permutation(plan.num_chunks, _Stream(seed), _CHUNKS).tolist():
        start, end = plan.bounds(chunk)
        yield start + _permutation(end - start, _Stream(seed, part=_stream_part(plan, chunk)), _PERMUTE)


def _sample(size: int, wanted: int, seed: int) -> Iterator[Indices]:
    """`wanted` of `size` examples in random order, as one piece; no piece for 0."""
    if wanted:
        edges = np.arange(wanted + 1) * size // wanted
        offsets = _raw(wanted, _Stream(seed), _SAMPLE) % np.diff(edges).astype(np.uint64)
        chosen = edges[:-1] + offsets.astype(np.int64)
        yield chosen[_permutation(wanted, _Stream(seed), _PERMUTE)]


def _batched(shuffled: Indices, lengths: Indices, size: int, stream: _Stream) -> Indices:
    """As many full batches of similar length as examples in random order fill, [batches, size]."""
    count = len(shuffled) // size
    # A stable sort of a shuffled order breaks ties of length at random.
    by_length = shuffled[np.argsort(lengths, kind="stable")].reshape(count, size)
    batches = by_length[_permutation(count, stream, _BATCHES)]
    # Without this the last rank would always have the longest examples of a batch.
    within = _raw(count * size, stream, _WITHIN).reshape(count, size)
    order: Indices = np.take_along_axis(batches, np.argsort(within, axis=1, kind="stable"), axis=1)
    return order


def _permutation(length: int, stream: _Stream, purpose: int) -> Indices:
    return np.argsort(_raw(length, stream, purpose), kind="stable")


def _raw(length: int, stream: _Stream, purpose: int) -> NDArray[np.uint64]:
    # The raw stream of a named bit generator is the same in every numpy, which Generator.permutation does not promise.
    counter = [0, stream.part, purpose, stream.epoch]
    return np.random.Philox(key=stream.seed & (2**64 - 1), counter=counter).random_raw(length)


def dropout_seed(seed: int, iteration: int, rank: int) -> int:
    """64 bits for all that is random in that rank's iteration: a resumed run draws the same numbers."""
    digest = hashlib.blake2b(f"{seed} {iteration} {rank}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
