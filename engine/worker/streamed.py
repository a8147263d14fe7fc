"""Parameters that come one after the other, and files of them: nobody needs room for all at once.

The format is safetensors': eight bytes of length, a JSON header with each tensor's type, shape and place, the tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

_NAMES = {
    mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.bool_: "BOOL",
    mx.uint8: "U8", mx.uint16: "U16", mx.uint32: "U32", mx.uint64: "U64",
    mx.int8: "I8", mx.int16: "I16", mx.int32: "I32", mx.int64: "I64",
}  # fmt: skip
_ALIGNED = 8


@dataclass(frozen=True)
class Entry:
    """One of them, before it comes."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.size


@dataclass(frozen=True)
class Weights:
    """Parameters by name. They can be taken once."""

    entries: Mapping[str, Entry]
    arrays: Iterator[mx.array]
    """In the order of `entries`. Where they come from other ranks, every rank takes all of them."""

    @classmethod
    def of(cls, arrays: Mapping[str, mx.array]) -> Weights:
        """Those that are there already."""
        return cls({name: Entry(value.shape, value.dtype) for name, value in arrays.items()}, iter(arrays.values()))

    def drain(self) -> None:
        """Take what is left, for the others' sake."""
        for _ in self.arrays:
            pass


def write_safetensors(path: Path, entries: Mapping[str, Entry], arrays: Iterator[mx.array]) -> None:
    """Write the next of `arrays`, which are those of `entries`: `path` is whole, on disk, or as it was before. Raises
    OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            header = _header(entries)
            file.write(len(header).to_bytes(_ALIGNED, "little") + header)
            for _ in entries:
                flat = next(arrays).reshape(-1)
                file.write(np.asarray(flat.view(mx.uint8)).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _header(entries: Mapping[str, Entry]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    start = 0
    for name, entry in entries.items():
        end = start + entry.nbytes
        described[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    raw = json.dumps(described, separators=(",", ":")).encode()
    return raw.ljust(-(-len(raw) // _ALIGNED) * _ALIGNED)
