"""A real all_sum over the ranks of a cluster for the preflight, with its own time limit.

    cd <bundle> && exec <python> -m engine.trainer.allreduce_check --seconds 2 --world-size 2 --backend ring \
        --out <dir>/rank{rank}.json

The rank is MLX_RANK. Always writes one JSON object, an AllSumResult. Exit code 0 when the sums are exact and nothing
failed, else 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import TYPE_CHECKING

from engine.protocol.measurements import ALL_SUM_LARGE_BYTES, AllSumResult
from engine.training.group_bench import reported

if TYPE_CHECKING:
    from engine.trainer.collective import Collective

_SMALL = 1_000
_LARGE = ALL_SUM_LARGE_BYTES // 4
"""Elements."""
_HEAD_START_S = 0.2
"""The last rank of a ring connects first, to rank 0; if that does not listen yet, MLX retries only after a second."""
_LEAST = 2
"""Rounds before the last one."""
_START_LIMIT_S = 45.0
"""The ring itself gives up on a missing peer after about 30 s."""


def measure(result: AllSumResult, backend: str, world_size: int, seconds: float) -> None:
    """Fill in `result`, within about `seconds` after all ranks have connected. Raises what MLX raises."""
    import mlx.core as mx

    from engine.trainer.collective import Collective

    mx.set_default_device(mx.cpu)
    if backend == "ring" and result.rank == world_size - 1 > 0:
        time.sleep(_HEAD_START_S)
    collective = Collective(backend, world_size, result.rank)
    result.size = collective.size
    connected = time.perf_counter()
    # Integers below 2^24 have the same float32 sum in whatever order they are added.
    for length in (1, _SMALL, _LARGE):
        mine = (mx.arange(length) % 1_000 + result.rank).astype(mx.float32)
        offsets = world_size * (world_size - 1) // 2
        expected = (mx.arange(length) % 1_000 * world_size + offsets).astype(mx.float32)
        if not mx.array_equal(collective.all_sum(mine), expected).item():
            result.error = f"the sum of {length} numbers over {world_size} ranks is wrong"
            return
    result.exact = True
    result.latency_s = _median_s(collective, 1, connected + seconds / 2)
    result.bandwidth_bytes_per_s = ALL_SUM_LARGE_BYTES / _median_s(collective, _LARGE, connected + seconds)


def _median_s(collective: Collective, length: int, until: float) -> float:
    """Median seconds of a sum of `length` ones, repeated at least three times until `until` (`time.perf_counter`), the
    same number of times on all ranks.

    Rank 0 announces the last round by a 0 as its first number. A number of rounds fixed beforehand would be a guess,
    wrong by a factor of ten where ranks wait for one another's core.
    """
    import mlx.core as mx

    ones, last = mx.ones(length), (mx.arange(length) > 0).astype(mx.float32)
    everyone = mx.array([float(collective.size)])
    mx.eval(ones, last, everyone)
    taken: list[float] = []
    while True:
        over = collective.rank == 0 and len(taken) >= _LEAST and time.perf_counter() >= until
        started = time.perf_counter()
        total = collective.all_sum(last if over else ones)
        taken.append(time.perf_counter() - started)
        # Without numpy: its import would take as long as all of this.
        if not mx.array_equal(total[:1], everyone).item():
            return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine.trainer.allreduce_check")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long to measure")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--backend", default="ring")
    parser.add_argument("--out", required=True, help="where the result goes; {rank} is replaced")
    options = parser.parse_args()
    result = AllSumResult(int(os.environ["MLX_RANK"]))
    limit_s = _START_LIMIT_S + 5 * options.seconds
    late = f"no result within {limit_s:g} s: a peer does not respond"
    with reported(result, options.out, limit_s, late):
        measure(result, options.backend, options.world_size, options.seconds)


if __name__ == "__main__":
    main()
