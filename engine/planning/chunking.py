"""A large dataset in chunks, so that the coordinator never holds all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

COORDINATOR_CHUNK_SIZE = 50_000
"""Examples. A dataset of as many or more is chunked."""


@dataclass(frozen=True)
class Chunking:
    """How a dataset is divided."""

    enabled: bool
    dataset_size: int
    chunk_size: int
    num_chunks: int
    """1 when it is not chunked."""

    def ranges(self) -> Iterator[range]:
        """The examples of each chunk, in order; together they are all examples, each once."""
        size = self.chunk_size if self.enabled else self.dataset_size
        for start in range(0, self.dataset_size, size):
            yield range(start, min(start + size, self.dataset_size))

    def progress(self, chunk: int) -> str:
        """What is said at the chunk-th chunk, counted from 1."""
        return progress_text(chunk, self.num_chunks)


def chunking(dataset_size: int, chunk_size: int = COORDINATOR_CHUNK_SIZE) -> Chunking:
    """How many chunks: ceil(dataset_size / chunk_size) from `chunk_size` examples on. Raises ValueError for sizes that
    are not above 0."""
    if dataset_size <= 0:
        raise ValueError(f"dataset_size must be above 0: {dataset_size}")
    if chunk_size <= 0:
        raise ValueError(f"chunk_size must be above 0: {chunk_size}")
    enabled = dataset_size >= chunk_size
    return Chunking(enabled, dataset_size, chunk_size, -(-dataset_size // chunk_size) if enabled else 1)


def progress_text(chunk: int, num_chunks: int) -> str:
    """ "Processing chunk 3/10 (30% complete)". Raises ValueError for a chunk that is none of them."""
    if not 1 <= chunk <= num_chunks:
        raise ValueError(f"chunk must be 1 to {num_chunks}: {chunk}")
    return f"Processing chunk {chunk}/{num_chunks} ({chunk * 100 // num_chunks}% complete)"
