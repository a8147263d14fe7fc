"""Short real iterations of a strategy on the real group, timed: of a partitioned one no node can make a step alone.

    cd <bundle> && exec <python> -m engine.trainer.group_bench SPEC --seconds 10 --out <dir>/rank{rank}.json

SPEC is the path of an AttemptSpec, the rank is MLX_RANK. Nothing is saved. Always writes one JSON object, a
GroupStepReport. Exit code 0 when iterations were timed, else 1.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from engine.node.processes import raise_priority
from engine.protocol.attempt import AttemptSpec
from engine.protocol.measurements import GROUP_LIMIT_S, GroupStepReport
from engine.trainer.allreduce_check import reported

_LEAST = 2
"""Updates that are timed, after a first one that is not."""


def measure(result: GroupStepReport, spec: AttemptSpec, home: Path, seconds: float) -> None:
    """Fill in `result`, within about `seconds` after the first update. Raises what the trainer raises."""
    from engine.trainer.collective import Collective

    # A rank that connects late fails the ring's start: nothing slow before.
    collective = Collective(spec.backend, spec.world_size, result.rank)
    import mlx.core as mx

    from engine.protocol.events import EventWriter
    from engine.trainer.train import load_strategy
    from engine.training.reporting import Reporter

    job, strategy = load_strategy(spec, home, collective, Reporter(EventWriter(None, result.rank, 1)))
    strategy.model.train()
    mx.reset_peak_memory()
    position, until, times, waits, counted = 0, 0.0, list[float](), list[float](), list[float]()
    while True:
        started, waited, tokens = time.perf_counter(), 0.0, 0
        for micro in range(1, job.grad_accumulation_steps + 1):
            step = strategy.accumulate(position, last=micro == job.grad_accumulation_steps)
            position, tokens, waited = position + 1, tokens + step.tokens, waited + step.communicate_s
        exchanging = time.perf_counter()
        over = result.rank == 0 and len(times) > _LEAST and exchanging >= until
        total, stop = strategy.exchange([float(tokens), float(over)])
        waited += time.perf_counter() - exchanging
        strategy.apply(total)
        ended = time.perf_counter()
        until = until or ended + seconds
        times.append(ended - started)
        waits.append(waited)
        counted.append(total)
        if stop:
            break
    iterations = (len(times) - 1) * job.grad_accumulation_steps
    result.steps, result.tokens = iterations, sum(counted[1:]) / iterations
    result.step_s = sum(times[1:]) / iterations
    result.compute_s = max(0.0, (sum(times[1:]) - sum(waits[1:])) / iterations)
    result.peak_bytes = mx.get_peak_memory()


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine.trainer.group_bench")
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
        spec = AttemptSpec.from_json(options.spec.read_text())
        os.chdir(spec.rank(result.rank).workdir)
        measure(result, spec, Path(options.out).parent, options.seconds)


if __name__ == "__main__":
    main()
