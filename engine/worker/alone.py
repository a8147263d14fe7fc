"""The trainer's step on one machine alone, timed: what a node does with the job when it waits for nobody."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from .data import Batch
from .dropout import dropout_seed
from .job import Job
from .optimizer import Updater
from .sampler import Indices
from .strategies.gradients import Gradients

PROBES = (1, 2)
"""Batches whose peak memory is looked at: the peak is affine in the batch."""
WARM_UP_STEPS = 2
WINDOWS = 10
"""Of the measurement: the spread is over their throughputs."""
_OTHER_PART = 0.2
"""Of a window's time, for steps of another batch: what a step costs whatever its batch follows from the two."""
_PROBE_STEPS = 5
"""Of a memory probe: MLX frees what a step is done with while the next operation runs, so that one step alone may show
less than it can take."""
_CACHE_BYTES = 2**30


class Data(Protocol):
    def batch(self, indices: Indices) -> Batch: ...


@dataclass
class Steps:
    """Steps of one batch."""

    batch: int
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds.append(seconds)
        self.tokens += tokens

    @property
    def total_s(self) -> float:
        return sum(self.seconds)

    @property
    def examples_per_s(self) -> float | None:
        return self.batch * len(self.seconds) / self.total_s if self.seconds else None

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.seconds)


class Alone:
    """One rank's training as the trainer does it, without peers, checkpoints or reports."""

    def __init__(self, job: Job, model: nn.Module, data: Data, order: Callable[[int], Indices]) -> None:
        """`order` gives the examples of the n-th global batch."""
        self._job = job
        self._data = data
        self._order = order
        self._gradients = Gradients(model)
        self._updater = Updater(job, model)
        self._updater.evaluate()
        self._sums: list[mx.array] | None = None
        self._targets = 0
        self._position = 0
        model.train()
        trainable = tree_flatten(model.trainable_parameters())
        self.gradient_bytes = sum(4 * value.size for _, value in trainable)
        """What an all_sum of the gradients carries: float32."""

    def step(self, batch_size: int) -> tuple[float, int]:
        """One iteration with the first `batch_size` examples of the next global batch: seconds, and target tokens."""
        begun = time.perf_counter()
        indices = np.resize(self._order(self._position), batch_size)
        batch = self._data.batch(indices)
        self._position += 1
        mx.random.seed(dropout_seed(self._job.seed, self._position, 0))
        self._accumulate(batch)
        if self._position % self._job.grad_accumulation_steps == 0:
            self._update()
        if mx.get_cache_memory() > (self._job.clear_cache_threshold or _CACHE_BYTES):
            mx.clear_cache()
        return time.perf_counter() - begun, batch.targets

    def probe(self, batch_size: int) -> tuple[int, int]:
        """Steps with `batch_size` sequences of the job's full length: bytes of the state (weights, gradients and
        moments) in the first, and of the highest peak; both are MLX's own figures."""
        batch = self._full(batch_size)
        states = []
        mx.clear_cache()
        mx.reset_peak_memory()
        for _ in range(_PROBE_STEPS):
            self._accumulate(batch)
            if self._job.grad_accumulation_steps > 1:
                self._accumulate(batch)
            states.append(mx.get_active_memory())
            self._update()
        return states[0], mx.get_peak_memory()

    def _accumulate(self, batch: Batch) -> None:
        _, buckets = self._gradients.of(batch)
        if self._sums is not None:
            buckets = [mine + before for mine, before in zip(buckets, self._sums, strict=True)]
            mx.eval(buckets)
        self._sums = buckets
        self._targets += batch.targets

    def _update(self) -> None:
        assert self._sums is not None
        if self._targets:
            self._updater.update(self._gradients.unpack(self._sums, self._targets))
        self._sums, self._targets = None, 0

    def _full(self, batch_size: int) -> Batch:
        """Real tokens, repeated until they fill the job's length."""
        length = max(self._job.max_seq_length, 2)
        tokens = self._data.batch(self._order(0)).tokens
        filled = np.resize(tokens[tokens != 0] if np.any(tokens) else tokens, (batch_size, length))
        bounds = np.tile(np.asarray([1, length], np.int32), (batch_size, 1))
        return Batch(filled.astype(np.int32), bounds, batch_size * (length - 1))


class Measurement:
    """Steps of two batches in turn, window by window; can be asked at any moment."""

    def __init__(
        self, training: Alone, batch: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`batch` is the one that is measured, for about `seconds`."""
        self._training = training
        self.seconds = seconds
        self._clock = clock
        self.steps = Steps(batch)
        self.others = Steps(1 if batch > 1 else 2)
        self.throughputs: list[float] = []
        """Of each window, examples per second."""
        self.elapsed_s = 0.0
        self.on_step: Callable[[], object] = lambda: None
        """Called when a step has ended."""

    def run(self, on_window: Callable[[], None]) -> None:
        """Measure until the time is over; at least one window."""
        begun = self._clock()
        while self.elapsed_s < self.seconds:
            self._window()
            self.elapsed_s = self._clock() - begun
            on_window()

    @property
    def spread(self) -> float | None:
        """Coefficient of variation of the windows' throughputs (standard deviation of a sample over mean)."""
        if len(self.throughputs) < 2:
            return None
        return statistics.stdev(self.throughputs) / statistics.fmean(self.throughputs)

    @property
    def overhead_s(self) -> float | None:
        """What a step costs whatever its batch: where the line through both batches' mean steps meets batch 0."""
        one, two = self.steps, self.others
        if not one.seconds or not two.seconds:
            return None
        slope = (one.mean_s - two.mean_s) / (one.batch - two.batch)
        return min(max(0.0, one.mean_s - slope * one.batch), one.mean_s)

    def _window(self) -> None:
        window = Steps(self.steps.batch)
        length = self.seconds / WINDOWS
        self._until(window, length * (1 - _OTHER_PART))
        self.steps.seconds += window.seconds
        self.steps.tokens += window.tokens
        throughput = window.examples_per_s
        assert throughput is not None
        self.throughputs.append(throughput)
        self._until(self.others, length * _OTHER_PART)

    def _until(self, steps: Steps, seconds: float) -> None:
        """At least one step."""
        begun = self._clock()
        while True:
            steps.add(*self._training.step(steps.batch))
            self.on_step()
            if self._clock() - begun >= seconds:
                return
