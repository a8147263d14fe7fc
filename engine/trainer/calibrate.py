"""Measures one node by itself: the trainer's own step, with the job's model and data, loaded as the trainer does.

    cd <bundle> && exec <python> -m engine.trainer.calibrate SPEC

SPEC is the path of a MeasureSpec. Prints a MeasureReport as JSON, one per line, while it runs, and always one at the
end. Exit code 0 when the measurement succeeded, else 1."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from engine.node.processes import end_with_parent, raise_priority, stay_awake
from engine.protocol.measurements import MeasureReport, MeasureSpec

_FIRST_STEP_LIMIT_S, _STEP_LIMIT_S = 600.0, 60.0
"""A node that does not finish its first step within the first counts as offline; g++ may have to build kernels before
it. A later step may take the second, or _TIMES as long as the longest one so far."""
_TIMES = 5.0
_POLL_S = 0.5
_PROGRESS_S = 2.0
"""Between two reports of steps; the head waits for one after another."""


def main(arguments: list[str]) -> int:
    spec_path = Path(arguments[0])
    spec = MeasureSpec(**json.loads(spec_path.read_text()))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.update(spec.env)
    end_with_parent()
    result = MeasureReport(qos="; ".join(dict.fromkeys((raise_priority(), stay_awake(os.getpid(), "-ims")))))
    try:
        _measure(spec, spec_path.parent, result)
    except Exception as error:
        # A JobError's message needs no class name.
        kind = type(error).__name__
        result.problem = str(error) if kind == "JobError" else f"{kind}: {error}"
    return _end(result)


def _measure(spec: MeasureSpec, home: Path, result: MeasureReport) -> None:
    _print(result)
    from engine.trainer.single_node_bench import PROBE_BATCHES, WARM_UP_STEPS, load_trainer, measure, second_batch

    training = load_trainer(spec, home)
    result.gradient_bytes = training.gradient_bytes
    result.batch = spec.batch
    watchdog = _StepWatchdog(lambda limit_s, stepped: _give_up(result, limit_s, stepped))
    printed_at = 0.0

    def report() -> None:
        nonlocal printed_at
        printed_at = time.monotonic()
        _print(result)

    def step_done() -> None:
        watchdog.step_done()
        if time.monotonic() - printed_at > _PROGRESS_S:
            report()

    def step(batch: int) -> tuple[float, int]:
        taken = training.step(batch)
        step_done()
        return taken

    result.phase = "probing"
    report()
    for batch in PROBE_BATCHES:
        state, peak = training.probe(batch, spec.seconds / len(PROBE_BATCHES), step_done)
        # The smallest batch leaves the least besides the state.
        result.state_bytes = result.state_bytes or state
        result.probes.append({"batch": batch, "peak_bytes": peak})
    result.phase = "warming up"
    report()
    started = time.monotonic()
    for batch in (second_batch(spec.batch), *[spec.batch] * WARM_UP_STEPS):
        step(batch)
        if time.monotonic() - started > spec.seconds:
            # Each is longer than the whole measurement: the probes' steps have warmed it up.
            break
    result.phase = "measuring"
    measure(step, spec.seconds, result, report)
    watchdog.end()


class _StepWatchdog:
    """Calls `on_late(limit_s, stepped)` when no step has ended for the limit; `stepped`: at least one has before."""

    def __init__(self, on_late: Callable[[float, bool], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = _FIRST_STEP_LIMIT_S
        self._longest_s = 0.0
        self._on_late = on_late
        self._clock = clock
        self._stepped_at = clock()
        self._stepped = False
        self._over = threading.Event()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def step_done(self) -> None:
        now = self._clock()
        self._longest_s = max(self._longest_s, now - self._stepped_at)
        self._limit_s = max(_STEP_LIMIT_S, _TIMES * self._longest_s)
        self._stepped, self._stepped_at = True, now

    def end(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(_POLL_S):
            if self._clock() - self._stepped_at > self._limit_s:
                self._on_late(self._limit_s, self._stepped)


def _give_up(result: MeasureReport, limit_s: float, stepped: bool) -> None:
    """Report and exit, from the watchdog's thread, as MLX does not return. Offline is only a node without any step."""
    if result.windows:
        result.problem = "a step has not ended"
    elif stepped:
        result.problem = f"a step has not ended within {limit_s:g} s"
    else:
        result.examples_per_s = 0.0
        result.problem = f"no step within {limit_s:g} s"
    os._exit(_end(result))


def _end(result: MeasureReport) -> int:
    result.phase = "measured"
    _print(result)
    return 0 if result.problem is None else 1


def _print(result: MeasureReport) -> None:
    print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # Skips MLX's own shutdown.
    os._exit(code)
