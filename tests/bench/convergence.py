"""Compares what exchanges that lose something learn: `python -m tests.bench.convergence`.

The demo's model, trained first so that there is something to fine-tune, then full fine-tunings by real trainers with
three seeds each: one rank with its half of each batch, two ranks with strategy "data" and with int8 gradients, and two
with strategy "local", also with plain averaging, for comparison. Exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten

from engine.protocol.job import Job
from engine.trainer.model import load_model
from tests.bench import blas
from tests.bench.figures import Figure, machine, report
from tests.bench.precision import FIRST_RATE, train
from tests.training.launching import launch

FIRST_STEPS: Final = 60
SEEDS: Final = (1, 2, 3)
STEPS: Final = 300
RATE: Final = 2e-5
BATCH: Final = 8
INT8_LIMIT: Final = 0.01
LOCAL_LIMIT: Final = 0.02
"""Of the synchronous validation loss."""
KINDS: Final[dict[str, dict[str, Any]]] = {
    "one rank, half of each batch": {"batch_size": BATCH // 2},
    "data": {},
    "data, int8": {"wire": "int8"},
    "local": {"strategy": "local"},
    "local, plain averaging": {"strategy": "local", "outer_learning_rate": 1.0, "outer_momentum": 0.0},
}
ONE, DATA, INT8, LOCAL, _ = KINDS


def compare(home: Path, steps: int, seeds: tuple[int, ...]) -> Iterator[Figure]:
    subprocess.run([sys.executable, "-m", "engine.demo_model", str(home / "demo")], check=True)
    raw = {
        "model": str(home / "demo" / "model"),
        "data": str(home / "demo" / "data"),
        "fine_tune_type": "full",
        "batch_size": BATCH,
        "max_seq_length": 64,
        "optimizer": "adam",
    }
    first = Job.from_spec(
        {**raw, "learning_rate": FIRST_RATE}, model=None, data=None, workdir=home, home=home / "first"
    )
    random = dict(tree_flatten(load_model(first)[0].parameters()))
    _, weights = train(first, random, mx.float32, min(FIRST_STEPS, steps))
    mx.save_safetensors(str(home / "demo" / "model" / "model.safetensors"), weights, {"format": "mlx"})
    losses: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in seeds:
        for kind, keys in KINDS.items():
            own = {"iters": steps, "steps_per_eval": steps, "save_every": steps, "val_batches": -1, "seed": seed}
            job = {**raw, **own, "learning_rate": RATE, "steps_per_report": steps, **keys}
            shares = (1.0,) if kind == ONE else (1.0, 1.0)
            run = launch(home / f"{seed}-{kind}".replace(" ", "_"), job, shares=shares).succeeded()
            before, *_, after = [event["val_loss"] for event in run.events(0, "validation")]
            losses[kind].append(after)
            if kind == DATA:
                yield Figure(f"seed {seed}: validation loss before", f"{before:.4f}")
    yield from figures(losses)


def figures(losses: dict[str, list[float]]) -> Iterator[Figure]:
    means = {kind: statistics.mean(found) for kind, found in losses.items()}
    for kind, found in losses.items():
        text = f"{means[kind]:.4f} ({', '.join(f'{loss:.4f}' for loss in found)}), × {means[kind] / means[DATA]:.4f}"
        limit = {INT8: INT8_LIMIT, LOCAL: LOCAL_LIMIT}.get(kind)
        target = f"within {limit:.0%} of data's" if limit else ""
        yield Figure(kind, text, target, limit is None or means[kind] <= means[DATA] * (1 + limit))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--blas", choices=blas.CHOICES, help="default: openblas, where it is installed")
    options = parser.parse_args()
    mx.disable_compile()
    print(machine(), blas.use(options.blas), sep="\n")
    print(f"validation loss after {options.steps} steps of {BATCH} examples, Adam at {RATE:g}")
    with TemporaryDirectory() as name:
        return report(compare(Path(name), options.steps, tuple(options.seeds)))


if __name__ == "__main__":
    sys.exit(main())
