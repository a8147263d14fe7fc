"""A real all_reduce over the ranks of a PyTorch job for the preflight, and what Accelerate makes of the group: see
engine.training.group_bench."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from typing import Any

from engine.protocol.job import TorchSettings, deepspeed_config
from engine.protocol.measurements import AllSumResult
from engine.torch_trainer.main import hide_gpus
from engine.training.group_bench import measure_sums, run_check

_START_LIMIT_S = 100.0
"""Importing PyTorch, Accelerate and DeepSpeed by all ranks of a machine, and connecting."""
_CONNECT_LIMIT = timedelta(seconds=90)
_PARTITIONING = ("FSDP", "DEEPSPEED")
"""Accelerate's distributed types that the strategies fsdp and deepspeed are to become."""


def check(result: AllSumResult, options: argparse.Namespace) -> None:
    backend, size = options.backend, options.world_size
    if options.accelerate is not None:
        check_accelerate(result, backend, size, options.accelerate)
    if result.error is not None:
        return
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = "cuda" if backend == "nccl" else "cpu"
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=_CONNECT_LIMIT)
    result.size = dist.get_world_size()

    def is_exact(length: int) -> bool:
        numbers = torch.arange(length, device=device) % 1_000
        mine = (numbers + result.rank).float()
        dist.all_reduce(mine)
        return bool(torch.equal(mine, (numbers * size + size * (size - 1) // 2).float()))

    def time_sum(length: int, over: bool) -> tuple[float, bool]:
        numbers = torch.ones(length, device=device)
        numbers[0] = 0.0 if over else 1.0
        started = time.perf_counter()
        dist.all_reduce(numbers)
        # Waits for the sum where that is a GPU's.
        total = numbers[0].item()
        return time.perf_counter() - started, total != size

    measure_sums(result, options.seconds, is_exact, time_sum)


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
        if wanted == "FSDP":
            result.error += '; use strategy "fsdp" of the built-in recipe, or fully_shard in your script, or GPUs'
    elif state.num_processes != world_size:
        result.error = f"Accelerate chose {result.chosen}, where {world_size} were asked for"


def recipe_accelerator(backend: str, world_size: int, asked: dict[str, Any]) -> Any:
    hide_gpus(backend)
    from engine.torch_trainer.strategies import make_accelerator

    settings = TorchSettings.from_spec(asked["recipe"])
    config = deepspeed_config(settings, micro_batch=1, accumulation=1, world_size=world_size, max_grad_norm=None)
    return make_accelerator(backend, asked["strategy"], settings, config, _CONNECT_LIMIT)


if __name__ == "__main__":
    run_check(int(os.environ["RANK"]), "gloo", _START_LIMIT_S, check)
