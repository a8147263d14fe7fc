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
import time
from datetime import timedelta
from typing import Any

from engine.protocol.deepspeed import deepspeed_config
from engine.protocol.job import TorchSettings
from engine.protocol.measurements import ALL_SUM_LARGE_BYTES, AllSumResult
from engine.torch_trainer.main import hide_gpus
from engine.training.group_bench import reported
from engine.training.outcome import first_line

_SMALL = 1_000
_LARGE = ALL_SUM_LARGE_BYTES // 4
"""Elements."""
_LEAST = 2
"""Rounds before the last one."""
_START_LIMIT_S = 100.0
"""Importing PyTorch, Accelerate and DeepSpeed by all ranks of a machine, and connecting."""
_CONNECT_LIMIT = timedelta(seconds=90)
_PARTITIONING = ("FSDP", "DEEPSPEED")
"""Accelerate's distributed types that the strategies fsdp and deepspeed are to become."""


def measure(result: AllSumResult, backend: str, world_size: int, seconds: float) -> None:
    """Fill in `result`, within about `seconds` after all ranks have connected. Raises what PyTorch raises."""
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = "cuda" if backend == "nccl" else "cpu"
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=_CONNECT_LIMIT)
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


def check_accelerate(result: AllSumResult, backend: str, world_size: int, asked: dict[str, Any]) -> None:
    """Have Accelerate make the group as it would for the job, and compare its choice with what was asked for: it
    replaces silently what it does not support. `asked`: the job's `strategy`, and for the `recipe` its TorchSettings.
    """
    from accelerate import Accelerator

    recipe = asked.get("recipe")
    # Set by `accelerate launch` for its options and configuration file.
    named = [name for name in _PARTITIONING if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"]
    if "DEEPSPEED" in named:
        from engine.torch_trainer.strategies import compile_nothing

        # This check ends itself when it is late.
        compile_nothing()
    state = (Accelerator() if recipe is None else recipe_accelerator(backend, world_size, asked)).state
    kind = str(state.distributed_type.value)
    result.chosen = f"{kind} with {state.num_processes} process{'es' * (state.num_processes != 1)}"
    wanted = next(iter(named), str(asked["strategy"]).upper())
    if recipe is not None and wanted == "FSDP":
        wanted, result.chosen = "", f"{result.chosen}; the recipe calls fully_shard itself"
    if wanted in _PARTITIONING and kind != wanted:
        why = f"which it does not support over {backend}" if named or backend == "gloo" else "which its options lack"
        result.error = f"Accelerate chose {result.chosen} in place of {wanted}, {why}"
    elif state.num_processes != world_size:
        result.error = f"Accelerate chose {result.chosen}, where {world_size} were asked for"


def recipe_accelerator(backend: str, world_size: int, asked: dict[str, Any]) -> Any:
    hide_gpus(backend)
    from engine.torch_trainer.strategies import make_accelerator

    settings = TorchSettings.from_spec(asked["recipe"])
    config = deepspeed_config(settings, micro_batch=1, accumulation=1, world_size=world_size, max_grad_norm=None)
    return make_accelerator(backend, asked["strategy"], settings, config, _CONNECT_LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine.torch_trainer.allreduce_check")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long to measure")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--accelerate", type=json.loads, help="also check what Accelerate chooses: see there")
    parser.add_argument("--out", required=True, help="where the result goes; {rank} is replaced")
    options = parser.parse_args()
    result = AllSumResult(int(os.environ["RANK"]))
    limit_s = _START_LIMIT_S + 5 * options.seconds
    late = f"no result within {limit_s:g} s: a peer does not respond"
    with reported(result, options.out, limit_s, late):
        try:
            if options.accelerate is not None:
                check_accelerate(result, options.backend, options.world_size, options.accelerate)
            if result.error is None:
                measure(result, options.backend, options.world_size, options.seconds)
        except Exception as error:
            # PyTorch adds C++ frames below it.
            result.error = f"{type(error).__name__}: {first_line(error) if str(error) else ''}"


if __name__ == "__main__":
    main()
