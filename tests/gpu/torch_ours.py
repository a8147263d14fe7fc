"""The built-in trainer's loop, in turns: `python -m tests.gpu.torch_ours REQUEST`; see torch_turns."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.protocol.attempt import AttemptSpec, RankSpec
from engine.protocol.events import EventWriter
from engine.torch_trainer.main import import_trainer
from engine.training.process import Control, TrainingProcess
from engine.training.reporting import Reporter
from tests.gpu.torch_turns import Turn, read_request, say_ready


def main() -> None:
    request = read_request()
    home = Path(request["folder"])
    ranks = [RankSpec(0, "n0", sys.executable, str(home))]
    spec = AttemptSpec("run", 1, "", request["backend"], 1, ranks, request["job"])
    reporter = Reporter(EventWriter(home / "events.jsonl", 0, 1))
    load = import_trainer(request["backend"]).load_training
    loop = load(TrainingProcess(spec, home, 0, Control(), reporter))
    loop.strategy.model.train()
    iteration = 0
    say_ready()
    while True:
        turn = Turn()
        for _ in range(turn.steps):
            iteration += 1
            loop.train(iteration, iteration)
        turn.end()


if __name__ == "__main__":
    main()
