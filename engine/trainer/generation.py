"""One rank that answers prompts with the weights of another run: `python -m engine.trainer.generation`. Imports as in
main."""

from __future__ import annotations

import sys

from engine.trainer.main import collect_garbage, join
from engine.training.process import TrainingProcess, run_rank


def generate(process: TrainingProcess) -> None:
    collective = join(process)
    from engine.trainer.answers import answer_prompts

    collect_garbage()
    answer_prompts(process, collective)


if __name__ == "__main__":
    sys.exit(run_rank(generate))
