"""Reads and verifies the header of a safetensors file without MLX and without its tensors: a malformed header must
not reach a C++ parser. The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length, that many
bytes of JSON (name -> dtype, shape, data_offsets), the data."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.protocol.attempt import open_regular


class CheckpointError(ValueError):
    """A file or checkpoint is incomplete, damaged, hostile or of another job: one line that says what is wrong."""


Shape = tuple[int, ...]

_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name → (dtype, shape)."""
    metadata: dict[str, Any]
    """Unverified: strings by name in a valid file."""


def check_header(path: Path, *, exact: bool = True) -> Header:
    """Raises CheckpointError when the header does not describe exactly the file's bytes, OSError. MLX reads files with
    gaps and bytes that belong to no tensor, too: not `exact`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        if len(head) < 8:
            raise CheckpointError("it has no safetensors header")
        (length,) = struct.unpack("<Q", head)
        if length > min(size - 8, _HEADER_BYTES):
            raise CheckpointError("its header is longer than the file")
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("its safetensors header is not JSON") from error
    if not isinstance(header, dict):
        raise CheckpointError("its safetensors header is not an object")
    # MLX writes null when it has no metadata.
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise CheckpointError("its metadata is not an object")
    tensors, spans = {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _tensor(name, entry)
        tensors[name] = (dtype, shape)
        spans.append((begin, end))
    at = 0
    for begin, end in sorted(spans):
        if begin != at and exact:
            raise CheckpointError("its tensors overlap or leave a gap")
        at = max(at, end)
    if at > size - 8 - length or (exact and at != size - 8 - length):
        raise CheckpointError(f"its tensors need {at:,} bytes, it has {size - 8 - length:,}")
    return Header(tensors, metadata)


def misfit(saved: Mapping[str, Shape], model: Mapping[str, Shape], trained: Collection[str]) -> str | None:
    """Description of weights that a model, of which `trained` are trained, has no place for. MLX ignores other names,
    and takes any shape."""
    strange = sorted(name for name in saved if name not in model)
    if not saved:
        return "it has no tensor"
    if len(strange) == len(saved):
        first, other = strange[0], min(trained, default="none")
        inner = next((name for name in model if first.endswith(f".{name}") or name.endswith(f".{first}")), None)
        todo = "; save it anew with the job's prefix" if inner is not None else ""
        many = f"none of its {len(saved):,} tensors is one of the job's: it has {ascii(first)[:90]}"
        return f"{many}, and the job trains {inner or other}{todo}"
    if strange:
        many = f"{len(strange):,} of its {len(saved):,} tensors are none of the job's"
        return f"{many}, such as {ascii(strange[0])[:90]}"
    other = next((name for name, shape in saved.items() if tuple(shape) != tuple(model[name])), "")
    return f"its {other} is {[*saved[other]]}, and the job's {[*model[other]]}" if other else None


def _tensor(name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    if isinstance(entry, dict) and str(entry.get("dtype")) in _DTYPE_BYTES:
        dtype, shape, span = entry["dtype"], _naturals(entry.get("shape")), _naturals(entry.get("data_offsets"))
        if shape is not None and span is not None and len(span) == 2:
            begin, end = span
            if end - begin == math.prod(shape) * _DTYPE_BYTES[dtype]:
                return dtype, shape, begin, end
    raise CheckpointError(f"its tensor {ascii(name)[:80]} has an invalid description")


def _naturals(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > 32:
        return None
    return tuple(value) if all(type(number) is int and 0 <= number < 1 << 62 for number in value) else None
