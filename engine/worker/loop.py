"""The training loop: iterations, updates, validation, what is told and saved, and how all ranks leave together.

How an update's work is divided over the ranks is the strategy's. The request to stop rides in the update's own sum, so
that all ranks leave after the same one.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import mlx.core as mx

from .arrays import floats
from .collective import Collective
from .control import Control
from .data import Split
from .dropout import dropout_seed
from .job import Job
from .periodic import Periodic
from .replicas import Corrupted, Replicas
from .reporting import Reporter, ReportWindow
from .rescue import Rescue
from .resume import Start
from .saving import Saver
from .snapshot import Snapshot
from .strategies.strategy import Share, Strategy

_CACHE_BYTES = 2**30


class Diverged(RuntimeError):
    """The loss or the gradient is no number any more."""


@dataclass(frozen=True)
class Outcome:
    """How the training ended."""

    completed: bool
    stopped: bool
    iteration: int


@dataclass
class _Micro:
    """One iteration as this rank saw it."""

    iteration: int
    share: Share
    own: dict[str, float | None] = field(default_factory=dict)
    """Of the update that it ends: what this rank says for itself."""
    own_s: float = 0.0
    """How long that took."""


class Loop:
    """One rank's training."""

    def __init__(
        self,
        *,
        job: Job,
        strategy: Strategy,
        valid: Split,
        collective: Collective,
        control: Control,
        reporter: Reporter,
        replicas: Replicas,
        periodic: Periodic,
        rescue: Rescue,
        start: Start | None = None,
    ) -> None:
        """`start`: what the strategy's state has been restored to."""
        self._job = job
        self._strategy = strategy
        self._valid = valid
        self._collective = collective
        self._control = control
        self._reporter = reporter
        self._replicas = replicas
        self._periodic = periodic
        self._rescue = rescue
        self._saver = Saver(job, strategy, collective, replicas, reporter)
        self._start = start or Start()
        self._window = ReportWindow(self._start.window)
        self._pending: list[_Micro] = []
        self._stop = False
        self._updates = self._start.update

    def run(self) -> Outcome:
        """Train until the last iteration or an agreed stop, and save. Raises Diverged, Corrupted, PeerLost, OSError."""
        job = self._job
        self._strategy.model.train()
        done = self._start.iteration
        self._rescue.hold(self._snapshot(done))
        if not self._replicas.compare(done, self._updates):
            return self._part()
        for iteration in range(done + 1, job.iters + 1):
            if iteration in (1, job.iters) or iteration % job.steps_per_eval == 0:
                self._validate(iteration - 1)
                if self._stop:
                    return self._leave(Outcome(False, True, iteration - 1))
            self._reporter.phase("training")
            self._accumulate(iteration)
            if iteration % job.grad_accumulation_steps == 0 or iteration == job.iters:
                try:
                    self._update()
                except Diverged:
                    # One rank's corrupted parameter may be what makes the sum no number.
                    if self._replicas.compare(iteration, self._updates + 1):
                        raise
                    return self._part()
                due = self._periodic.due(self._updates)
                if (due or self._replicas.due(self._updates)) and not self._replicas.compare(iteration, self._updates):
                    return self._part()
                if due:
                    self._periodic.begin(self._snapshot(iteration))
            self._strategy.feed.finish(iteration - 1)
            if self._stop and iteration < job.iters:
                return self._leave(Outcome(False, True, iteration))
            if iteration % job.save_every == 0:
                if not self._replicas.compare(iteration, self._updates):
                    return self._part()
                self._saver.save(iteration, last=False)
            if mx.get_cache_memory() > (job.clear_cache_threshold or _CACHE_BYTES):
                mx.clear_cache()
        return self._leave(Outcome(True, self._stop, job.iters))

    def evaluate(self, examples: Split, limit: int) -> float | None:
        """Mean cross-entropy over all target tokens of `limit` batches; None without targets or when stopped."""
        self._strategy.model.eval()
        loss, tokens = 0.0, 0.0
        for indices in examples.fixed_batches(self._job.batch_size, self._job.seed, limit):
            own_loss, own_tokens = self._strategy.loss(examples, indices)
            # A whole validation may take longer than a stop has time: the request is looked for in every batch.
            sums = mx.array([own_loss, float(own_tokens), float(self._control.stop_asked)])
            total = floats(self._collective.sum(sums))
            loss, tokens = loss + total[0], tokens + total[1]
            if total[2]:
                self._stop = True
                break
        self._strategy.model.train()
        return None if self._stop or not tokens else loss / tokens

    def _validate(self, iteration: int) -> None:
        if not len(self._valid) or self._job.val_batches == 0:
            return
        self._reporter.phase("validating")
        begun = time.perf_counter()
        loss = self.evaluate(self._valid, self._job.val_batches)
        if loss is not None:
            seconds = time.perf_counter() - begun
            self._reporter.validation({"iteration": iteration, "val_loss": loss, "val_time": seconds})

    def _accumulate(self, iteration: int) -> None:
        mx.random.seed(dropout_seed(self._job.seed, iteration, self._collective.rank))
        self._pending.append(_Micro(iteration, self._strategy.accumulate(iteration - 1)))

    def _update(self) -> None:
        """Sum over the ranks, and take one optimizer step; then tell of the iterations."""
        self._look_at_own()
        begun = time.perf_counter()
        counters = [micro.share.loss_sum for micro in self._pending]
        counters += [float(micro.share.tokens) for micro in self._pending]
        counters += [float(self._control.stop_asked), *self._periodic.counters()]
        *counted, stop, idle, settled = self._strategy.exchange(counters)
        losses, tokens = counted[: len(self._pending)], counted[len(self._pending) :]
        self._stop = stop > 0
        self._keep_up(idle, settled)
        summed = time.perf_counter()
        for micro, loss in zip(self._pending, losses, strict=True):
            if not math.isfinite(loss):
                raise Diverged(f"loss is not finite at iteration {micro.iteration}")
        with self._rescue.changing():
            norm = self._step(sum(tokens))
            updated = time.perf_counter()
            self._updates += 1
            self._tell(losses, tokens, summed - begun, updated - summed, norm)
            self._rescue.hold(self._snapshot(self._pending[-1].iteration))
        self._pending = []

    def _snapshot(self, iteration: int) -> Snapshot:
        return Snapshot(iteration, self._updates, self._window.counted, self._strategy.state())

    def _keep_up(self, idle: float, settled: float) -> None:
        """What the sums say of the checkpoints: once one is whole, what earlier attempts have rescued is older."""
        before = self._periodic.committed
        self._periodic.agree(idle, settled)
        if before is None and self._periodic.committed is not None:
            self._rescue.forget()

    def _look_at_own(self) -> None:
        """This rank's loss and gradient norm before they are summed: how the consistency of the ranks is judged."""
        begun, last = time.perf_counter(), self._pending[-1]
        tokens = sum(micro.share.tokens for micro in self._pending)
        loss = sum(micro.share.loss_sum for micro in self._pending) / tokens if tokens else None
        norm = self._strategy.own_norm(tokens)
        last.own = {"update": self._updates + 1, "own_loss": loss, "own_grad_norm": norm}
        last.own_s = time.perf_counter() - begun

    def _step(self, tokens: float) -> float | None:
        """Apply the summed gradients; their mean's norm, or None when there was no target anywhere."""
        iteration = self._pending[-1].iteration
        norm = self._strategy.apply(tokens)
        if norm is None:
            self._reporter.warn(f"iteration {iteration}: no token is a target, so nothing was learned from it")
        elif not math.isfinite(norm):
            raise Diverged(f"gradient is not finite at iteration {iteration}")
        return norm

    def _tell(
        self, losses: list[float], tokens: list[float], communicate_s: float, update_s: float, norm: float | None
    ) -> None:
        for micro, loss, count in zip(self._pending, losses, tokens, strict=True):
            boundary, share = micro is self._pending[-1], micro.share
            mean = loss / count if count else None
            compute_s = share.compute_s + micro.own_s
            exchange_s = share.communicate_s + (communicate_s if boundary else 0.0)
            apply_s = update_s if boundary else 0.0
            self._reporter.event(
                "step",
                iteration=micro.iteration,
                loss=mean,
                tokens=int(count),
                data_s=share.data_s,
                compute_s=compute_s,
                communicate_s=exchange_s,
                update_s=apply_s,
                grad_norm=norm if boundary else None,
                peak_memory_bytes=mx.get_peak_memory(),
                **micro.own,
            )
            self._window.add(mean, int(count), share.data_s + compute_s + exchange_s + apply_s)
            if micro.iteration % self._job.steps_per_report == 0 or micro.iteration == self._job.iters:
                values = self._window.close(micro.iteration, self._strategy.learning_rate)
                self._reporter.report(self._job.iters, values)

    def _leave(self, outcome: Outcome) -> Outcome:
        # What was never trained must not replace what an earlier run has left.
        if outcome.iteration > 0:
            if not self._replicas.compare(outcome.iteration, self._updates):
                return self._part()
            self._saver.save(outcome.iteration, last=True)
            # A run that was stopped can go on where it was; one that is complete needs no more than its weights.
            self._periodic.finish(None if outcome.completed else self._snapshot(outcome.iteration))
            if not outcome.completed and not self._periodic.on:
                # Without checkpoints too; and an older rescue must not be what it goes on from.
                self._rescue.keep()
            # Who leaves first would take the others down.
            self._collective.barrier()
            if outcome.completed:
                self._rescue.forget_all()
        return outcome

    def _part(self) -> Outcome:
        """The replicas differ: all ranks leave together, at the last iteration where they agreed as far as that has
        been kept. What is on disk is of that iteration or from before. Raises Corrupted on the ranks that differ."""
        found, agreed = self._replicas.difference, self._replicas.agreed_at or 0
        assert found is not None
        said = self._replicas.words()
        if agreed > 0 and self._saver.saved != agreed and self._replicas.restore():
            self._saver.save(agreed, last=True)
        saved = self._saver.saved
        kept = f"kept: what was saved at iteration {saved}" if saved is not None else "nothing was saved"
        self._reporter.say(f"{said}; {kept}")
        if self._collective.rank in found.ranks:
            raise Corrupted(f"{said}; {kept}", found.ranks, certain=found.certain)
        return Outcome(False, True, agreed)
