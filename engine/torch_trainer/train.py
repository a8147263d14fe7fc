"""One rank's training with PyTorch: loads model and data, checks that all ranks have the same, and runs the loop.

The ranks decide together. What each update needs of all ranks (its number of targets, and whether one was asked to
stop) is gathered before its first backward pass, so that all of them stop after the same update.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import re
import resource
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.protocol.job import Job, TorchSettings, config_hash
from engine.protocol.partition import epoch_iterations
from engine.torch_trainer.checkpoint import StateCheckpoints, TrainingPoint, all_gather_object
from engine.torch_trainer.data import EMPTY, load_tokenizer, loss_sum, row_format
from engine.torch_trainer.model import FACTS_FILE, TrainedFolder, count_parameters, load_model
from engine.torch_trainer.optimizer import Schedule, make_schedule
from engine.torch_trainer.strategies import STRATEGIES, TorchStrategy, distributed_type, join_group
from engine.torch_trainer.waits import WaitTimer
from engine.training.best_validation import BestValidation
from engine.training.checkpoint_files import Origin
from engine.training.control import Control
from engine.training.data import Batch, DataLoader, Split
from engine.training.inputs import crc_text, files_checksum, load_splits, rank_job
from engine.training.outcome import Diverged, GroupError, Outcome, PeerLost
from engine.training.process import TrainingProcess
from engine.training.reporting import Reporter, ReportWindow
from engine.training.sampler import Indices, dropout_seed

_PACKAGES = ("torch", "accelerate", "transformers", "peft", "deepspeed")
_LOST_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited", re.IGNORECASE)
"""gloo's and NCCL's messages on the ranks that lose another one."""


def train(process: TrainingProcess) -> None:
    """Run the job to its end or to an agreed stop. Raises JobError, GroupError, PeerLost, Diverged, OSError."""
    try:
        _train(process)
    except RuntimeError as error:
        if _LOST_PEER.search(str(error)):
            raise PeerLost(str(error)) from error
        raise


def _train(process: TrainingProcess) -> None:
    training, reporter = load_training(process), process.reporter
    loop, test, job = training.loop, training.test, training.loop.job
    outcome = loop.run()
    if test is not None and not outcome.stopped:
        reporter.phase("validating")
        loss = loop.evaluate(test, job.test_batches)
        if loss is not None:
            reporter.test(outcome.iteration, loss)
    reporter.end(outcome)
    # The first rank to exit would take the others down.
    dist.barrier()


@dataclass(frozen=True)
class LoadedTraining:
    loop: TorchLoop
    test: Split | None
    """For the job's `test`."""


def load_training(process: TrainingProcess) -> LoadedTraining:
    """Form the group, load model and data, and resume where the attempt says so. Raises JobError, GroupError."""
    spec, reporter = process.spec, process.reporter
    raw = spec.job or {}
    job, settings = rank_job(raw, spec.rank(process.rank), process.home), TorchSettings.from_spec(raw)
    schedule = make_schedule(job)
    accelerator = join_group(spec, job, settings)
    reporter.print(f"rank {process.rank} of {spec.world_size} on {spec.rank(process.rank).node}: loading")
    tokenizer = load_tokenizer(job)
    examples, valid, test = load_splits(job, row_format(job, tokenizer), reporter)
    if job.epochs is not None:
        job = replace(job, iters=epoch_iterations(job.epochs, len(examples), job.batch_size))
    model = load_model(job, settings, reporter.warn)
    inputs = {"train.jsonl": crc_text(examples), "valid.jsonl": crc_text(valid)}
    inputs["the base model"] = files_checksum(job, adapter=False)
    checksum = files_checksum(job, adapter=True)
    _check_equal({"the job's configuration": config_hash(raw), **inputs, "the model or the adapter": checksum})
    trainable, total = count_parameters(model)
    strategy = STRATEGIES[job.strategy](accelerator, job, settings, model)
    reporter.event(
        "start",
        versions=package_versions(),
        world_size=accelerator.num_processes,
        backend=spec.backend if spec.backend == "nccl" else dist.get_backend(),
        config_hash=config_hash(raw),
        parameter_checksum=checksum,
        iterations=job.iters,
        trainable_parameters=trainable,
        total_parameters=total,
        device=str(accelerator.device),
        distributed_type=distributed_type(accelerator),
        strategy=job.strategy,
        partitioned=strategy.partitioned,
    )
    divided = f", {' and '.join(strategy.partitioned)} divided over the ranks" if strategy.partitioned else ""
    reporter.print(
        f"training {trainable / 1e6:.3f} of {total / 1e6:.3f} million parameters, {job.fine_tune_type}, {job.strategy}"
        f"{divided}, {len(examples)} examples, {job.iters} iterations of {job.batch_size} on {accelerator.device}"
    )
    loader = DataLoader(examples, job, [rank.share for rank in spec.ranks], process.rank, reporter)
    part, parts = (process.rank, spec.world_size) if strategy.partitioned else (0, 1)
    origin = Origin(config_hash(raw), spec.world_size, part, parts, inputs)
    checkpoints = StateCheckpoints(process, origin, strategy, package_versions())
    start = checkpoints.resume() if spec.resume else TrainingPoint()
    loop = TorchLoop(job, strategy, loader, valid, schedule, checkpoints, process.control, reporter, tokenizer, start)
    return LoadedTraining(loop, test)


def package_versions() -> dict[str, str]:
    """The versions of Python and of those packages that this node has: DeepSpeed is only needed for its strategy."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _check_equal(own: dict[str, str]) -> None:
    """Raises GroupError, on all ranks, when the ranks have different jobs, models or data."""
    table: list[dict[str, str]] = all_gather_object(own)
    for name in own:
        differing = [rank for rank, other in enumerate(table) if other[name] != table[0][name]]
        if differing:
            raise GroupError(f"{name} of rank {', '.join(map(str, differing))} is not that of rank 0")


@dataclass
class _Iteration:
    """One micro-batch of the update under way."""

    number: int
    batch: Batch
    data_s: float
    compute_s: float = 0.0
    loss_sum: Tensor | None = None


@dataclass
class TorchLoop:
    """One rank's training: iterations, updates, validation, reports and saves."""

    job: Job
    strategy: TorchStrategy
    loader: DataLoader
    valid: Split
    schedule: Schedule
    checkpoints: StateCheckpoints
    control: Control
    reporter: Reporter
    tokenizer: Any
    start: TrainingPoint = field(default_factory=TrainingPoint)

    def __post_init__(self) -> None:
        self._accelerator = self.strategy.accelerator
        self._rank, self._ranks = self._accelerator.process_index, self._accelerator.num_processes
        self._waits = WaitTimer(self.strategy.model, self._accelerator.device)
        self._point = self.start
        self._window, self._best = ReportWindow(**self.start.window), BestValidation(**self.start.best)
        self._stop = False

    def run(self) -> Outcome:
        """Train until the last iteration or an agreed stop, and save. Raises Diverged, PeerLost, OSError."""
        job = self.job
        self.strategy.model.train()
        while self._point.iteration < job.iters:
            first = self._point.iteration + 1
            last = min(-(-first // job.grad_accumulation_steps) * job.grad_accumulation_steps, job.iters)
            due = [iteration for iteration in range(first, last + 1) if self._validation_due(iteration)]
            if due and not self._patience_over:
                self._validate(due[0] - 1)
                if self._stop:
                    return self._finish(Outcome(False, True, self._point.iteration))
            if self._patience_over:
                early = self._best.early_stop(self._point.iteration)
                return self._finish(Outcome(True, False, self._point.iteration, early))
            self.update(first, last)
            if self._stop and last < job.iters:
                return self._finish(Outcome(False, True, last))
            if self.checkpoints.due(self._point.update):
                self.checkpoints.save(self._point)
            if last // job.save_every > (first - 1) // job.save_every:
                self._save(job.adapter_path, last=False)
        return self._finish(Outcome(True, self._stop, job.iters))

    @property
    def stopping(self) -> bool:
        """A rank has been asked to stop before the last update."""
        return self._stop

    def update(self, first: int, last: int) -> None:
        """The iterations from `first` to `last`, and one step of the optimizer with their mean loss."""
        self.reporter.phase("training")
        device = self._accelerator.device
        iterations = [self._load(number) for number in range(first, last + 1)]
        counts = [float(iteration.batch.targets) for iteration in iterations]
        started = time.perf_counter()
        *tokens, stop = self._sum([*counts, float(self.control.stop_requested)])
        communicate_s = time.perf_counter() - started
        self._stop = stop > 0
        update = self._point.update + 1
        learning_rate = self.schedule(update - 1)
        self.strategy.begin(learning_rate, update)
        # The gradients are averaged over ranks and iterations, however many targets each has.
        scale = self._ranks * self.job.grad_accumulation_steps / max(sum(tokens), 1.0)
        self._waits.take()
        for iteration in iterations:
            started = time.perf_counter()
            torch.manual_seed(dropout_seed(self.job.seed, iteration.number, self._rank))
            with self.strategy.accumulate(last=iteration.number == last):
                loss = loss_sum(self.strategy.model, iteration.batch, device)
                iteration.loss_sum = loss.detach()
                self.strategy.backward(loss * scale)
            waited = self._waits.take()
            iteration.compute_s = time.perf_counter() - started - waited
            communicate_s += waited
        started = time.perf_counter()
        norm = self.strategy.step()
        waited = self._waits.take()
        update_s = time.perf_counter() - started - waited
        communicate_s += waited
        started = time.perf_counter()
        own = [float(iteration.loss_sum) for iteration in iterations if iteration.loss_sum is not None]
        losses = self._sum(own)
        communicate_s += time.perf_counter() - started
        for number, loss in zip(range(first, last + 1), losses, strict=True):
            if not math.isfinite(loss):
                raise Diverged(f"loss is not finite at iteration {number}")
        if not sum(tokens):
            self.reporter.warn(f"iteration {last}: no token is a target, so nothing was learned from it")
        skipped = self.strategy.step_was_skipped
        if skipped and self.strategy.scales_loss:
            self.reporter.warn(f"iteration {last}: float16 overflowed, so nothing was learned from it")
        elif skipped or not math.isfinite(norm):
            raise Diverged(f"gradient is not finite at iteration {last}")
        facts = {
            "grad_norm": norm if math.isfinite(norm) else None,
            "update": update,
            "own_loss": sum(own) / sum(counts) if sum(counts) else None,
            "communicate_s": communicate_s,
            "update_s": update_s,
        }
        self._report(iterations, losses, tokens, facts)
        self._point = TrainingPoint(last, update, asdict(self._window), self._best.state())
        for iteration in iterations:
            self.loader.end_batch(iteration.number - 1)

    def _load(self, number: int) -> _Iteration:
        started = time.perf_counter()
        batch = self.loader.batch(number - 1)
        return _Iteration(number, batch, time.perf_counter() - started)

    def _sum(self, values: list[float]) -> list[float]:
        """The sums over all ranks."""
        own = torch.tensor(values, dtype=torch.float64, device=self._accelerator.device)
        found: list[float] = self._accelerator.gather(own).reshape(self._ranks, -1).sum(0).tolist()
        return found

    def _report(
        self, iterations: list[_Iteration], losses: list[float], tokens: list[float], facts: dict[str, Any]
    ) -> None:
        """`facts`: of the update, for the event of its last iteration."""
        peak = _peak_memory(self._accelerator.device)
        learning_rate = self.schedule(facts["update"] - 1)
        for iteration, loss, count in zip(iterations, losses, tokens, strict=True):
            mean = loss / count if count else None
            of_update = facts if iteration is iterations[-1] else {"grad_norm": None}
            values: dict[str, Any] = {
                "iteration": iteration.number,
                "loss": mean,
                "tokens": int(count),
                "data_s": iteration.data_s,
                "compute_s": iteration.compute_s,
                "communicate_s": 0.0,
                "update_s": 0.0,
                "peak_memory_bytes": peak,
                **of_update,
            }
            self.reporter.event("step", **values)
            seconds = sum(values[name] for name in ("data_s", "compute_s", "communicate_s", "update_s"))
            self._window.add(mean, int(count), seconds)
            if iteration.number % self.job.steps_per_report == 0 or iteration.number == self.job.iters:
                self.reporter.report(self.job.iters, self._window.close(iteration.number, learning_rate, peak))

    def evaluate(self, examples: Split, limit: int) -> float | None:
        """Mean cross-entropy over all target tokens of `limit` batches; None without targets or when stopped."""
        self.strategy.model.eval()
        loss, tokens = 0.0, 0.0
        for indices in examples.fixed_batches(self.job.batch_size, self.job.seed, limit):
            batch = self._validation_batch(examples, indices)
            with torch.no_grad():
                own = float(loss_sum(self.strategy.model, batch, self._accelerator.device))
            # A whole validation may take longer than a stop has time: every batch carries the request.
            total = self._sum([own, float(batch.targets), float(self.control.stop_requested)])
            self.reporter.going_on()
            loss, tokens = loss + total[0], tokens + total[1]
            if total[2]:
                self._stop = True
                break
        self.strategy.model.train()
        return None if self._stop or not tokens else loss / tokens

    def _validation_batch(self, examples: Split, indices: Indices) -> Batch:
        own = self.loader.validation_share(indices)
        return examples.batch(own) if len(own) else EMPTY

    def _validation_due(self, iteration: int) -> bool:
        return len(self.valid) > 0 and self.job.validates_before(iteration)

    def _validate(self, iteration: int) -> None:
        self.reporter.phase("validating")
        started = time.perf_counter()
        loss = self.evaluate(self.valid, self.job.val_batches)
        if loss is None:
            return
        seconds = time.perf_counter() - started
        self.reporter.validation({"iteration": iteration, "val_loss": loss, "val_time": seconds})
        # What was never trained must not replace what an earlier run has left.
        if self._best.add(iteration, loss) and self.job.save_best and self._point.update > 0:
            self._save(self.job.adapter_path / "best", last=False, val_loss=loss)

    @property
    def _patience_over(self) -> bool:
        return self._best.is_over(self.job.patience)

    def _finish(self, outcome: Outcome) -> Outcome:
        if outcome.completed:
            self._window.require_targets()
        # What was never trained must not replace what an earlier run has left.
        if outcome.iteration > 0:
            self._save(self.job.adapter_path, last=True)
            if not outcome.completed:
                # A stopped run can resume where it was; a complete one needs no more than its weights.
                self.checkpoints.save(self._point)
        return outcome

    def _save(self, target: Path, *, last: bool, **facts: float) -> None:
        """Write the trained weights, on rank 0. A full disk is a warning, except for the last save."""
        self.reporter.phase("saving")
        weights = self.strategy.weights()
        failed = None
        if self._rank == 0 and not self._has_better(target, **facts):
            try:
                self._write(
                    target,
                    weights,
                    numbered=not facts and (not last or self._point.iteration < self.job.iters),
                    **facts,
                )
            except OSError as error:
                failed = error
                self.reporter.warn(f"iteration {self._point.iteration}: not saved: {error}")
        # No rank continues before the save is done.
        self._accelerator.wait_for_everyone()
        if failed is not None and last:
            raise failed

    def _write(self, target: Path, weights: dict[str, Tensor], *, numbered: bool, **facts: float) -> None:
        iteration, started = self._point.iteration, time.perf_counter()
        if self.job.fine_tune_type == "full" and not facts:
            target = target / "model"
        targets = [target, *([self.job.adapter_path / f"checkpoint-{iteration}"] if numbered else [])]
        path = targets[-1]
        self.reporter.event("checkpoint", phase="begin", iteration=iteration, path=str(path))
        about = {"run": self.job.home.name, "iteration": iteration, **facts}
        folder = TrainedFolder(self.job.adapter_path, self.strategy.module, self.tokenizer)
        size = folder.save(targets, weights, about)
        self.reporter.event(
            "checkpoint",
            phase="committed",
            iteration=iteration,
            path=str(path),
            bytes=size,
            seconds=time.perf_counter() - started,
            **facts,
        )
        self.reporter.print(f"saved {path}")

    def _has_better(self, target: Path, val_loss: float | None = None) -> bool:
        """The best weights there are of this run: a resumed one repeats validations before theirs."""
        if val_loss is None:
            return False
        try:
            found = json.loads((target / FACTS_FILE).read_text())
            return bool(found["run"] == self.job.home.name and found["val_loss"] < val_loss)
        except (OSError, ValueError, KeyError, TypeError):
            return False


def _peak_memory(device: torch.device) -> int:
    """Bytes: of PyTorch's allocator on a GPU, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
