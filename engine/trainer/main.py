"""The MLX trainer, for a training and for tasks on its result: `python -m engine.trainer.main`. MLX is imported late,
and mlx-lm only after the group is up: a rank that connects 15 seconds after the others fails the ring's start, so
nothing slow may run in between."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

from engine.protocol.task import Task
from engine.training.process import TrainingProcess, run_rank

if TYPE_CHECKING:
    from engine.trainer.collective import Collective
    from engine.trainer.loop import Loop


def join(process: TrainingProcess) -> Collective:
    """The group of the attempt. Raises GroupError."""
    from engine.trainer.elastic_group import join_group

    spec, rank, reporter = process.spec, process.rank, process.reporter
    collective, backend = join_group(spec, rank, reporter.warn)
    reporter.print(f"rank {rank} of {spec.world_size} on {spec.rank(rank).node}, backend {backend}: loading")
    return collective


def collect_garbage() -> None:
    """From now on. What the imports have made stays: no collection looks through it, not the one at the end either."""
    gc.freeze()
    gc.enable()


def load_training(process: TrainingProcess) -> Loop:
    """Join the group, and then load as `train.load_training`, which says what it raises."""
    collective = join(process)
    from engine.trainer.train import load_training

    collect_garbage()
    return load_training(process, collective)


def do_task(process: TrainingProcess, task: Task) -> None:
    """Join the group, and then take what another run has trained. Raises as the function of the task's kind."""
    collective = join(process)
    match task.kind:
        case "evaluate":
            from engine.trainer.variants import evaluate as do
        case "lm_eval":
            from engine.trainer.answers import do_lm_eval as do
        case "fuse":
            from engine.trainer.fused_model import fuse as do
        case "generate":
            from engine.trainer.answers import answer_prompts as do
        case "serve":
            from engine.trainer.http_server import serve as do
    # Only now: it imports mlx-lm.
    from engine.trainer.saved_weights import assembled
    from engine.training.result_tasks import remove_leftovers

    remove_leftovers(process.home)
    collect_garbage()
    with assembled(process, collective) as with_weights:
        do(with_weights, collective)


def run(process: TrainingProcess) -> None:
    if process.spec.task is not None:
        do_task(process, Task(**process.spec.task))
    else:
        load_training(process).run_and_test()


def main() -> int:
    return run_rank(run)


if __name__ == "__main__":
    sys.exit(main())
