"""Times the PyTorch trainer on the real group, by its own `step` events: see engine.training.group_bench."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from engine.protocol.attempt import AttemptSpec
from engine.protocol.events import EventWriter
from engine.protocol.measurements import STEP_PARTS, GroupStepReport, RoundTimes
from engine.torch_trainer.main import import_trainer
from engine.training.group_bench import run_bench, timed_rounds
from engine.training.process import Control, TrainingProcess
from engine.training.reporting import Reporter


class _Steps(Reporter):
    """Keeps the `step` events since the last round."""

    def __init__(self, rank: int) -> None:
        super().__init__(EventWriter(None, rank, 1))
        self.steps: list[dict[str, Any]] = []

    def event(self, event: str, **fields: Any) -> None:
        if event == "step":
            self.steps.append(fields)


class _Clock(Control):
    """Asks for the end of the measurement as a person asks for a stop."""

    over = False

    @property
    def stop_requested(self) -> bool:
        return self.over


def measure(result: GroupStepReport, spec: AttemptSpec, home: Path, seconds: float) -> None:
    load_training = import_trainer(spec.backend).load_training
    reporter, control = _Steps(result.rank), _Clock()
    loop = load_training(TrainingProcess(spec, home, result.rank, control, reporter)).loop
    loop.strategy.model.train()
    accumulation = loop.job.grad_accumulation_steps
    updates = max(1, loop.job.iters // accumulation)
    update = 0

    def run_round(over: bool) -> tuple[RoundTimes, bool]:
        nonlocal update
        # A job's schedules know of no iteration beyond its last.
        first, update = update % updates * accumulation + 1, update + 1
        control.over = over
        reporter.steps.clear()
        started = time.perf_counter()
        loop.train(first, first + accumulation - 1)
        parts = [sum(step[name] for step in reporter.steps) for name in ("tokens", *STEP_PARTS)]
        return RoundTimes(time.perf_counter() - started, *parts), loop.stopping

    rounds = timed_rounds(result.rank, seconds, run_round)
    result.summarise(rounds, accumulation)
    result.peak_bytes = max(step["peak_memory_bytes"] for step in reporter.steps)


if __name__ == "__main__":
    run_bench(measure)
