"""A sequence in tiles beside the whole one: `uv run python -m tests.bench.long_context`.

One step of small models with random weights in float32, layers recomputed in both (grad_checkpoint), each in a process
of its own, by the trainer's own code: loss, gradients, MLX's own peak, and what the plan estimates for that. Time is
that of the processor, which other programs change least. The gradients of a step in tiles are compared with those of
the whole one: of 1,024 tokens in float64, which MLX lacks for experts, and of all in float32, where the whole step's
own rounding is most of the difference. The errors of both are the distances from a step of all tokens in float64, in
tiles, since the whole one would take twice the memory. A distance is that of the gradient that is furthest off, over
the largest one, and in norm. Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import mlx.core as mx
import numpy as np

from engine.config.models import FineTuneType
from engine.plan.memory.estimate import RankWorkload, estimate
from engine.plan.memory.shape import ModelShape
from engine.protocol import exchange
from engine.protocol.job import Job
from engine.trainer.model import load_model
from engine.trainer.strategies.data_parallel import Gradients
from engine.training.data import Batch
from tests.bench.figures import Figure, machine, report
from tests.bench.memory import TOKENIZER
from tests.bench.memory_step import write_weights

TOKENS: Final = 16_384
TILE: Final = 512
SHORT: Final = (1_024, 128)
"""Tokens and their tiles in float64, whole and tiled."""
MEMORY, GRADIENT, ESTIMATE = 0.4, 1e-6, 0.2
EQUAL, ROUNDED = 1e-12, 1e-5
"""Distances of gradients in tiles from whole ones, in float64 and in float32."""
_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 512,
    "max_position_embeddings": 131_072,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
"""The scores of two heads and 16,384 tokens take 2.15 GB."""
_SCALED: Final = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_EXPERTS: Final = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
CASES: Final[Mapping[str, tuple[FineTuneType, Mapping[str, Any]]]] = {
    "llama, scaled rope": ("full", {"rope_scaling": {**_SCALED, "original_max_position_embeddings": 8192}}),
    "qwen3": ("lora", {}),
    "gemma3_text, window": ("lora", {"sliding_window": 1024, "sliding_window_pattern": 2}),
    "qwen3_moe": ("full", _EXPERTS),
}
"""Name, which begins with the model_type → fine_tune_type, and keys of its config.json."""


def config_of(name: str) -> dict[str, Any]:
    return {**_SIZES, "model_type": name.partition(",")[0], **CASES[name][1]}


def step(directory: Path, tokens: int, tile: int, number: str) -> int:
    """One step, in this process; prints its loss, processor seconds and peak bytes, and writes its gradients."""
    mx.set_default_device(mx.cpu)
    # As the trainer does on the CPU.
    mx.disable_compile()
    kind = json.loads((directory / "request.json").read_text())
    settings = {"fine_tune_type": kind, "num_layers": -1, "grad_checkpoint": True, "sequence_tiling": tile}
    path = str(directory)
    settings["max_seq_length"] = tokens + 1
    job = Job.from_spec(settings, model=path, data=path, workdir=directory, home=directory)
    model, _ = load_model(job)
    model.set_dtype(getattr(mx, number))
    model.train()
    # As of a text, a few are frequent: of tokens drawn evenly, nearly all of a gradient cancels out.
    drawn = np.minimum(np.random.default_rng(7).zipf(1.3, (1, tokens + 1)), 500).astype(np.int32)
    # A prompt that is not trained on.
    batch = Batch(drawn, np.asarray([[tokens // 3, tokens + 1]], np.int32), tokens + 1 - tokens // 3)
    # About a layer's, as those of larger models: evaluated at once, all layers would be recomputed side by side.
    vars(exchange)["LEAST_BUCKET"] = 10_000
    gradients = Gradients(model)
    mx.clear_cache()
    mx.reset_peak_memory()
    started = time.process_time()
    loss = gradients.add(batch)
    values: dict[str, mx.array] = {}
    for piece in gradients.pieces():
        mx.eval(piece)
        values |= piece
    seconds = time.process_time() - started
    print(json.dumps({"loss": loss, "seconds": seconds, "peak": mx.get_peak_memory()}))
    mx.savez(str(directory / "gradients.npz"), **values)
    return 0


def run_step(directory: Path, tokens: int, tile: int, number: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """One step in a process of its own: its figures, and its gradients."""
    argv = [sys.executable, "-m", "tests.bench.long_context", "--step", str(directory), str(tokens), str(tile), number]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    with np.load(directory / "gradients.npz") as gradients:
        return json.loads(done.stdout), dict(gradients)


def compare(name: str, tokens: int, directory: Path) -> Iterator[Figure]:
    kind, config = CASES[name][0], config_of(name)
    subprocess.run([sys.executable, "-c", TOKENIZER, str(directory)], check=True, capture_output=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "request.json").write_text(json.dumps(kind))
    mx.random.seed(7)
    write_weights(directory)
    (whole, of_whole), (tiled, of_tiles) = (run_step(directory, tokens, tile, "float32") for tile in (0, TILE))
    memory = tiled["peak"] / whole["peak"]
    sizes = f"{tiled['peak'] / 1e6:,.0f} of {whole['peak'] / 1e6:,.0f} MB: {memory:.2f} x"
    yield Figure(f"{name}, {kind}: peak, beside the whole", sizes, f"<= {MEMORY:g}", memory <= MEMORY)
    for label, tile, run in (("whole", 0, whole), ("in tiles", TILE, tiled)):
        load = RankWorkload(fine_tune_type=kind, sequence=tokens, grad_checkpoint=True, sequence_tiling=tile)
        off = estimate(ModelShape.from_config(config), load).peak_bytes / run["peak"] - 1
        limit = f"within {ESTIMATE:.0%}"
        yield Figure(f"{name}: estimate of the peak, {label}", f"{off:+.0%}", limit, abs(off) <= ESTIMATE)
    seconds = f"{tiled['seconds']:.0f} of {whole['seconds']:.0f} s: {tiled['seconds'] / whole['seconds']:.2f} x"
    yield Figure(f"{name}: processor time", seconds)
    yield gradients(f"{name}: gradients, in tiles from whole", of_tiles, of_whole, ROUNDED)
    if "num_experts" in config:
        return
    length, tile = SHORT
    exact, exact_tiles = (run_step(directory, length, size, "float64")[1] for size in (0, tile))
    yield gradients(f"{name}: gradients of {length:,} tokens, float64", exact_tiles, exact, EQUAL)
    _, exact = run_step(directory, tokens, TILE, "float64")
    yield gradients(f"{name}: error of the gradients, in tiles", of_tiles, exact, GRADIENT)
    yield gradients(f"{name}: error of the gradients, whole", of_whole, exact)


def gradients(name: str, some: Mapping[str, Any], others: Mapping[str, Any], most: float | None = None) -> Figure:
    """How far they are from `others`: the largest difference over the largest of `others`, and `most` of that."""
    flat, expected = (np.concatenate([run[key].ravel() for key in others], dtype=np.float64) for run in (some, others))
    furthest = np.abs(flat - expected).max()
    off = float(furthest / np.abs(expected).max())
    norm = np.linalg.norm(flat - expected) / np.linalg.norm(expected)
    limit = f"<= {most:g} of the largest" if most is not None else ""
    text = f"{off:.1e} of the largest ({furthest:.1e}), {norm:.1e} in norm"
    return Figure(name, text, limit, most is None or off <= most)


def main() -> int:
    parser = argparse.ArgumentParser(description="A sequence in tiles beside the whole one.")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--step", nargs=4, metavar=("DIRECTORY", "TOKENS", "TILE", "TYPE"), help="one step in this process"
    )
    options = parser.parse_args()
    if options.step:
        directory, tokens, tile, number = options.step
        return step(Path(directory), int(tokens), int(tile), number)
    print(machine())
    print(f"{options.tokens:,} tokens, tiles of {TILE}, layers recomputed in both", flush=True)
    code = 0
    for name in CASES:
        if options.only in name:
            with TemporaryDirectory() as directory:
                code |= report(compare(name, options.tokens, Path(directory)))
    return code


if __name__ == "__main__":
    sys.exit(main())
