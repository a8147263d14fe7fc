"""One rank of tests.bench.links: `python -m tests.bench.link_rank KIND ARGUMENT…`, in the environment of mlx.launch.

    ours                    the trainer; its specification is named by the environment
    stock CONFIG LOG        mlx_lm.lora, as tests.bench.stock
    exchange BYTES LOG      gathers so many bytes of each rank, and nothing else; rank 0 writes the seconds of each
                            round to LOG, a JSON list

The ring's threads, which spin while they wait, run at a lower priority than what computes, in all three.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from engine.trainer import main as trainer
from engine.trainer.collective import Collective
from tests.bench import stock

_NICE: Final = 10
_ROUNDS: Final = 6
_TASKS: Final = Path("/proc/self/task")


def yield_to_compute() -> None:
    """Have every group's threads, from now on, run at a lower priority than those that compute."""
    init = mx.distributed.init

    def nice_init(*arguments: Any, **keys: Any) -> Any:
        before = set(_TASKS.iterdir())
        group = init(*arguments, **keys)
        for thread in set(_TASKS.iterdir()) - before:
            os.setpriority(os.PRIO_PROCESS, int(thread.name), _NICE)
        return group

    mx.distributed.init = nice_init


def exchange(size: int, log: Path) -> None:
    """Seconds of one gather after the other."""
    rank = int(os.environ["MLX_RANK"])
    collective = Collective("ring", 2, rank)
    bucket = mx.zeros(size, mx.uint8)
    seconds = []
    for _ in range(_ROUNDS):
        collective.barrier()
        started = time.perf_counter()
        collective.gather_arrays(bucket)
        seconds.append(time.perf_counter() - started)
    collective.barrier()
    if rank == 0:
        log.write_text(json.dumps(seconds))


def main(kind: str, *arguments: str) -> int:
    yield_to_compute()
    if kind == "ours":
        return trainer.main()
    if kind == "stock":
        config, log = arguments
        stock.main(config, Path(log))
    else:
        size, log = arguments
        exchange(int(size), Path(log))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
