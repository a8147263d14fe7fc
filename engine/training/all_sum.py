"""The preflight's sums over the ranks, with their own time limit: the frame of each framework's own program.

    cd <bundle> && exec <python> -m <program> --seconds 2 --world-size 2 --backend ring --out <dir>/rank{rank}.json

The environment is that of a rank. Always writes one JSON object, an AllSumResult. Exit code 0 when the sums are exact
and nothing failed, else 1. Nothing here imports NumPy, which would take as long as all of it."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from engine.protocol.measurements import ALL_SUM_LARGE_BYTES, AllSumResult
from engine.training.group_bench import reported

_SMALL = 1_000
_LARGE = ALL_SUM_LARGE_BYTES // 4
"""Elements."""
_LEAST = 2
"""Rounds before the last one."""


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
            over = result.rank == 0 and len(taken) >= _LEAST and time.perf_counter() >= until
            sum_s, last = time_sum(length, over)
            taken.append(sum_s)
        return statistics.median(taken)

    result.latency_s = median_s(1, connected + seconds / 2)
    result.bandwidth_bytes_per_s = ALL_SUM_LARGE_BYTES / median_s(_LARGE, connected + seconds)
