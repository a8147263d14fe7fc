"""One rank that measures the weights of another run: `python -m engine.trainer.evaluation`. Imports as in main."""

from __future__ import annotations

import sys

from engine.trainer.main import collect_garbage, join
from engine.training.process import TrainingProcess, run_rank


def evaluate(process: TrainingProcess) -> None:
    collective = join(process)
    from engine.trainer.variants import Variants

    collect_garbage()
    Variants.of(process, collective).measure_all()


if __name__ == "__main__":
    sys.exit(run_rank(evaluate))
