"""One rank that fuses the weights of another run: `python -m engine.trainer.fusion`. Imports as in main."""

from __future__ import annotations

import sys

from engine.trainer.main import collect_garbage, join
from engine.training.process import TrainingProcess, run_rank


def fuse(process: TrainingProcess) -> None:
    collective = join(process)
    from engine.trainer.fused_model import fuse

    collect_garbage()
    fuse(process, collective)


if __name__ == "__main__":
    sys.exit(run_rank(fuse))
