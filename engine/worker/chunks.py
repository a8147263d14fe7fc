"""The arithmetic of coordinator chunking: when a dataset is streamed in chunks, and which examples a chunk has.

Standard library alone: the engine plans with it, the trainer streams by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

COORDINATOR_CHUNK_SIZE = 50_000
"""Examples of a chunk, and the smallest dataset that is chunked."""


@dataclass(frozen=True)
class ChunkPlan:
    """How a dataset is divided; examples and chunks count from 0, ranges are half-open."""

    enabled: bool
    """Whether the dataset is streamed; else it is one piece in memory."""
    dataset_size: int
    """Examples in all."""
    chunk_size: int
    """Examples of every chunk but the last, which may have fewer."""
    num_chunks: int
    """ceil(dataset_size / chunk_size)."""

    def bounds(self, chunk: int) -> tuple[int, int]:
        """The first example of `chunk` and the one after its last. Raises IndexError."""
        if not 0 <= chunk < self.num_chunks:
            raise IndexError(f"chunk {chunk} of {self.num_chunks}")
        start = chunk * self.chunk_size
        return start, min(start + self.chunk_size, self.dataset_size)

    @property
    def boundaries(self) -> Iterator[tuple[int, int]]:
        """Every chunk's bounds, in the file's order."""
        return (self.bounds(chunk) for chunk in range(self.num_chunks))


def chunk_plan(dataset_size: int, chunk_size: int = COORDINATOR_CHUNK_SIZE) -> ChunkPlan:
    """The plan for `dataset_size` examples: chunking is on from `chunk_size` of them.

    Raises ValueError for a size that is not a whole number of at least 1.
    """
    for name, value in (("dataset_size", dataset_size), ("chunk_size", chunk_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}: must be a whole number, at least 1")
    num_chunks = -(-dataset_size // chunk_size)
    return ChunkPlan(dataset_size >= chunk_size, dataset_size, chunk_size, num_chunks)


def progress_text(chunk: int, num_chunks: int) -> str:
    """What is said of the `chunk`-th of `num_chunks` chunks, from 1: with it, so much of the dataset is done.

    Raises ValueError for a chunk that there is not.
    """
    if not 1 <= chunk <= num_chunks:
        raise ValueError(f"chunk {chunk} of {num_chunks}")
    return f"Processing chunk {chunk}/{num_chunks} ({100 * chunk // num_chunks}% complete)"
