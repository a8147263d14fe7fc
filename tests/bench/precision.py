"""Compares what training in bfloat16 and in float32 learns: `python -m tests.bench.precision`.

The demo's model, trained in float32 first so that there is something to fine-tune, then 300 steps at mlx-lm's own
learning rate by the trainer's own arithmetic, from the same weights (those that bfloat16 can hold) over the same
batches: in float32, in bfloat16 with each form of the optimizer's state that a plan may choose, and with Adam in
bfloat16 (`optimizer_precision = "parameter"`, as stock mlx-lm trains). Exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from engine.protocol.job import Job
from engine.trainer.model import load_model, row_format
from engine.trainer.optimizer import Updater
from engine.trainer.optimizer_state import COMPENSATION, compensated
from engine.trainer.strategies.data_parallel import Gradients
from engine.trainer.weights import scalar
from engine.training.data import Split
from tests.bench.figures import Figure, machine, report

STEPS: Final = 300
RATE: Final = 1e-5
FIRST_STEPS, FIRST_RATE = 150, 1e-3
VALIDATION: Final = 10
"""Batches."""
MOVEMENT_LIMIT: Final = 0.05
LOSS_LIMIT: Final = 0.005
"""Of the validation loss at the end."""
FORMS: Final = {
    "bf16, float32 masters": ("float32", "float32"),
    "bf16, kahan": ("kahan", "float32"),
    "bf16, kahan, 16-bit moments": ("kahan", "bfloat16"),
    "bf16, kahan, 8-bit moments": ("kahan", "8bit"),
    "bf16, stochastic": ("stochastic", "float32"),
    "bf16, stochastic, 8-bit moments": ("stochastic", "8bit"),
}
STOCK: Final = "Adam in bf16"
"""For comparison, without a target: that it moves less and learns less is what the forms are for."""


@dataclass(frozen=True)
class Trained:
    """What the steps have done."""

    way: dict[str, mx.array]
    """From the first trained weights to the last, at the optimizer's precision, float32."""
    before: float
    """Loss of the validation set, computed in float32 with the model's weights, at the beginning …"""
    after: float
    """… and at the end."""

    @property
    def moved(self) -> float:
        """The length of the way."""
        return math.sqrt(self.along(self))

    def along(self, other: Trained) -> float:
        """The scalar product of the ways."""
        return sum(scalar((way * other.way[name]).sum()) for name, way in self.way.items())


def train(job: Job, weights: dict[str, mx.array], dtype: mx.Dtype, steps: int) -> tuple[Trained, dict[str, mx.array]]:
    """From `weights`, in `dtype`; and the model's weights after it."""
    model, tokenizer = load_model(job)
    model.update(tree_unflatten([(name, value.astype(dtype)) for name, value in weights.items()]))
    mx.eval(model.parameters())
    train_split, valid = (Split(job, name, row_format(job, tokenizer), lambda _: None) for name in ("train", "valid"))
    sampler = train_split.sampler(job.batch_size, job.seed)
    gradients, updater = Gradients(model), Updater(job, model)
    start = exact(updater)
    mx.eval(start)
    before = validation(job, dict(tree_flatten(model.parameters())), valid)
    model.train()
    for position in range(steps):
        batch = train_split.batch(sampler.batch(position))
        gradients.add(batch)
        gradients.apply(updater, batch.targets)
    way = {name: value - start[name] for name, value in exact(updater).items()}
    after = dict(tree_flatten(model.parameters()))
    return Trained(way, before, validation(job, after, valid)), after


def exact(updater: Updater) -> dict[str, mx.array]:
    """The trained weights at the optimizer's precision, float32."""
    kept = updater.state()["optimizer"]
    return {
        name: compensated(value, kept[f"{name}:{COMPENSATION}"])
        if f"{name}:{COMPENSATION}" in kept
        else value.astype(mx.float32)
        for name, value in updater.masters.items()
    }


def validation(job: Job, weights: dict[str, mx.array], valid: Split) -> float:
    """Mean cross-entropy over some batches."""
    model, _ = load_model(job)
    model.update(tree_unflatten([(name, value.astype(mx.float32)) for name, value in weights.items()]))
    model.eval()
    forward = Gradients(model)
    batches = [valid.batch(indices) for indices in valid.fixed_batches(job.batch_size, job.seed, VALIDATION)]
    return sum(map(forward.loss, batches)) / sum(batch.targets for batch in batches)


def compare(home: Path, steps: int, rate: float) -> Iterator[Figure]:
    subprocess.run([sys.executable, "-m", "engine.demo_model", str(home / "demo")], check=True)
    raw = {
        "model": "demo/model",
        "data": "demo/data",
        "fine_tune_type": "full",
        "batch_size": 4,
        "max_seq_length": 64,
        "optimizer": "adam",
    }

    def job(**keys: Any) -> Job:
        return Job.from_spec({**raw, **keys}, model=None, data=None, workdir=home, home=home / "run")

    random = dict(tree_flatten(load_model(job())[0].parameters()))
    _, trained = train(job(learning_rate=FIRST_RATE), random, mx.float32, FIRST_STEPS)
    weights = {name: value.astype(mx.bfloat16) for name, value in trained.items()}
    mx.eval(weights)
    kinds = {
        "float32": (mx.float32, ("float32", "float32")),
        **{name: (mx.bfloat16, form) for name, form in FORMS.items()},
        STOCK: (mx.bfloat16, ("parameter", "float32")),
    }
    runs = {
        name: train(
            job(learning_rate=rate, seed=1, optimizer_precision=precision, moments=moments), weights, dtype, steps
        )[0]
        for name, (dtype, (precision, moments)) in kinds.items()
    }
    yield from figures(runs)


def figures(runs: dict[str, Trained]) -> Iterator[Figure]:
    exact = runs["float32"]
    yield Figure("float32: validation loss", f"{exact.before:.4f} to {exact.after:.4f}")
    yield Figure("float32: weights moved by", f"{exact.moved:.5f}")
    for name, run in list(runs.items())[1:]:
        moved, loss = run.moved / exact.moved, run.after / exact.after
        kept = name != STOCK
        yield Figure(
            f"{name}: weights moved",
            f"× {moved:.3f} of float32's",
            f"within {MOVEMENT_LIMIT:.0%}" if kept else "(not so)",
            (abs(moved - 1) <= MOVEMENT_LIMIT) is kept,
        )
        # Random rounding makes the way longer, to no side: this is without it.
        yield Figure(f"{name}: on float32's way", f"× {run.along(exact) / exact.moved**2:.3f}")
        yield Figure(
            f"{name}: validation loss",
            f"{run.after:.4f}, × {loss:.5f} of float32's",
            f"within {LOSS_LIMIT:.1%}" if kept else "",
            abs(loss - 1) <= LOSS_LIMIT or not kept,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate")
    options = parser.parse_args()
    mx.disable_compile()
    print(machine())
    print(f"{options.steps} steps of Adam at {options.rate:g}")
    with TemporaryDirectory() as name:
        return report(compare(Path(name), options.steps, options.rate))


if __name__ == "__main__":
    sys.exit(main())
