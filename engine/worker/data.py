"""Examples: read as mlx-lm reads them (text, prompt and completion, chat), and padded into batches."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tuner.datasets import CacheDataset, create_dataset
from numpy.typing import NDArray

from .job import Job, JobError

_PAD_TO = 32


@dataclass(frozen=True)
class Batch:
    """Some examples as arrays."""

    tokens: NDArray[np.int32]
    """[examples, length], padded with 0."""
    bounds: NDArray[np.int32]
    """[examples, 2]: the first token that is a target, and the number of tokens."""
    targets: int
    """How many tokens are targets in all."""


class Examples:
    """One split of the data, tokenised when asked for."""

    def __init__(self, path: Path, tokenizer: Any, job: Job, on_truncate: Callable[[int], None]) -> None:
        """Read `path`; a missing file is an empty split. Raises JobError for what cannot be read."""
        self._path = path
        self._max_length = job.max_seq_length
        self._on_truncate = on_truncate
        raw = path.read_bytes() if path.exists() else b""
        self.checksum = zlib.crc32(raw)
        rows = _rows(path, raw)
        try:
            self._data = CacheDataset(create_dataset(rows, tokenizer, job)) if rows else []
        except ValueError as error:
            raise JobError(f"{path}: {str(error).splitlines()[0]}") from error
        self.lengths = [_length(row) for row in rows]
        """A measure of each example's length, for sorting."""

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> Batch:
        """The examples at `indices` (at least one), padded to a multiple of 32 input tokens at most."""
        examples = [self._example(int(index)) for index in indices]
        longest = max(len(tokens) for tokens, _ in examples)
        if longest > self._max_length:
            self._on_truncate(longest)
        bounds = [(max(start, 1), min(len(tokens), self._max_length)) for tokens, start in examples]
        # One more than a multiple, since the input is all but the last token.
        width = min(1 + _PAD_TO * -(-max(longest - 1, 1) // _PAD_TO), max(self._max_length, 2))
        array = np.zeros((len(examples), width), np.int32)
        for row, ((tokens, _), (_, end)) in enumerate(zip(examples, bounds, strict=True)):
            array[row, :end] = tokens[:end]
        targets = sum(max(0, end - start) for start, end in bounds)
        return Batch(array, np.asarray(bounds, np.int32), targets)

    def _example(self, index: int) -> tuple[list[int], int]:
        try:
            tokens, start = self._data[index]
        except (KeyError, TypeError, IndexError) as error:
            raise JobError(f"{self._path}: example {index + 1} has not the form of the first one: {error!r}") from error
        return tokens, start


def load_split(job: Job, name: str, tokenizer: Any, on_truncate: Callable[[int], None]) -> Examples:
    """The split `name` (train, valid or test) of the job's data directory. Raises JobError."""
    return Examples(job.data / f"{name}.jsonl", tokenizer, job, on_truncate)


def _rows(path: Path, raw: bytes) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise JobError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise JobError(f"{path}, line {number}: not a JSON object")
        rows.append(row)
    return rows


def _length(value: Any) -> int:
    """Characters of text in an example: near enough to its tokens for sorting, without tokenising everything first."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_length, value.values()))
    if isinstance(value, list):
        return sum(map(_length, value))
    return 0
