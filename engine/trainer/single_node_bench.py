"""The trainer's step on one machine without peers, timed and probed for memory; and the synthetic model and data
that are measured for a job with its own command."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from engine.protocol.job import Job
from engine.protocol.measurements import MeasureReport, MeasureSpec
from engine.trainer.collective import Collective
from engine.trainer.model import limit_cache, load_model, row_format, set_up_device
from engine.trainer.strategies.data_parallel import DataParallel
from engine.training.data import Batch, load_train_split, with_standard_data
from engine.training.sampler import Indices, dropout_seed

SYNTHETIC_VOCABULARY = 384
SYNTHETIC_LENGTH = 129
"""Tokens of each example."""
SYNTHETIC_EXAMPLES = 64


class SyntheticData:
    """Examples of one length, the same on every node."""

    def __init__(self) -> None:
        self._tokens = np.random.default_rng(7).integers(
            0, SYNTHETIC_VOCABULARY, (SYNTHETIC_EXAMPLES, SYNTHETIC_LENGTH), np.int32
        )

    def batch(self, indices: Sequence[int] | Indices) -> Batch:
        rows = np.asarray(indices) % SYNTHETIC_EXAMPLES
        bounds = np.tile(np.asarray([1, SYNTHETIC_LENGTH], np.int32), (len(rows), 1))
        return Batch(self._tokens[rows], bounds, len(rows) * (SYNTHETIC_LENGTH - 1))


def synthetic_model(batch_size: int, home: Path) -> tuple[Job, nn.Module]:
    """The job, and its model with everything but embeddings, norm and head trained, as in mlx-lm's "full"."""
    mx.random.seed(7)
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=128,
            num_hidden_layers=2,
            intermediate_size=320,
            num_attention_heads=4,
            num_key_value_heads=4,
            rms_norm_eps=1e-5,
            vocab_size=SYNTHETIC_VOCABULARY,
            tie_word_embeddings=False,
        )
    )
    model.freeze()
    for layer in model.layers:
        layer.unfreeze()
    mx.eval(model.parameters())
    job = Job(home, home, home, home, fine_tune_type="full", batch_size=batch_size, max_seq_length=SYNTHETIC_LENGTH)
    return job, model


def load_trainer(spec: MeasureSpec, home: Path) -> SingleNodeTrainer:
    """Loads model and data as the trainer does. `home`: for what is indexed. Raises JobError."""
    os.chdir(spec.workdir)
    if spec.job is None:
        job, model = synthetic_model(spec.batch, home)
        set_up_device(job)
        return SingleNodeTrainer(
            job, model, SyntheticData(), lambda position: np.arange(spec.batch) + position * spec.batch, spec.ranks
        )
    there = Job.from_spec(spec.job, model=spec.model, data=spec.data, workdir=Path(spec.workdir), home=home)
    # What is measured is a step of so many sequences.
    job = replace(with_standard_data(there), batch_tokens=None)
    set_up_device(job)
    model, tokenizer = load_model(job)
    train = load_train_split(job, row_format(job, tokenizer), lambda longest: None)
    return SingleNodeTrainer(job, model, train, train.sampler(job.batch_size, job.seed).batch, spec.ranks)


PROBE_BATCHES = (1, 2)
"""Batches whose peak memory is measured: the peak is affine in the batch."""
WARM_UP_STEPS = 2
WINDOWS = 10
"""The spread is over their throughputs."""
_SECOND_BATCH_FRACTION = 0.2
"""Share of a window for steps of the second batch."""
_LEAST_PROBE_STEPS, _PROBE_STEPS = 2, 5
"""Steps of a memory probe, the fewest where they are slow: one may show less than the peak, as MLX frees late."""


class BatchSource(Protocol):
    def batch(self, indices: Indices) -> Batch: ...


class SingleNodeTrainer:
    """The iterations of strategy "data", without peers, checkpoints or reports."""

    def __init__(
        self, job: Job, model: nn.Module, data: BatchSource, order: Callable[[int], Indices], ranks: int = 1
    ) -> None:
        """`order`: the examples of the n-th global batch. With several `ranks` gradients are kept as if exchanged."""
        self._job = job
        self._data = data
        self._order = order
        self._strategy = DataParallel(job, model, cast("Any", None), Collective("any", 1, 0), ranks)
        mx.eval(self._strategy.state())
        self._targets = 0
        self._position = 0
        model.train()
        trainable = tree_flatten(model.trainable_parameters())
        self.gradient_bytes = sum(4 * value.size for _, value in trainable)
        """Bytes of an all_sum of the gradients (float32)."""

    def step(self, batch_size: int) -> tuple[float, int]:
        """One iteration with `batch_size` examples of the next global batch; its seconds and target tokens."""
        started = time.perf_counter()
        batch = self._data.batch(np.resize(self._order(self._position), batch_size))
        self._position += 1
        mx.random.seed(dropout_seed(self._job.seed, self._position, 0))
        last = self._position % self._job.grad_accumulation_steps == 0
        self._accumulate(batch, last=last)
        if last:
            self._strategy.exchange([])
            self._apply()
        limit_cache(self._job)
        return time.perf_counter() - started, batch.targets

    def probe(
        self, batch_size: int, seconds: float = math.inf, on_step: Callable[[], object] = lambda: None
    ) -> tuple[int, int]:
        """Steps of full length, as many as begin within `seconds`; MLX's bytes of the state (weights, moments, and the
        gradients held until the update) in the first, and the peak. `on_step` is called after each."""
        batch = self._full(batch_size)
        states = list[int]()
        mx.clear_cache()
        mx.reset_peak_memory()
        started = time.monotonic()
        while len(states) < _LEAST_PROBE_STEPS or (len(states) < _PROBE_STEPS and time.monotonic() - started < seconds):
            before = mx.get_active_memory()
            if self._job.grad_accumulation_steps > 1:
                self._accumulate(batch, last=False)
            self._accumulate(batch, last=True)
            self._strategy.exchange([])
            states.append(before + self._strategy.gradients.nbytes)
            self._apply()
            on_step()
        return states[0], mx.get_peak_memory()

    def _accumulate(self, batch: Batch, *, last: bool) -> None:
        self._targets += self._strategy.forward_backward(batch, last=last)[1]

    def _apply(self) -> None:
        self._strategy.apply(self._targets)
        self._targets = 0

    def _full(self, batch_size: int) -> Batch:
        """Real tokens, repeated to the job's full length."""
        length = max(self._job.max_seq_length, 2)
        tokens = self._data.batch(self._order(0)).tokens
        filled = np.resize(tokens[tokens != 0] if np.any(tokens) else tokens, (batch_size, length))
        bounds = np.tile(np.asarray([1, length], np.int32), (batch_size, 1))
        return Batch(filled.astype(np.int32), bounds, batch_size * (length - 1))


Step = Callable[[int], tuple[float, int]]


def second_batch(batch: int) -> int:
    """Measured beside `batch`: the two give a step's fixed overhead."""
    return 1 if batch > 1 else 2


def measure(
    step: Step,
    seconds: float,
    report: MeasureReport,
    on_window: Callable[[], object],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Steps of `report.batch` and of a second batch in turn, window by window, for about `seconds`, at least one
    window; the figures are in `report` after each, those of `report.batch` even when the second batch hangs."""
    assert report.batch is not None
    batch, other, length = report.batch, second_batch(report.batch), seconds / WINDOWS
    times: list[float] = []
    other_times: list[float] = []
    tokens, throughputs, started = 0, list[float](), clock()
    while report.measured_s < seconds:
        taken, targets = _steps(step, batch, length * (1 - _SECOND_BATCH_FRACTION), clock)
        throughputs.append(batch * len(taken) / sum(taken))
        times, tokens = times + taken, tokens + targets
        mean = statistics.fmean(times)
        report.steps, report.windows, report.measured_s = len(times), len(throughputs), clock() - started
        report.examples_per_s = batch / mean
        report.tokens_per_s = tokens / sum(times)
        report.step_s = statistics.median(times)
        if len(throughputs) > 1:
            # The coefficient of variation: sample standard deviation over mean.
            report.spread = statistics.stdev(throughputs) / statistics.fmean(throughputs)
        other_times += _steps(step, other, length * _SECOND_BATCH_FRACTION, clock)[0]
        other_mean, report.measured_s = statistics.fmean(other_times), clock() - started
        # The line through both batches' mean steps, at batch 0.
        report.overhead_s = min(max(0.0, mean - batch * (mean - other_mean) / (batch - other)), mean)
        on_window()


def _steps(step: Step, batch: int, seconds: float, clock: Callable[[], float]) -> tuple[list[float], int]:
    """The seconds of each step, at least one, and the target tokens of all."""
    started, times, tokens = clock(), list[float](), 0
    while not times or clock() - started < seconds:
        taken, targets = step(batch)
        times.append(taken)
        tokens += targets
    return times, tokens
