"""Every model type of mlx-lm trains with mlx-lm's own loss and gradients, or is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.bench.models import DOCUMENT
from tests.bench.models_step import measure, with_optional_packages
from tests.bench.tiny_models import model_types, tiny_config
from tests.training.tiny import Tiny

TRAINED = [
    *(("qwen3_5", training) for training in ("lora", "full")),
    *(("qwen3_5_moe", training) for training in ("lora", "full")),
    # Built alike, with `model` a property; a head beside the language model; embeddings of another name; no layers.
    *((kind, "lora") for kind in ("kimi_k25", "kimi_k3", "minimax_m3_vl", "gemma3", "gpt2", "mamba2", "qwen2_5_vl")),
]


@pytest.mark.parametrize(("kind", "training"), TRAINED)
def test_loss_and_gradients_are_those_of_mlx_lm(kind: str, training: str, tiny: Tiny, tmp_path: Path) -> None:
    for file in tiny.model.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    step = measure(kind, training, 32, tmp_path)
    assert step.failure is None and step.stock is None
    assert step.loss_difference is not None and step.loss_difference < 1e-6
    assert step.gradient_difference is not None and step.gradient_difference < 1e-5


def test_the_matrix_has_every_model_type_of_the_installed_mlx_lm() -> None:
    """A new one: give it the fields that are missed in tests/bench/tiny_models.py, then run
    `python -m tests.bench.models --write`; what does not train is refused in engine/plan/obstacles.py."""
    with_optional_packages()
    for kind in model_types():
        assert json.dumps(tiny_config(kind)), kind
    listed = {line.split("|")[1].strip() for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")}
    assert set(model_types()) == listed - {"model"}, "run python -m tests.bench.models --write"
