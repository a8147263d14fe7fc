"""Saves adapters (or trained layers) that mlx-lm loads and fuses, and whole models. Rank 0 writes, the others wait."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_config, save_config

from engine.protocol.attempt import replacing, write_atomic
from engine.protocol.job import Job
from engine.protocol.safetensors import CheckpointError, check_header
from engine.trainer.collective import Collective, packed
from engine.trainer.replica_check import Corrupted, ReplicaCheck
from engine.trainer.strategies.base import PartitionedStrategy, Strategy
from engine.trainer.weights import WeightStream, scalar, write_safetensors
from engine.training.checkpoint_files import list_files, replace_folder
from engine.training.reporting import Reporter, SavedWeights

BEST_FILE = "best_adapters.safetensors"
CONFIG_FILE = "adapter_config.json"


def save_adapters(job: Job, weights: WeightStream, iteration: int | None) -> SavedWeights:
    """Write trained `weights` as adapters.safetensors, and as the numbered file of `iteration` if any, which is the one
    returned. A reader sees a complete file or the previous one. Raises OSError."""
    path = job.adapter_path / "adapters.safetensors"
    digest = write_safetensors(path, weights.entries, weights.arrays)
    if iteration is not None:
        latest, path = path, job.adapter_path / f"{iteration:07d}_adapters.safetensors"
        with latest.open("rb") as source, replacing(path) as copy:
            shutil.copyfileobj(source, copy)
    return _saved(job, path, digest)


def _saved(job: Job, path: Path, digest: str) -> SavedWeights:
    files = list_files(path.parent, (path.name, CONFIG_FILE), {path.name: digest})
    holds = "weights" if job.fine_tune_type == "full" else "adapter"
    return SavedWeights(path, path.stat().st_size, holds, path.parent, files)


def save_best_adapters(job: Job, weights: WeightStream, iteration: int, val_loss: float, valid: str) -> SavedWeights:
    """Likewise as BEST_FILE, whose metadata has the run, `iteration`, `val_loss`, and what that is of: the checksum of
    the `valid` data."""
    path = job.adapter_path / BEST_FILE
    metadata = {"run": job.home.name, "iteration": str(iteration), "val_loss": repr(val_loss), "valid": valid}
    return _saved(job, path, write_safetensors(path, weights.entries, weights.arrays, metadata))


def has_better(job: Job, val_loss: float, valid: str) -> bool:
    """BEST_FILE is of this run and has a lower loss of the same data: a resumed run repeats validations before that of
    the file."""
    try:
        metadata = check_header(job.adapter_path / BEST_FILE).metadata
        same = (metadata["run"], metadata["valid"]) == (job.home.name, valid)
        return same and float(metadata["val_loss"]) < val_loss
    except (CheckpointError, OSError, KeyError, TypeError, ValueError):
        return False


_FILE_BYTES = 5 * 10**9
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
"""A model's files beside its weights."""


def write_model(
    target: Path, source: Path, weights: WeightStream, config: dict[str, Any] | None = None
) -> SavedWeights:
    """Write `weights`, all of a model of the same kind as `source`, as the directory `target`, which is complete
    afterwards, or as it was before. `config`: None for that of `source`. Raises OSError."""
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True
    ) as temporary:
        scratch = Path(temporary) / target.name
        scratch.mkdir()
        for pattern in _SIDE_FILES:
            for file in source.glob(pattern):
                if file.is_file() and not file.name.endswith(".safetensors.index.json"):
                    shutil.copyfile(file, scratch / file.name)
        save_config(config or load_config(source), scratch / "config.json", keep_vision_config=True)
        size, hashes = _write_weights(scratch, weights)
        files = list_files(scratch, [path.name for path in scratch.iterdir()], hashes)
        replace_folder(scratch, target)
    return SavedWeights(target, size, "model", target, files)


def _write_weights(scratch: Path, weights: WeightStream) -> tuple[int, dict[str, str]]:
    """Their bytes, and the SHA-256 of each file of them."""
    files = packed(weights.entries, lambda name: weights.entries[name].nbytes, _FILE_BYTES)
    weight_map, hashes = dict[str, str](), dict[str, str]()
    for position, names in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{position:05d}-of-{len(files):05d}.safetensors"
        entries = {name: weights.entries[name] for name in names}
        hashes[file] = write_safetensors(scratch / file, entries, weights.arrays)
        weight_map |= dict.fromkeys(names, file)
    size = sum(entry.nbytes for entry in weights.entries.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomic(scratch / "model.safetensors.index.json", json.dumps(index, indent=4))
    return size, hashes


@dataclass
class Saver:
    """The saves of one run. Every call is made by every rank."""

    job: Job
    strategy: Strategy
    collective: Collective
    replicas: ReplicaCheck
    reporter: Reporter
    valid: str
    """The checksum of the validation data."""
    saved: int | None = None
    """The iteration of the last successful save."""

    def save_config(self) -> None:
        """Write adapter_config.json, from which mlx-lm rebuilds the adapter's layers before it loads the weights."""
        job, layers = self.job, self.job.layers(len(self.strategy.model.layers))
        job.adapter_path.mkdir(parents=True, exist_ok=True)
        config = {**asdict(job), "num_layers": layers, "grad_checkpoint": bool(job.grad_checkpoint)}
        if job.fine_tune_type == "full":
            config["lora_parameters"] = None
        text = json.dumps(config, indent=4, sort_keys=True, default=str)
        write_atomic(job.adapter_path / CONFIG_FILE, text)

    def save(self, iteration: int, *, last: bool) -> None:
        """Write the adapters. A full disk is a warning, except for the last save. Corrupted parameters are not written:
        those of an intact rank are. Raises Corrupted when there is none, at the last save; OSError, PeerLost."""
        weights = self._intact_weights(last=last)
        if weights is None:
            return
        # As in mlx-lm, the end of the training has no numbered file of its own.
        numbered = iteration if not last or iteration < self.job.iters else None
        write = partial(save_adapters, self.job, weights, numbered)
        written = self._write(iteration, self.job.adapter_path, weights, write, last=last)
        if last and self.job.fine_tune_type == "full" and isinstance(self.strategy, PartitionedStrategy):
            # No rank has the whole model otherwise.
            path, every = self.job.adapter_path / "model", self.strategy.all_weights()
            self._write(iteration, path, every, lambda: write_model(path, self.job.model, every), last=True)
        # Also a barrier: no rank continues before the save is done.
        if scalar(self.collective.all_sum(mx.array(float(written)))) > 0:
            self.saved = iteration

    def save_best(self, iteration: int, val_loss: float) -> None:
        """Write the weights of the best validation so far, unless their file has better ones of the same run. What
        cannot be saved is a warning. Raises PeerLost."""
        weights = self._intact_weights(last=False)
        if weights is None:
            return
        if self.collective.rank == 0 and has_better(self.job, val_loss, self.valid):
            weights.drain()
        else:
            write = partial(save_best_adapters, self.job, weights, iteration, val_loss, self.valid)
            self._write(iteration, self.job.adapter_path / BEST_FILE, weights, write, last=False, val_loss=val_loss)
        # No rank continues before the save is done.
        self.collective.barrier()

    def _intact_weights(self, *, last: bool) -> WeightStream | None:
        """The weights to save; None, reported, when all ranks' are corrupted. Raises Corrupted at the last save;
        PeerLost."""
        self.reporter.phase("saving")
        source = self.replicas.intact_rank
        if source is None:
            mismatch, message = self.replicas.difference, f"not saved: {self.replicas.message()}"
            if last:
                assert mismatch is not None
                raise Corrupted(message, mismatch)
            self.reporter.warn(message)
            return None
        if source == 0:
            return self.strategy.trained_weights()
        if self.collective.rank == 0:
            self.reporter.warn(f"saving the parameters of rank {source}: those of rank 0 are corrupted")
        return WeightStream.of(self.replicas.broadcast_trained(source))

    def _write(
        self,
        iteration: int,
        target: Path,
        weights: WeightStream,
        write: Callable[[], SavedWeights],
        *,
        last: bool,
        **facts: float,
    ) -> bool:
        """On rank 0 `write` the `weights` into `target`, see Reporter.save; False on the others."""
        try:
            return self.collective.rank == 0 and self.reporter.save(iteration, target, write, last=last, **facts)
        finally:
            weights.drain()
