"""What safetensors files on a node are: whole, and what a file of trained weights would continue."""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ..checkpoint.errors import Refused
from ..checkpoint.safetensors import check_header

_ADAPTER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.(.+)\.lora_a$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")


def fault(path: Path) -> str | None:
    """What is wrong with a file; None when it is whole."""
    try:
        check_header(path)
    except Refused as refused:
        return str(refused)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return None


def adapter(path: Path) -> dict[str, Any]:
    """What a file of trained weights would continue: its `kind` (lora, dora, full), the adapters' `ranks`, the `layers`
    and the `modules` in them. Raises Refused, OSError."""
    tensors = check_header(path).tensors
    found = [(match, shape) for name, (_, shape) in tensors.items() if (match := _ADAPTER.search(name)) is not None]
    if not found:
        layers = {int(match[1]) for name in tensors if (match := _LAYER.search(name)) is not None}
        return {"kind": "full", "ranks": [], "layers": sorted(layers), "modules": []}
    magnitudes = any(name.endswith(".m") for name in tensors)
    return {
        "kind": "dora" if magnitudes else "lora",
        # Of an expert's stack the axes are others: its rank is not read here.
        "ranks": sorted({shape[1] for _, shape in found if len(shape) == 2}),
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
