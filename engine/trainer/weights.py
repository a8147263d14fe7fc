"""Parameters as a stream of arrays, one at a time, and safetensors files written from such a stream; MLX arrays as
Python floats. For the format see protocol.safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from engine.protocol.attempt import replacing
from engine.trainer.collective import TensorSpec

State = dict[str, dict[str, mx.array]]
"""A training's, group → name → array: references, evaluated. MLX's arrays never change, so this is a snapshot."""

UINT_OF_SIZE = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
"""By bytes: as integers, values are hashed and summed bit for bit, where a sum of floats would lose -0.0."""


def on_cuda() -> bool:
    """MLX computes on a CUDA GPU."""
    return mx.cuda.is_available() and mx.default_device() != mx.Device(mx.cpu)


def for_other_threads(state: State) -> State:
    """`state` to be read on the host by another thread. What is read moves there, of CUDA's arrays (MLX 0.32.4,
    CudaAllocator::move_to_unified_memory), and its memory on the GPU is free at once, even while kernels of this thread
    read it: there these are copies, or where a step leaves no room for them, moved here."""
    if not on_cuda():
        return state
    arrays = [value for group in state.values() for value in group.values()]
    free = cast("dict[str, int]", mx.device_info())["free_memory"] + mx.get_cache_memory()
    if sum(value.nbytes for value in arrays) < free - (mx.get_peak_memory() - mx.get_active_memory()):
        state = {kind: {name: copied(value) for name, value in group.items()} for kind, group in state.items()}
        mx.eval(state)
    else:
        mx.synchronize()
        for value in arrays:
            memoryview(cast(Any, value))
    return state


def copied(value: mx.array) -> mx.array:
    """In memory of its own: `mx.contiguous` may share that of `value`."""
    kind = UINT_OF_SIZE[value.dtype.size]
    return mx.bitwise_or(value.view(kind), mx.array(0, kind)).view(value.dtype)


def floats(array: mx.array) -> list[float]:
    values: list[float] = np.asarray(array, dtype=np.float64).reshape(-1).tolist()
    return values


def scalar(array: mx.array) -> float:
    (value,) = floats(array)
    return value


_DTYPE_NAMES = {
    mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.bool_: "BOOL",
    mx.uint8: "U8", mx.uint16: "U16", mx.uint32: "U32", mx.uint64: "U64",
    mx.int8: "I8", mx.int16: "I16", mx.int32: "I32", mx.int64: "I64",
}  # fmt: skip
_ALIGNMENT = 8


@dataclass(frozen=True)
class WeightStream:
    """Parameters by name, iterated once."""

    entries: Mapping[str, TensorSpec]
    arrays: Iterator[mx.array]
    """In the order of `entries`. Where they come from other ranks, every rank iterates over all of them."""

    @classmethod
    def of(cls, arrays: Mapping[str, mx.array]) -> WeightStream:
        return cls(
            {name: TensorSpec(value.shape, value.dtype) for name, value in arrays.items()}, iter(arrays.values())
        )

    def drain(self) -> None:
        """Iterate over the rest: other ranks wait for it."""
        for _ in self.arrays:
            pass


def write_safetensors(
    path: Path, entries: Mapping[str, TensorSpec], arrays: Iterator[mx.array], metadata: Mapping[str, str] | None = None
) -> str:
    """Write one of `arrays` per entry; `path` is complete and on disk afterwards, or as before. Returns the file's
    SHA-256. Raises OSError."""
    header = _header(entries, metadata or {})
    start = len(header).to_bytes(_ALIGNMENT, "little") + header
    digest = hashlib.sha256(start)
    with replacing(path) as file:
        file.write(start)
        for _ in entries:
            data = np.asarray(next(arrays).reshape(-1).view(mx.uint8)).data
            file.write(data)
            digest.update(data)
    return digest.hexdigest()


def _header(entries: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "mlx", **metadata}}
    start = 0
    for name, entry in entries.items():
        end = start + entry.nbytes
        described[name] = {"dtype": _DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    raw = json.dumps(described, separators=(",", ":")).encode()
    return raw.ljust(-(-len(raw) // _ALIGNMENT) * _ALIGNMENT)
