"""The training data as one rank gets it: its share of each global batch, and a tidied memory after each chunk."""

from __future__ import annotations

import gc

import mlx.core as mx

from .chunks import progress_text
from .data import Batch, Split
from .job import Job
from .reporting import Reporter
from .sampler import share_slice


class Feed:
    """A pure function of the position, which is the whole state of it: going on at a position is resuming there."""

    def __init__(self, train: Split, job: Job, counts: list[int], rank: int, reporter: Reporter) -> None:
        """`counts` is how many examples of a batch each rank takes. Raises ValueError for too few examples."""
        self._train = train
        self._sampler = train.sampler(job.batch_size, job.seed)
        self._mine = share_slice(job.batch_size, counts, rank)
        self._reporter = reporter

    @property
    def batches_per_epoch(self) -> int:
        return self._sampler.batches_per_epoch

    def batch(self, position: int) -> Batch:
        """This rank's examples of the `position`-th global batch, from 0. Raises JobError."""
        return self._train.batch(self._sampler.batch(position)[self._mine])

    def finish(self, position: int) -> None:
        """The batch at `position` has been trained on: where a chunk ends with it, free what it took, and say so."""
        ended = self._sampler.chunk_end(position)
        if ended is None:
            return
        gc.collect()
        mx.clear_cache()
        text = progress_text(ended.chunk, ended.num_chunks)
        self._reporter.event(
            "chunk",
            chunk=ended.chunk,
            num_chunks=ended.num_chunks,
            epoch=ended.epoch,
            iteration=position + 1,
            progress=text,
        )
        self._reporter.say(text)
