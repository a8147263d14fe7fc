"""Padding, speed and memory of batches by a budget of tokens, beside batches of one size, ours and those of stock
mlx_lm.lora: `uv run python -m tests.bench.batches [--only WORD] [--seconds S] [--untimed] [--before FOLDER]`.

Four kinds of data as people have them, of 100 and of 5,000 examples; a small Llama with LoRA on one rank. The budget is
the one that the plan suggests in place of a batch of 8. Real over computed tokens are of an epoch of each trainer's own
batches. Speed is in real tokens a second of the processor, which other programs change least. All batches of 100
examples are timed, and of 5,000 every so many in order of their width: a few at random would hold more or less of the
long ones, which cost most. With a budget and in batches of 8 the peak is that of an epoch, of stock that of what is
timed. `--before`: a checkout of an earlier commit, in whose order batches of 8 are measured as well: 8a962fce sorted by
characters. Nothing compiles: g++ would build kernels first. Last, the validation losses by budget and by batch after
epochs of the same data. Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from mlx_lm.tuner.datasets import CacheDataset, TextDataset
from mlx_lm.tuner.trainer import iterate_batches
from mlx_lm.utils import load_tokenizer

from engine.demo_model import calls
from engine.plan.padding import suggested_budget
from engine.protocol.job import Job, scaled_rate
from engine.trainer.model import row_format
from engine.training.data import Split
from tests.bench.equal_data import write_llama
from tests.bench.figures import Figure, machine, report
from tests.bench.throughput import Counted
from tests.bench.trainers import run_ours, run_stock

BATCH: Final = 8
LONGEST: Final = 2_048
SIZES: Final = {100: 0.70, 5_000: 0.95}
"""Examples → the least real over computed tokens."""
MODEL: Final = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
_STEP: Final = Path(__file__).with_name("batches_step.py")
TOKENS_A_S: Final = 6_000
"""About what a busy core computes."""


def log_normal(dice: random.Random, mean: float, spread: float) -> int:
    return round(dice.lognormvariate(math.log(mean) - spread**2 / 2, spread))


KINDS: Final[dict[str, Callable[[random.Random], int]]] = {
    "alpaca-like": lambda dice: 30 + log_normal(dice, 60, 0.8),
    "short chats with a tail": lambda dice: dice.randint(500, 1_500) if dice.random() < 0.03 else dice.randint(20, 100),
    "log-normal 300": lambda dice: log_normal(dice, 300, 0.8),
    "multi-turn 800": lambda dice: log_normal(dice, 800, 0.5),
}
"""Tokens of an example."""
TAILED: Final = "short chats with a tail"


@dataclass(frozen=True)
class Measured(Counted):
    """`seconds`: of the processor."""

    peak_bytes: float
    batches: list[tuple[int, int]]
    """Real and computed inputs of each batch of an epoch."""

    @property
    def share(self) -> float:
        real, computed = map(sum, zip(*self.batches, strict=True))
        return real / computed


class Data:
    """One data set, and the trainers on it."""

    def __init__(self, root: Path, kind: str, examples: int) -> None:
        self._root = root
        self.folder = root / f"{kind} {examples}".replace(" ", "-")
        self.examples = examples
        dice = random.Random(kind)
        radio = " ".join(itertools.islice(calls(dice), 20_000)).split()
        for name, count in (("train", examples), ("valid", 40)):
            texts = (self._text(dice, radio, KINDS[kind](dice)) for _ in range(count))
            write_rows(self.folder / f"{name}.jsonl", [{"text": text} for text in texts])
        self._tokenizer = load_tokenizer(root / "model")
        job = Job.from_spec(self.job(None), model=None, data=None, workdir=root, home=root)
        split = Split(job, "train", row_format(job, self._tokenizer), lambda _: None)
        tokens = split.batch(range(examples)).bounds[:, 1]
        self.budget = suggested_budget(sorted(tokens.tolist(), reverse=True), BATCH, LONGEST)

    @staticmethod
    def _text(dice: random.Random, words: list[str], tokens: int) -> str:
        # A word is about a token and a half.
        start = dice.randrange(len(words) - LONGEST)
        return " ".join(words[start : start + max(1, min(round(tokens / 1.5), LONGEST))])

    def directory(self) -> Path:
        return Path(mkdtemp(prefix="run-", dir=self._root))

    def job(self, budget: int | None, **keys: Any) -> dict[str, Any]:
        size = {"batch_size": BATCH} if budget is None else {"batch_tokens": budget}
        own = {"model": str(self._root / "model"), "data": str(self.folder), "fine_tune_type": "lora", "num_layers": -1}
        fixed = {"max_seq_length": LONGEST, "val_batches": 0, "save_every": 1_000_000, "learning_rate": 1e-4}
        return {**own, **size, **fixed, "optimizer_precision": "parameter", **keys}

    def ours(self, budget: int | None, tokens: int, before: Path | None = None) -> Measured:
        """About so many `tokens`, by the engine in the checkout `before`, if any."""
        file = self.directory() / "request.json"
        file.write_text(json.dumps({"job": self.job(budget), "tokens": tokens}))
        environment = {**os.environ, "PYTHONPATH": str(before or Path(__file__).parents[2])}
        argv = [sys.executable, "-W", "ignore", str(_STEP), str(file)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        result = json.loads(done.stdout)
        return Measured(result["targets"], result["seconds"], result["peak"], result["batches"])

    def stock(self, tokens: int) -> Measured:
        """As `ours`, in batches of the file's order: stock's sort by length does nothing."""
        rows = [json.loads(line) for line in (self.folder / "train.jsonl").read_text().splitlines()]
        made = iterate_batches(CacheDataset(TextDataset(rows, self._tokenizer)), BATCH, LONGEST)
        # It prints a line for each batch that it truncates, and takes the batches in a random order, as it would train.
        with contextlib.redirect_stdout(io.StringIO()), patch.object(np.random, "permutation", range):
            batches = [(sum(end - 1 for _, end in ends.tolist()), batch.size - len(batch)) for batch, ends in made]
        if not tokens:
            return Measured(0, 0.0, 0.0, batches)
        by_width = sorted(range(len(batches)), key=lambda number: batches[number][1])
        every = max(1, min(round(sum(size for _, size in batches) / tokens), len(batches) // 3))
        chosen = by_width[every // 2 :: every]
        directory = self.directory()
        some = [row for number in chosen for row in rows[number * BATCH : (number + 1) * BATCH]]
        for name in ("train", "valid"):
            write_rows(directory / "data" / f"{name}.jsonl", some)
        paths = {"data": str(directory / "data"), "adapter_path": str(directory / "adapters")}
        job = self.job(None, iters=len(chosen), steps_per_report=1, **paths)
        del job["optimizer_precision"]
        first, *_, last = run_stock(directory, job, 1, {"MLX_DISABLE_COMPILE": "1"})
        # Its mask takes the first token of padding of each example for a target.
        targets = last["trained_tokens"] - first["trained_tokens"] - BATCH * (len(chosen) - 1)
        return Measured(targets, last["processor"] - first["processor"], 1e9 * last["peak_memory"], batches)


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def compared(data: Data, name: str, least_share: float, options: argparse.Namespace) -> Iterator[Figure]:
    tokens = 0 if options.untimed else round(options.seconds * TOKENS_A_S)
    runs = {"budget": data.ours(data.budget, tokens), "batch": data.ours(None, tokens), "stock": data.stock(tokens)}
    if options.before is not None:
        runs["before"] = data.ours(None, tokens, options.before)
    labels = ", ".join(runs)
    shares = ", ".join(f"{run.share:.3f}" for run in runs.values())
    budget, met = runs["budget"], runs["budget"].share >= least_share
    text = f"{shares} (batch_tokens = {data.budget})"
    yield Figure(f"{name}: real over computed tokens, {labels}", text, f"≥ {least_share:.2f}", met)
    if not tokens:
        return
    times = {label: budget.speed / run.speed for label, run in runs.items()}
    value = ", ".join(f"{run.speed:,.0f}" for run in runs.values())
    value += " real tokens a processor second: " + ", ".join(f"{ratio:.2f} ×" for ratio in [*times.values()][1:])
    tailed = TAILED in name
    slower = ["stock", *(["before" if "before" in runs else "batch"] if tailed else [])]
    met = all(times[label] >= 1.5 for label in slower)
    yield Figure(f"{name}: speed, {labels}", value, f"≥ 1.5 × {', '.join(slower)}", met)
    peak = budget.peak_bytes / runs["batch"].peak_bytes
    sizes = ", ".join(f"{run.peak_bytes / 1e6:,.0f}" for run in runs.values())
    met = peak <= 0.5 or not tailed
    yield Figure(f"{name}: peak, {labels}", f"{sizes} MB: {peak:.2f} × by batch", "≤ 0.5 ×" * tailed, met)


def learned(data: Data, epochs: int, seeds: int) -> Figure:
    """The validation loss after the same data, by budget and by batch, each at the rate that the rule has for the
    examples of its updates, 1e-3 at a batch of 8."""
    by_budget, by_batch = (
        [_validation_loss(data, budget, epochs, seed) for seed in range(seeds)] for budget in (data.budget, None)
    )
    ratios = [one / other for one, other in zip(by_budget, by_batch, strict=True)]
    ratio = statistics.fmean(ratios)
    value = f"{statistics.fmean(by_budget):.4f} and {statistics.fmean(by_batch):.4f}: × {ratio:.4f} "
    value += f"({min(ratios):.4f} to {max(ratios):.4f})"
    name = f"validation loss after {epochs} epochs, {seeds} seeds, by budget and by batch"
    return Figure(name, value, "≤ 1.01 ×", ratio <= 1.01)


def _validation_loss(data: Data, budget: int | None, epochs: int, seed: int) -> float:
    per_update = data.examples / len(data.ours(budget, 0).batches)
    rate = 1e-3 * scaled_rate(per_update, "sqrt") / scaled_rate(BATCH, "sqrt")
    keys = {"epochs": epochs, "val_batches": -1, "steps_per_eval": 1_000_000, "learning_rate": rate, "seed": seed}
    run = run_ours(data.directory(), data.job(budget, **keys, fine_tune_type="full"), (1.0,))
    return float(run.events(0, "validation")[-1]["val_loss"])


def figures(root: Path, options: argparse.Namespace) -> Iterator[Figure]:
    subprocess.run([sys.executable, "-m", "engine.demo_model", str(root / "demo")], check=True)
    write_llama(root / "model", root / "demo" / "model", MODEL | {"num_key_value_heads": 4}, "float32")
    for kind, (examples, least) in itertools.product(KINDS, SIZES.items()):
        if options.only in (name := f"{kind}, {examples:,}"):
            yield from compared(Data(root, kind, examples), name, least, options)
    if options.only in "validation loss":
        yield learned(Data(root, "alpaca-like", options.learned), options.epochs, options.seeds)


def main() -> int:
    parser = argparse.ArgumentParser(description="Batches by a budget of tokens, by size, and stock mlx_lm.lora's.")
    parser.add_argument("--only", default="", help="data whose name has this, or `validation loss`")
    parser.add_argument("--seconds", type=float, default=20.0, help="about as long each speed is measured")
    parser.add_argument("--untimed", action="store_true", help="only real over computed tokens, and the loss")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit, whose batches of 8 are measured")
    parser.add_argument("--learned", type=int, default=400, help="examples of the validation's training")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    print(f"Llama of {MODEL['num_hidden_layers']} layers, LoRA, one rank, batch {BATCH}, max_seq_length {LONGEST}")
    with TemporaryDirectory() as root:
        return report(figures(Path(root), options))


if __name__ == "__main__":
    sys.exit(main())
