"""A whole model as mlx-lm loads it: config.json, tokenizer and weights in one directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_config, save_config

from .streamed import Entry, Weights, write_safetensors
from .wire import write_atomic

_FILE_BYTES = 5 * 10**9
_BESIDE = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
"""What a model has beside its weights."""


def write(target: Path, source: Path, weights: Weights) -> int:
    """Write `weights`, all of a model of the kind in `source`, as the directory `target`, which is then whole, or as it
    was before; bytes of weights. Raises OSError."""
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        _copy_rest(source, scratch)
        size = _write_weights(scratch, weights)
        _put(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return size


def _copy_rest(source: Path, scratch: Path) -> None:
    for pattern in _BESIDE:
        for file in source.glob(pattern):
            if file.is_file() and not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, scratch / file.name)
    config: dict[str, Any] = load_config(source)
    save_config(config, scratch / "config.json", keep_vision_config=True)


def _write_weights(scratch: Path, weights: Weights) -> int:
    files = _files(weights)
    names: dict[str, str] = {}
    for number, entries in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(scratch / name, entries, weights.arrays)
        names |= dict.fromkeys(entries, name)
    size = sum(entry.nbytes for entry in weights.entries.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
    write_atomic(scratch / "model.safetensors.index.json", json.dumps(index, indent=4))
    return size


def _files(weights: Weights) -> list[dict[str, Entry]]:
    """In order, as many to a file as its size allows."""
    files: list[dict[str, Entry]] = [{}]
    room = _FILE_BYTES
    for name, entry in weights.entries.items():
        if files[-1] and entry.nbytes > room:
            files.append({})
            room = _FILE_BYTES
        files[-1][name] = entry
        room -= entry.nbytes
    return files


def _put(scratch: Path, target: Path) -> None:
    """Rename it into its place; what is there goes out of the way first."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.before")
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        target.rename(aside)
    scratch.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
