"""Times the MLX trainer on the real group: see engine.training.group_bench."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.trainer.main import load_training
from engine.training.group_bench import run_bench

if TYPE_CHECKING:
    from engine.trainer.loop import Loop
    from engine.training.process import TrainingProcess


def load(process: TrainingProcess) -> Loop:
    loop = load_training(process)
    import mlx.core as mx

    # Loading may have taken more than a step.
    mx.reset_peak_memory()
    return loop


if __name__ == "__main__":
    run_bench(load)
