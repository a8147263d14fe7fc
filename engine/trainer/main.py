"""The MLX trainer: `python -m engine.trainer.main`. MLX is imported late, and mlx-lm only after the group is up: a rank
that connects 15 seconds after the others fails the ring's start, so nothing slow may run in between."""

from __future__ import annotations

import gc
import sys

from engine.training.process import TrainingProcess, run_rank


def main() -> int:
    return run_rank(_run)


def _run(process: TrainingProcess) -> None:
    from engine.trainer.elastic_group import join_group

    spec, rank, reporter = process.spec, process.rank, process.reporter
    collective, backend = join_group(spec, rank, reporter.warn)
    reporter.print(f"rank {rank} of {spec.world_size} on {spec.rank(rank).node}, backend {backend}: loading")
    from engine.trainer.train import train

    # What the imports have made stays: no collection looks through it, not the one at the end either.
    gc.freeze()
    gc.enable()
    train(spec, process.home, collective, process.control, reporter)


if __name__ == "__main__":
    sys.exit(main())
