"""What the job leaves while it trains and at its end: rank 0 writes the adapters, the others wait."""

from __future__ import annotations

import time
from pathlib import Path

import mlx.core as mx

from . import checkpoints, model_directory
from .arrays import number
from .collective import Collective
from .job import Job
from .replicas import Corrupted, Replicas
from .reporting import Reporter
from .strategies.strategy import Strategy
from .streamed import Weights


class Saver:
    """The saves of one run. Every call is made by every rank."""

    def __init__(
        self, job: Job, strategy: Strategy, collective: Collective, replicas: Replicas, reporter: Reporter
    ) -> None:
        self._job = job
        self._strategy = strategy
        self._collective = collective
        self._replicas = replicas
        self._reporter = reporter
        self.saved: int | None = None
        """The iteration of the last save that came about."""

    def save(self, iteration: int, *, last: bool) -> None:
        """Write the adapters. A full disk is a warning, except for the last save. Parameters that are known to be
        corrupted are not written: those of a rank that has sound ones are. Raises Corrupted when nobody has, at the
        last save; OSError, PeerLost."""
        self._reporter.phase("saving")
        sound = self._replicas.sound
        if sound is None:
            self._refuse(last=last)
            return
        weights = self._strategy.trained() if sound == 0 else Weights.of(self._replicas.trained_of(sound))
        written = False
        if self._collective.rank == 0:
            if sound != 0:
                self._reporter.warn(f"saved are the parameters of rank {sound}: those of rank 0 are corrupted")
            written = self._write(weights, iteration, last=last)
        weights.drain()
        if last and self._job.fine_tune_type == "full" and not self._strategy.replicated:
            self._write_model(iteration)
        # Nobody goes on before it is done, and all know whether it is.
        if number(self._collective.sum(mx.array(float(written)))) > 0:
            self.saved = iteration

    def _refuse(self, *, last: bool) -> None:
        found = self._replicas.difference
        assert found is not None
        said = f"not saved: {self._replicas.words()}"
        if last:
            raise Corrupted(said, found.ranks, certain=found.certain)
        self._reporter.warn(said)

    def _write_model(self, iteration: int) -> None:
        """The whole model, beside its trained parameters: no rank has it otherwise. Raises OSError, PeerLost."""
        weights = self._strategy.whole()
        if self._collective.rank == 0:
            path, begun = self._job.adapter_path / "model", time.perf_counter()
            self._begin(iteration, path)
            try:
                size = model_directory.write(path, self._job.model, weights)
            finally:
                weights.drain()
            self._committed(iteration, path, size, begun)
        weights.drain()

    def _write(self, weights: Weights, iteration: int, *, last: bool) -> bool:
        """Whether the disk has taken it."""
        # As in mlx-lm, the end of the training has no numbered file of its own.
        numbered = iteration if not last or iteration < self._job.iters else None
        begun = time.perf_counter()
        self._begin(iteration, self._job.adapter_path)
        try:
            path, size = checkpoints.save_adapters(self._job, weights, numbered)
        except OSError as error:
            weights.drain()
            if last:
                raise
            self._reporter.warn(f"iteration {iteration}: not saved: {error}")
            return False
        self._committed(iteration, path, size, begun)
        return True

    def _begin(self, iteration: int, where: Path) -> None:
        self._reporter.event("checkpoint", phase="begin", iteration=iteration, path=str(where))

    def _committed(self, iteration: int, path: Path, size: int, begun: float) -> None:
        seconds = time.perf_counter() - begun
        self._reporter.event(
            "checkpoint", phase="committed", iteration=iteration, path=str(path), bytes=size, seconds=seconds
        )
        self._reporter.say(f"saved {path}")
