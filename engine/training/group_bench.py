"""Measurements on a job's real group of ranks, with either framework:

    cd <bundle> && exec <python> -m engine.training.group_bench SPEC --seconds 10 --out <dir>/rank{rank}.json

times short real iterations. SPEC is the path of an AttemptSpec, the rank is MLX_RANK. The steps are the training loop's
own. Nothing is saved. Always writes one JSON object, a GroupStepReport. Exit code 0 when iterations were timed, else 1.

    cd <bundle> && exec <python> -m <program> --seconds 2 --world-size 2 --backend ring --out <dir>/rank{rank}.json

sums over the ranks, for the preflight, in the environment of a rank: each framework's allreduce_check. Always writes an
AllSumResult. Exit code 0 when the sums are exact and nothing failed, else 1. Nothing here imports NumPy, which would
take as long as all of it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.node.processes import raise_priority
from engine.protocol.attempt import NONCE_ENV, AttemptSpec, write_atomic
from engine.protocol.events import EventWriter
from engine.protocol.measurements import (
    ALL_SUM_LARGE_BYTES,
    GROUP_LIMIT_S,
    STEP_PARTS,
    AllSumResult,
    GroupStepReport,
)
from engine.training.process import Control, TrainingProcess
from engine.training.reporting import Reporter, first_line

if TYPE_CHECKING:
    from engine.training.loop import TrainingLoop

_LEAST = 3
"""Rounds that are timed, after a first one that is not."""


class _Steps(Reporter):
    """Keeps the `step` events since the last round."""

    def __init__(self, rank: int) -> None:
        super().__init__(EventWriter(None, rank, 1))
        self.rank = rank
        self.steps: list[dict[str, Any]] = []

    def event(self, event: str, **fields: Any) -> None:
        if event == "step":
            self.steps.append(fields)


def run_bench() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("--seconds", type=float, required=True, help="about how long to measure")
    parser.add_argument("--out", required=True, help="where the result goes; {rank} is replaced")
    options = parser.parse_args()
    result = GroupStepReport(int(os.environ["MLX_RANK"]))
    limit_s = GROUP_LIMIT_S + 5 * options.seconds
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise_priority()
    with reported(result, options.out, limit_s, f"no result within {limit_s:g} s"):
        spec = replace(AttemptSpec.from_json(options.spec.read_text()), nonce=os.environ.get(NONCE_ENV, ""))
        os.chdir(spec.rank(result.rank).workdir)
        reporter = _Steps(result.rank)
        # The folder is for what is indexed.
        process = TrainingProcess(spec, Path(options.out).parent, result.rank, Control(), reporter)
        loop: TrainingLoop = importlib.import_module(spec.trainer).load_training(process)
        loop.reset_peak_memory()
        rounds = timed_rounds(loop, reporter, options.seconds)
        result.summarise(rounds, len(reporter.steps))
        result.peak_bytes = max(step["peak_memory_bytes"] for step in reporter.steps)


def timed_rounds(loop: TrainingLoop, reporter: _Steps, seconds: float) -> list[dict[str, float]]:
    """Rounds, as GroupStepReport.summarise takes them, for about `seconds` after a first one, which is left out. All
    ranks make the same number: rank 0 asks for the end as for a stop."""
    loop.strategy.model.train()
    job, rounds, until, done = loop.job, list[dict[str, float]](), 0.0, 0
    # With strategy "local", up to an averaging.
    updates = job.local_steps if job.strategy == "local" else 1
    # A job's schedules know of no iteration beyond its last, which may end an incomplete update.
    iterations = job.iters - job.iters % job.grad_accumulation_steps or job.iters
    while not loop.stopping:
        if reporter.rank == 0 and len(rounds) >= _LEAST and time.perf_counter() >= until:
            loop.control.stop.set()
        reporter.steps.clear()
        started, end = time.perf_counter(), loop.point.update + updates
        while loop.point.update < end:
            first = done % iterations + 1
            done = loop.last_of_step(first)
            loop.train(first, done)
        parts = {name: sum(step[name] for step in reporter.steps) for name in ("tokens", *STEP_PARTS)}
        rounds.append({"step_s": time.perf_counter() - started, **parts})
        until = until or time.perf_counter() + seconds
    return rounds[1:]


@contextlib.contextmanager
def reported(result: AllSumResult | GroupStepReport, out: str, limit_s: float, late: str) -> Iterator[None]:
    """Write `result` to `out`, in which {rank} is replaced, when the body ends, fails, or has not ended after `limit_s`
    seconds (`late` is its error then); and end the process, with code 0 where the result is good, else 1."""
    path = Path(out.replace("{rank}", str(result.rank)))

    def end() -> None:
        write_atomic(path, json.dumps(asdict(result)))
        sys.stdout.flush()
        # Skips the framework's own shutdown, which may wait for peers that are gone.
        os._exit(0 if result.succeeded else 1)

    def give_up() -> None:
        result.error = late
        end()

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        # PyTorch adds C++ frames below it.
        kind, why = type(error).__name__, first_line(error)
        result.error = why if kind == "JobError" else f"{kind}: {why}"
        traceback.print_exc()
    timer.cancel()
    end()


_SMALL = 1_000
_LARGE = ALL_SUM_LARGE_BYTES // 4
"""Elements."""
_LEAST_SUMS = 2
"""Before the last one."""


def run_check(
    rank: int, backend: str, start_limit_s: float, check: Callable[[AllSumResult, argparse.Namespace], None]
) -> None:
    """`start_limit_s`: for imports and connecting. `check` fills in the result; raises what the framework raises."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long to measure")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--backend", default=backend)
    parser.add_argument("--accelerate", type=json.loads, help="also check what Accelerate chooses: see there")
    parser.add_argument("--out", required=True, help="where the result goes; {rank} is replaced")
    options = parser.parse_args()
    result, limit_s = AllSumResult(rank), start_limit_s + 5 * options.seconds
    with reported(result, options.out, limit_s, f"no result within {limit_s:g} s: a peer does not respond"):
        check(result, options)


def measure_sums(
    result: AllSumResult,
    seconds: float,
    is_exact: Callable[[int], bool],
    time_sum: Callable[[int, bool], tuple[float, bool]],
) -> None:
    """Fill in `result`, within about `seconds`. `is_exact`: the sum over the ranks of so many integers below 2^24,
    which have the same float32 sum in whatever order they are added, is right. `time_sum`: the seconds of a sum of so
    many ones; told on rank 0 that it is the last round, it announces that by a 0 as the first of them, and returns it
    on every rank."""
    connected = time.perf_counter()
    for length in (1, _SMALL, _LARGE):
        if not is_exact(length):
            result.error = f"the sum of {length} numbers over {result.size} ranks is wrong"
            return
    result.exact = True

    def median_s(length: int, until: float) -> float:
        # A number of rounds fixed beforehand would be a guess, wrong by a factor of ten where ranks wait for one
        # another's core.
        taken, last = list[float](), False
        while not last:
            over = result.rank == 0 and len(taken) >= _LEAST_SUMS and time.perf_counter() >= until
            sum_s, last = time_sum(length, over)
            taken.append(sum_s)
        return statistics.median(taken)

    result.latency_s = median_s(1, connected + seconds / 2)
    result.bandwidth_bytes_per_s = ALL_SUM_LARGE_BYTES / median_s(_LARGE, connected + seconds)


if __name__ == "__main__":
    run_bench()
