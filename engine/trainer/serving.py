"""One rank that serves the weights of another run: `python -m engine.trainer.serving`. Imports as in main."""

from __future__ import annotations

import sys

from engine.trainer.main import collect_garbage, join
from engine.training.process import TrainingProcess, run_rank


def serve(process: TrainingProcess) -> None:
    collective = join(process)
    from engine.trainer.http_server import serve

    collect_garbage()
    serve(process, collective)


if __name__ == "__main__":
    sys.exit(run_rank(serve))
