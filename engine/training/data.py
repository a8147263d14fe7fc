"""Training examples, tokenised by the trainer's framework, padded into batches, and loaded rank by rank; and
the checksums by which ranks and attempts see that they have the same inputs.

A large split is streamed in chunks: examples are read from the file when their batch is due, so that memory use is that
of one chunk."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.node.source_files import DataError
from engine.node.standard_data import standard_data
from engine.protocol.attempt import AttemptSpec, RankSpec
from engine.protocol.checksums import BASE_MODEL, crc32_text, model_checksum
from engine.protocol.job import Job, JobError, config_hash, scaled_rate, scaling_rule
from engine.protocol.jsonl import fault_of, form_of, half_pair
from engine.protocol.partition import (
    ChunkPlan,
    chunk_plan,
    epoch_iterations,
    input_width,
    progress_text,
    share_counts,
    share_counts_among,
    share_slice,
    token_edges,
)
from engine.training.jsonl import JsonlIndex, JsonlRows, has_examples, line_number
from engine.training.reporting import Reporter
from engine.training.sampler import BudgetSampler, Indices, Sampler, fixed_batches

Tokens = tuple[Sequence[int] | NDArray[np.int32], int]
"""An example's tokens, and the index of its first target."""
_COMPARED = 256
"""Examples of a streamed split by which ranks compare how they tokenise."""
RowFormat = Callable[[dict[str, Any]], Callable[[dict[str, Any]], Tokens]]
"""From a file's first row, which determines the format of all, to what tokenises each. Raises ValueError."""


@dataclass(frozen=True)
class Batch:
    tokens: NDArray[np.int32]
    """[examples, length], padded with 0."""
    bounds: NDArray[np.int32]
    """[examples, 2]: the first token that is a target, and the number of tokens."""
    targets: int


EMPTY = Batch(np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int32), 0)
"""For a rank without examples, which takes part in what all ranks do all the same."""


class Split:
    """One file of examples: streamed if it has [job] chunk_size examples or more, unless chunking is off. Then an
    example is read and tokenised each time it is used; else all are in memory, each tokenised once."""

    def __init__(
        self,
        job: Job,
        name: str,
        row_format: RowFormat,
        on_truncate: Callable[[int], None],
        going_on: Callable[[], object] = lambda: None,
    ) -> None:
        """`name`: train, valid or test, of the job's data directory; a missing file is an empty split. `going_on` is
        called while all of a split is tokenised. Raises JobError for what cannot be read."""
        self._path = path = job.data / f"{name}.jsonl"
        self._features = job.features
        self._max_length = job.max_seq_length
        self._seed, self._batch_tokens = job.seed, job.batch_tokens
        self._on_truncate, self._going_on = on_truncate, going_on
        self._lengths = lru_cache(4)(self._count_tokens)
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
        if self._batch_tokens is not None:
            return self._by_budget
        try:
            return Sampler(self.plan, self._lengths, batch_size, seed)
        except ValueError as error:
            raise JobError(f"[job] batch_size = {batch_size}: {error}") from error

    def fixed_batches(self, batch_size: int, seed: int, limit: int) -> Iterator[Indices]:
        """Batches for validation and test, at most `limit`: the same every time. Raises JobError."""
        if self._batch_tokens is None:
            return fixed_batches(self.plan, batch_size, seed, limit)
        return self._by_budget.fixed(limit) if len(self) else iter(())

    @cached_property
    def _by_budget(self) -> BudgetSampler:
        assert self._batch_tokens is not None
        return BudgetSampler(self.plan, self._lengths, (self._batch_tokens, self._max_length), self._seed)

    def widths(self, batch: Indices) -> list[int]:
        """Padded inputs of each of these examples, one or more of one chunk. Raises JobError."""
        start, end = self.plan.bounds(int(batch[0]) // self.plan.chunk_size)
        return [input_width(length, self._max_length) for length in self._lengths(start, end)[batch - start].tolist()]

    @cached_property
    def order_checksum(self) -> int:
        """CRC-32 of the examples' lengths in tokens, by which they are ordered; of a streamed split of the first ones.
        Raises JobError."""
        lengths = self._count(range(min(len(self), _COMPARED))) if self.plan.enabled else self._lengths(0, len(self))
        return zlib.crc32(np.asarray(lengths, "<i8").tobytes())

    def _count_tokens(self, start: int, end: int) -> Indices:
        """The tokens of each example, from `start` to before `end`, as far as they are used. Raises JobError."""
        if isinstance(self._rows, JsonlIndex):
            first = np.asarray(self._examples([start])[0][0], "<i8")
            counts = self._rows.counts(start, end, zlib.crc32(first.tobytes()), self._count)
        else:
            counts = np.asarray(self._count(range(start, end)), dtype=np.int64)
        return np.minimum(counts, self._max_length)

    def _count(self, indices: range) -> list[int]:
        counts = []
        for start in range(0, len(indices), _COMPARED):
            counts += [len(tokens) for tokens, _ in self._examples([*indices[start : start + _COMPARED]])]
            self._going_on()
        return counts

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
            tokens, start = self._tokenise(row)
            return np.asarray(tokens, np.int32), start
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


def load_train_split(
    job: Job, row_format: RowFormat, on_truncate: Callable[[int], None], going_on: Callable[[], object] = lambda: None
) -> Split:
    """Raises JobError, also when there is no example."""
    train = Split(job, "train", row_format, on_truncate, going_on)
    if not len(train):
        raise JobError(f"{job.data / 'train.jsonl'} is missing or empty: there is nothing to train on")
    return train


def _padded(examples: list[Tokens], max_length: int, on_truncate: Callable[[int], None]) -> Batch:
    longest = max(len(tokens) for tokens, _ in examples)
    if longest > max_length:
        on_truncate(longest)
    bounds = [(max(start, 1), min(len(tokens), max_length)) for tokens, start in examples]
    # The input is all but the last token.
    array = np.zeros((len(examples), 1 + input_width(longest, max_length)), np.int32)
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
        self._counts: tuple[list[int], list[int]] | None = None
        """Sequences of a full batch by rank, of training and of validation; None with batch_tokens."""
        taking_part = validates or [True] * len(shares)
        self._shares = [*shares], [share if part else 0.0 for share, part in zip(shares, taking_part, strict=True)]
        try:
            if job.batch_tokens is None:
                in_validation = share_counts_among(job.batch_size, shares, validates)
                self._counts = share_counts(job.batch_size, shares), in_validation
        except ValueError as error:
            raise JobError(f"[job] batch_size = {job.batch_size}: {error}") from error
        self._sampler = train.sampler(job.batch_size, job.seed) if train is not None else None
        self._rank = rank
        self._reporter = reporter

    def batch(self, position: int) -> Batch:
        """This rank's examples of the `position`-th global batch, from 0. Raises JobError."""
        assert self._train is not None and self._sampler is not None
        share = self._share(self._train, self._sampler.batch(position), validation=False)
        return self._train.batch(share) if len(share) else EMPTY

    def validation_share(self, examples: Split, batch: Indices) -> Indices:
        """This rank's examples of a batch of a validation or test; perhaps none."""
        return self._share(examples, batch, validation=True)

    def _share(self, examples: Split, batch: Indices, *, validation: bool) -> Indices:
        if self._counts is not None:
            return batch[share_slice(len(batch), self._counts[validation], self._rank)]
        shares = self._shares[validation]
        # Else the first rank would always have the longest examples, and a gradient unlike the others'.
        first = int(batch[0]) % len(shares)
        edges = token_edges(examples.widths(batch), [*shares[first:], *shares[:first]])
        return batch[slice(*edges[(self._rank - first) % len(shares) :][:2])]

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
    train = load_train_split(job, row_format, truncated, reporter.going_on)
    valid = Split(job, "valid", row_format, truncated, reporter.going_on)
    wants_validation = "patience" if job.patience is not None else "save_best" if job.save_best else None
    if not len(valid) and wants_validation is not None:
        raise JobError(f"{job.data / 'valid.jsonl'} is missing or empty, and {wants_validation} needs it")
    if not len(valid):
        reporter.warn(f"{job.data / 'valid.jsonl'} is missing or empty: training continues without validation")
    test = Split(job, "test", row_format, truncated, reporter.going_on) if job.test else None
    if test is not None and not len(test):
        raise JobError(f"{job.data / 'test.jsonl'} is missing or empty, and test = true needs it")
    return with_batches(job, train), train, valid, test


def with_batches(job: Job, train: Split) -> Job:
    """The job with what depends on its batches: the iterations of its epochs, and a learning rate by rule. Raises
    JobError."""
    if job.epochs is None and not job.rate_by_rule:
        return job
    batches = train.sampler(job.batch_size, job.seed).batches_per_epoch
    if job.epochs is not None:
        job = replace(job, iters=epoch_iterations(job.epochs, batches))
    if job.rate_by_rule:
        per_update = len(train) / batches * job.grad_accumulation_steps
        job = replace(job, learning_rate=scaled_rate(per_update, scaling_rule(job.optimizer)))
    return job


def warn_of_truncation(job: Job, reporter: Reporter, longest: int) -> None:
    """An example has so many tokens."""
    text = f"some examples are longer than max_seq_length = {job.max_seq_length} (one has {longest} tokens) and are"
    reporter.warn(f"{text} truncated", about="truncated")


def partly_resumed(job: Job, present: int, trained: int) -> str:
    """The warning about weights that lack some of those that are trained."""
    named = f"resume_adapter_file = {job.resume_adapter_file!r}"
    return f"{named} has {present:,} of the {trained:,} tensors that are trained: the others begin anew"


def rank_facts(spec: AttemptSpec, train: Split, valid: Split, test: Split | None, checksum: str) -> dict[str, object]:
    """All that must be the same on every rank. `checksum`: of the model with the adapter that it starts from."""
    data = {"train.jsonl": train.checksum, "valid.jsonl": valid.checksum}
    if test is not None:
        data["test.jsonl"] = test.checksum
    data["the tokenizer, by the lengths of train.jsonl,"] = train.order_checksum
    return {"the job's configuration": config_hash(spec.job or {}), "the model or the adapter": checksum, **data}


def checksums(job: Job, **splits: Split) -> dict[str, str]:
    """Origin.inputs, of these splits by name. Raises OSError."""
    files = {f"{name}.jsonl": crc32_text(split.checksum) for name, split in splits.items()}
    return {**files, BASE_MODEL: files_checksum(job, adapter=False)}


def files_checksum(job: Job, *, adapter: bool) -> str:
    """That of the model's files, and with `adapter` of its file. Raises OSError."""
    adapters = [Path(job.resume_adapter_file)] if adapter and job.resume_adapter_file is not None else []
    return model_checksum(job.model, adapters)
