"""Short real iterations of a job on the real group, timed: the strategy's own steps and exchange, on the job's model
and data.

    cd <bundle> && exec <python> -m engine.trainer.group_bench SPEC --seconds 10 --out <dir>/rank{rank}.json

SPEC is the path of an AttemptSpec, the rank is MLX_RANK. Nothing is saved. Always writes one JSON object, a
GroupStepReport. Exit code 0 when iterations were timed, else 1.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.node.processes import raise_priority
from engine.protocol.attempt import NONCE_ENV, AttemptSpec
from engine.protocol.measurements import GROUP_LIMIT_S, GroupStepReport, RoundTimes
from engine.trainer.allreduce_check import reported

if TYPE_CHECKING:
    from engine.protocol.job import Job
    from engine.trainer.collective import Collective
    from engine.trainer.strategies.base import LocalStep, Strategy

_LEAST = 3
"""Rounds that are timed, after a first one that is not."""
_PARTS = ("data_s", "compute_s", "communicate_s", "update_s")


def measure(result: GroupStepReport, spec: AttemptSpec, home: Path, seconds: float) -> None:
    """Fill in `result`, within about `seconds` after the first round. Raises what the trainer raises."""
    from engine.trainer.elastic_group import join_group

    # A rank that connects late fails the ring's start: nothing slow before.
    collective, _ = join_group(spec, result.rank, print)
    import mlx.core as mx

    from engine.protocol.events import EventWriter
    from engine.trainer.train import load_strategy
    from engine.training.reporting import Reporter

    job, strategy = load_strategy(spec, home, collective, Reporter(EventWriter(None, result.rank, 1)))
    strategy.model.train()
    mx.reset_peak_memory()
    # With strategy "local", up to an averaging.
    updates = job.local_steps if strategy.any_part else 1
    position, until = 0, 0.0
    rounds: list[RoundTimes] = []
    while True:
        started, stop, tokens = time.perf_counter(), False, 0.0
        steps: list[LocalStep] = []
        for update in range(updates):
            over = result.rank == 0 and update == updates - 1 and len(rounds) >= _LEAST and started >= until
            made, counted, stop = _update(job, strategy, collective, position, over=over)
            steps, tokens, position = steps + made, tokens + counted, position + len(made)
        ended = time.perf_counter()
        until = until or ended + seconds
        parts = [sum(getattr(step, name) for step in steps) for name in _PARTS]
        rounds.append(RoundTimes(ended - started, tokens, *parts))
        if stop:
            break
    result.summarise(rounds[1:], updates * job.grad_accumulation_steps)
    result.peak_bytes = mx.get_peak_memory()


def _update(
    job: Job, strategy: Strategy, collective: Collective, position: int, *, over: bool
) -> tuple[list[LocalStep], float, bool]:
    """One update as the trainer's loop makes it: its iterations, its targets over all ranks, and whether one of them
    says that the measurement is over."""
    import mlx.core as mx

    from engine.training.sampler import dropout_seed

    steps = []
    for micro in range(job.grad_accumulation_steps):
        # A job's schedules know of no iteration beyond its last.
        at = (position + micro) % job.iters
        mx.random.seed(dropout_seed(job.seed, at + 1, collective.rank))
        steps.append(strategy.accumulate(at, last=micro == job.grad_accumulation_steps - 1))
        strategy.loader.end_batch(at)
    started = time.perf_counter()
    tokens, stop = strategy.exchange([float(sum(step.tokens for step in steps)), float(over)])
    exchanged = time.perf_counter()
    strategy.apply(tokens)
    before = collective.waited_s
    strategy.average()()
    waited = collective.waited_s - before
    applied = time.perf_counter() - exchanged - waited
    steps[-1] = steps[-1].with_update(exchanged - started + waited, applied, lazy=strategy.lazy)
    return steps, tokens, stop > 0


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
        spec = replace(AttemptSpec.from_json(options.spec.read_text()), nonce=os.environ.get(NONCE_ENV, ""))
        os.chdir(spec.rank(result.rank).workdir)
        measure(result, spec, Path(options.out).parent, options.seconds)


if __name__ == "__main__":
    main()
