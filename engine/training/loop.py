"""The training loop of both frameworks: validation, patience, stop and end, and the reports of an update."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.protocol.job import Job, config_hash
from engine.protocol.measurements import STEP_PARTS
from engine.training.checkpoint_files import TrainingPoint
from engine.training.data import Split
from engine.training.process import Control, TrainingProcess
from engine.training.reporting import BestValidation, Diverged, Outcome, Reporter, ReportWindow
from engine.training.sampler import Indices


def report_start(
    process: TrainingProcess, job: Job, examples: Split, checksum: str, counts: tuple[int, int], **facts: Any
) -> None:
    """`checksum`: of the parameters. `counts`: of trained parameters, and of all. `facts`: more of the event."""
    (trainable, total), spec = counts, process.spec
    facts |= {"trainable_parameters": trainable, "total_parameters": total, "parameter_checksum": checksum}
    about = {"config_hash": config_hash(spec.job or {}), "world_size": spec.world_size, "strategy": job.strategy}
    facts["from_base"] = job.resume_adapter_file is None
    process.reporter.event("start", iterations=job.iters, **about, **facts)
    chunks = f" in {examples.plan.num_chunks} chunks of {job.chunk_size}" if examples.plan.enabled else ""
    size = job.batch_size if job.batch_tokens is None else f"up to {job.batch_tokens:,} tokens"
    process.reporter.print(
        f"training {trainable / 1e6:.3f} of {total / 1e6:.3f} million parameters, {job.fine_tune_type}, "
        f"{job.strategy}, {len(examples)} examples{chunks}, {job.iters} iterations of {size}"
    )


def sum_losses(
    losses: Iterator[tuple[float, int]],
    total: Callable[[list[float]], list[float]],
    control: Control,
    reporter: Reporter,
) -> tuple[float, int, bool]:
    """The sum of cross-entropies and the number of targets over all ranks; True where a rank has been asked to stop:
    they are of some batches only. `losses`: this rank's part of each batch. `total`: the sums over all ranks."""
    loss, tokens, stopped = 0.0, 0.0, 0.0
    while not stopped and (part := next(losses, None)) is not None:
        # It may take longer than a stop has time: every batch carries the request.
        summed, targets, stopped = total([part[0], float(part[1]), float(control.stop.is_set())])
        reporter.going_on()
        loss, tokens = loss + summed, tokens + targets
    return loss, int(tokens), stopped > 0


@dataclass
class TrainingLoop(ABC):
    """One rank's training. Every call is made by every rank."""

    job: Job
    strategy: Any
    valid: Split
    control: Control
    reporter: Reporter
    test: Split | None = field(default=None, kw_only=True)
    """For the job's `test`."""

    def _begin(self, point: TrainingPoint) -> None:
        """Go on from this point, which the strategy's state has been restored to."""
        self._window, self._best = ReportWindow(**point.window), BestValidation(**point.best)
        self.point = TrainingPoint(point.iteration, point.update, point.window, best=self._best.state())
        """The last update. A resumed training repeats the validations since."""
        self.stopping = False
        """A rank has been asked to stop."""

    def _end_update(self, iteration: int) -> None:
        update, window = self.point.update + 1, asdict(self._window)
        self.point = TrainingPoint(iteration, update, window, best=self._best.state())

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Before steps are measured: loading may have taken more."""

    def last_of_step(self, first: int) -> int:
        """The last of the iterations that one call of `train` takes together."""
        return first

    @abstractmethod
    def train(self, first: int, last: int) -> None:
        """The iterations from `first` to `last`, and the update if it ends with them."""

    @abstractmethod
    def _between(self, iteration: int, *, save: bool) -> None:
        """Save the state where it is due, and the weights with `save`. Called after the last iteration too."""

    @abstractmethod
    def _save_at_end(self, outcome: Outcome) -> None:
        """The saves at the end of the training, which has trained something."""

    @abstractmethod
    def _loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        """This rank's part of one batch: the sum of cross-entropies, and the number of targets."""

    @abstractmethod
    def _sum(self, values: list[float]) -> list[float]:
        """The sums over all ranks."""

    @abstractmethod
    def _save_best(self, iteration: int, loss: float) -> None:
        """Save the weights of the best validation so far."""

    @property
    def _comparable(self) -> bool:
        """A validation's loss is of as many examples as those before."""
        return True

    def run(self) -> Outcome:
        """Train until the last iteration, the end of the job's patience or an agreed stop, and save."""
        outcome = self._train_and_validate()
        if outcome.completed:
            self._window.require_targets()
        # What was never trained must not replace what an earlier run has left.
        if outcome.iteration > 0:
            self._save_at_end(outcome)
        return outcome

    def _train_and_validate(self) -> Outcome:
        self.strategy.model.train()
        done = self.point.iteration
        while done < self.job.iters:
            last = self.last_of_step(done + 1)
            iterations = range(done + 1, last + 1) if len(self.valid) else ()
            due = next(filter(self.job.validates_before, iterations), None)
            if due is not None and not self._patience_over:
                self._validate(due - 1)
                if self.stopping:
                    return Outcome(False, True, self.point.iteration)
            # In the middle of an accumulation, its update comes first.
            if self._patience_over and self.point.iteration == done:
                return Outcome(True, False, done, self._best.early_stop(done))
            self.train(done + 1, last)
            if self.stopping and last < self.job.iters:
                return Outcome(False, True, last)
            self._between(last, save=last // self.job.save_every > done // self.job.save_every)
            done = last
        return Outcome(True, self.stopping, self.job.iters)

    def run_and_test(self) -> None:
        """Run, and report the end."""
        outcome = self.run()
        if self.test is not None and not outcome.stopped:
            self.reporter.phase("validating")
            if (loss := self.evaluate(self.test, self.job.test_batches)) is not None:
                self.reporter.test(outcome.iteration, loss)
        self.reporter.end(outcome)

    def evaluate(self, examples: Split, limit: int) -> float | None:
        """Mean cross-entropy over all target tokens of `limit` batches; None without targets or when stopped."""
        self.strategy.model.eval()
        batches = examples.fixed_batches(self.job.batch_size, self.job.seed, limit)
        losses = (self._loss(examples, indices) for indices in batches)
        loss, tokens, stopped = sum_losses(losses, self._sum, self.control, self.reporter)
        self.stopping |= stopped
        self.strategy.model.train()
        return None if self.stopping or not tokens else loss / tokens

    def _validate(self, iteration: int) -> None:
        self.reporter.phase("validating")
        started = time.perf_counter()
        loss = self.evaluate(self.valid, self.job.val_batches)
        if loss is None:
            return
        seconds = time.perf_counter() - started
        self.reporter.validation({"iteration": iteration, "val_loss": loss, "val_time": seconds})
        better = self._comparable and self._best.add(iteration, loss)
        # What was never trained must not replace what an earlier run has left.
        if better and self.job.save_best and self.point.update > 0:
            self._save_best(iteration, loss)

    @property
    def _patience_over(self) -> bool:
        return self._best.is_over(self.job.patience)

    def _check_losses(self, iterations: Iterable[int], losses: Iterable[float]) -> None:
        for iteration, loss in zip(iterations, losses, strict=True):
            if not math.isfinite(loss):
                raise Diverged(f"loss is not finite at iteration {iteration}")

    def _report_update(
        self,
        steps: Mapping[int, Any],
        sums: tuple[Sequence[float], Sequence[float]],
        of_update: Mapping[str, Any],
        learning_rate: float,
        peak_bytes: int,
    ) -> None:
        """`steps`: the update's iterations, each with this rank's STEP_PARTS. `sums`: over the ranks, of the losses and
        of the targets of each. `of_update`: for the event of the last one."""
        for (iteration, step), loss, count in zip(steps.items(), *sums, strict=True):
            mean, parts = loss / count if count else None, {name: getattr(step, name) for name in STEP_PARTS}
            facts = of_update if iteration == max(steps) else {"grad_norm": None}
            values = {"iteration": iteration, "loss": mean, "tokens": int(count), **parts}
            self.reporter.event("step", **values, peak_memory_bytes=peak_bytes, **facts)
            self._window.add(mean, int(count), sum(parts.values()))
            if iteration % self.job.steps_per_report == 0 or iteration == self.job.iters:
                self.reporter.report(self.job.iters, self._window.close(iteration, learning_rate, peak_bytes))
