"""A real all_reduce over the ranks of a PyTorch job for the preflight, with its own time limit, and what Accelerate
makes of the group.

    cd <bundle> && exec <python> -m engine.torch_trainer.allreduce_check --seconds 2 --world-size 2 --backend gloo \
        --out <dir>/rank{rank}.json

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment. Always writes one JSON object, an AllSumResult.
Exit code 0 when the sums are exact and nothing failed, else 1.
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
from datetime import timedelta
from pathlib import Path

from engine.protocol.attempt import write_atomic
from engine.protocol.measurements import ALL_SUM_LARGE_BYTES, AllSumResult

_SMALL = 1_000
_LARGE = ALL_SUM_LARGE_BYTES // 4
"""Elements."""
_LEAST = 2
"""Rounds before the last one."""
_START_LIMIT_S = 50.0
"""Importing PyTorch on a cold disk, and connecting."""
_CONNECT_LIMIT_S = 30.0


def measure(result: AllSumResult, backend: str, world_size: int, seconds: float) -> None:
    """Fill in `result`, within about `seconds` after all ranks have connected. Raises what PyTorch raises."""
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = "cuda" if backend == "nccl" else "cpu"
    dist.init_process_group(backend, timeout=timedelta(seconds=_CONNECT_LIMIT_S))
    result.size = dist.get_world_size()
    connected = time.perf_counter()
    # Integers below 2^24 have the same float32 sum in whatever order they are added.
    for length in (1, _SMALL, _LARGE):
        numbers = torch.arange(length, device=device) % 1_000
        mine = (numbers + result.rank).float()
        dist.all_reduce(mine)
        if not torch.equal(mine, (numbers * world_size + world_size * (world_size - 1) // 2).float()):
            result.error = f"the sum of {length} numbers over {world_size} ranks is wrong"
            return
    result.exact = True

    def median_s(length: int, until: float) -> float:
        """Rank 0 announces the last round by a 0 as its first number, as in engine.trainer.allreduce_check."""
        taken: list[float] = []
        while True:
            numbers = torch.ones(length, device=device)
            if result.rank == 0 and len(taken) >= _LEAST and time.perf_counter() >= until:
                numbers[0] = 0
            started = time.perf_counter()
            dist.all_reduce(numbers)
            # Waits for the sum where that is a GPU's.
            total = numbers[0].item()
            taken.append(time.perf_counter() - started)
            if total != result.size:
                return statistics.median(taken)

    result.latency_s = median_s(1, connected + seconds / 2)
    result.bandwidth_bytes_per_s = ALL_SUM_LARGE_BYTES / median_s(_LARGE, connected + seconds)


def check_accelerate(result: AllSumResult, backend: str, world_size: int) -> None:
    """Compare Accelerate's choice with what was asked for: it replaces silently what it does not support."""
    from accelerate import Accelerator

    state = Accelerator(cpu=backend == "gloo").state
    kind = state.distributed_type.value
    result.chosen = f"{kind} with {state.num_processes} processes"
    # Set by `accelerate launch` for its options and configuration file.
    asked = next((name for name in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{name}") == "true"), None)
    if state.num_processes != world_size:
        result.error = f"Accelerate chose {result.chosen}, where {world_size} were asked for"
    elif asked is not None and kind != asked:
        result.error = f"Accelerate chose {kind} in place of {asked}, which it does not support over {backend}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine.torch_trainer.allreduce_check")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long to measure")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--accelerate", action="store_true", help="also check what Accelerate chooses")
    parser.add_argument("--out", required=True, help="where the result goes; {rank} is replaced")
    options = parser.parse_args()
    result = AllSumResult(int(os.environ["RANK"]))
    limit_s = _START_LIMIT_S + 5 * options.seconds

    def end() -> None:
        write_atomic(Path(options.out.replace("{rank}", str(result.rank))), json.dumps(asdict(result)))
        sys.stdout.flush()
        # Skips PyTorch's own shutdown, which may wait for peers that are gone.
        os._exit(0 if result.succeeded else 1)

    def give_up() -> None:
        result.error = f"no result within {limit_s:g} s: a peer does not respond"
        end()

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        measure(result, options.backend, options.world_size, options.seconds)
        if options.accelerate and result.succeeded:
            check_accelerate(result, options.backend, options.world_size)
    except Exception as error:
        result.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    timer.cancel()
    end()


if __name__ == "__main__":
    main()
