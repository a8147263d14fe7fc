"""What calibration times is the trainer's own step; its figures follow from the steps alone."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from engine.protocol.job import Job
from engine.protocol.measurements import MeasureReport, MeasureSpec
from engine.trainer import calibrate
from engine.trainer.model import load_model, row_format
from engine.trainer.single_node_bench import (
    PROBE_BATCHES,
    WINDOWS,
    SingleNodeTrainer,
    SyntheticData,
    load_trainer,
    measure,
    synthetic_model,
)
from engine.trainer.strategies import data_parallel
from engine.trainer.strategies.data_parallel import WholeStep
from engine.training.data import Batch, Split
from tests.training.test_update import train
from tests.training.tiny import Tiny, make_job


def alone(job: Job, ranks: int = 1) -> tuple[SingleNodeTrainer, Any]:
    model, tokenizer = load_model(job)
    data = Split(job, "train", row_format(job, tokenizer), lambda _: None)
    return SingleNodeTrainer(job, model, data, data.sampler(job.batch_size, job.seed).batch, ranks), model


@pytest.mark.parametrize(
    "keys",
    [{}, {"grad_accumulation_steps": 3, "iters": 6}, {"fine_tune_type": "lora", "lora_parameters": {"dropout": 0.1}}],
)
def test_its_steps_are_the_trainers_to_the_bit(tiny: Tiny, tmp_path: Path, keys: dict[str, Any]) -> None:
    trained = train(tiny, tmp_path, **keys)
    training, model = alone(make_job(tiny, tmp_path, **keys))
    tokens = sum(training.step(trained.job.batch_size)[1] for _ in range(trained.job.iters))
    weights = trained.weights()
    assert all(mx.array_equal(value, weights[name]) for name, value in tree_flatten(model.trainable_parameters()))
    assert tokens == sum(step["tokens"] for step in trained.of("step"))


def test_on_a_gpu_it_takes_whole_steps_as_the_trainer_does(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_parallel, "compiles", lambda job: True)
    widths: list[int] = []
    run = WholeStep.run

    def noted(step: WholeStep, batch: Batch) -> tuple[float, float]:
        widths.append(batch.tokens.shape[1])
        return run(step, batch)

    monkeypatch.setattr(WholeStep, "run", noted)
    job = train(tiny, tmp_path).job
    trained, widths[:] = list(widths), []
    training, _ = alone(make_job(tiny, tmp_path))
    for _ in range(job.iters):
        training.step(job.batch_size)
    assert len(trained) == job.iters and widths == trained
    training.probe(job.batch_size)
    assert set(widths[job.iters :]) == {job.max_seq_length}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_probe_measures_state_and_peak_at_the_full_length(tiny: Tiny, tmp_path: Path, ranks: int) -> None:
    training, model = alone(make_job(tiny, tmp_path), ranks)
    everything = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    # What earlier tests have left must not go while it is measured.
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        found = [training.probe(batch) for batch in (*PROBE_BATCHES, 4)]
    finally:
        gc.enable()
    # Beside what was there (weights, and Adam's moments), the gradients of a job of several ranks.
    held = training.gradient_bytes if ranks > 1 else 0
    assert held <= found[0][0] - before < held + 4096
    assert before > everything + 2 * training.gradient_bytes
    peaks = [peak for _, peak in found]
    assert peaks[0] < peaks[1] < peaks[2]
    # Affine, as far as so small a model shows it: what is in flight at the peak differs from run to run.
    assert peaks[2] - peaks[1] == pytest.approx(2 * (peaks[1] - peaks[0]), rel=0.5)


class FixedTimes:
    """Steps that take what a formula says, on a clock of its own."""

    def __init__(self, overhead_s: float, per_example_s: float | Iterator[float]) -> None:
        self.now = 0.0
        self.steps: list[tuple[int, float]] = []
        """The batch and the seconds of each."""
        self._overhead_s = overhead_s
        self._per_example_s = per_example_s if not isinstance(per_example_s, float) else iter(lambda: per_example_s, 0)

    def step(self, batch_size: int) -> tuple[float, int]:
        seconds = self._overhead_s + batch_size * next(self._per_example_s)
        self.now += seconds
        self.steps.append((batch_size, seconds))
        return seconds, batch_size * 10


def measured(paced: FixedTimes, batch: int, seconds: float) -> MeasureReport:
    report = MeasureReport(batch=batch)
    measure(paced.step, seconds, report, lambda: None, clock=lambda: paced.now)
    return report


@pytest.mark.parametrize("batch", [1, 4])
def test_throughput_and_what_a_step_costs_whatever_its_batch(batch: int) -> None:
    found = measured(FixedTimes(0.02, 0.01), batch, 30.0)
    assert found.examples_per_s == pytest.approx(batch / (0.02 + batch * 0.01))
    assert found.tokens_per_s == pytest.approx(10 * batch / (0.02 + batch * 0.01))
    assert found.step_s == pytest.approx(0.02 + batch * 0.01)
    assert found.overhead_s == pytest.approx(0.02)
    assert found.spread == pytest.approx(0)
    assert 30.0 <= found.measured_s < 34.0


def test_the_spread_is_over_windows_and_says_how_unsteady_it_was() -> None:
    slower = (0.01 * (1 + step / 1000) for step in count())
    paced = FixedTimes(0.0, slower)
    found = measured(paced, 4, 20.0)
    windows = [[seconds for _, seconds in steps] for batch, steps in groupby(paced.steps, itemgetter(0)) if batch == 4]
    throughputs = [4 / np.mean(times) for times in windows]
    assert WINDOWS - 2 <= found.windows == len(throughputs) <= WINDOWS
    assert found.spread is not None and found.spread == pytest.approx(
        np.std(throughputs, ddof=1) / np.mean(throughputs)
    )
    assert found.spread > 0.05


def test_a_second_batch_that_hangs_loses_nothing_of_the_first_one() -> None:
    paced, report = FixedTimes(0.0, 0.01), MeasureReport(batch=4)

    def step(batch: int) -> tuple[float, int]:
        # As far as the report goes, an error is the same.
        return paced.step(batch) if batch == 4 else pytest.fail("it hangs")

    with pytest.raises(pytest.fail.Exception):
        measure(step, 10.0, report, lambda: None, clock=lambda: paced.now)
    assert (report.windows, report.steps, report.overhead_s) == (1, 20, None)
    assert (report.step_s, report.examples_per_s, report.tokens_per_s) == pytest.approx((0.04, 100.0, 1000.0))
    assert report.measured_s == pytest.approx(20 * 0.04)


def test_a_step_that_outlasts_the_measurement_is_measured_once() -> None:
    found = measured(FixedTimes(0.0, 100.0), 2, 10.0)
    assert found.steps == 1 and found.spread is None
    assert found.examples_per_s == pytest.approx(0.01)


def run(spec: MeasureSpec, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    (folder / "spec.json").write_text(json.dumps(asdict(spec)))
    argv = [sys.executable, "-m", "engine.trainer.calibrate", str(folder / "spec.json")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def spec(tiny: Tiny, folder: Path, job: dict[str, Any] | None, **fields: Any) -> MeasureSpec:
    known: dict[str, Any] = {"workdir": str(folder), "job": job, "model": str(tiny.model), "data": str(tiny.text)}
    return MeasureSpec(**{**known, "batch": 4, "seconds": 0.3, **fields})


def test_the_program_says_how_far_it_is_and_what_it_has_measured(tiny: Tiny, tmp_path: Path) -> None:
    code, output = run(spec(tiny, tmp_path, tiny.job()), tmp_path)
    assert code == 0
    phases = list(dict.fromkeys(line["phase"] for line in output))
    assert phases == ["loading", "probing", "warming up", "measuring", "measured"]
    found = MeasureReport(**output[-1])
    assert found.problem is None and found.batch == 4 and found.steps > 0
    assert found.examples_per_s is not None and found.examples_per_s > 0
    assert found.tokens_per_s is not None and found.tokens_per_s > found.examples_per_s
    assert [probe["batch"] for probe in found.probes] == list(PROBE_BATCHES)
    assert found.state_bytes is not None and found.gradient_bytes is not None
    assert found.qos == ("not on macOS" if sys.platform != "darwin" else found.qos)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spec.json"]


def test_a_job_of_ones_own_has_a_stand_in_that_needs_no_files(tmp_path: Path) -> None:
    own = MeasureSpec(workdir=str(tmp_path), job=None, model=None, data=None, batch=1, seconds=0.3)
    measured = MeasureReport()
    calibrate._measure(own, tmp_path, measured)
    assert measured.examples_per_s is not None and measured.examples_per_s > 0


def test_what_is_missing_is_said_in_one_line(tiny: Tiny, tmp_path: Path) -> None:
    code, output = run(spec(tiny, tmp_path, tiny.job(), model=str(tmp_path / "none")), tmp_path)
    assert code == 1
    assert output[-1]["examples_per_s"] is None
    assert "is not a directory on this node" in output[-1]["problem"]


@pytest.mark.parametrize(
    ("stepped", "speed", "problem"),
    [(False, 0.0, "no step within 60 s"), (True, None, "a step has not ended within 60 s")],
)
def test_only_a_node_that_finishes_no_step_at_all_counts_as_offline(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stepped: bool,
    speed: float | None,
    problem: str,
) -> None:
    class LeftError(Exception):
        """In place of the process's end."""

    def leave(code: int) -> None:
        raise LeftError(code)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(LeftError, match="1"):
        calibrate._give_up(MeasureReport(), 60.0, stepped)
    found = json.loads(capsys.readouterr().out)
    assert (found["examples_per_s"], found["problem"]) == (speed, problem)


def test_the_limit_is_of_each_step_and_follows_the_longest_one() -> None:
    now, polled = [0.0], threading.Semaphore(0)

    def clock() -> float:
        polled.release()
        return now[0]

    late: list[tuple[float, bool]] = []
    reported = threading.Event()

    def on_late(limit_s: float, stepped: bool) -> None:
        late.append((limit_s, stepped))
        reported.set()

    watch = calibrate._StepWatchdog(on_late, clock)
    for seconds in (500.0, 1200.0, 2400.0):
        now[0] += seconds
        watch.step_done()
        for _ in range(6):
            polled.acquire()
        assert late == [], "the first step is long, and so are those after it"
    now[0] += 12_001.0
    assert reported.wait(30)
    watch.end()
    assert late[:1] == [(12_000.0, True)]


def test_a_probe_of_slow_steps_makes_few_and_reports_each(tiny: Tiny, tmp_path: Path) -> None:
    trainer, steps = load_trainer(spec(tiny, tmp_path, tiny.job()), tmp_path), list[int]()
    for seconds, made in ((0.0, 2), (3600.0, 5)):
        steps.clear()
        trainer.probe(1, seconds, lambda: steps.append(1))
        assert len(steps) == made


def test_every_node_has_the_same_synthetic_model(tmp_path: Path) -> None:
    models = [dict(tree_flatten(synthetic_model(4, tmp_path)[1].parameters())) for _ in range(2)]
    assert all(mx.array_equal(value, models[1][name]) for name, value in models[0].items())
    batches = [SyntheticData().batch(np.arange(4)) for _ in range(2)]
    assert np.array_equal(batches[0].tokens, batches[1].tokens)
    assert batches[0].targets == 4 * 128
