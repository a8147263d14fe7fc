"""One rank of a test: answers the prompts of the cases of `cases.json`, one after the other, in one group. Each writes
its events to `<name>.events.jsonl`, and rank 0 the tokens of each answer to `<name>.tokens.json`.

    python -m tests.training.generation_program DIRECTORY      (under mlx.launch, or alone)
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import stream_generate

from engine.protocol.attempt import AttemptSpec, RankSpec
from engine.protocol.events import EventWriter
from engine.trainer import answers
from engine.trainer.answers import answer_prompts
from engine.trainer.collective import Collective
from engine.training.process import Control, TrainingProcess
from engine.training.reporting import Reporter


def answer(case: dict[str, Any], collective: Collective, directory: Path, control: Control | None = None) -> None:
    rank, size = collective.rank, collective.size
    ranks = [RankSpec(number, f"n{number}", sys.executable, str(directory)) for number in range(size)]
    spec = AttemptSpec("run", 1, "nonce", case.get("backend", "ring"), size, ranks, job=case["job"], task=case["task"])
    recorded: list[list[int]] = []

    def recording(*arguments: Any, **options: Any) -> Iterator[Any]:
        recorded.append([])
        for response in stream_generate(*arguments, **options):
            recorded[-1].append(response.token)
            yield response

    if rank == 0:
        vars(answers)["stream_generate"] = recording
    events = EventWriter(directory / f"{case['name']}.events{rank}.jsonl", rank, 1)
    answer_prompts(TrainingProcess(spec, directory, rank, control or Control(), Reporter(events)), collective)
    if rank == 0:
        (directory / f"{case['name']}.tokens.json").write_text(json.dumps(recorded))


def main(directory: Path) -> None:
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    collective = Collective("ring", int(os.environ.get("RANKS", "1")), int(os.environ.get("MLX_RANK", "0")))
    for case in json.loads((directory / "cases.json").read_text()):
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        answer(case, collective, directory)
    collective.barrier()
    # Past MLX's own end, which may wait for peers that are gone.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
