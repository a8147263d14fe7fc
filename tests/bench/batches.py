"""Padding, speed and memory of batches by a budget of tokens, beside batches of one size, ours and those of stock
mlx_lm.lora: `uv run python -m tests.bench.batches [--only WORD] [--seconds S] [--untimed]`.

Four kinds of data as people have them, of 100 and of 5,000 examples; a small Llama with LoRA on one rank, each run by
real mlx.launch. The budget is the one that the plan suggests in place of a batch of 8. Real over computed tokens are
counted over an epoch of each trainer's own batches. Speed is in real tokens, of 100 examples over whole epochs (equal
data), of 5,000 over as many batches, in random order, as there is time for; so is the peak. Neither compiles: both
would have g++ build kernels first. Last, the validation losses by budget and by batch after epochs of the same data.
Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Final

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
_STOP: Final = {"MLX_DISABLE_COMPILE": "1"}
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
    peak_bytes: float


class Data:
    """One data set, and its trainers' batches."""

    def __init__(self, root: Path, kind: str, examples: int) -> None:
        self._root = root
        self.folder = root / f"{kind} {examples}".replace(" ", "-")
        self.folder.mkdir()
        dice = random.Random(kind)
        radio = " ".join(itertools.islice(calls(dice), 20_000)).split()
        for name, count in (("train", examples), ("valid", 40)):
            texts = (self._text(dice, radio, KINDS[kind](dice)) for _ in range(count))
            rows = (json.dumps({"text": text}) + "\n" for text in texts)
            (self.folder / f"{name}.jsonl").write_text("".join(rows))
        self._tokenizer = load_tokenizer(root / "model")
        lengths = sorted(self._split().widths(np.arange(examples)), reverse=True)
        self.budget = suggested_budget(lengths, BATCH, None)

    @staticmethod
    def _text(dice: random.Random, words: list[str], tokens: int) -> str:
        # A word is about a token and a half.
        start = dice.randrange(len(words) - LONGEST)
        return " ".join(words[start : start + max(1, min(round(tokens / 1.5), LONGEST))])

    def job(self, budget: int | None, **keys: Any) -> dict[str, Any]:
        size = {"batch_size": BATCH} if budget is None else {"batch_tokens": budget}
        own = {"model": str(self._root / "model"), "data": str(self.folder), "fine_tune_type": "lora", "num_layers": -1}
        fixed = {"max_seq_length": LONGEST, "val_batches": 0, "save_every": 1_000_000, "learning_rate": 1e-4}
        return {**own, **size, **fixed, "optimizer_precision": "parameter", **keys}

    def _split(self, budget: int | None = None) -> Split:
        job = Job.from_spec(self.job(budget), model=None, data=None, workdir=self._root, home=self._root)
        return Split(job, "train", row_format(job, self._tokenizer), lambda _: None)

    @functools.cache  # noqa: B019  (as long as the benchmark)
    def batches(self, budget: int | None = None) -> list[tuple[int, int]]:
        """Real and computed inputs of each batch of our first epoch."""
        split = self._split(budget)
        sampler = split.sampler(BATCH, 0)
        made = (split.batch(sampler.batch(position)) for position in range(sampler.batches_per_epoch))
        return [(batch.targets, batch.tokens.shape[0] * (batch.tokens.shape[1] - 1)) for batch in made]

    @functools.cached_property
    def stock_batches(self) -> list[tuple[int, int]]:
        rows = [json.loads(line) for line in (self.folder / "train.jsonl").read_text().splitlines()]
        made = iterate_batches(CacheDataset(TextDataset(rows, self._tokenizer)), BATCH, LONGEST)
        # It prints a line for each batch that it truncates.
        with contextlib.redirect_stdout(io.StringIO()):
            return [(sum(end - 1 for _, end in ends.tolist()), tokens.size - len(tokens)) for tokens, ends in made]


def share(batches: list[tuple[int, int]]) -> float:
    real, computed = map(sum, zip(*batches, strict=True))
    return real / computed


def timed(data: Data, budget: int | None, seconds: float, *, stock: bool) -> Measured:
    """The speed after a first part that warms up."""
    directory = Path(mkdtemp(prefix="run-", dir=data.folder.parent))
    batches = data.stock_batches if stock else data.batches(budget)
    epoch = len(batches)
    computed = sum(size for _, size in batches) / epoch
    enough = max(2, round(seconds * TOKENS_A_S / computed))
    # Whole epochs, as far as there is time for one.
    counted = epoch * max(1, enough // epoch) if epoch <= 2 * enough else enough
    keys = {"iters": 2 * counted + 1, "steps_per_report": counted, "adapter_path": str(directory / "adapters")}
    job = data.job(budget, **keys)
    if not stock:
        run = run_ours(directory, job, (1.0,))
        first, last = run.events(0, "report")[:2]
        tokens = last["trained_tokens"] - first["trained_tokens"]
    else:
        del job["optimizer_precision"]
        first, last = run_stock(directory, job, 1, _STOP)[:2]
        # Its mask takes the first token of padding of each example for a target.
        tokens = last["trained_tokens"] - first["trained_tokens"] - BATCH * counted
    return Measured(tokens, last["t"] - first["t"], 1e9 * last["peak_memory"])


def compared(data: Data, name: str, seconds: float, *, tailed: bool) -> Iterator[Figure]:
    stock, ours = timed(data, None, seconds, stock=True), timed(data, None, seconds, stock=False)
    budget = timed(data, data.budget, seconds, stock=False)
    value = f"{budget.speed:,.0f}, {ours.speed:,.0f} and {stock.speed:,.0f} real tok/s"
    times = f"{budget.speed / ours.speed:.2f} × ours by batch, {budget.speed / stock.speed:.2f} × stock"
    least = 1.5 * tailed
    met = budget.speed >= 1.5 * stock.speed and budget.speed >= least * ours.speed
    target = "≥ 1.5 × stock" + ", ≥ 1.5 × ours" * tailed
    yield Figure(f"{name}: by budget, by batch, stock", f"{value}: {times}", target, met)
    peak = budget.peak_bytes / ours.peak_bytes
    sizes = ", ".join(f"{run.peak_bytes / 1e6:,.0f}" for run in (budget, ours, stock))
    yield Figure(f"{name}: peak", f"{sizes} MB: {peak:.2f} × by batch", "≤ 0.5 ×" * tailed, peak <= 0.5 or not tailed)


def learned(data: Data, epochs: int) -> Figure:
    """The validation loss after the same data, by budget and by batch, each at the rate that the rule has for the
    examples of its updates, 1e-3 at a batch of 8."""
    losses = []
    for budget in (data.budget, None):
        directory = Path(mkdtemp(prefix="run-", dir=data.folder.parent))
        sizes = data.batches(budget)
        examples = len(list(data.folder.joinpath("train.jsonl").open())) / len(sizes)
        rate = 1e-3 * scaled_rate(examples, "sqrt") / scaled_rate(BATCH, "sqrt")
        keys = {"epochs": epochs, "val_batches": -1, "steps_per_eval": 1_000_000, "learning_rate": rate}
        run = run_ours(directory, data.job(budget, **keys, fine_tune_type="full"), (1.0,))
        losses.append([event["val_loss"] for event in run.events(0, "validation")])
    (before, by_budget), (_, by_batch) = losses
    ratio = by_budget / by_batch
    value = f"{by_budget:.4f} and {by_batch:.4f}, from {before:.4f}: × {ratio:.4f}"
    return Figure(f"validation loss after {epochs} epochs, by budget and by batch", value, "≤ 1.01 ×", ratio <= 1.01)


def figures(root: Path, options: argparse.Namespace) -> Iterator[Figure]:
    subprocess.run([sys.executable, "-m", "engine.demo_model", str(root / "demo")], check=True)
    write_llama(root / "model", root / "demo" / "model", MODEL | {"num_key_value_heads": 4}, "float32")
    for kind, (examples, least) in itertools.product(KINDS, SIZES.items()):
        name = f"{kind}, {examples:,}"
        if options.only not in name:
            continue
        data = Data(root, kind, examples)
        shares = [share(batches) for batches in (data.batches(data.budget), data.batches(), data.stock_batches)]
        value = f"{shares[0]:.3f} (batch_tokens = {data.budget}), {shares[1]:.3f} and {shares[2]:.3f}"
        figure = Figure(f"{name}: real over computed tokens", value, f"≥ {least:.2f}", shares[0] >= least)
        yield figure
        if not options.untimed:
            yield from compared(data, name, options.seconds, tailed=kind == TAILED)
    if options.only in "validation loss":
        (root / "learned").mkdir()
        (root / "learned" / "model").symlink_to(root / "model")
        yield learned(Data(root / "learned", "alpaca-like", options.learned), options.epochs)


def main() -> int:
    parser = argparse.ArgumentParser(description="Batches by a budget of tokens, by size, and stock mlx_lm.lora's.")
    parser.add_argument("--only", default="", help="data whose name has this, or `validation loss`")
    parser.add_argument("--seconds", type=float, default=4.0, help="about as long each speed is measured")
    parser.add_argument("--untimed", action="store_true", help="only what does not depend on the machine's load")
    parser.add_argument("--learned", type=int, default=400, help="examples of the validation's training")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    print(machine())
    print(f"Llama of {MODEL['num_hidden_layers']} layers, LoRA, one rank, batch {BATCH}, max_seq_length {LONGEST}")
    with TemporaryDirectory() as root:
        return report(figures(Path(root), options))


if __name__ == "__main__":
    sys.exit(main())
