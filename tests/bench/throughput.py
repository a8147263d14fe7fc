"""Tokens per second of our trainer beside stock mlx_lm.lora's: `uv run python -m tests.bench.throughput [--only WORD]`.

Both by real mlx.launch on the same model, data, batch, ranks and precision, alternating, each rank held to a core of
its own. What is counted is the same: whole epochs after one to warm up, so the same documents; target tokens without
padding; by rank 0's clock from one report to another, so that loading, warming up and the end are left out.
Documents of unlike length (what real data has, where sorting by length decides) and of equal length (where only the
step counts). Then with one of two ranks slowed to about a third (its core shared with two programs that only count),
where our shares are in proportion to what each core does alone in the same run. On OpenBLAS where it is installed; the
first lines say so. Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Final

import mlx.core as mx

from engine.demo_model import calls
from tests.bench import blas
from tests.bench.calibration import SPINNERS, spinning
from tests.bench.equal_data import write_equal_data
from tests.bench.figures import Figure, machine, report
from tests.bench.trainers import run_ours, run_stock

BATCH: Final = 8
EXAMPLES: Final = 64
EPOCH: Final = EXAMPLES // BATCH
"""Iterations."""
CALLS: Final = (1, 8)
"""Least and most calls of an example: what real data has, documents of unlike length."""
TOKENS: Final = 129
"""Of each example of equal length."""
LIMIT, UNEQUAL_LIMIT = 1.0, 1.4


@dataclass(frozen=True)
class Case:
    """What is trained, and on how many ranks."""

    ranks: int
    kind: str
    """lora or full."""
    precision: str
    """float32 or bfloat16: the model's, and (as in mlx-lm, and by choice in ours) its optimizer's."""
    equal: bool = False
    """Examples of equal length."""

    @property
    def name(self) -> str:
        length = ", equal lengths" if self.equal else ""
        return f"{self.ranks} rank{'s' if self.ranks > 1 else ''}, {self.kind}, {self.precision}{length}"


CASES: Final = tuple(
    Case(ranks, kind, precision, equal)
    for equal in (True, False)
    for precision in ("float32", "bfloat16")
    for kind in ("lora", "full")
    for ranks in (1, 2)
)


@dataclass(frozen=True)
class Counted:
    """What one run did between two of its reports."""

    tokens: int
    """Targets, padding left out."""
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Workspace:
    """Where models, data and runs lie."""

    def __init__(self, root: Path, epochs: int) -> None:
        self._root = root
        self._epochs = epochs
        demo = root / "demo"
        subprocess.run([sys.executable, "-m", "engine.demo_model", str(demo)], check=True)
        for precision in ("float32", "bfloat16"):
            shutil.copytree(demo / "model", self._model(precision))
        _to_bfloat16(self._model("bfloat16") / "model.safetensors")
        write_data(root / "unlike")
        write_equal_data(root / "equal", demo / "model", TOKENS, EXAMPLES)
        (root / "kernels").mkdir()
        # The kernels of compiled steps, by the system's C++ compiler for half a minute, are built once.
        self._environment = {"TMPDIR": str(root / "kernels")}

    def ours(self, case: Case, shares: tuple[float, ...], cores: Sequence[int] = (0, 1)) -> Counted:
        """Our trainer, strategy data."""
        directory = self._directory()
        job = self._job(case, directory) | {"optimizer_precision": "parameter", "compile_on_cpu": True}
        run = run_ours(directory, job, shares, cores[: case.ranks], self._environment)
        return self._counted(run.events(0, "report"), padding=0)

    def stock(self, case: Case) -> Counted:
        """mlx_lm.lora."""
        directory = self._directory()
        reports = run_stock(directory, self._job(case, directory), case.ranks, self._environment, pinned=True)
        # Its mask takes the first token of padding of each document for a target, and equal ones have none.
        padding = 0 if case.equal else EXAMPLES * self._epochs
        return self._counted(reports, padding=padding)

    def _job(self, case: Case, directory: Path) -> dict[str, Any]:
        """mlx-lm's own keys."""
        return {
            "model": str(self._model(case.precision)),
            "data": str(self._root / ("equal" if case.equal else "unlike")),
            "adapter_path": str(directory / "adapters"),
            "fine_tune_type": case.kind,
            "num_layers": -1,
            "batch_size": BATCH,
            # One more than is counted: the last one validates, and saves.
            "iters": (1 + self._epochs) * EPOCH + 1,
            "steps_per_report": EPOCH,
            "save_every": 1_000_000,
            "val_batches": 0,
            # Nothing to pad, for stock neither.
            **({"max_seq_length": TOKENS} if case.equal else {}),
        }

    def _counted(self, reports: list[dict[str, Any]], *, padding: int) -> Counted:
        if len(reports) <= self._epochs + 1:
            raise AssertionError(f"only {len(reports)} reports")
        first, last = reports[0], reports[self._epochs]
        return Counted(last["trained_tokens"] - first["trained_tokens"] - padding, last["t"] - first["t"])

    def _model(self, precision: str) -> Path:
        return self._root / f"model-{precision}"

    def _directory(self) -> Path:
        return Path(mkdtemp(prefix="run-", dir=self._root))


def write_data(directory: Path) -> None:
    """Radio calls, the same every time."""
    directory.mkdir()
    dice = random.Random(7)
    radio = calls(dice)
    for split, count in {"train": EXAMPLES, "valid": BATCH}.items():
        texts = (" ".join(next(radio) for _ in range(dice.randint(*CALLS))) for _ in range(count))
        (directory / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def _to_bfloat16(path: Path) -> None:
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    halves = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    mx.eval(halves)
    mx.save_safetensors(str(path), halves, metadata={"format": "mlx"})


def compared(workspace: Workspace, case: Case, rounds: int) -> Figure:
    """Ours and stock in turns."""
    ours, stocks = [], []
    for _ in range(rounds):
        ours.append(workspace.ours(case, (1.0,) * case.ranks))
        stocks.append(workspace.stock(case))
    return _figure(case.name, ours, stocks, LIMIT)


def unequal(workspace: Workspace, case: Case, rounds: int) -> Iterator[Figure]:
    """The same with the second rank slowed, and our shares in proportion."""
    lone = Case(1, case.kind, case.precision)
    with spinning(1, SPINNERS, 0):
        alone = [workspace.ours(lone, (1.0,), [core]).speed for core in (0, 1)]
        ours, stocks = [], []
        for _ in range(rounds):
            ours.append(workspace.ours(case, (alone[0], alone[1])))
            stocks.append(workspace.stock(case))
    yield Figure("the slowed core beside the other, alone", f"{alone[1] / alone[0]:.0%}")
    yield _figure(f"{case.name}, one slowed", ours, stocks, UNEQUAL_LIMIT)


def _figure(name: str, ours: list[Counted], stocks: list[Counted], limit: float) -> Figure:
    if len(counts := {run.tokens for run in (*ours, *stocks)}) > 1:
        raise AssertionError(f"{name}: not the same tokens: {sorted(counts)}")
    mine, theirs = (statistics.median(run.speed for run in runs) for runs in (ours, stocks))
    value = f"{mine:,.0f} and {theirs:,.0f} tok/s: {mine / theirs:.2f} ×"
    return Figure(name, value, f"≥ {limit:.1f} ×", mine >= limit * theirs)


def figures(root: Path, cases: list[Case], rounds: int, epochs: int, *, slowed: bool) -> Iterator[Figure]:
    workspace = Workspace(root, epochs)
    for case in cases:
        yield compared(workspace, case, rounds)
    if slowed:
        yield from unequal(workspace, Case(2, "lora", "float32"), rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description="Our trainer's tokens per second beside stock mlx_lm.lora's.")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, in turns")
    parser.add_argument("--epochs", type=int, default=2, help="counted, of 8 iterations")
    parser.add_argument("--only", default="", help="cases whose name has this, or `slowed`")
    parser.add_argument("--blas", choices=blas.CHOICES, help="OpenBLAS, if it is installed")
    options = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("two cores are needed: each rank has one of its own")
    # So that what runs is ended then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = [case for case in CASES if options.only in case.name]
    slowed = options.only in ("", "slowed")
    print(machine())
    print(blas.use(options.blas))
    print(f"demo model, {EXAMPLES} examples, batch {BATCH}: ours and stock mlx_lm.lora, medians of {options.rounds}")
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(TemporaryDirectory()))
        return report(figures(root, chosen, options.rounds, options.epochs, slowed=slowed))


if __name__ == "__main__":
    sys.exit(main())
