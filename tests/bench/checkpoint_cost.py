"""What checkpoints of the whole state cost a training: `python -m tests.bench.checkpoint_cost`.

Real steps of a small Llama (full fine-tuning, Adam, float32) by the trainer's own arithmetic on one rank. Three kinds
of windows, alternating in one process, each as long as from one checkpoint to the next at the planned frequency
(min(1000, iterations / 20)): without any; with ours, written beside the training; and with saving in line, as stock
mlx-lm saves its adapters, of the same arrays to the same disk. Blocking is what the training's own thread waits for.
Exit code 1 when the target is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.llama import Model, ModelArgs

from engine.plan.checkpoints import save_every
from engine.protocol.attempt import AttemptSpec
from engine.protocol.events import EventWriter
from engine.protocol.job import Job
from engine.trainer.checkpoint.saving import PeriodicCheckpoints
from engine.trainer.checkpoint.store import CheckpointFolder, Snapshot
from engine.trainer.optimizer import Updater
from engine.trainer.single_node_bench import SYNTHETIC_LENGTH, SYNTHETIC_VOCABULARY, SyntheticData
from engine.trainer.strategies.data_parallel import Gradients
from engine.training.checkpoint_files import Origin
from engine.training.reporting import Reporter
from tests.bench.figures import Figure, machine, report

ITERATIONS: Final = 500
BATCH: Final = 4
ROUNDS: Final = 3
LIMIT, GOAL = 0.05, 0.01
"""Shares of the training's time that may be blocked."""


@dataclass
class Window:
    """The steps of one kind, all rounds together."""

    steps: list[float] = field(default_factory=list)
    """Seconds, the saving apart."""
    blocked: list[float] = field(default_factory=list)
    """Seconds per checkpoint, on the training's thread."""
    whole: list[float] = field(default_factory=list)
    """Seconds per window, with everything."""


class Training:
    """A step, and the state after it."""

    def __init__(self, home: Path, width: int, layers: int) -> None:
        mx.random.seed(7)
        model = Model(
            ModelArgs(
                model_type="llama",
                hidden_size=width,
                num_hidden_layers=layers,
                intermediate_size=width * 5 // 2,
                num_attention_heads=4,
                num_key_value_heads=4,
                rms_norm_eps=1e-5,
                vocab_size=SYNTHETIC_VOCABULARY,
                tie_word_embeddings=False,
            )
        )
        mx.eval(model.parameters())
        job = Job(home, home, home, home, fine_tune_type="full", batch_size=BATCH, max_seq_length=SYNTHETIC_LENGTH)
        self._data, self._position = SyntheticData(), 0
        self._gradients, self.updater = Gradients(model), Updater(job, model)

    def step(self) -> None:
        batch = self._data.batch(np.arange(BATCH) + self._position * BATCH)
        self._position += 1
        self._gradients.add(batch)
        self._gradients.apply(self.updater, batch.targets)

    def snapshot(self) -> Snapshot:
        return Snapshot(self._position, self._position, {}, self.updater.state())


def in_line(training: Training, folder: Path) -> None:
    """As stock mlx-lm saves, but of the whole state, and on the disk when it returns."""
    for group, arrays in training.updater.state().items():
        path = folder / f"{group}.safetensors"
        mx.save_safetensors(str(path), arrays)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def measure(home: Path, every: int, width: int, layers: int) -> Iterator[Figure]:
    training = Training(home, width, layers)
    size = sum(value.nbytes for arrays in training.updater.state().values() for value in arrays.values())
    for _ in range(3):
        training.step()
    quiet = Reporter(EventWriter(None, 0, 1))
    origin = Origin("bench", world_size=1, part=0, parts=1, inputs={})
    spec = AttemptSpec("bench", 1, "", "ring", 1, [], None, checkpoint_every=every)
    ours = PeriodicCheckpoints(CheckpointFolder(home / "ours"), spec, origin, quiet)
    kinds = {"without": Window(), "beside": Window(), "in line": Window()}
    written: list[float] = []
    for _ in range(ROUNDS):
        for kind, window in kinds.items():
            started = time.perf_counter()
            blocked = 0.0
            for _ in range(every):
                at = time.perf_counter()
                training.step()
                window.steps.append(time.perf_counter() - at)
                if kind == "beside":
                    at = time.perf_counter()
                    idle, settled = ours.counters()
                    ours.sync(idle, settled, 1)
                    blocked += time.perf_counter() - at
            at = time.perf_counter()
            if kind == "beside":
                ours.begin(training.snapshot())
            elif kind == "in line":
                in_line(training, home)
            blocked += time.perf_counter() - at
            window.blocked.append(blocked)
            window.whole.append(time.perf_counter() - started)
            if kind == "beside":
                # What it takes away from the steps that follow counts for its own kind.
                at = time.perf_counter()
                while ours.counters()[0] == 0.0:
                    step = time.perf_counter()
                    training.step()
                    window.steps.append(time.perf_counter() - step)
                written.append(time.perf_counter() - at)
    yield from figures(kinds, size, every, written)


def figures(kinds: dict[str, Window], size: int, every: int, written: list[float]) -> Iterator[Figure]:
    plain = statistics.median(kinds["without"].steps)
    yield Figure("state", f"{size / 1e6:.1f} MB")
    yield Figure("from one checkpoint to the next", f"{every} updates")
    yield Figure("step without checkpoints, median", f"{plain * 1e3:.1f} ms")
    for kind, window in kinds.items():
        if kind == "without":
            continue
        blocked = statistics.fmean(window.blocked)
        part = blocked / (every * plain)
        yield Figure(f"{kind}: blocked per checkpoint", f"{blocked * 1e3:.2f} ms")
        yield Figure(f"{kind}: step, median", f"{statistics.median(window.steps) * 1e3:.1f} ms")
        ours = kind == "beside"
        yield Figure(
            f"{kind}: blocked, of the training's time",
            f"{part:.2%}",
            f"< {LIMIT:.0%}" if ours else "",
            not ours or part < LIMIT,
        )
    yield Figure("beside: until it is on the disk and read back", f"{statistics.fmean(written) * 1e3:.0f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="of the run whose frequency is planned")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    options = parser.parse_args()
    mx.disable_compile()
    print(machine())
    with TemporaryDirectory() as name:
        every = save_every(options.iterations, full=True)
        return report(measure(Path(name), every, options.width, options.layers))


if __name__ == "__main__":
    sys.exit(main())
