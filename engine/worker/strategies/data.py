"""Strategy "data": every rank holds the whole model and computes its share of each global batch.

One update is the single machine's: sums of gradients, losses and tokens go through one all_sum, then are divided. The
stop request rides in the same sum, so that all ranks leave after the same update.
"""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from .. import checkpoints
from ..arrays import floats, number
from ..collective import Collective
from ..control import Control
from ..data import Split
from ..feed import Feed
from ..job import Job, JobError
from ..optimizer import Updater
from ..replicas import Corrupted, Replicas
from ..reporting import Reporter, ReportWindow
from ..sampler import Indices, share_counts, share_slice
from .gradients import Gradients

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
    """One iteration as this rank saw it: a sum of cross-entropies, target tokens, seconds."""

    iteration: int
    loss_sum: float
    tokens: int
    data_s: float
    compute_s: float
    own: dict[str, float | None] = field(default_factory=dict)
    """Of the update that it ends: what this rank says for itself."""


class DataParallel:
    """One rank's training loop."""

    def __init__(
        self,
        *,
        job: Job,
        model: nn.Module,
        train: Split,
        valid: Split,
        collective: Collective,
        shares: list[float],
        control: Control,
        reporter: Reporter,
        replicas: Replicas,
    ) -> None:
        """Raises JobError when the batch is too small for the ranks or too large for the data."""
        self._job = job
        self._model = model
        self._valid = valid
        self._collective = collective
        self._control = control
        self._reporter = reporter
        self._replicas = replicas
        try:
            self._counts = share_counts(job.batch_size, shares)
            self._feed = Feed(train, job, self._counts, collective.rank, reporter)
        except ValueError as error:
            raise JobError(f"[job] batch_size = {job.batch_size}: {error}") from error
        self._gradients = Gradients(model)
        self._updater = Updater(job, model)
        self._window = ReportWindow()
        self._pending: list[_Micro] = []
        self._sums: list[mx.array] | None = None
        self._stop = False
        self._updates = 0
        self._saved: int | None = None

    @property
    def in_16_bits(self) -> bool:
        """Whether any trained parameter has only 16 bits."""
        return any(dtype.size < 4 for dtype in self._updater.dtypes.values())

    def run(self) -> Outcome:
        """Train until the last iteration or an agreed stop, and save. Raises Diverged, Corrupted, PeerLost, OSError."""
        job = self._job
        self._model.train()
        # From here on, dropout: other numbers on every rank.
        mx.random.seed(job.seed * 65_537 + self._collective.rank + 1)
        if not self._replicas.compare(0, 0):
            return self._part()
        for iteration in range(1, job.iters + 1):
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
                if self._replicas.due(self._updates) and not self._replicas.compare(iteration, self._updates):
                    return self._part()
            self._feed.finish(iteration - 1)
            if self._stop and iteration < job.iters:
                return self._leave(Outcome(False, True, iteration))
            if iteration % job.save_every == 0:
                if not self._replicas.compare(iteration, self._updates):
                    return self._part()
                self._save(iteration, last=False)
            if mx.get_cache_memory() > (job.clear_cache_threshold or _CACHE_BYTES):
                mx.clear_cache()
        return self._leave(Outcome(True, self._stop, job.iters))

    def evaluate(self, examples: Split, limit: int) -> float | None:
        """Mean cross-entropy over all target tokens of `limit` batches; None without targets or when stopped."""
        self._model.eval()
        loss, tokens = 0.0, 0.0
        for indices in examples.fixed_batches(self._job.batch_size, self._job.seed, limit):
            mine = self._mine(indices)
            batch = examples.batch(mine) if len(mine) else None
            sums = [self._gradients.loss(batch), float(batch.targets)] if batch else [0.0, 0.0]
            # A whole validation may take longer than a stop has time: the request is looked for in every batch.
            total = floats(self._collective.sum(mx.array([*sums, float(self._control.stop_asked)])))
            loss, tokens = loss + total[0], tokens + total[1]
            if total[2]:
                self._stop = True
                break
        self._model.train()
        return None if self._stop or not tokens else loss / tokens

    def _mine(self, indices: Indices) -> Indices:
        return indices[share_slice(len(indices), self._counts, self._collective.rank)]

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
        """This rank's share of one global batch, added to the sums of the update under way."""
        begun = time.perf_counter()
        batch = self._feed.batch(iteration - 1)
        ready = time.perf_counter()
        loss, buckets = self._gradients.of(batch)
        if self._sums is not None:
            buckets = [mine + before for mine, before in zip(buckets, self._sums, strict=True)]
            mx.eval(buckets)
        self._sums = buckets
        compute = time.perf_counter() - ready
        self._pending.append(_Micro(iteration, loss, batch.targets, ready - begun, compute))

    def _update(self) -> None:
        """Sum over the ranks, divide by the tokens, and take one optimizer step; then tell of the iterations."""
        assert self._sums is not None
        self._look_at_own(self._sums)
        begun = time.perf_counter()
        counters = [micro.loss_sum for micro in self._pending] + [float(micro.tokens) for micro in self._pending]
        *buckets, last = self._sums
        # Counters of float32 are exact up to 16 million tokens an iteration.
        tail = mx.concatenate([last, mx.array([*counters, float(self._control.stop_asked)])])
        totals = [self._collective.sum(bucket) for bucket in [*buckets, tail]]
        *counted, stop = floats(totals[-1][last.size :])
        losses, tokens = counted[: len(self._pending)], counted[len(self._pending) :]
        self._stop = stop > 0
        summed = time.perf_counter()
        for micro, loss in zip(self._pending, losses, strict=True):
            if not math.isfinite(loss):
                raise Diverged(f"loss is not finite at iteration {micro.iteration}")
        norm = self._step(totals, sum(tokens))
        updated = time.perf_counter()
        self._updates += 1
        self._tell(losses, tokens, summed - begun, updated - summed, norm)
        self._pending, self._sums = [], None

    def _look_at_own(self, sums: list[mx.array]) -> None:
        """This rank's loss and gradient norm before they are summed: how the consistency of the ranks is judged."""
        begun, last = time.perf_counter(), self._pending[-1]
        tokens = sum(micro.tokens for micro in self._pending)
        loss = sum(micro.loss_sum for micro in self._pending) / tokens if tokens else None
        norm = self._gradients.norm(sums, tokens) if tokens else None
        last.own = {"update": self._updates + 1, "own_loss": loss, "own_grad_norm": norm}
        last.compute_s += time.perf_counter() - begun

    def _step(self, totals: list[mx.array], tokens: float) -> float | None:
        """Apply the summed gradients; their mean's norm, or None when there was no target anywhere."""
        iteration = self._pending[-1].iteration
        if not tokens:
            self._reporter.warn(f"iteration {iteration}: no token is a target, so nothing was learned from it")
            return None
        norm = number(self._updater.update(self._gradients.unpack(totals, tokens)))
        if not math.isfinite(norm):
            raise Diverged(f"gradient is not finite at iteration {iteration}")
        return norm

    def _tell(
        self, losses: list[float], tokens: list[float], communicate_s: float, update_s: float, norm: float | None
    ) -> None:
        for micro, loss, count in zip(self._pending, losses, tokens, strict=True):
            boundary = micro is self._pending[-1]
            mean = loss / count if count else None
            self._reporter.event(
                "step",
                iteration=micro.iteration,
                loss=mean,
                tokens=int(count),
                data_s=micro.data_s,
                compute_s=micro.compute_s,
                communicate_s=communicate_s if boundary else 0.0,
                update_s=update_s if boundary else 0.0,
                grad_norm=norm if boundary else None,
                peak_memory_bytes=mx.get_peak_memory(),
                **micro.own,
            )
            seconds = micro.data_s + micro.compute_s + (communicate_s + update_s if boundary else 0.0)
            self._window.add(mean, int(count), seconds)
            if micro.iteration % self._job.steps_per_report == 0 or micro.iteration == self._job.iters:
                self._reporter.report(self._job.iters, self._window.close(micro.iteration, self._updater.learning_rate))

    def _leave(self, outcome: Outcome) -> Outcome:
        # What was never trained must not replace what an earlier run has left.
        if outcome.iteration > 0:
            if not self._replicas.compare(outcome.iteration, self._updates):
                return self._part()
            self._save(outcome.iteration, last=True)
        return outcome

    def _part(self) -> Outcome:
        """The replicas differ: all ranks leave together, at the last iteration where they agreed as far as that has
        been kept. What is on disk is of that iteration or from before. Raises Corrupted on the ranks that differ."""
        found, agreed = self._replicas.difference, self._replicas.agreed_at or 0
        assert found is not None
        said = self._replicas.words()
        if agreed > 0 and self._saved != agreed and self._replicas.restore():
            self._save(agreed, last=True)
        kept = f"kept: what was saved at iteration {self._saved}" if self._saved is not None else "nothing was saved"
        self._reporter.say(f"{said}; {kept}")
        if self._collective.rank in found.ranks:
            raise Corrupted(f"{said}; {kept}", found.ranks, certain=found.certain)
        return Outcome(False, True, agreed)

    def _save(self, iteration: int, *, last: bool) -> None:
        """Rank 0 writes the adapters, the others wait. A full disk is a warning, except for the last save. Parameters
        that are known to be corrupted are not written: those of a rank that has sound ones are. Raises Corrupted when
        nobody has, at the last save."""
        self._reporter.phase("saving")
        saved = False
        sound = self._replicas.sound
        if sound is None:
            found = self._replicas.difference
            assert found is not None
            said = f"not saved: {self._replicas.words()}"
            if last:
                raise Corrupted(said, found.ranks, certain=found.certain)
            self._reporter.warn(said)
            return
        own = tree_flatten(self._model.trainable_parameters())
        if sound != 0:
            theirs = self._replicas.trained_of(sound)
            if self._collective.rank == 0:
                self._reporter.warn(f"saved are the parameters of rank {sound}: those of rank 0 are corrupted")
                self._model.update(tree_unflatten(list(theirs.items())))
        if self._collective.rank == 0:
            # As in mlx-lm, the end of the training has no numbered file of its own.
            numbered = not last or iteration < self._job.iters
            begun = time.perf_counter()
            where = str(self._job.adapter_path)
            self._reporter.event("checkpoint", phase="begin", iteration=iteration, path=where)
            try:
                path, size = checkpoints.save_adapters(self._job, self._model, iteration if numbered else None)
            except OSError as error:
                if last:
                    raise
                self._reporter.warn(f"iteration {iteration}: not saved: {error}")
            else:
                saved = True
                seconds = time.perf_counter() - begun
                self._reporter.event(
                    "checkpoint", phase="committed", iteration=iteration, path=str(path), bytes=size, seconds=seconds
                )
                self._reporter.say(f"saved {path}")
            finally:
                self._model.update(tree_unflatten(own))
        # Nobody goes on before it is done, and all know whether it is.
        if number(self._collective.sum(mx.array(float(saved)))) > 0:
            self._saved = iteration
