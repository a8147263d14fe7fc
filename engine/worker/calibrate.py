"""Measures one node alone: the trainer's own step, with the job's model and data, loaded as the trainer loads them.

    cd <bundle> && exec <python> -m worker.calibrate SPEC

SPEC is the path of a wire.MeasureSpec. Prints JSON objects, one a line: {"progress": MeasureProgress} as it goes, and
at last {"measured": Measured}, whatever happens. Exit code 0 when it has measured, else 1.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .looks.parent import end_with_parent
from .priority import raise_priority, stay_awake
from .wire import Measured, MeasureProgress, MeasureSpec

if TYPE_CHECKING:
    from .alone import Alone, Measurement

_STEP_LIMIT_S = 60.0
"""For each step, or three times that of measuring: a node that does not finish its first one counts as offline."""
_LOOK_EVERY_S = 0.5


def main(arguments: list[str]) -> int:
    spec_path = Path(arguments[0])
    spec = MeasureSpec.from_json(spec_path.read_text())
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.update(spec.env)
    end_with_parent()
    result = Measured(qos="; ".join(dict.fromkeys((raise_priority(), stay_awake(os.getpid())))))
    try:
        _measure(spec, spec_path.parent, result)
    except Exception as error:
        # A JobError is told in its own words, what else may come with its kind.
        kind = type(error).__name__
        result.problem = str(error) if kind == "JobError" else f"{kind}: {error}"
    return _settle(result)


def _measure(spec: MeasureSpec, home: Path, result: Measured) -> None:
    _say(MeasureProgress("loading"))
    training = _training(spec, home)
    result.gradient_bytes = training.gradient_bytes
    result.batch = spec.batch
    from .alone import PROBES, WARM_UP_STEPS, Measurement

    measurement = Measurement(training, spec.batch, spec.seconds)
    watch = _Watch(max(_STEP_LIMIT_S, 3 * spec.seconds), lambda stepped: _give_up(result, measurement, stepped))
    measurement.on_step = watch.beat
    _say(MeasureProgress("probing"))
    for batch in PROBES:
        state, peak = training.probe(batch)
        # The smaller the batch, the less of it is still about.
        result.state_bytes = result.state_bytes or state
        result.probes.append((batch, peak))
        watch.beat()
    _say(MeasureProgress("warming up"))
    for batch in (measurement.others.batch, *[spec.batch] * WARM_UP_STEPS):
        training.step(batch)
        watch.beat()

    def tell() -> None:
        steps = measurement.steps
        _say(MeasureProgress("measuring", measurement.elapsed_s, len(steps.seconds), steps.examples_per_s))

    measurement.run(tell)
    watch.end()
    _fill_in(result, measurement)


def _training(spec: MeasureSpec, home: Path) -> Alone:
    """Loaded as the trainer does."""
    import mlx.core as mx
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    from .alone import Alone
    from .data import load_split
    from .job import Job, JobError
    from .model import load_model

    os.chdir(spec.workdir)
    if mx.default_device() == mx.Device(mx.cpu):
        mx.disable_compile()
    maybe_set_recommended_wired_limit()
    if spec.job is None:
        import numpy as np

        from .stand_in import RandomTokens, stand_in

        job, model = stand_in(spec.batch, home)
        return Alone(job, model, RandomTokens(), lambda position: np.arange(spec.batch) + position * spec.batch)
    job = Job.of(spec.job, model=spec.model, data=spec.data, workdir=Path(spec.workdir), home=home)
    model, tokenizer = load_model(job)
    train = load_split(job, "train", tokenizer, lambda longest: None)
    if not len(train):
        raise JobError(f"{job.data / 'train.jsonl'} is missing or empty: there is nothing to train on")
    try:
        sampler = train.sampler(job.batch_size, job.seed)
    except ValueError as error:
        raise JobError(f"[job] batch_size = {job.batch_size}: {error}") from error
    return Alone(job, model, train, sampler.batch)


def _fill_in(result: Measured, measurement: Measurement) -> None:
    steps = measurement.steps
    result.examples_per_s = steps.examples_per_s
    result.tokens_per_s = steps.tokens / steps.total_s
    result.step_s = statistics.median(steps.seconds)
    result.spread = measurement.spread
    result.windows = len(measurement.throughputs)
    result.overhead_s = measurement.overhead_s
    result.steps = len(steps.seconds)
    result.measured_s = measurement.elapsed_s


class _Watch:
    """Hears each step that has ended, and calls `on_late`, with whether there was any, `limit_s` after the last one."""

    def __init__(
        self, limit_s: float, on_late: Callable[[bool], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit_s
        self._on_late = on_late
        self._clock = clock
        self._beat_at = clock()
        self._stepped = False
        self._over = threading.Event()
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def beat(self) -> None:
        self._stepped, self._beat_at = True, self._clock()

    def end(self) -> None:
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            if self._clock() - self._beat_at > self._limit_s:
                self._on_late(self._stepped)


def _give_up(result: Measured, measurement: Measurement, stepped: bool) -> None:
    """In the watch's thread, past an MLX that does not come back. Only a node that has not finished one step counts as
    offline."""
    limit_s = max(_STEP_LIMIT_S, 3 * measurement.seconds)
    if measurement.throughputs:
        _fill_in(result, measurement)
        result.problem = "a step has not ended"
    elif stepped:
        result.problem = f"a step has not ended within {limit_s:g} s"
    else:
        result.examples_per_s = 0.0
        result.problem = f"no step within {limit_s:g} s"
    os._exit(_settle(result))


def _settle(result: Measured) -> int:
    print(json.dumps({"measured": asdict(result)}), flush=True)
    return 0 if result.problem is None else 1


def _say(progress: MeasureProgress) -> None:
    print(json.dumps({"progress": asdict(progress)}), flush=True)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # Past MLX's own end: nothing of it is needed any more.
    os._exit(code)
