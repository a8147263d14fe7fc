"""One rank's training with PyTorch: loads model and data, checks that all ranks have the same, and runs the loop.

The ranks decide together. What each update needs of all ranks (its number of targets, and whether one was asked to
stop) is gathered before its first backward pass, so that all of them stop after the same update."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from engine.protocol.checksums import crc32_text, package_versions
from engine.protocol.job import TorchSettings, config_hash
from engine.torch_trainer.checkpoint import StateCheckpoints, all_gather_object
from engine.torch_trainer.model import (
    FACTS_FILE,
    TrainedFolder,
    base_type,
    count_parameters,
    load_model,
    load_tokenizer,
    loss_sum,
    row_format,
)
from engine.torch_trainer.optimizer import Schedule, make_schedule
from engine.torch_trainer.strategies import STRATEGIES, TorchStrategy, distributed_type, join_group
from engine.torch_trainer.waits import WaitTimer
from engine.training.checkpoint_files import ORDER, Origin, TrainingPoint
from engine.training.data import (
    EMPTY,
    Batch,
    DataLoader,
    Split,
    checksums,
    files_checksum,
    load_splits,
    rank_facts,
    rank_job,
)
from engine.training.loop import TrainingLoop, report_start
from engine.training.process import TrainingProcess
from engine.training.reporting import Diverged, Outcome, SavedWeights, check_equal
from engine.training.sampler import Indices, dropout_seed

_PACKAGES = ("torch", "accelerate", "transformers", "peft", "deepspeed")
"""DeepSpeed is only needed for its strategy."""


def run(process: TrainingProcess) -> None:
    """Run the job to its end or to an agreed stop. Raises JobError, GroupError, Diverged, OSError."""
    load_training(process).run_and_test()
    # The first rank to exit would take the others down.
    dist.barrier()


def load_training(process: TrainingProcess) -> TorchLoop:
    """Form the group, load model and data, and resume where the attempt says so. Raises JobError, GroupError."""
    spec, reporter = process.spec, process.reporter
    raw = spec.job or {}
    job, settings = rank_job(raw, spec.rank(process.rank), process.home), TorchSettings.from_spec(raw)
    make_schedule(job)  # raises JobError
    accelerator = join_group(spec, job, settings)
    reporter.print(f"rank {process.rank} of {spec.world_size} on {spec.rank(process.rank).node}: loading")
    tokenizer = load_tokenizer(job)
    job, examples, valid, test = load_splits(job, row_format(job, tokenizer), reporter)
    model = load_model(job, base_type(job, settings), reporter.warn)
    inputs, checksum = checksums(job, train=examples, valid=valid), files_checksum(job, adapter=True)
    check_equal(all_gather_object(rank_facts(spec, examples, valid, test, checksum)))
    counts = count_parameters(model)
    strategy = STRATEGIES[job.strategy](accelerator, job, settings, model)
    about = {
        "versions": package_versions(*_PACKAGES),
        "backend": spec.backend if spec.backend == "nccl" else dist.get_backend(),
        "device": str(accelerator.device),
        "distributed_type": distributed_type(accelerator),
        "partitioned": strategy.partitioned,
    }
    report_start(process, job, examples, checksum, counts, inputs=inputs, **about)
    loader = DataLoader(examples, job, [rank.share for rank in spec.ranks], process.rank, reporter)
    part, parts = (process.rank, spec.world_size) if strategy.partitioned else (0, 1)
    inputs = {**inputs, ORDER: crc32_text(examples.order_checksum)}
    origin = Origin(config_hash(raw), spec.world_size, part, parts, inputs)
    checkpoints = StateCheckpoints(process, origin, strategy, package_versions(*_PACKAGES))
    start = checkpoints.resume() if spec.resume else TrainingPoint()
    common = job, strategy, valid, process.control, reporter
    return TorchLoop(*common, loader, make_schedule(job), checkpoints, tokenizer, start, test=test)


@dataclass
class _Iteration:
    """One micro-batch of the update under way."""

    number: int
    batch: Batch
    data_s: float
    compute_s: float = 0.0
    communicate_s: float = 0.0
    update_s: float = 0.0
    loss_sum: Tensor | float = 0.0


@dataclass
class TorchLoop(TrainingLoop):
    strategy: TorchStrategy
    loader: DataLoader
    schedule: Schedule
    checkpoints: StateCheckpoints
    tokenizer: Any
    start: TrainingPoint = field(default_factory=TrainingPoint)

    def __post_init__(self) -> None:
        self._accelerator = self.strategy.accelerator
        self._rank, self._ranks = self._accelerator.process_index, self._accelerator.num_processes
        self._waits = WaitTimer(self.strategy.model, self._accelerator.device)
        self._begin(self.start)

    def reset_peak_memory(self) -> None:
        """Nothing to do: the figure is that of loading and steps together."""

    def last_of_step(self, first: int) -> int:
        """The end of its update."""
        return min(-(-first // self.job.grad_accumulation_steps) * self.job.grad_accumulation_steps, self.job.iters)

    def _between(self, iteration: int, *, save: bool) -> None:
        # Before the state: a training that resumes from it would not save them.
        if save:
            self._save(self.job.adapter_path, last=False)
        if self.checkpoints.due(self.point.update):
            self.checkpoints.save(self.point)

    def train(self, first: int, last: int) -> None:
        """The iterations from `first` to `last`, and one step of the optimizer with their mean loss."""
        self.reporter.phase("training")
        device = self._accelerator.device
        iterations = [self._load(number) for number in range(first, last + 1)]
        counts = [float(iteration.batch.targets) for iteration in iterations]
        started = time.perf_counter()
        *tokens, stop = self._sum([*counts, float(self.control.stop.is_set())])
        communicate_s = time.perf_counter() - started
        self.stopping = stop > 0
        update = self.point.update + 1
        learning_rate = self.schedule(update - 1)
        self.strategy.begin(learning_rate, update)
        # The gradients are averaged over ranks and iterations, however many targets each has.
        scale = self._ranks * self.job.grad_accumulation_steps / max(sum(tokens), 1.0)
        self._waits.take()
        # By gradients of zero, momentum and decay would move the weights.
        learns = sum(tokens) > 0
        for iteration in iterations if learns else ():
            communicate_s += self._backward(iteration, scale, last=iteration.number == last)
        started = time.perf_counter()
        norm = self.strategy.step() if learns else None
        waited = self._waits.take()
        update_s = time.perf_counter() - started - waited
        communicate_s += waited
        started = time.perf_counter()
        loss_sums = [float(iteration.loss_sum) for iteration in iterations]
        losses = self._sum(loss_sums)
        communicate_s += time.perf_counter() - started
        self._check_losses(range(first, last + 1), losses)
        skipped = self._accelerator.optimizer_step_was_skipped
        if norm is None:
            self.reporter.warn(f"iteration {last}: no token is a target, so nothing was learned from it")
        elif skipped and self.strategy.settings.precision == "fp16":
            self.reporter.warn(f"iteration {last}: float16 overflowed, so nothing was learned from it")
        elif skipped or not math.isfinite(norm):
            raise Diverged(f"gradient is not finite at iteration {last}")
        iterations[-1].communicate_s, iterations[-1].update_s = communicate_s, update_s
        facts = {
            "grad_norm": norm if norm is not None and math.isfinite(norm) else None,
            "update": update,
            "own_loss": sum(loss_sums) / sum(counts) if sum(counts) else None,
        }
        steps = {iteration.number: iteration for iteration in iterations}
        self._report_update(steps, (losses, tokens), facts, learning_rate, peak_memory(device))
        self._end_update(last)
        for iteration in iterations:
            self.loader.end_batch(iteration.number - 1)

    def _backward(self, iteration: _Iteration, scale: float, *, last: bool) -> float:
        """Add its gradients, times `scale`, to the update's; the seconds that were waited for others."""
        started = time.perf_counter()
        torch.manual_seed(dropout_seed(self.job.seed, iteration.number, self._rank))
        with self.strategy.accumulate(last=last):
            loss = loss_sum(self.strategy.model, iteration.batch, self._accelerator.device)
            iteration.loss_sum = loss.detach()
            self.strategy.backward(loss * scale)
        waited = self._waits.take()
        iteration.compute_s = time.perf_counter() - started - waited
        return waited

    def _load(self, number: int) -> _Iteration:
        started = time.perf_counter()
        batch = self.loader.batch(number - 1)
        return _Iteration(number, batch, time.perf_counter() - started)

    def _sum(self, values: list[float]) -> list[float]:
        return sum_over_ranks(self._accelerator, values)

    def _loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        share = self.loader.validation_share(examples, indices)
        batch = examples.batch(share) if len(share) else EMPTY
        with torch.no_grad():
            loss = float(loss_sum(self.strategy.model, batch, self._accelerator.device))
        return loss, batch.targets

    def _save_best(self, iteration: int, loss: float) -> None:
        self._save(self.job.adapter_path / "best", last=False, val_loss=loss)

    def _save_at_end(self, outcome: Outcome) -> None:
        self._save(self.job.adapter_path, last=True)
        if not outcome.completed:
            # A stopped run can resume where it was; a complete one needs no more than its weights.
            self.checkpoints.save(self.point)

    def _save(self, target: Path, *, last: bool, **facts: float) -> None:
        """Write the trained weights, on rank 0."""
        self.reporter.phase("saving")
        weights = self.strategy.weights()
        failed = None
        if self._rank == 0 and not self._has_better(target, **facts):
            try:
                numbered = not facts and (not last or self.point.iteration < self.job.iters)
                self._write(target, weights, numbered=numbered, last=last, **facts)
            except OSError as error:
                failed = error
        # No rank continues before the save is done.
        self._accelerator.wait_for_everyone()
        if failed is not None:
            raise failed

    def _write(self, target: Path, weights: dict[str, Tensor], *, numbered: bool, last: bool, **facts: float) -> None:
        iteration, holds = self.point.iteration, "model" if self.job.fine_tune_type == "full" else "adapter"
        if self.job.fine_tune_type == "full" and not facts:
            target = target / "model"
        targets = [target, *([self.job.adapter_path / f"checkpoint-{iteration}"] if numbered else [])]
        about = {**self._validated, "iteration": iteration, **facts}
        path, folder = targets[-1], TrainedFolder(self.job.adapter_path, self.strategy.module, self.tokenizer)

        def write() -> SavedWeights:
            size, files = folder.save(targets, weights, about)
            return SavedWeights(path, size, holds, path, files)

        self.reporter.save(iteration, path, write, last=last, **facts)

    @property
    def _validated(self) -> dict[str, str]:
        """The run and its validation data."""
        return {"run": self.job.home.name, "valid": crc32_text(self.valid.checksum)}

    def _has_better(self, target: Path, val_loss: float | None = None) -> bool:
        """The best weights there are of this run: a resumed one repeats validations before theirs."""
        if val_loss is None:
            return False
        try:
            facts = json.loads((target / FACTS_FILE).read_text())
            same = all(facts[name] == value for name, value in self._validated.items())
            return bool(same and facts["val_loss"] < val_loss)
        except (OSError, ValueError, KeyError, TypeError):
            return False


def sum_over_ranks(accelerator: Accelerator, values: list[float]) -> list[float]:
    if accelerator.num_processes == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    sums: list[float] = accelerator.gather(tensor).reshape(accelerator.num_processes, -1).sum(0).tolist()
    return sums


def peak_memory(device: torch.device) -> int:
    """Bytes: of PyTorch's allocator on a GPU, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
