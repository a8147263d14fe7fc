"""What a job leaves: adapters (or full weights of the trained layers) that mlx-lm loads and fuses as its own."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

from .job import Job
from .streamed import Weights, write_safetensors
from .wire import write_atomic


def save_config(job: Job, layers: int) -> None:
    """Write adapter_config.json: how mlx-lm rebuilds the adapter's layers before it loads the weights."""
    job.adapter_path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        key: str(value) if isinstance(value, Path) else value for key, value in dataclasses.asdict(job).items()
    }
    config["num_layers"] = layers
    if job.fine_tune_type == "full":
        config["lora_parameters"] = None
    write_atomic(job.adapter_path / "adapter_config.json", json.dumps(dict(sorted(config.items())), indent=4))


def save_adapters(job: Job, weights: Weights, iteration: int | None) -> tuple[Path, int]:
    """Write trained `weights` as adapters.safetensors, and as the numbered file of `iteration` where there is one; the
    last path, and bytes.

    A reader sees the whole of a file or the one before. Raises OSError when the disk does not take it.
    """
    latest = job.adapter_path / "adapters.safetensors"
    write_safetensors(latest, weights.entries, weights.arrays)
    if iteration is None:
        return latest, latest.stat().st_size
    numbered = job.adapter_path / f"{iteration:07d}_adapters.safetensors"
    _copy(latest, numbered)
    return numbered, numbered.stat().st_size


def _copy(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
