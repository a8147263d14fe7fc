"""Training examples, tokenised by the trainer's framework, padded into batches, and loaded rank by rank; and
the checksums by which ranks and attempts see that they have the same inputs.

A large split is streamed in chunks: examples are read from the file when their batch is due, so that memory use is that
of one chunk."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.node.source_files import DataError
from engine.node.standard_data import standard_data
from engine.protocol.attempt import AttemptSpec, RankSpec
from engine.protocol.checksums import BASE_MODEL, crc32_text, model_checksum
from engine.protocol.job import Job, JobError, config_hash
from engine.protocol.jsonl import fault_of, form_of, half_pair
from engine.protocol.partition import (
    ChunkPlan,
    chunk_plan,
    epoch_iterations,
    padded_width,
    progress_text,
    share_counts,
    share_counts_among,
    share_slice,
)
from engine.training.jsonl import JsonlIndex, JsonlRows, has_examples, line_number
from engine.training.reporting import Reporter
from engine.training.sampler import Indices, Sampler, fixed_batches

Tokens = tuple[list[int], int]
"""An example's tokens, and the index of its first target."""
RowFormat = Callable[[dict[str, Any]], Callable[[dict[str, Any]], Tokens]]
"""From a file's first row, which determines the format of all, to what tokenises each. Raises ValueError."""


@dataclass(frozen=True)
class Batch:
    tokens: NDArray[np.int32]
    """[examples, length], padded with 0."""
    bounds: NDArray[np.int32]
    """[examples, 2]: the first token that is a target, and the number of tokens."""
    targets: int


class Split:
    """One file of examples: streamed if it has [job] chunk_size examples or more, unless chunking is off. Then an
    example is read and tokenised each time it is used; else all are in memory, each tokenised once."""

    def __init__(self, job: Job, name: str, row_format: RowFormat, on_truncate: Callable[[int], None]) -> None:
        """`name`: train, valid or test, of the job's data directory; a missing file is an empty split. Raises JobError
        for what cannot be read."""
        self._path = path = job.data / f"{name}.jsonl"
        self._features = job.features
        self._max_length = job.max_seq_length
        self._on_truncate = on_truncate
        self._tokenised: dict[int, Tokens] = {}
        try:
            large = job.chunking and path.exists() and has_examples(path, job.chunk_size)
            self._rows: JsonlRows | JsonlIndex = JsonlIndex.of(path, job.home / "index") if large else JsonlRows(path)
        except OSError as error:
            raise JobError(f"{path} cannot be read: {error}") from error
        size = len(self._rows)
        self.plan = chunk_plan(size, job.chunk_size) if large else ChunkPlan.whole(size)
        self.checksum = self._rows.checksum
        """CRC-32 of the file."""
        self.form: str | None = None
        """That of the rows, as engine.protocol.jsonl names it; None without any."""
        if size:
            self._tokenise = self._choose_format(row_format, self._rows.rows([0])[0])

    def __len__(self) -> int:
        return self.plan.dataset_size

    def batch(self, indices: Sequence[int] | Indices) -> Batch:
        """The examples at `indices` (one or more), padded to a width of `padded_width` or less. Raises JobError."""
        return _padded(self._examples([int(index) for index in indices]), self._max_length, self._on_truncate)

    def sampler(self, batch_size: int, seed: int) -> Sampler:
        """Endless global batches. Raises JobError for fewer examples than a batch."""
        try:
            return Sampler(self.plan, self._rows.lengths, batch_size, seed)
        except ValueError as error:
            raise JobError(f"[job] batch_size = {batch_size}: {error}") from error

    def fixed_batches(self, batch_size: int, seed: int, limit: int) -> Iterator[Indices]:
        """Batches for validation and test, at most `limit`: the same every time."""
        return fixed_batches(self.plan, batch_size, seed, limit)

    def _examples(self, indices: list[int]) -> list[Tokens]:
        """Raises JobError."""
        tokenised = {} if self.plan.enabled else self._tokenised
        lacking = [index for index in dict.fromkeys(indices) if index not in tokenised]
        for index, row in zip(lacking, self._rows.rows(lacking), strict=True):
            tokenised[index] = self._tokens(index, row)
        return [tokenised[index] for index in indices]

    def _choose_format(self, row_format: RowFormat, first: dict[str, Any]) -> Callable[[dict[str, Any]], Tokens]:
        self.form = form_of(first, self._features)
        if self.form is None:
            raise JobError(f"{self._path}: line {line_number(self._path, 0)} {fault_of(first, None, self._features)}")
        try:
            return row_format(first)
        except ValueError as error:
            raise JobError(f"{self._path}: {str(error).splitlines()[0]}") from error

    def _tokens(self, index: int, row: dict[str, Any]) -> Tokens:
        try:
            return self._tokenise(row)
        except (KeyError, TypeError, IndexError, UnicodeEncodeError) as error:
            why = half_pair(row) or f"does not have the format of the first one: {error!r}"
            raise JobError(f"{self._path}: line {line_number(self._path, index)} {why}") from error


def with_standard_data(job: Job) -> Job:
    """The job with its data as a folder of train, valid and test.jsonl. Raises JobError."""
    options = {**job.features, "max_seq_length": job.max_seq_length, "data": job.data_options}
    try:
        return replace(job, data=standard_data(job.data, options).folder)
    except DataError as error:
        raise JobError(str(error)) from error


def load_train_split(job: Job, row_format: RowFormat, on_truncate: Callable[[int], None]) -> Split:
    """Raises JobError, also when there is no example."""
    train = Split(job, "train", row_format, on_truncate)
    if not len(train):
        raise JobError(f"{job.data / 'train.jsonl'} is missing or empty: there is nothing to train on")
    return train


def _padded(examples: list[Tokens], max_length: int, on_truncate: Callable[[int], None]) -> Batch:
    longest = max(len(tokens) for tokens, _ in examples)
    if longest > max_length:
        on_truncate(longest)
    bounds = [(max(start, 1), min(len(tokens), max_length)) for tokens, start in examples]
    # The input is all but the last token.
    width = min(1 + padded_width(max(longest - 1, 1)), max(max_length, 2))
    array = np.zeros((len(examples), width), np.int32)
    for row, ((tokens, _), (_, end)) in enumerate(zip(examples, bounds, strict=True)):
        array[row, :end] = tokens[:end]
    targets = sum(max(0, end - start) for start, end in bounds)
    return Batch(array, np.asarray(bounds, np.int32), targets)


class DataLoader:
    """This rank's share of each global batch, by its position alone: resuming needs no other state."""

    def __init__(
        self,
        train: Split | None,
        job: Job,
        shares: Sequence[float],
        rank: int,
        reporter: Reporter,
        validates: Sequence[bool] | None = None,
    ) -> None:
        """`train`: None where nothing is trained. `shares`: relative. `validates`: the ranks that take part in
        validation, all by default. Raises JobError for a batch too small for the ranks or too large for the data."""
        self._train = train
        try:
            self._counts = share_counts(job.batch_size, shares)
            self._validation_counts = share_counts_among(job.batch_size, shares, validates)
        except ValueError as error:
            raise JobError(f"[job] batch_size = {job.batch_size}: {error}") from error
        self._sampler = train.sampler(job.batch_size, job.seed) if train is not None else None
        self._rank = rank
        self._reporter = reporter

    def batch(self, position: int) -> Batch:
        """This rank's examples of the `position`-th global batch, from 0. Raises JobError."""
        assert self._train is not None and self._sampler is not None
        return self._train.batch(self.local_share(self._sampler.batch(position)))

    def local_share(self, batch: Indices) -> Indices:
        """This rank's examples of a global batch; perhaps none of a short one."""
        return batch[share_slice(len(batch), self._counts, self._rank)]

    def validation_share(self, batch: Indices) -> Indices:
        """This rank's examples of a batch of a validation or test; perhaps none."""
        return batch[share_slice(len(batch), self._validation_counts, self._rank)]

    def end_batch(self, position: int) -> bool:
        """After the batch at `position`: where a chunk ends with it, free its memory, report it, and return True."""
        assert self._train is not None and self._sampler is not None
        ended = self._sampler.chunk_end(position)
        if ended is None:
            return False
        gc.collect()
        (epoch, chunk), num_chunks = ended, self._train.plan.num_chunks
        text = progress_text(chunk, num_chunks)
        self._reporter.event(
            "chunk", chunk=chunk, num_chunks=num_chunks, epoch=epoch, iteration=position + 1, progress=text
        )
        self._reporter.print(text)
        return True


def rank_job(raw: dict[str, Any], rank: RankSpec, home: Path) -> Job:
    """The job with this rank's own paths. Raises JobError."""
    of_rank = {"adapter_path": rank.adapter_path, "resume_adapter_file": rank.resume_adapter_file}
    chosen = {**raw, **{key: path for key, path in of_rank.items() if path is not None}}
    return Job.from_spec(chosen, model=rank.model, data=rank.data, workdir=Path(rank.workdir), home=home)


def load_splits(job: Job, row_format: RowFormat, reporter: Reporter) -> tuple[Job, Split, Split, Split | None]:
    """The job with the iterations of its epochs, and the examples for training, for validation (perhaps empty), and for
    the job's `test`. Raises JobError."""

    job = with_standard_data(job)
    truncated = partial(warn_of_truncation, job, reporter)
    train = load_train_split(job, row_format, truncated)
    valid = Split(job, "valid", row_format, truncated)
    wants_validation = "patience" if job.patience is not None else "save_best" if job.save_best else None
    if not len(valid) and wants_validation is not None:
        raise JobError(f"{job.data / 'valid.jsonl'} is missing or empty, and {wants_validation} needs it")
    if not len(valid):
        reporter.warn(f"{job.data / 'valid.jsonl'} is missing or empty: training continues without validation")
    test = Split(job, "test", row_format, truncated) if job.test else None
    if test is not None and not len(test):
        raise JobError(f"{job.data / 'test.jsonl'} is missing or empty, and test = true needs it")
    if job.epochs is not None:
        job = replace(job, iters=epoch_iterations(job.epochs, len(train), job.batch_size))
    return job, train, valid, test


def warn_of_truncation(job: Job, reporter: Reporter, longest: int) -> None:
    """An example has so many tokens."""
    text = f"some examples are longer than max_seq_length = {job.max_seq_length} (one has {longest} tokens) and are"
    reporter.warn(f"{text} truncated", about="truncated")


def partly_resumed(job: Job, present: int, trained: int) -> str:
    """The warning about weights that lack some of those that are trained."""
    named = f"resume_adapter_file = {job.resume_adapter_file!r}"
    return f"{named} has {present:,} of the {trained:,} tensors that are trained: the others begin anew"


def rank_facts(spec: AttemptSpec, train: Split, valid: Split, checksum: str) -> dict[str, object]:
    """All that must be the same on every rank. `checksum`: of the model with the adapter that it starts from."""
    data = {"train.jsonl": train.checksum, "valid.jsonl": valid.checksum}
    return {"the job's configuration": config_hash(spec.job or {}), "the model or the adapter": checksum, **data}


def checksums(job: Job, **splits: Split) -> dict[str, str]:
    """Origin.inputs, of these splits by name. Raises OSError."""
    files = {f"{name}.jsonl": crc32_text(split.checksum) for name, split in splits.items()}
    return {**files, BASE_MODEL: files_checksum(job, adapter=False)}


def files_checksum(job: Job, *, adapter: bool) -> str:
    """That of the model's files, and with `adapter` of its file. Raises OSError."""
    adapters = [Path(job.resume_adapter_file)] if adapter and job.resume_adapter_file is not None else []
    return model_checksum(job.model, adapters)
