"""Tiny models with adapters, what stock mlx-lm answers with them, and what the ranks of a ring do."""

from __future__ import annotations

import importlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm import load, stream_generate
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import quantize_model, save_model

from tests.training import kinds
from tests.training.partitioned_cases import run_ranks
from tests.training.tiny import Tiny

RING_LIMIT_S = 480.0
PROMPTS = ["tower, raven zero one", "hold level " * 25 + "over"]
"""The second one is longer than a message of tokens, and than the models' windows."""
LORA = {"rank": 4, "scale": 8.0, "dropout": 0.0}


@dataclass(frozen=True)
class Trained:
    """A model's directory, and that of an adapter's, as mlx-lm reads them."""

    model: Path
    adapter: Path
    job: dict[str, Any]


@dataclass(frozen=True)
class Made:
    """A model of the matrix."""

    kind: str
    tied: bool = False
    tuning: str = "lora"
    bits: int | None = None
    config: dict[str, Any] = field(default_factory=dict)


def _large(kind: str, tuning: str = "lora", bits: int | None = None, **config: Any) -> Made:
    size = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 384, "num_hidden_layers": 32}
    return Made(kind, tuning=tuning, bits=bits, config={**size, "head_dim": 64, **config})


_FULL, _TURNS = ["full_attention"] * 32, ["full_attention", "sliding_attention"] * 16
LARGE = {
    "llama": _large("llama", layer_types=_TURNS[::-1]),
    "llama dora": _large("llama", "dora", layer_types=_FULL),
    "llama full": _large("llama", "full", layer_types=_FULL),
    "llama quantized": _large("llama", bits=8, layer_types=_FULL),
    "qwen3": _large("qwen3"),
    "qwen3_moe": _large("qwen3_moe"),
    "mixtral": _large("mixtral", intermediate_size=384),
    "ministral3": _large("ministral3", layer_types=_TURNS),
}
"""Of 32 layers, which are all but 1 % of the model."""


def make_trained(tiny: Tiny, home: Path, made: Made) -> Trained:
    """A random model of four layers, and an adapter that changes what it says."""
    model_path, adapter = home / "model", home / "adapter"
    for folder in (model_path, adapter):
        folder.mkdir(parents=True)
    shutil.copy(tiny.model / "tokenizer.json", model_path)
    # No token ends an answer.
    tokenizer = json.loads((tiny.model / "tokenizer_config.json").read_text())
    (model_path / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": None}))
    described = kinds.config(made.kind, tied=made.tied)
    described.get("text_config", described).update({"vocab_size": 385, **made.config})
    architecture = importlib.import_module(f"mlx_lm.models.{made.kind}")
    mx.random.seed(7)
    model: nn.Module = architecture.Model(architecture.ModelArgs.from_dict(described))
    # Sharper than what MLX begins with: no two tokens are nearly as probable.
    model.update(tree_map(lambda value: value * 2.5 if value.ndim > 1 else value, model.parameters()))
    if made.bits is not None:
        model, described = quantize_model(model, described, group_size=32, bits=made.bits)
    save_model(model_path, model)
    (model_path / "config.json").write_text(json.dumps(described))
    layers = -1 if made.tuning == "full" else 3
    keys = {"fine_tune_type": made.tuning, "num_layers": layers, "lora_parameters": LORA}
    model.freeze()
    if made.tuning == "full":
        for layer in model.layers:
            layer.unfreeze()
    else:
        linear_to_lora_layers(model, layers, LORA, use_dora=made.tuning == "dora")
    trained = {
        name: value + 0.1 * mx.random.normal(value.shape) for name, value in tree_flatten(model.trainable_parameters())
    }
    mx.save_safetensors(str(adapter / "adapters.safetensors"), trained)
    (adapter / "adapter_config.json").write_text(json.dumps(keys))
    return Trained(model_path, adapter, tiny.job(model=str(model_path), **keys))


@dataclass(frozen=True)
class Stock:
    """The base model's answers to PROMPTS, then those with the adapter."""

    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def stock(trained: Trained, tokens: int) -> Stock:
    """Greedy, by mlx-lm alone."""
    answers = Stock()
    for adapter in (None, str(trained.adapter)):
        model, tokenizer = load(str(trained.model), adapter_path=adapter)[:2]
        for prompt in PROMPTS:
            responses = list(stream_generate(model, tokenizer, prompt, max_tokens=tokens))
            answers.tokens.append([response.token for response in responses])
            answers.texts.append("".join(response.text for response in responses))
    return answers


def case(name: str, trained: Trained, **options: Any) -> dict[str, Any]:
    weights = str(trained.adapter / "adapters.safetensors")
    task = {"kind": "generate", "source": "trained", "weights": weights}
    return {"name": name, "job": trained.job, "task": {**task, "options": {"prompts": PROMPTS, "raw": True, **options}}}


@dataclass(frozen=True)
class Answered:
    tokens: list[list[int]]
    """Of each answer, first those of the base model."""
    events: list[list[dict[str, Any]]]
    """By rank."""

    @property
    def results(self) -> list[dict[str, Any]]:
        return [event for event in self.events[0] if event["event"] == "result"]


def read(directory: Path, name: str, ranks: int) -> Answered:
    files = [directory / f"{name}.events{rank}.jsonl" for rank in range(ranks)]
    events = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return Answered(json.loads((directory / f"{name}.tokens.json").read_text()), events)


def run(directory: Path, cases: list[dict[str, Any]], ranks: int) -> dict[str, Answered]:
    """On a ring; by case."""
    directory.mkdir(parents=True)
    (directory / "cases.json").write_text(json.dumps(cases))
    run_ranks("tests.training.generation_program", directory, ranks, RING_LIMIT_S)
    return {item["name"]: read(directory, item["name"], ranks) for item in cases}
