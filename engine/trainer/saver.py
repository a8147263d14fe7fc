"""Saves adapters (or the full weights of the trained layers) that mlx-lm loads and fuses, and whole models. Rank 0
writes, the others wait.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_config, save_config

from engine.protocol.attempt import replacing, write_atomic
from engine.protocol.job import Job
from engine.trainer.checkpoint.files import replace_folder
from engine.trainer.collective import Collective
from engine.trainer.replica_check import Corrupted, ReplicaCheck
from engine.trainer.reporting import Reporter
from engine.trainer.strategies.base import PartitionedStrategy, Strategy
from engine.trainer.weights import TensorSpec, WeightStream, scalar, write_safetensors


def save_adapter_config(job: Job, layers: int) -> None:
    """Write adapter_config.json, from which mlx-lm rebuilds the adapter's layers before it loads the weights."""
    job.adapter_path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        key: str(value) if isinstance(value, Path) else value for key, value in dataclasses.asdict(job).items()
    }
    config["num_layers"] = layers
    if job.fine_tune_type == "full":
        config["lora_parameters"] = None
    write_atomic(job.adapter_path / "adapter_config.json", json.dumps(dict(sorted(config.items())), indent=4))


def save_adapters(job: Job, weights: WeightStream, iteration: int | None) -> tuple[Path, int]:
    """Write trained `weights` as adapters.safetensors, and as the numbered file of `iteration` if any; returns the last
    path and its bytes. A reader sees a complete file or the previous one. Raises OSError.
    """
    latest = job.adapter_path / "adapters.safetensors"
    write_safetensors(latest, weights.entries, weights.arrays)
    if iteration is None:
        return latest, latest.stat().st_size
    numbered = job.adapter_path / f"{iteration:07d}_adapters.safetensors"
    with latest.open("rb") as source, replacing(numbered) as copy:
        shutil.copyfileobj(source, copy, _COPY_BYTES)
    return numbered, numbered.stat().st_size


_FILE_BYTES = 5 * 10**9
_COPY_BYTES = 2**20
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
"""A model's files beside its weights."""


def write_model(target: Path, source: Path, weights: WeightStream) -> int:
    """Write `weights`, all of a model of the same kind as `source`, as the directory `target`, which is complete
    afterwards, or as it was before; returns the bytes of weights. Raises OSError."""
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        _copy_rest(source, scratch)
        size = _write_weights(scratch, weights)
        replace_folder(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return size


def _copy_rest(source: Path, scratch: Path) -> None:
    for pattern in _SIDE_FILES:
        for file in source.glob(pattern):
            if file.is_file() and not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, scratch / file.name)
    config: dict[str, Any] = load_config(source)
    save_config(config, scratch / "config.json", keep_vision_config=True)


def _write_weights(scratch: Path, weights: WeightStream) -> int:
    files = _split_into_files(weights)
    names: dict[str, str] = {}
    for position, entries in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{position:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(scratch / name, entries, weights.arrays)
        names |= dict.fromkeys(entries, name)
    size = sum(entry.nbytes for entry in weights.entries.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
    write_atomic(scratch / "model.safetensors.index.json", json.dumps(index, indent=4))
    return size


def _split_into_files(weights: WeightStream) -> list[dict[str, TensorSpec]]:
    """In order, up to _FILE_BYTES each."""
    files: list[dict[str, TensorSpec]] = [{}]
    room = _FILE_BYTES
    for name, entry in weights.entries.items():
        if files[-1] and entry.nbytes > room:
            files.append({})
            room = _FILE_BYTES
        files[-1][name] = entry
        room -= entry.nbytes
    return files


class Saver:
    """The saves of one run. Every call is made by every rank."""

    def __init__(
        self, job: Job, strategy: Strategy, collective: Collective, replicas: ReplicaCheck, reporter: Reporter
    ) -> None:
        self._job = job
        self._strategy = strategy
        self._collective = collective
        self._replicas = replicas
        self._reporter = reporter
        self.saved: int | None = None
        """The iteration of the last successful save."""

    def save(self, iteration: int, *, last: bool) -> None:
        """Write the adapters. A full disk is a warning, except for the last save. Corrupted parameters are not written:
        those of an intact rank are. Raises Corrupted when there is none, at the last save; OSError, PeerLost."""
        self._reporter.phase("saving")
        source = self._replicas.intact_rank
        if source is None:
            self._refuse(last=last)
            return
        if source == 0:
            weights = self._strategy.trained_weights()
        else:
            weights = WeightStream.of(self._replicas.broadcast_trained(source))
        written = False
        if self._collective.rank == 0:
            if source != 0:
                self._reporter.warn(f"saving the parameters of rank {source}: those of rank 0 are corrupted")
            written = self._write(weights, iteration, last=last)
        weights.drain()
        if last and self._job.fine_tune_type == "full" and isinstance(self._strategy, PartitionedStrategy):
            # No rank has the whole model otherwise.
            self._write_model(iteration, self._strategy.all_weights())
        # Also a barrier: no rank continues before the save is done.
        if scalar(self._collective.all_sum(mx.array(float(written)))) > 0:
            self.saved = iteration

    def _refuse(self, *, last: bool) -> None:
        mismatch = self._replicas.difference
        assert mismatch is not None
        message = f"not saved: {self._replicas.message()}"
        if last:
            raise Corrupted(message, mismatch.ranks, certain=mismatch.certain)
        self._reporter.warn(message)

    def _write_model(self, iteration: int, weights: WeightStream) -> None:
        """Beside the trained parameters. Raises OSError, PeerLost."""
        if self._collective.rank == 0:
            path = self._job.adapter_path / "model"
            try:
                self._report(iteration, path, lambda: (path, write_model(path, self._job.model, weights)))
            finally:
                weights.drain()
        weights.drain()

    def _write(self, weights: WeightStream, iteration: int, *, last: bool) -> bool:
        """False when the disk did not take it. Raises OSError at the last save."""
        # As in mlx-lm, the end of the training has no numbered file of its own.
        numbered = iteration if not last or iteration < self._job.iters else None
        try:
            self._report(iteration, self._job.adapter_path, lambda: save_adapters(self._job, weights, numbered))
        except OSError as error:
            weights.drain()
            if last:
                raise
            self._reporter.warn(f"iteration {iteration}: not saved: {error}")
            return False
        return True

    def _report(self, iteration: int, target: Path, write: Callable[[], tuple[Path, int]]) -> None:
        """`write` into `target`; it returns the last path and its bytes."""
        self._reporter.event("checkpoint", phase="begin", iteration=iteration, path=str(target))
        started = time.perf_counter()
        path, size = write()
        seconds = time.perf_counter() - started
        self._reporter.event(
            "checkpoint", phase="committed", iteration=iteration, path=str(path), bytes=size, seconds=seconds
        )
        self._reporter.print(f"saved {path}")
