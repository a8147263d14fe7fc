"""The preflight's real all_sum over the ranks of a cluster, bounded in time by itself.

    cd <bundle> && exec <python> -m worker.all_sum --seconds 2 --world-size 2 --backend ring --out <dir>/rank{rank}.json

The rank is MLX_RANK. Writes one JSON object, wire.AllSumResult, whatever happens. Exit code 0 when the sums are exact
and nothing went wrong, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .wire import ALL_SUM_LARGE_BYTES, write_atomic
from .wire import AllSumResult as Result

if TYPE_CHECKING:
    from .collective import Collective

_SMALL = 1_000
_LARGE = ALL_SUM_LARGE_BYTES // 4
"""Numbers."""
_HEAD_START_S = 0.2
"""The last rank of a ring connects first, to rank 0; where that does not listen yet, MLX tries again after a second."""
_LEAST = 2
"""Rounds before the last one."""
_START_LIMIT_S = 45.0
"""The ring itself gives up on a missing peer after about 30 s."""


def measure(result: Result, backend: str, world_size: int, seconds: float) -> None:
    """Fill `result` in, within about `seconds` of the moment that the ranks are together. Raises what MLX raises."""
    import mlx.core as mx

    from .collective import Collective

    mx.set_default_device(mx.cpu)
    if backend == "ring" and result.rank == world_size - 1 > 0:
        time.sleep(_HEAD_START_S)
    collective = Collective(backend, world_size, result.rank)
    result.size = collective.size
    together = time.perf_counter()
    # Whole numbers below 2^24 have one float32 sum, in whatever order they are added.
    for length in (1, _SMALL, _LARGE):
        mine = (mx.arange(length) % 1_000 + result.rank).astype(mx.float32)
        offsets = world_size * (world_size - 1) // 2
        expected = (mx.arange(length) % 1_000 * world_size + offsets).astype(mx.float32)
        if not mx.array_equal(collective.sum(mine), expected).item():
            result.error = f"the sum of {length} numbers over {world_size} ranks is wrong"
            return
    result.exact = True
    result.latency_s = _median_s(collective, 1, together + seconds / 2)
    result.bandwidth_bytes_per_s = ALL_SUM_LARGE_BYTES / _median_s(collective, _LARGE, together + seconds)


def _median_s(collective: Collective, length: int, until: float) -> float:
    """Median seconds of a sum of `length` ones, repeated until then (`time.perf_counter`), on all ranks alike and
    thrice at least.

    The first number is rank 0's word: all ranks stop after the sum in which it is not one. A number of rounds agreed on
    beforehand would be a guess, wrong tenfold where ranks wait for one another's core.
    """
    import mlx.core as mx

    ones, last = mx.ones(length), (mx.arange(length) > 0).astype(mx.float32)
    everyone = mx.array([float(collective.size)])
    mx.eval(ones, last, everyone)
    taken: list[float] = []
    while True:
        over = collective.rank == 0 and len(taken) >= _LEAST and time.perf_counter() >= until
        begun = time.perf_counter()
        total = collective.sum(last if over else ones)
        taken.append(time.perf_counter() - begun)
        # numpy, which the trainer takes numbers out of arrays with, costs as much to import as all of this.
        if not mx.array_equal(total[:1], everyone).item():
            return statistics.median(taken)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="worker.all_sum", description="A real all_sum, checked and measured.")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long to measure")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--backend", default="ring")
    parser.add_argument("--out", required=True, help="where the result goes; {rank} is replaced")
    options = parser.parse_args(arguments)
    rank = int(os.environ["MLX_RANK"])
    result = Result(rank)
    out = Path(options.out.replace("{rank}", str(rank)))

    def settle() -> int:
        write_atomic(out, json.dumps(asdict(result)))
        return 0 if result.exact and result.error is None else 1

    def give_up() -> None:
        result.error = f"no result within {limit:g} s: a peer does not answer"
        settle()
        os._exit(1)

    limit = _START_LIMIT_S + 5 * options.seconds
    watch = threading.Timer(limit, give_up)
    watch.daemon = True
    watch.start()
    try:
        measure(result, options.backend, options.world_size, options.seconds)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
    watch.cancel()
    code = settle()
    sys.stdout.flush()
    # Past MLX's own end, which may wait for peers that are gone.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
