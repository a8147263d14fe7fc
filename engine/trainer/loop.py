"""The training loop of MLX, and how all ranks stop together: a stop request is one of the counters in the update's own
all_sum. How the work of an update is divided over the ranks is up to the strategy."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field, replace

import mlx.core as mx
from mlx_lm.tuner.callbacks import get_reporting_callbacks

from engine.protocol.checksums import crc32_text
from engine.trainer.checkpoint.saving import EmergencyCheckpoint, PeriodicCheckpoints
from engine.trainer.checkpoint.store import Snapshot
from engine.trainer.collective import Collective
from engine.trainer.elastic_group import LeftOut
from engine.trainer.model import limit_cache
from engine.trainer.replica_check import Corrupted, ReplicaCheck
from engine.trainer.samples import Samples
from engine.trainer.saver import Saver
from engine.trainer.strategies.base import LocalStep, Strategy
from engine.trainer.weights import floats
from engine.training.checkpoint_files import ResumePoint, TrainingPoint
from engine.training.data import Split
from engine.training.loop import TrainingLoop
from engine.training.reporting import Diverged, Outcome, PeerLost
from engine.training.sampler import Indices, dropout_seed


class _ReplicasDiffer(Exception):
    """A replica check found a difference that ends the training."""


@dataclass
class Loop(TrainingLoop):
    """`start` is the point that the strategy's state has been restored to."""

    strategy: Strategy
    collective: Collective
    replicas: ReplicaCheck
    periodic: PeriodicCheckpoints
    emergency: EmergencyCheckpoint
    start: ResumePoint = field(default_factory=ResumePoint)
    samples: Samples | None = None
    """None without sample_prompts."""

    def __post_init__(self) -> None:
        valid = crc32_text(self.valid.checksum)
        self._saver = Saver(self.job, self.strategy, self.collective, self.replicas, self.reporter, valid)
        self._ranks = self.collective.size
        self._begin(self.start)

    def _begin(self, point: TrainingPoint) -> None:
        super()._begin(point)
        self._pending: dict[int, LocalStep] = {}
        """The iterations of the update under way."""

    def reset_peak_memory(self) -> None:
        mx.reset_peak_memory()

    def run_and_test(self) -> None:
        if self.collective.rank == 0:
            self._saver.save_config()
            job, config = self.job, {key: str(value) for key, value in asdict(self.job).items()}
            about = {"project_name": job.project_name, "log_dir": str(job.adapter_path), "config": config}
            # SwanLab by mlx-lm's own callback, or None: the head writes for the other services.
            self.reporter.callback = get_reporting_callbacks(job.report_to, **about)
        try:
            super().run_and_test()
        except PeerLost:
            self.emergency.save_on_peer_loss()
            raise

    def run(self) -> Outcome:
        """Raises Diverged, Corrupted, PeerLost, OSError."""
        while True:
            try:
                if self.collective.left_out:
                    self._rejoin()
                done = self.point.iteration
                self.emergency.hold(self._snapshot(done))
                self._check_replicas(done)
                if self.samples is not None:
                    self.samples.begin(done)
                return super().run()
            except LeftOut as error:
                self.reporter.warn(f"the other ranks go on without this one: {error}")
            except _ReplicasDiffer:
                break
        return self._stop_on_mismatch()

    def _rejoin(self) -> None:
        self.reporter.phase("loading")
        point = self.strategy.rejoin(self.control.stop.is_set, self.emergency.release)
        self._begin(point)
        self.reporter.print(f"joins again after iteration {point.iteration} (update {point.update})")

    def _between(self, iteration: int, *, save: bool) -> None:
        if save:
            self._check_replicas(iteration)
            self._saver.save(iteration, last=False)
        # Ranks that were left out go on from here: between two iterations all take part in the same operations.
        if self.strategy.admits and not self._pending:
            # It may take long.
            self.reporter.phase("saving")
            self.strategy.admit(self._snapshot(iteration))
        if self.samples is not None and iteration < self.job.iters:
            self.samples.take(iteration)
        limit_cache(self.job)

    def _loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        return self.strategy.loss(examples, indices)

    def _sum(self, values: list[float]) -> list[float]:
        return floats(self.collective.all_sum(mx.array(values)))

    @property
    def _comparable(self) -> bool:
        """The share of a rank that is left out is missing."""
        return self.collective.size == self._ranks

    def _save_best(self, iteration: int, loss: float) -> None:
        self._check_replicas(iteration)
        self._saver.save_best(iteration, loss)

    def train(self, iteration: int, _: int) -> None:
        """One iteration, and the update and the periodic checkpoint that end with it."""
        self.reporter.phase("training")
        mx.random.seed(dropout_seed(self.job.seed, iteration, self.collective.rank))
        last = iteration % self.job.grad_accumulation_steps == 0 or iteration == self.job.iters
        self._pending[iteration] = self.strategy.accumulate(
            iteration - 1, last=last, exact=self.periodic.planned(self.point.update + 1)
        )
        if last:
            try:
                self._update()
            except Diverged:
                # One rank's corrupted parameter may be what makes the sum not finite.
                self._check_replicas(iteration, self.point.update + 1)
                raise
            checkpoint_due = self.periodic.due(self.point.update)
            if checkpoint_due or self.replicas.due(self.point.update):
                self._check_replicas(iteration)
            if checkpoint_due:
                self.periodic.begin(self._snapshot(iteration))
        if self.strategy.loader.end_batch(iteration - 1):
            mx.clear_cache()

    def _update(self) -> None:
        """Sum over the ranks, take one optimizer step, and report the iterations."""
        *_, (last, step) = self._pending.items()
        started = time.perf_counter()
        counters = [step.loss_sum for step in self._pending.values()]
        counters += [float(step.tokens) for step in self._pending.values()]
        counters += [float(self.control.stop.is_set()), *self.periodic.counters()]
        *counted, stop, idle, settled = self.strategy.exchange(counters)
        losses, tokens = counted[: len(self._pending)], counted[len(self._pending) :]
        self.stopping = stop > 0
        if self.periodic.sync(idle, settled, self.collective.size):
            # Emergency checkpoints of earlier attempts are older than the first complete one.
            self.emergency.remove_older()
        summed = time.perf_counter()
        self._check_losses(self._pending, losses)
        with self.emergency.changing():
            norm = self.strategy.apply(sum(tokens))
            if (late := self.strategy.late_loss) is not None:
                losses, step = [late], replace(step, loss_sum=late)
                self._check_losses(self._pending, losses)
            if norm is None:
                self.reporter.warn(f"iteration {last}: no token is a target, so nothing was learned from it")
            elif not math.isfinite(norm):
                raise Diverged(f"gradient is not finite at iteration {last}")
            self._end_update(last)
            self.emergency.hold(self._snapshot(last))
        before = self.collective.waited_s
        # Meanwhile a lost peer leaves the state as it is.
        adopt = self.strategy.average()
        with self.emergency.changing():
            adopt()
            waited = self.collective.waited_s - before
            applied = time.perf_counter() - summed - waited
            self._pending[last] = step.with_update(summed - started + waited, applied, lazy=self.strategy.lazy)
            facts = {**self._own_facts(), "grad_norm": norm}
            rate, peak = self.strategy.updater.learning_rate, mx.get_peak_memory()
            self._report_update(self._pending, (losses, tokens), facts, rate, peak)
            self.emergency.hold(self._snapshot(last))
        self._pending = {}

    def _own_facts(self) -> dict[str, float | None]:
        """This rank's own loss and gradient norm of the update: the validators compare the ranks by them."""
        tokens = sum(step.tokens for step in self._pending.values())
        loss = sum(step.loss_sum for step in self._pending.values()) / tokens if tokens else None
        return {"update": self.point.update, "own_loss": loss, "own_grad_norm": self.strategy.local_norm(tokens)}

    def _snapshot(self, iteration: int) -> Snapshot:
        window, state = asdict(self._window), self.strategy.state()
        return Snapshot(iteration, self.point.update, window, state, best=self.point.best)

    def _check_replicas(self, iteration: int, update: int | None = None) -> None:
        """Raises _ReplicasDiffer when the training has to stop for it; PeerLost."""
        if not self.replicas.compare(iteration, self.point.update if update is None else update):
            raise _ReplicasDiffer

    def _save_at_end(self, outcome: Outcome) -> None:
        self._check_replicas(outcome.iteration)
        self._saver.save(outcome.iteration, last=True)
        # A stopped run can resume where it was; a complete one needs no more than its weights.
        self.periodic.finish(None if outcome.completed else self._snapshot(outcome.iteration))
        if not outcome.completed and not self.periodic.on:
            # Without periodic checkpoints too; and it must not resume from an older emergency checkpoint.
            self.emergency.save_on_stop()
        if self.samples is not None and not outcome.stopped:
            self.samples.take(outcome.iteration, last=True)
        # The first rank to exit would take the others down.
        self.collective.barrier()
        if outcome.completed:
            self.emergency.remove_all()

    def _stop_on_mismatch(self) -> Outcome:
        """The replicas differ: all ranks stop at the last iteration where they agreed, as far as its parameters have
        been kept. What is on disk is of that iteration or earlier. Raises Corrupted on the ranks that differ."""
        mismatch, agreed = self.replicas.difference, self.replicas.agreed_at or 0
        assert mismatch is not None
        message = self.replicas.message()
        if agreed > 0 and self._saver.saved != agreed and self.replicas.restore():
            self._saver.save(agreed, last=True)
        saved = self._saver.saved
        message += f"; kept: what was saved at iteration {saved}" if saved is not None else "; nothing was saved"
        self.reporter.print(message)
        if self.collective.rank in mismatch.ranks:
            raise Corrupted(message, mismatch)
        return Outcome(False, True, agreed)
