"""Short real iterations of a job on the real group, timed: the frame of each framework's own program.

    cd <bundle> && exec <python> -m <program> SPEC --seconds 10 --out <dir>/rank{rank}.json

SPEC is the path of an AttemptSpec, the rank is MLX_RANK. Nothing is saved. Always writes one JSON object, a
GroupStepReport. Exit code 0 when iterations were timed, else 1."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from engine.node.processes import raise_priority
from engine.protocol.attempt import NONCE_ENV, AttemptSpec, write_atomic
from engine.protocol.measurements import GROUP_LIMIT_S, AllSumResult, GroupStepReport, RoundTimes
from engine.training.reporting import first_line

_LEAST = 3
"""Rounds that are timed, after a first one that is not."""
Measure = Callable[[GroupStepReport, AttemptSpec, Path, float], None]
"""Fills in the report, for about so many seconds; the folder is for what is indexed. Raises what the trainer raises."""


def run_bench(measure: Measure) -> None:
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
        measure(result, spec, Path(options.out).parent, options.seconds)


def timed_rounds(rank: int, seconds: float, run_round: Callable[[bool], tuple[RoundTimes, bool]]) -> list[RoundTimes]:
    """Rounds for about `seconds` after a first one, which is left out. `run_round` is told whether the round is the
    last one by this rank's clock, and returns whether it is by any: all ranks make the same number."""
    rounds, stop, until = list[RoundTimes](), False, 0.0
    while not stop:
        over = rank == 0 and len(rounds) >= _LEAST and time.perf_counter() >= until
        times, stop = run_round(over)
        until = until or time.perf_counter() + seconds
        rounds.append(times)
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
