"""How a dataset is cut into chunks, and a global batch into the ranks' shares: the same arithmetic for plan and
trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COORDINATOR_CHUNK_SIZE = 50_000
"""Examples per chunk, and the smallest dataset that is chunked."""


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a dataset; examples and chunks count from 0, ranges are half-open."""

    enabled: bool
    """The dataset is streamed; else it is one piece in memory."""
    dataset_size: int
    """Examples."""
    chunk_size: int
    """Examples per chunk; the last one may have fewer."""
    num_chunks: int
    """ceil(dataset_size / chunk_size)."""

    @classmethod
    def whole(cls, dataset_size: int) -> ChunkPlan:
        """One piece in memory, perhaps empty."""
        return cls(False, dataset_size, dataset_size, 1)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """The range of examples of `chunk`. Raises IndexError."""
        if not 0 <= chunk < self.num_chunks:
            raise IndexError(f"chunk {chunk} of {self.num_chunks}")
        start = chunk * self.chunk_size
        return start, min(start + self.chunk_size, self.dataset_size)


def chunk_plan(dataset_size: int, chunk_size: int = COORDINATOR_CHUNK_SIZE) -> ChunkPlan:
    """The plan for `dataset_size` examples: chunked if there are `chunk_size` or more. Raises ValueError for a size
    that is not an integer of at least 1."""
    for name, value in (("dataset_size", dataset_size), ("chunk_size", chunk_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}: must be a whole number, at least 1")
    num_chunks = -(-dataset_size // chunk_size)
    return ChunkPlan(dataset_size >= chunk_size, dataset_size, chunk_size, num_chunks)


def progress_text(chunk: int, num_chunks: int) -> str:
    """The progress line after the `chunk`-th of `num_chunks` chunks, from 1. Raises ValueError for a chunk out of
    range."""
    if not 1 <= chunk <= num_chunks:
        raise ValueError(f"chunk {chunk} of {num_chunks}")
    return f"Processing chunk {chunk}/{num_chunks} ({100 * chunk // num_chunks}% complete)"


def share_counts(total: int, shares: Sequence[float]) -> list[int]:
    """`total` examples divided over ranks in proportion to `shares`, by largest remainder (Hamilton's method), at least
    1 each. Raises ValueError for a share that is not above 0, or fewer examples than ranks."""
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
    """The rank's slice of a batch of `length`, which may be less than the counts' sum (the last one of a
    validation)."""
    start = sum(counts[:rank])
    return slice(min(start, length), min(start + counts[rank], length))
