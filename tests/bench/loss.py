"""The loss in chunks of tokens beside that of all logits: `uv run python -m tests.bench.loss`.

A head of 150,000 tokens on 4,096 inputs, float32 and bfloat16: loss and the gradient of the inputs, in turns, each in a
process of its own. The peak is MLX's own, without what was there before; the time is that of the processor, which other
programs change least. Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx import nn

from engine.protocol.partition import loss_tokens
from engine.trainer.strategies import loss
from engine.trainer.weights import scalar
from tests.bench.figures import Figure, machine, report

TOKENS: Final = 4_096
VOCABULARY: Final = 150_000
WIDTH: Final = 16
"""Of the hidden states: small, since MLX's Linux wheel multiplies matrices slowly. Wider ones favour neither."""
ROUNDS: Final = 3
MEMORY, TIME, GRADIENT = 0.5, 1.05, 1e-6
FORMS: Final = ("whole", "chunked")


class Trunk(nn.Module):  # type: ignore[misc]  # mlx.nn has no types
    """Only embeddings, which are what is trained: everything else is the head's."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.lookup = nn.Embedding(tokens, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        logits: mx.array = self.lm_head(self.lookup(mx.arange(tokens.shape[1])[None]))
        return logits


def step(form: str, dtype: str, tokens: int, gradient: Path) -> int:
    """One step, in this process; prints its processor seconds and peak bytes, and writes the gradient."""
    mx.disable_compile()
    mx.random.seed(5)
    model = Trunk(tokens)
    model.set_dtype(getattr(mx, dtype))
    model.lm_head.freeze()
    inputs = mx.random.randint(0, VOCABULARY, (1, tokens + 1))
    mx.eval(model.parameters(), inputs)
    if form == "whole":
        vars(loss)["loss_tokens"] = lambda tokens, vocabulary: tokens
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    started = time.process_time()
    differentiate = nn.value_and_grad(model, loss.loss_sum)
    arguments = (inputs, mx.array([[1, tokens + 1]]), mx.array(1.0))
    value, gradients = differentiate(model, *arguments, trained=["lookup.weight"])
    mx.eval(value, gradients)
    seconds = time.process_time() - started
    found = gradients["lookup"]["weight"].astype(mx.float32)
    np.save(gradient, np.array(found))
    print(json.dumps({"seconds": seconds, "peak": mx.get_peak_memory() - held, "loss": scalar(value)}))
    return 0


def compare(dtype: str, tokens: int, rounds: int, home: Path) -> Iterator[Figure]:
    runs: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
    for _ in range(rounds):
        for form in FORMS:
            argv = [sys.executable, "-m", "tests.bench.loss", "--tokens", str(tokens), "--step", form, dtype]
            done = subprocess.run([*argv, str(home / f"{form}.npy")], stdout=subprocess.PIPE, text=True, check=True)
            runs[form].append(json.loads(done.stdout))
    whole, chunked = runs["whole"], runs["chunked"]
    peaks = [max(run["peak"] for run in each) for each in (whole, chunked)]
    memory = peaks[1] / peaks[0]
    name = f"{dtype}, in chunks of {loss_tokens(tokens, VOCABULARY)}"
    yield Figure(
        f"{name}: peak, beside all logits'",
        f"{peaks[1] / 1e9:.2f} of {peaks[0] / 1e9:.2f} GB: {memory:.2f} x",
        f"<= {MEMORY:g}",
        memory <= MEMORY,
    )
    seconds = [statistics.median(run["seconds"] for run in each) for each in (whole, chunked)]
    took = statistics.median(ours["seconds"] / theirs["seconds"] for theirs, ours in zip(whole, chunked, strict=True))
    yield Figure(
        f"{name}: processor time", f"{seconds[1]:.1f} of {seconds[0]:.1f} s: {took:.2f} x", f"<= {TIME:g}", took <= TIME
    )
    theirs, ours = (np.load(home / f"{form}.npy") for form in FORMS)
    off = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    exact = dtype == "float32"
    yield Figure(
        f"{name}: gradient", f"{off:.1e} relative", f"<= {GRADIENT:g}" if exact else "", not exact or off <= GRADIENT
    )


def main() -> int:
    options = argparse.ArgumentParser(description="The loss in chunks of tokens beside that of all logits.")
    options.add_argument("--tokens", type=int, default=TOKENS)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--step", nargs=3, metavar=("FORM", "DTYPE", "FILE"), help="one step in this process")
    chosen = options.parse_args()
    if chosen.step:
        form, dtype, file = chosen.step
        return step(form, dtype, chosen.tokens, Path(file))
    print(machine())
    print(f"vocabulary {VOCABULARY:,}, {chosen.tokens:,} tokens, medians of {chosen.rounds} in turns", flush=True)
    with TemporaryDirectory() as directory:
        kinds = ("float32", "bfloat16")
        return report(
            figure for dtype in kinds for figure in compare(dtype, chosen.tokens, chosen.rounds, Path(directory))
        )


if __name__ == "__main__":
    sys.exit(main())
