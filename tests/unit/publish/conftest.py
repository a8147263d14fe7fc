"""A run that has ended, with the adapter that it saved, and whole models as mlx-lm and transformers save them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from engine.run.events import SavedFiles, TrainingStarted, WeightsSaved
from engine.run.run_plan import write_plan
from tests.model_files import TINY_LLAMA, llama_files, safetensors
from tests.unit.run.run_maker import MadeRun, report, validation

WriteModel = Callable[..., Path]
LORA = {"model.layers.0.self_attn.q_proj.lora_a": (8, 2), "model.layers.0.self_attn.q_proj.lora_b": (2, 8)}
ADAPTER_CONFIG = {
    "fine_tune_type": "lora",
    "num_layers": 1,
    "lora_parameters": {"rank": 2, "scale": 20.0, "dropout": 0.0},
    "model": "/Users/ana/models/Tiny",
    "adapter_path": "/Users/ana/adapters",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


def write_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]] = LORA, **config: object) -> Path:
    """As mlx-lm and our trainer save it."""
    folder.mkdir()
    (folder / "adapters.safetensors").write_bytes(safetensors(shapes))
    (folder / "0000010_adapters.safetensors").write_bytes(b"an older one")
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER_CONFIG, **config}))
    return folder


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """Writes a tiny Llama with more or other keys in its config.json."""

    def write(**config: object) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        files = llama_files(
            TINY_LLAMA | {"architectures": ["LlamaForCausalLM"], "_name_or_path": "/Users/ana/m"} | config
        )
        tokenizer = {"eos_token": {"content": "<|end|>"}, "chat_template": "{{ x }}", "name_or_path": "/Users/ana/m"}
        files["tokenizer_config.json"] = json.dumps(tokenizer).encode()
        files["generation_config.json"] = json.dumps({"temperature": 0.6, "top_k": 20}).encode()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder

    return write


@pytest.fixture
def run(home: Path, adapter: Path) -> str:
    return ended_run(home, adapter / "adapters.safetensors")


def ended_run(home: Path, weights: Path) -> str:
    """The id of a run that saved this adapter at iteration 20 of 60, and was then aborted."""
    made = MadeRun(home, name="support").attempt()
    keys = {**made.plan.config.job.mlx_lm, "learning_rate": 1e-4, "data": "/Users/ana/data"}
    job = made.plan.config.job.model_copy(
        update={"env": {"WANDB_API_KEY": "of-the-job-12345"}, "model": "/Users/ana/models/Tiny", "mlx_lm": keys}
    )
    write_plan(
        made.directory.plan, made.plan.model_copy(update={"config": made.plan.config.model_copy(update={"job": job})})
    )
    files = [(path.name, path.read_bytes()) for path in (weights, weights.with_name("adapter_config.json"))]
    hashed = tuple((name, len(content), hashlib.sha256(content).hexdigest()) for name, content in files)
    saved = SavedFiles(folder=str(weights.parent), iteration=20, files=hashed)
    inputs = {"train.jsonl": "crc32 0123abcd", "the base model": "fedcba9876543210"}
    versions = {"mlx": "0.32.4", "mlx-lm": "0.32.2"}
    made.append(
        TrainingStarted(attempt=1, versions=versions, inputs=inputs, from_base=True),
        WeightsSaved(rank=0, node="node0", attempt=1, holds="adapter", saved=saved),
    )
    made.metrics([validation(0, 5.0), report(20, 2.5), validation(20, 2.0)])
    made.state("running", "aborted", reason="user_abort", iteration=25)
    return made.close().id
