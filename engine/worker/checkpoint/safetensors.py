"""What a safetensors file says of itself, read without MLX and without its tensors: a header that lies must not reach a
C++ parser. The one reader of the trainer, of what looks at a node, and of the head. Standard library alone.

The format: 8 bytes little-endian length, that many bytes of JSON (name → dtype, shape, data_offsets), the data.
https://huggingface.co/docs/safetensors (Format)
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import Refused

_HEADER_BYTES = 100_000_000
"""What the reference implementation accepts."""
_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """Of one file."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name → (dtype, shape)."""
    metadata: dict[str, Any]
    """What else it says: texts by name, where it is as it should be."""


def check_header(path: Path) -> Header:
    """Raises Refused when the header does not describe exactly the file's bytes, OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        if len(head) < 8:
            raise Refused("it has no safetensors header")
        (length,) = struct.unpack("<Q", head)
        if length > min(size - 8, _HEADER_BYTES):
            raise Refused("it says that its header is longer than the file")
        raw = file.read(length)
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused("its safetensors header is no JSON") from error
    if not isinstance(said, dict):
        raise Refused("its safetensors header is no object")
    # MLX writes null where it has none.
    metadata = said.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise Refused("its metadata is no table")
    tensors, spans = {}, []
    for name, entry in said.items():
        dtype, shape, begin, end = _tensor(name, entry)
        tensors[name] = (dtype, shape)
        spans.append((begin, end))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise Refused("its tensors overlap or leave a gap")
        at = end
    if at != size - 8 - length:
        raise Refused(f"its tensors need {at:,} bytes, it has {size - 8 - length:,}")
    return Header(tensors, metadata)


def _tensor(name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    fault = Refused(f"its tensor {ascii(name)[:80]} is described wrongly")
    if not isinstance(entry, dict):
        raise fault
    dtype, shape, span = entry.get("dtype"), _naturals(entry.get("shape")), _naturals(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _SIZES or shape is None or span is None or len(span) != 2:
        raise fault
    begin, end = span
    if end - begin != math.prod(shape) * _SIZES[dtype]:
        raise fault
    return dtype, shape, begin, end


def _naturals(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > 32:
        return None
    if not all(type(each) is int and 0 <= each < 1 << 62 for each in value):
        return None
    return tuple(value)
