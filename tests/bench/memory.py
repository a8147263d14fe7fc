"""Memory: bytes per parameter at the peak, ours beside stock mlx-lm's (tests.bench.peaks); the estimate from
config.json, against MLX's own figures; and what fits: `python -m tests.bench.memory [--write] [--only WORD]`.

Each combination is one real training step (loading, adapters, gradients, optimizer: engine.trainer) in its own
process on MLX's CPU build, at batch 1, 2 and 8. Exits 1 when a target is missed. `--write` puts the tables into
docs/memory.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.measurements import MemoryProbe
from engine.plan.memory.estimate import MemoryEstimate, RankWorkload, estimate, peak_from_probes
from engine.plan.memory.fit import WORKING_SET
from engine.plan.memory.shape import ModelShape
from tests.bench.figures import Figure, machine, report, system
from tests.bench.fits import FORMS, fit_figures, fit_table
from tests.bench.known_sizes import KNOWN_SIZES, TOKENS, known_bytes
from tests.bench.peaks import peak_figures

STATE_LIMIT, PEAK_LIMIT, PROBES_LIMIT = 0.03, 0.10, 0.05
BATCHES = (1, 2, 8)
DOCUMENT = Path(__file__).parents[2] / "docs" / "memory.md"
TOKENIZER = """
import random, sys
from pathlib import Path
from engine.demo_model import calls, write_tokenizer
radio = calls(random.Random(7))
write_tokenizer(Path(sys.argv[1]), [" ".join(next(radio) for _ in range(4)) for _ in range(512)])
"""

_BASE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 352,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
_HYBRID = {
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "logits_scaling": 1.0,
    "attention_multiplier": 0.1,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_bias": False,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
_NEXT = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 96,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.25,
}


@dataclass(frozen=True)
class Combination:
    """One model and job."""

    name: str
    kind: str = "llama"
    dtype: str = "float32"
    sequence: int = 128
    config: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> dict[str, Any]:
        return {**_BASE, "model_type": self.kind, "torch_dtype": self.dtype, **self.config}

    @property
    def settings(self) -> dict[str, Any]:
        """[job]; one token more than the sequence, whose last one is only a target."""
        given = {"fine_tune_type": "full", "num_layers": -1, **self.job}
        return {**given, "max_seq_length": self.sequence + 1, "lora_parameters": {"rank": 8, **given.get("lora", {})}}

    def ask(self, batch: int) -> RankWorkload:
        settings = self.settings
        keys = settings["lora_parameters"].get("keys")
        return RankWorkload(
            fine_tune_type=settings["fine_tune_type"],
            num_layers=settings["num_layers"],
            lora_rank=settings["lora_parameters"]["rank"],
            lora_keys=tuple(keys) if keys else None,
            batch=batch,
            sequence=self.sequence,
            grad_checkpoint=settings.get("grad_checkpoint", False),
            optimizer=settings.get("optimizer", "adam"),
            accumulation=settings.get("grad_accumulation_steps", 1),
            **{key: settings[key] for key in ("optimizer_precision", "moments") if key in settings},
        )


def _lora(**job: Any) -> dict[str, Any]:
    return {"fine_tune_type": "lora", **job}


_16_BITS, _CHECKPOINTS = "bfloat16", {"grad_checkpoint": True}
COMBINATIONS = (
    # Experts in float32 only: MLX's CPU build gathers them in no other type.
    Combination("full"),
    Combination("full, 256 tokens", sequence=256),
    Combination("full, checkpointing", job=_CHECKPOINTS),
    Combination("full", dtype=_16_BITS, sequence=256),
    Combination("full, checkpointing", dtype=_16_BITS, sequence=256, job=_CHECKPOINTS),
    Combination("full, last 4 of 8 layers", dtype=_16_BITS, config={"num_hidden_layers": 8}, job={"num_layers": 4}),
    Combination("full, moments in 16 bits", dtype=_16_BITS, sequence=256, job={"optimizer_precision": "parameter"}),
    Combination(
        "full, kahan, 8-bit moments",
        dtype=_16_BITS,
        sequence=256,
        job={"optimizer_precision": "kahan", "moments": "8bit"},
    ),
    Combination("full, adafactor", sequence=256, job={"optimizer": "adafactor"}),
    Combination("full, accumulating 2", job={"grad_accumulation_steps": 2}),
    Combination("lora", job=_lora()),
    Combination("lora", dtype=_16_BITS, sequence=256, job=_lora()),
    Combination("lora, checkpointing", dtype=_16_BITS, job=_lora(**_CHECKPOINTS)),
    Combination(
        "lora, q and v of the last 2 of 8 layers",
        dtype=_16_BITS,
        config={"num_hidden_layers": 8},
        job=_lora(num_layers=2, lora={"keys": ["self_attn.q_proj", "self_attn.v_proj"]}),
    ),
    Combination("lora, 4-bit", dtype=_16_BITS, config={"quantization": {"group_size": 32, "bits": 4}}, job=_lora()),
    Combination("dora", kind="phi3", job={"fine_tune_type": "dora"}),
    Combination("full, tied", kind="qwen3", dtype=_16_BITS, config={"tie_word_embeddings": True}),
    Combination("lora, tied", kind="qwen2", job=_lora(), config={"tie_word_embeddings": True}),
    Combination(
        "lora, vocabulary 8,192",
        kind="gemma3_text",
        dtype=_16_BITS,
        config={"vocab_size": 8_192, "num_hidden_layers": 6},
        job=_lora(),
    ),
    Combination(
        "full, 4 experts", kind="mixtral", sequence=256, config={"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    Combination(
        "lora, 8 experts",
        kind="qwen3_moe",
        config={**_EXPERTS, "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
        job=_lora(),
    ),
    Combination("full, Mamba-2 and attention", kind="granitemoehybrid", config=_HYBRID),
    Combination(
        "lora, gated delta and experts",
        kind="qwen3_next",
        sequence=32,
        config={**_EXPERTS, **_NEXT},
        job=_lora(),
    ),
)


@dataclass(frozen=True)
class MemoryRow:
    """What was measured of one combination, bytes, beside what was expected."""

    combination: Combination
    trainable: int
    total: int
    state: int
    peaks: Mapping[int, int]

    def expected(self, batch: int) -> MemoryEstimate:
        return estimate(ModelShape.from_config(self.combination.model), self.combination.ask(batch))

    @property
    def state_error(self) -> float:
        need = self.expected(1)
        return (need.weights_bytes + need.gradients_bytes + need.optimizer_bytes) / self.state - 1

    def peak_error(self, batch: int) -> float:
        return self.expected(batch).peak_bytes / self.peaks[batch] - 1

    @property
    def probes_error(self) -> float | None:
        """The error of batch 8, from the peaks of batch 1 and 2; None where those are no line."""
        probes = [MemoryProbe(batch=batch, peak_bytes=self.peaks[batch]) for batch in BATCHES[:2]]
        predicted = peak_from_probes(probes, BATCHES[-1], self.expected(1).before_bytes)
        return predicted / self.peaks[BATCHES[-1]] - 1 if predicted is not None else None

    @property
    def met(self) -> bool:
        probes = self.probes_error
        return (
            abs(self.state_error) <= STATE_LIMIT
            and all(abs(self.peak_error(batch)) <= PEAK_LIMIT for batch in BATCHES)
            and probes is not None
            and abs(probes) <= PROBES_LIMIT
        )


def measure(combination: Combination, tokenizer: Path) -> MemoryRow:
    """Run the step in its own process."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        for file in tokenizer.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        (directory / "config.json").write_text(json.dumps(combination.model))
        (directory / "request.json").write_text(json.dumps({"job": combination.settings, "batches": BATCHES}))
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.memory_step", name], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{combination.kind}, {combination.name}: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    peaks = {int(batch): peak for batch, peak in answer["peaks"].items()}
    return MemoryRow(combination, answer["trainable"], answer["total"], answer["state"], peaks)


HEADER = (
    "model", "job", "weights", "tokens", "trained", "state", "error", "peak at 1", "error", "at 2", "error", "at 8",
    "error", "8 from 1 and 2", "",
)  # fmt: skip


def cells(row: MemoryRow) -> list[str]:
    """One line of the table."""
    combination = row.combination
    line = [
        combination.kind,
        combination.name,
        combination.dtype,
        str(combination.sequence),
        f"{row.trainable / 1e6:.2f} M",
        _megabytes(row.state),
        f"{row.state_error:+.1%}",
    ]
    for batch in BATCHES:
        line += [_megabytes(row.peaks[batch]), f"{row.peak_error(batch):+.1%}"]
    probes = row.probes_error
    return [*line, "no line" if probes is None else f"{probes:+.1%}", "met" if row.met else "MISSED"]


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _figure_table(figures: Sequence[Figure], found: str) -> str:
    lines = [[figure.name, figure.value, figure.target, figure.verdict] for figure in figures]
    return _markdown([["what", found, "target", ""], ["---"] * 4, *lines])


def document(peaks: Sequence[Figure], fitting: Sequence[Figure], rows: Sequence[MemoryRow]) -> str:
    """docs/memory.md."""
    met = sum(row.met for row in rows)
    table = [HEADER, tuple("---" for _ in HEADER), *map(cells, rows)]
    known = [
        f"| {size.name} | {shape.total_parameters / 1e9:.2f} × 10⁹ | {size.reported_gb} GB"
        f"{' with gradient checkpointing' if size.grad_checkpoint else ''} | {known_bytes(size) / 1e9:.0f} GB |"
        for size in KNOWN_SIZES
        for shape in [ModelShape.from_config(size.config)]
    ]
    return f"""# Memory: measured beside stock mlx-lm, and estimated from config.json

Written by `python -m tests.bench.memory --write` on {date.today().isoformat()}: {system()}, on the CPU.

## Bytes per parameter

Each line is a real training by `mlx.launch`: full fine-tuning with AdamW of a bfloat16 Llama of 32 layers, 192 wide (14
million parameters), one sequence of 33 tokens on each rank, so that weights, gradients and the optimizer's state are
nearly all of it. Measured is MLX's own peak (`mx.get_peak_memory()`, which stock mlx-lm reports too) of the rank with
the highest, over the parameters of the whole model. Our trainer and stock mlx-lm without `mx.compile`, if not said
otherwise: on the CPU ours compiles only if asked to.

{_figure_table(peaks, "measured")}

## What fits

Full fine-tuning with AdamW, by the plan's estimate from the public configurations: one sequence of {TOKENS:,} tokens on
each machine, gradient checkpointing in all layers, the reserve included; on two machines with `strategy = "sharded"`.
Each cell is the most precise form of the optimizer ({"; ".join(FORMS)}) that fits {WORKING_SET:.0%} of a machine's
memory, about what Metal lets a process use by default, and what each machine needs for it.
GB are 10⁹ bytes on this page.

{_markdown(fit_table())}

The least that each of these needs:

{_figure_table(fitting, "estimated")}

## The estimate, and its errors

{met} of {len(rows)} combinations met all their targets.

Each row is one real training step (the trainer's own loading, adapters, gradients and optimizer) in its own process.
The measured values are MLX's: `mx.get_active_memory()` before the update is the state (weights, gradients, masters
and moments), `mx.get_peak_memory()` over the step is the peak, at batches of 1, 2 and 8 sequences. The errors are
those of the estimate, which uses only config.json and the job: estimated over measured, minus one. "8 from 1 and 2"
is the error of the peak at batch 8 when it is extrapolated from the measurement at 2, as after `flightdeck
calibrate`: on the line that starts at batch 0 with what the estimate has for any batch.
Targets: state within {STATE_LIMIT:.0%}, peak within {PEAK_LIMIT:.0%} at each batch, extrapolated peak within
{PROBES_LIMIT:.0%}.

{_markdown(table)}

## Assumptions

- Activations are counted for MLX's operations without fused kernels, as its CPU build runs them. The fused kernels of
  a Mac's GPU keep less: there the estimate is an upper bound, and `flightdeck calibrate` measures the real value.
- Attention on a Mac's GPU is an exception since mlx 0.32.4, whose gradient is computed from tiles of 1,024 × 1,024
  scores: nothing of the size of all pairs of tokens is kept. That holds for heads of 64, 72, 80, 96, 128, 192 or 256
  elements and a causal mask; a sliding window shorter than the sequence is an array, and soft-capped scores are kept
  whole. With an older mlx, or `MLX_SDPA_VJP_FALLBACK=1` in `[job] env`, the scores are counted. No Mac was at hand: the
  conditions are those of the library, and the bytes follow the figures published for an M1 Max, 0.68 GiB against 12.53
  for one causal step at 8,192 tokens. On CUDA see [there](cuda.md).
- Weights are counted as mlx-lm holds them once they are loaded: packed by its own `quantization`, with the bits of each
  layer, or by a `quantization_config` of AWQ, GPTQ, mxfp4, mxfp8, NVFP4, compressed-tensors or BitNet.
- The peak is the largest of the moments of a step: the gradient of the loss, the backward pass of the layers that keep
  their activations, that of the recomputed layers, and the update. Each is counted with the weights, the optimizer's
  state and the gradients that are alive by then.
- The backward pass of a layer needs as much working memory as the layer keeps in full fine-tuning, its scores once
  more, and three arrays of its width; 0.7 times for experts, and 0.25 times for Mamba-2, whose arrays do not live at
  once. A recomputed layer keeps its input until then, and needs 2.4 times what it would have kept, since it repeats the
  forward pass first; 3.6 times in a pipeline, where MLX starts the next layers early.
- Where scores are the most of a recomputed layer, it needs 2.4 times those beside what it would have kept.
- With `sequence_tiling` (`python -m tests.bench.long_context`), attention keeps no scores, and an MLP only its input.
  While one tile's gradient is computed, MLX has allocated the next tiles': 6 arrays of a tile's scores, or 3.5 times
  what the MLP would have kept of a tile, and in full fine-tuning three float32 arrays of its parameters. The mask of a
  sliding window takes a byte for each pair of tokens.
- The loss needs three arrays of tokens × vocabulary. The tokens are those of one chunk: all of them where their logits
  take 128 MiB in float32 or less, else the gradient of the head's input waits until the layers' backward pass has
  ended.
- One rank holds no set of gradients: each is applied as it is computed, beside the activations of the other layers.
  With clipping alone, and in a pipeline of one micro-batch, all are held in their own type; with accumulation or
  several ranks as sums in float32 (sharded: of the rank's part), or in bfloat16 where the step rounds them to it.
- Several ranks need buffers for the exchange: with `data` two buckets of gradients, what is received of one, and its
  sum (a bucket is 1/64 of the trained parameters, at least 262,144 of them, and at least the largest parameter); with
  `sharded` two sections gathered whole, and one layer's gradients with their sums. `wire = "int8"` keeps 2 bytes more
  per trained parameter.
- With `local` each rank needs what one rank does, and for each trained parameter the weight after the last averaging
  and its momentum (4 bytes each, or 2 with `stochastic` and `parameter`). During an averaging no gradients are alive,
  but what is sent of all parameters (0.56 bytes each; 1.02 with `wire = "int8"`, 4 with `"float32"`), N + 4 times that
  of a piece (67 million parameters, or the largest) with N ranks, and N + 5 float32 arrays of the largest parameter.
  That is rank 0's, which needs the most.
- An update is computed in pieces of 1/256 of the trained parameters, from 65,536 to 16.8 million, for which it needs 5
  (`parameter`), 7 (`float32`) or 12 float32 arrays (`kahan`, `stochastic`), and at least 18 with moments in bfloat16,
  22 in 8 bits; and two arrays of the rest of the piece. A larger parameter is updated in slices, beside its gradient
  and its new state; but as one by Muon and Adafactor, and on one rank with `parameter` or `float32` and moments in
  float32, where a GPU takes the whole step at once. If the update is the peak (many trained parameters, few
  tokens), the peak does not grow with small batches; so the extrapolation starts at the part that no batch changes.
- Beside a trained 16-bit weight are 4 bytes of master (`float32`), 2 of compensation (`kahan`) or none, and each moment
  takes 4 bytes, 2 (`bfloat16`) or 1.06 (`8bit`). mlx-lm's adapters are always float32, and in a 16-bit model each makes
  a float32 copy of its input.
- In addition to MLX's peak a node needs a reserve: up to 1 GiB of freed buffers that MLX caches, and half a GiB for
  Python.

## Sizes that users report

These are 12 bytes per parameter (weights, gradients and two moments in 16 bits, and a float32 master) plus
activations, computed from the public configuration of each size in `tests/bench/known_sizes.py` for one sequence of
2,048 tokens with fused attention. 320 GB is less than 12 bytes for 32.76 × 10⁹ parameters, even with checkpointing; it
matches 10 bytes per parameter (float32 gradients, everything else in 16 bits).

| model | parameters | reported | computed |
| --- | --- | --- | --- |
{chr(10).join(known)}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory, measured beside stock mlx-lm's and the estimate.")
    parser.add_argument("--write", action="store_true", help=f"the tables into {DOCUMENT.name}")
    parser.add_argument("--jobs", type=int, default=2, help="steps measured at once")
    parser.add_argument("--only", default="", help="combinations whose kind or name contains this, and nothing else")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write takes all of them")
    chosen = [each for each in COMBINATIONS if options.only in f"{each.kind} {each.name} {each.dtype}"]
    print(machine())
    peaks: list[Figure] = []
    fitting: list[Figure] = []
    code = 0
    if not options.only:
        with TemporaryDirectory() as name:
            code |= report(_kept(peak_figures(Path(name)), peaks))
        print("\n".join("  ".join(f"{cell:>20}" for cell in line) for line in fit_table()))
        code |= report(_kept(fit_figures(), fitting))
    rows = []
    with TemporaryDirectory() as name:
        subprocess.run([sys.executable, "-c", TOKENIZER, name], check=True, capture_output=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            for row in pool.map(lambda combination: measure(combination, Path(name)), chosen):
                rows.append(row)
                print("  ".join(f"{cell:>10}" for cell in cells(row)), flush=True)
    if options.write:
        DOCUMENT.write_text(document(peaks, fitting, rows), encoding="utf-8")
    return code if all(row.met for row in rows) else 1


def _kept(figures: Iterable[Figure], kept: list[Figure]) -> Iterator[Figure]:
    for figure in figures:
        kept.append(figure)
        yield figure


if __name__ == "__main__":
    sys.exit(main())
