"""Reads what a safetensors file says of itself, without MLX and without its tensors.

The format: eight bytes, the header's length (little-endian); the header, JSON, name → dtype, shape and data_offsets;
then the tensors' bytes (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

_LENGTH_BYTES = 8
_HEADER_LIMIT = 100_000_000
"""As safetensors itself has it."""
_ADAPTER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.(.+)\.lora_a$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")


class Damaged(Exception):
    """The file is not what its header says; the reason is the text."""


def header(path: Path) -> dict[str, dict[str, Any]]:
    """Name → what the header says of the tensor, once the file's length is what it must be. Raises Damaged, OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _HEADER_LIMIT):
            raise Damaged("its header is cut off")
        text = file.read(length)
    try:
        document = json.loads(text)
        tensors = {name: entry for name, entry in document.items() if name != "__metadata__"}
        ends = [int(entry["data_offsets"][1]) for entry in tensors.values()]
        for entry in tensors.values():
            entry["shape"] = [int(axis) for axis in entry["shape"]]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise Damaged("its header cannot be read") from None
    expected = _LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        raise Damaged(f"it has {size:,} bytes, and its header says {expected:,}")
    return tensors


def fault(path: Path) -> str | None:
    """What is wrong with a file; None when it is whole."""
    try:
        header(path)
    except Damaged as damaged:
        return str(damaged)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return None


def adapter(path: Path) -> dict[str, Any]:
    """What a file of trained weights would continue: its `kind` (lora, dora, full), the adapters' `ranks`, the `layers`
    and the `modules` in them. Raises Damaged, OSError."""
    tensors = header(path)
    found = [(match, entry) for name, entry in tensors.items() if (match := _ADAPTER.search(name)) is not None]
    if not found:
        layers = {int(match[1]) for name in tensors if (match := _LAYER.search(name)) is not None}
        return {"kind": "full", "ranks": [], "layers": sorted(layers), "modules": []}
    magnitudes = any(name.endswith(".m") for name in tensors)
    return {
        "kind": "dora" if magnitudes else "lora",
        # Of an expert's stack the axes are others: its rank is not read here.
        "ranks": sorted({entry["shape"][1] for _, entry in found if len(entry["shape"]) == 2}),
        "layers": sorted({int(match[1]) for match, _ in found}),
        "modules": sorted({match[2] for match, _ in found}),
    }


def size_of(folder: Path, most_files: int = 20_000) -> int:
    """Bytes of what lies in a folder, as far as that many files."""
    total = seen = 0
    for base, _, names in os.walk(folder):
        for name in names:
            seen += 1
            if seen > most_files:
                return total
            try:
                total += (Path(base) / name).lstat().st_size
            except OSError:
                continue
    return total
