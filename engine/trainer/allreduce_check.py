"""A real all_sum over the ranks of a cluster for the preflight: see engine.training.group_bench."""

from __future__ import annotations

import argparse
import os
import time

from engine.protocol.measurements import AllSumResult
from engine.training.group_bench import measure_sums, run_check

_HEAD_START_S = 0.2
"""The last rank of a ring connects first, to rank 0; if that does not listen yet, MLX retries only after a second."""
_START_LIMIT_S = 45.0
"""The ring itself gives up on a missing peer after about 30 s."""


def check(result: AllSumResult, options: argparse.Namespace) -> None:
    import mlx.core as mx

    from engine.trainer.collective import Collective

    size = options.world_size
    if options.backend == "ring" and result.rank == size - 1 > 0:
        time.sleep(_HEAD_START_S)
    collective = Collective(options.backend, size, result.rank, _START_LIMIT_S)
    mx.set_default_device(mx.gpu if options.backend == "nccl" else mx.cpu)
    result.size = collective.size

    def is_exact(length: int) -> bool:
        numbers = mx.arange(length) % 1_000
        expected = (numbers * size + size * (size - 1) // 2).astype(mx.float32)
        return bool(mx.array_equal(collective.all_sum((numbers + result.rank).astype(mx.float32)), expected).item())

    def time_sum(length: int, over: bool) -> tuple[float, bool]:
        ones = (mx.arange(length) > 0).astype(mx.float32) if over else mx.ones(length)
        mx.eval(ones)
        started = time.perf_counter()
        total = collective.all_sum(ones)
        return time.perf_counter() - started, total[0].item() != size

    measure_sums(result, options.seconds, is_exact, time_sum)


if __name__ == "__main__":
    run_check(int(os.environ["MLX_RANK"]), "ring", _START_LIMIT_S, check)
