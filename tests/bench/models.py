"""Architectures: what the plan says of each with LoRA, DoRA and full fine-tuning, in 16 and in 4 bits, against one real
training step: `python -m tests.bench.models [--write] [--only WORD]`.

Each cell is a tiny model with random weights, loaded, adapted and stepped by the trainer's own code in its own process
on MLX's CPU build. The plan sees its config.json and the job alone. Exits 1 when the two disagree in a cell. `--write`
puts the table into docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.config.models import PARTITIONED
from engine.plan.planner import make_plan
from tests.bench.figures import machine, system
from tests.bench.memory import TOKENIZER
from tests.unit.plan.clusters import inputs, ultra_and_max
from tests.unit.plan.memory.tiny import TINY

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
}
_WIDER = ("qwen3_moe", "qwen3_next", "nemotron_h")
MODELS: dict[str, dict[str, Any]] = {
    **{
        # Experts of 48 are not divided by the group of 32, and so would not be quantized.
        kind: {**TINY[kind], "vocab_size": 1024, **({"moe_intermediate_size": 64} if kind in _WIDER else {})}
        for kind in (
            *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gemma2", "phi3", "mixtral"),
            *("mamba2", "granitemoehybrid", "lfm2", "nemotron_h"),
        )
    },
    # As many layers as the pattern has at least: mlx-lm looks for the first one with full attention.
    "gemma3_text": {**TINY["gemma3_text"], "vocab_size": 1024, "sliding_window_pattern": 2},
    # The sizes of these two are unknown to the memory estimate.
    "deepseek_v3": {
        **_COMMON,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "qk_nope_head_dim": 32,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        **_COMMON,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""model_type → its tiny config.json."""
_EXPERTS = {"qwen3_moe", "qwen3_next", "mixtral", "granitemoehybrid", "nemotron_h", "deepseek_v3", "gpt_oss"}
TRAININGS, BITS = ("lora", "dora", "full"), (16, 4)


@dataclass(frozen=True)
class Cell:
    """One model and job: what is said of it, and what happens."""

    kind: str
    training: str
    bits: int

    @property
    def model(self) -> dict[str, Any]:
        # MLX's CPU build multiplies by experts that are not quantized in float32 alone.
        dtype = "float32" if self.bits == 16 and self.kind in _EXPERTS else "bfloat16"
        packed = {"quantization": {"group_size": 32, "bits": self.bits}} if self.bits < 16 else {}
        return {**MODELS[self.kind], "torch_dtype": dtype, **packed}

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "fine_tune_type": self.training,
            "num_layers": -1,
            "batch_size": 2,
            "max_seq_length": 65,
            "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0},
        }

    def refusal(self) -> str | None:
        """The plan's, for two Macs; None if it would launch."""
        plan = make_plan(inputs(ultra_and_max(), settings=self.settings, model=self.model))
        return "; ".join(issue.text for issue in plan.refusals) or None

    def failure(self, tokenizer: Path) -> str | None:
        """The last line of a process that could not train; None if its steps succeeded."""
        with TemporaryDirectory() as name:
            directory = Path(name)
            for file in tokenizer.iterdir():
                (directory / file.name).write_bytes(file.read_bytes())
            (directory / "config.json").write_text(json.dumps(self.model))
            (directory / "request.json").write_text(json.dumps({"job": self.settings, "batches": [1]}))
            argv = [sys.executable, "-m", "tests.bench.memory_step", name]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


@dataclass(frozen=True)
class Tried:
    """A cell's two verdicts."""

    cell: Cell
    refusal: str | None
    failure: str | None

    @property
    def agrees(self) -> bool:
        return (self.refusal is None) == (self.failure is None)

    @property
    def text(self) -> str:
        if not self.agrees:
            return "DISAGREES"
        return "refused" if self.refusal else "trains"


def _divided(kind: str) -> str:
    """The plan's answer to the strategies that divide a model."""
    cell = Cell(kind, "lora", 16)
    refused = [
        make_plan(inputs(ultra_and_max(), settings=cell.settings, model=cell.model, strategy=strategy)).refusals
        for strategy in PARTITIONED
    ]
    return "refused" if all(refused) else "train" if not any(refused) else "one is refused"


def document(tried: Sequence[Tried]) -> str:
    """docs/models.md."""
    columns = list(product(TRAININGS, BITS))
    found = {(each.cell.kind, each.cell.training, each.cell.bits): each for each in tried}
    rows = [
        f"| {kind} | " + " | ".join(found[(kind, *column)].text for column in columns) + f" | {_divided(kind)} |"
        for kind in MODELS
    ]
    heads = " | ".join(f"{training}, {bits} bits" for training, bits in columns)
    # One example of each kind: the matrices that they name differ.
    reasons = {text.split(";")[0]: text for text in sorted(each.refusal for each in tried if each.refusal is not None)}
    failures = sorted({each.failure.rpartition(": [job] ")[2] for each in tried if each.failure is not None})
    agreeing = sum(each.agrees for each in tried)
    return f"""# Models: what can be trained, and what is refused

Written by `python -m tests.bench.models --write` on {date.today().isoformat()}: {system()}, on the CPU.

Other models of mlx-lm are trained as well; these {len(MODELS)} have been tried. Each cell is a tiny model of the
architecture with random weights: what the plan says from its config.json and the job, and one real training by the
trainer's own code (loading, adapters, gradients, optimizer), which knows nothing of these refusals and fails with an
error of MLX or mlx-lm. The two agree in {agreeing} of {len(tried)} cells. Models of 16 bits with experts were computed
in float32, since MLX's CPU build multiplies by experts in no other type; on nodes without a GPU the plan refuses such a
model in 16 bits. The last column, whether these strategies can divide the model, is the plan's answer alone.

| model | {heads} | {", ".join(PARTITIONED)} |
|{"---|" * (len(columns) + 2)}
{chr(10).join(rows)}

`flightdeck plan` and preflight (`hardware_layer`) refuse with what to change:

{chr(10).join(f"- {reason}" for reason in reasons.values())}

What these trainings end with, where nothing has refused them:

{chr(10).join(f"- `{failure}`" for failure in failures)}

Also before the launch, and not by a rank:

- `lora_parameters.keys` that name no matrix of the trained layers, with those that there are. Where the memory estimate
  does not know the architecture, a node builds the model with mlx-lm, without its weights, and tells (`model_present`).
- A `strategy` that cannot divide the architecture, and an `lr_schedule` whose arguments do not fit.
- `report_to` without its package or API key: `wandb` on this machine, `swanlab` on rank 0's node.
- Lines of chat or prompts that the model's chat template refuses, in the plan and by `data_matches`. mlx-lm's own code
  renders one line of each kind (roles, tools, empty or missing texts) on one node, of each file as many as it reads in
  ten seconds.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="What trains, by the plan and by a real step.")
    parser.add_argument("--write", action="store_true", help=f"the table into {DOCUMENT.name}")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at once")
    parser.add_argument("--only", choices=MODELS, help="this architecture alone")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write takes all of them")
    cells = [Cell(*each) for each in product([options.only] if options.only else MODELS, TRAININGS, BITS)]
    print(machine())
    with TemporaryDirectory() as name:
        subprocess.run([sys.executable, "-c", TOKENIZER, name], check=True, capture_output=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            tried = []
            for each in pool.map(lambda cell: Tried(cell, cell.refusal(), cell.failure(Path(name))), cells):
                tried.append(each)
                cell = f"{each.cell.kind}, {each.cell.training}, {each.cell.bits} bits"
                print(f"{cell:<36} {each.text:<10} {each.failure or ''}", flush=True)
                if not each.agrees:
                    print(f"    the plan: {each.refusal}", flush=True)
    if options.write:
        DOCUMENT.write_text(document(tried), encoding="utf-8")
    return 0 if all(each.agrees for each in tried) else 1


if __name__ == "__main__":
    sys.exit(main())
