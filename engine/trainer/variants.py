"""A run's weights in their variants (base, adapter, fused), measured one after the other on one split: each is loaded
over the ranks as the job's strategy divides it. Rank 0 alone has the trained weights' files: the others get the tensors
over the group, in parts, and keep those that are theirs."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_config

from engine.protocol.job import Job, JobError
from engine.protocol.partition import parse_split
from engine.protocol.safetensors import CheckpointError, check_header, misfit
from engine.protocol.task import Task
from engine.trainer.collective import Collective, broadcast_arrays, broadcast_object, packed
from engine.trainer.model import limit_cache, load_base, load_tokenizer, row_format, set_up_device, unfreeze_trained
from engine.trainer.strategies.base import Strategy
from engine.trainer.train import make_strategy
from engine.trainer.weights import floats
from engine.training.data import rank_job
from engine.training.process import TrainingProcess
from engine.training.result_tasks import MeasuredVariants, evaluated_split

_LEAST_PART_BYTES = 2**20
"""A 256th of the tensors is sent at once, and no less than this: a rank has some copies of it beside its own."""


@dataclass(frozen=True)
class Variants(MeasuredVariants):
    collective: Collective

    @classmethod
    def of(cls, process: TrainingProcess, collective: Collective) -> Variants:
        """Raises JobError, GroupError, PeerLost."""
        spec, task = process.spec, Task(**(process.spec.task or {}))
        job = _evaluated(rank_job(spec.job or {}, spec.rank(collective.rank), process.home), collective.size)
        set_up_device(job, collective.rank)
        form = row_format(job, load_tokenizer(job, load_config(job.model)))
        variants = cls(process, job, task, *evaluated_split(job, task, form, process.reporter), collective)
        collective.check_equal(variants.facts)
        return variants

    def broadcast(self, value: Any) -> Any:
        return broadcast_object(self.collective, value, 0)

    def _sum(self, values: list[float]) -> list[float]:
        return floats(self.collective.all_sum(mx.array(values)))

    def _losses(self, strategy: Strategy) -> Iterator[tuple[float, int]]:
        strategy.model.eval()
        for indices in self._batches():
            yield strategy.loss(self.examples, indices)
            limit_cache(self.job)

    def _load(self, path: Path | None) -> Strategy:
        mx.clear_cache()
        collective, job = self.collective, self.job
        whole = bool(broadcast_object(collective, path is not None and path.is_dir(), 0))
        with self._directory(path, whole=whole) as directory:
            model, _ = build(job, directory, path if collective.rank == 0 else None, adapter=bool(path) and not whole)
            strategy = make_strategy(self.process, job, model, None, collective)
            del model
            if path is not None and not (whole and collective.size == 1):
                for tensors in broadcast_file(collective, path):
                    mx.eval(put(strategy.model, tensors))
                    self.process.reporter.going_on()
            mx.eval(strategy.model.parameters())
        return strategy

    @contextmanager
    def _directory(self, path: Path | None, *, whole: bool) -> Iterator[Path]:
        """The directory that the model is built from: the job's, or where `whole`, `path` on rank 0, and on the others
        one with its configuration, whose files of weights are holes with a header."""
        if path is None or not whole:
            yield self.job.model
        elif self.collective.rank == 0:
            described = [(path / "config.json").read_text(), [_described(file) for file in weight_files(path)]]
            broadcast_object(self.collective, described, 0)
            yield path
        else:
            config, files = broadcast_object(self.collective, None, 0)
            with tempfile.TemporaryDirectory(dir=self.process.home, ignore_cleanup_errors=True) as temporary:
                directory = Path(temporary)
                (directory / "config.json").write_text(config)
                for source in self.job.model.glob("*.py"):
                    (directory / source.name).write_bytes(source.read_bytes())
                for name, header, size in files:
                    with (directory / Path(name).name).open("wb") as file:
                        file.write(header.encode("latin-1"))
                        file.truncate(size)
                yield directory


def evaluate(process: TrainingProcess, collective: Collective) -> None:
    """One rank's part of the task. Raises JobError, GroupError, PeerLost."""
    Variants.of(process, collective).measure_all()


def _evaluated(job: Job, ranks: int) -> Job:
    """As it was trained, where so many ranks can be divided as they were."""
    strategy = "data" if job.strategy == "local" or ranks == 1 else job.strategy
    split = job.layer_split if job.layer_split is not None and len(parse_split(job.layer_split)) == ranks else None
    return replace(job, strategy=strategy, layer_split=split, grad_checkpoint=False, resume_adapter_file=None)


def build(job: Job, directory: Path, weights: Path | None, *, adapter: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The model in `directory`, frozen and not read, and its configuration; `weights`, if given, fit it. `adapter`:
    they are what the job trains, for which the model has its layers of LoRA or DoRA; else the whole model. Raises
    JobError."""
    model, config = load_base(job, directory)
    if adapter:
        unfreeze_trained(job, model)
    needed = [name for name, _ in tree_flatten(model.trainable_parameters() if adapter else model.parameters())]
    model.freeze()
    if weights is not None:
        _check(weights, model, needed)
    return model, config


def _check(path: Path, model: nn.Module, needed: Collection[str]) -> None:
    """Raises JobError unless the weights fit `model` and have the `needed` names."""
    try:
        saved = {name: shape for file in weight_files(path) for name, (_, shape) in check_header(file).tensors.items()}
    except (CheckpointError, OSError) as error:
        raise JobError(f"the weights {path}: {error}") from error
    why = misfit(saved, {name: value.shape for name, value in tree_flatten(model.parameters())}, needed)
    if why is None and (lacking := [name for name in needed if name not in saved]):
        why = f"{len(lacking):,} of {len(needed):,} tensors are missing, such as {lacking[0]}"
    if why is not None:
        raise JobError(f"the weights {path}: {why}")


def weight_files(path: Path) -> list[Path]:
    """Those of a model's directory, or the file itself."""
    return sorted(path.glob("model*.safetensors")) if path.is_dir() else [path]


def load_tensors(path: Path) -> dict[str, mx.array]:
    """Those of a file or a model's directory, not read."""
    loaded: list[Any] = [mx.load(str(file)) for file in weight_files(path)]
    return {name: value for tensors in loaded for name, value in tensors.items()}


def broadcast_file(collective: Collective, path: Path) -> Iterator[Mapping[str, mx.array]]:
    """The tensors of rank 0's `path` on every rank, part by part. Raises PeerLost."""
    return broadcast_tensors(collective, load_tensors(path) if collective.rank == 0 else {}, 0)


def broadcast_tensors(
    collective: Collective, weights: dict[str, mx.array], owner: int
) -> Iterator[Mapping[str, mx.array]]:
    """The `weights` of rank `owner`, which are taken out of it, on every rank, part by part. Raises PeerLost."""
    sizes = broadcast_object(collective, {name: value.nbytes for name, value in weights.items()}, owner)
    for names in packed(sizes, sizes.__getitem__, max(_LEAST_PART_BYTES, sum(sizes.values()) // 256)):
        mine = {"": {name: weights.pop(name) for name in names}} if collective.rank == owner else None
        yield broadcast_arrays(collective, mine, owner)[""]


def put(model: nn.Module, tensors: Mapping[str, mx.array]) -> list[mx.array]:
    """Those that this rank has a place for, as what others hold is empty here, or missing; in the model's types, as a
    checkpoint has float32 masters. They are returned, not evaluated."""
    held = dict(tree_flatten(model.parameters()))
    mine = [(name, value) for name, value in tensors.items() if name in held and held[name].shape == value.shape]
    mine = [(name, value.astype(held[name].dtype)) for name, value in mine]
    model.update(tree_unflatten(mine))
    return [value for _, value in mine]


def _described(file: Path) -> tuple[str, str, int]:
    """A safetensors file's name, its bytes before the tensors as latin-1, and its size."""
    with file.open("rb") as opened:
        length = opened.read(8)
        header = length + opened.read(int.from_bytes(length, "little"))
    return file.name, header.decode("latin-1"), file.stat().st_size
