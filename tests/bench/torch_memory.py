"""Memory of a rank of a PyTorch job: peak RSS measured against the plan's estimate, for DDP, FSDP2, ZeRO-2 and ZeRO-3
on three sizes: `python -m tests.bench.torch_memory [--only WORD]`.

Each line is a real training of a Llama with random weights by the built-in trainer, 2 ranks over gloo on this machine,
started as `flightdeck plan` prints it for torchrun. Measured is the peak RSS that the ranks' last steps report, of the
rank that needs the most. Exits 1 when an estimate is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.config.mlx_lm_keys import TORCH_KEYS, with_defaults
from engine.demo_model import calls, write_tokenizer
from engine.plan.memory.shape import ModelShape
from engine.plan.torch.memory import TorchWorkload, torch_estimate
from tests.bench.figures import Figure, machine, report
from tests.needs import TORCH

LIMIT = 0.15
RANKS, BATCH, SEQUENCE, STEPS = 2, 2, 256, 3
ROOT = Path(__file__).parents[2]
SIZES = {"34 M": (512, 8, 1376, 8_192), "110 M": (768, 12, 2048, 16_384), "239 M": (1024, 16, 2816, 16_384)}
"""Hidden size, layers, inner size and vocabulary."""
STRATEGIES: Mapping[str, dict[str, Any]] = {
    "DDP": {"strategy": "ddp"},
    "FSDP2": {"strategy": "fsdp", "sharding": "full"},
    "ZeRO-2": {"strategy": "deepspeed", "zero_stage": 2},
    "ZeRO-3": {"strategy": "deepspeed", "zero_stage": 3},
}
KINDS: Mapping[str, dict[str, Any]] = {
    "full": {"fine_tune_type": "full", "precision": "fp32"},
    "full, bf16": {"fine_tune_type": "full", "precision": "bf16"},
    "full, recomputed": {"fine_tune_type": "full", "precision": "fp32", "grad_checkpoint": True},
    "lora": {"fine_tune_type": "lora", "precision": "fp32"},
}
WEIGHTS = """
import json, sys
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
folder = Path(sys.argv[1])
LlamaForCausalLM(LlamaConfig(**json.loads((folder / "config.json").read_text()))).save_pretrained(folder)
"""


def config(size: str) -> dict[str, Any]:
    hidden, layers, inner, words = SIZES[size]
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": words,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def write_model(folder: Path, size: str) -> None:
    folder.mkdir()
    radio = calls(random.Random(7))
    write_tokenizer(folder, [" ".join(next(radio) for _ in range(4)) for _ in range(512)])
    (folder / "config.json").write_text(json.dumps(config(size)))
    subprocess.run([str(TORCH), "-c", WEIGHTS, str(folder)], check=True, capture_output=True)


def write_data(folder: Path) -> None:
    folder.mkdir()
    radio = calls(random.Random(8))
    rows = [{"text": " ".join(next(radio) for _ in range(SEQUENCE))} for _ in range(4 * RANKS * BATCH)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(folder: Path, keys: Mapping[str, Any]) -> int:
    """Bytes of the highest peak RSS of a rank. `folder` has model and data."""
    given = {"batch_size": RANKS * BATCH, "iters": STEPS, "max_seq_length": SEQUENCE + 1, "val_batches": 0}
    given |= {"grad_checkpoint": False, **keys}
    settings = with_defaults({key: value for key, value in given.items() if key != "strategy"})
    job = {**settings, **given, "model": "model", "data": "data", "framework": "torch"}
    job |= {key: None for key in TORCH_KEYS if job[key] == "auto"} | {"chunking": False}
    (folder / "job.json").write_text(json.dumps({"backend": "gloo", "job": job}))
    program = ["-m", "engine.torch_trainer.standalone", "job.json"]
    # torchrun leaves its folder of logs in TMPDIR.
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    done = subprocess.run(
        [str(TORCH), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *program],
        cwd=folder,
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    events = [
        json.loads(line)
        for path in folder.glob("standalone/attempts/1/events.*.jsonl")
        for line in path.read_text().splitlines()
    ]
    for path in folder.glob("standalone/attempts/1/events.*.jsonl"):
        path.unlink()
    return max(int(event["peak_memory_bytes"]) for event in events if event["event"] == "step")


def expected(size: str, keys: Mapping[str, Any]) -> int:
    workload = TorchWorkload(**keys, batch=BATCH, sequence=SEQUENCE, world_size=RANKS, on_gpu=False)
    return torch_estimate(ModelShape.from_config(config(size)), workload).needed_bytes


def figures(only: str = "") -> Iterator[Figure]:
    for size in SIZES:
        chosen = {
            name: {**how, **job}
            for kind, job in KINDS.items()
            for strategy, how in STRATEGIES.items()
            if only in (name := f"{size}, {kind}, {strategy}")
        }
        if not chosen:
            continue
        with TemporaryDirectory() as name:
            folder = Path(name)
            write_model(folder / "model", size)
            write_data(folder / "data")
            for label, keys in chosen.items():
                measured, estimate = measure(folder, keys), expected(size, keys)
                error = estimate / measured - 1
                value = f"{estimate / 1e6:,.0f} of {measured / 1e6:,.0f} MB: {error:+.1%}"
                yield Figure(label, value, f"within {LIMIT:.0%}", abs(error) <= LIMIT)


def main() -> int:
    parser = argparse.ArgumentParser(description="A rank's memory, estimated against measured.")
    parser.add_argument("--only", default="", help="those whose name contains this")
    print(machine())
    return report(figures(parser.parse_args().only))


if __name__ == "__main__":
    raise SystemExit(main())
