"""Times the MLX trainer on the real group, with the strategy's own steps: see engine.training.group_bench."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine.protocol.attempt import AttemptSpec
from engine.protocol.measurements import STEP_PARTS, GroupStepReport, RoundTimes
from engine.training.group_bench import run_bench, timed_rounds

if TYPE_CHECKING:
    from engine.protocol.job import Job
    from engine.trainer.collective import Collective
    from engine.trainer.strategies.base import LocalStep, Strategy


def measure(result: GroupStepReport, spec: AttemptSpec, home: Path, seconds: float) -> None:
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
    position = 0

    def run_round(over: bool) -> tuple[RoundTimes, bool]:
        nonlocal position
        started, stop, tokens = time.perf_counter(), False, 0.0
        steps: list[LocalStep] = []
        for update in range(1, updates + 1):
            made, counted, stop = _update(job, strategy, collective, position, over=over and update == updates)
            steps, tokens, position = steps + made, tokens + counted, position + len(made)
        parts = [sum(getattr(step, name) for step in steps) for name in STEP_PARTS]
        return RoundTimes(time.perf_counter() - started, tokens, *parts), stop

    rounds = timed_rounds(result.rank, seconds, run_round)
    result.summarise(rounds, updates * job.grad_accumulation_steps)
    result.peak_bytes = mx.get_peak_memory()


def _update(
    job: Job, strategy: Strategy, collective: Collective, position: int, *, over: bool
) -> tuple[list[LocalStep], float, bool]:
    """One update as the loop makes it: its iterations, all ranks' targets, and whether any rank is `over`."""
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


if __name__ == "__main__":
    run_bench(measure)
