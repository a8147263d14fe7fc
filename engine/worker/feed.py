"""The training data as one rank gets it: its share of each global batch, and a tidied memory after each chunk."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import mlx.core as mx

from .chunks import progress_text
from .data import Batch, Split
from .job import Job, JobError
from .reporting import Reporter
from .sampler import Indices
from .shares import share_counts, share_slice


class Feed:
    """A pure function of the position, which is the whole state of it: going on at a position is resuming there."""

    def __init__(self, train: Split, job: Job, shares: Sequence[float], rank: int, reporter: Reporter) -> None:
        """`shares` is what each rank takes of a batch beside the others. Raises JobError when the batch is too small
        for the ranks or too large for the data."""
        self._train = train
        try:
            self._counts = share_counts(job.batch_size, shares)
            self._sampler = train.sampler(job.batch_size, job.seed)
        except ValueError as error:
            raise JobError(f"[job] batch_size = {job.batch_size}: {error}") from error
        self._rank = rank
        self._reporter = reporter

    @property
    def batches_per_epoch(self) -> int:
        return self._sampler.batches_per_epoch

    def batch(self, position: int) -> Batch:
        """This rank's examples of the `position`-th global batch, from 0. Raises JobError."""
        return self._train.batch(self.mine(self._sampler.batch(position)))

    def mine(self, batch: Indices) -> Indices:
        """This rank's examples of any global batch; perhaps none of one that is shorter than others."""
        return batch[share_slice(len(batch), self._counts, self._rank)]

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
