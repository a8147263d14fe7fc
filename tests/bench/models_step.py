"""One model type's trainings, ours beside stock mlx-lm's, in a process of its own, which tests.bench.models starts:

    python -m tests.bench.models_step KIND DIRECTORY

DIRECTORY holds a tokenizer. For each training a tiny model with random weights is written there, and loaded and adapted
twice: by the trainer's own code, and as mlx_lm.lora does. Prints one JSON object for each; see Step.
"""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load

from engine.protocol.job import Job
from engine.trainer.model import load_model
from engine.trainer.optimizer import Updater
from engine.trainer.strategies import loss as chunked
from engine.trainer.strategies.data_parallel import Gradients
from engine.trainer.weights import scalar
from engine.training.data import Batch
from tests.bench.memory_step import write_weights
from tests.bench.tiny_models import FROM_ZERO, tiny_config

TRAININGS, BITS = ("lora", "dora", "full"), (32, 4)
ROWS, LENGTH, CHUNK = 2, 40, 16
"""A batch, and the tokens whose logits are in memory at once, and that attention and MLPs compute at a time."""


@dataclass(frozen=True)
class Step:
    """One training of a type: stock's loss and the relative differences of ours, or what it ended with."""

    kind: str
    training: str
    bits: int
    loss: float | None = None
    loss_difference: float | None = None
    gradient_difference: float | None = None
    """The largest of any tensor."""
    failure: str | None = None
    """The last line of ours."""
    stock: str | None = None
    """That of stock mlx-lm."""


def model_config(kind: str, bits: int) -> dict[str, Any]:
    """config.json of the type in float32, packed with `bits` but for 32."""
    config = {**tiny_config(kind), "torch_dtype": "float32"}
    # A type whose files are always quantized has its own.
    return (
        config
        if bits == 32 or "quantization" in config
        else {**config, "quantization": {"group_size": 32, "bits": bits}}
    )


def job_settings(training: str) -> dict[str, Any]:
    lora = {"rank": 8, "scale": 20.0, "dropout": 0.0}
    return {"fine_tune_type": training, "num_layers": -1, "batch_size": ROWS, "lora_parameters": lora}


def stock_model(directory: Path, job: Job) -> nn.Module:
    """As mlx_lm.lora.train_model makes it."""
    model, _ = load(str(directory))
    mx.random.seed(job.seed)
    model.freeze()
    if job.fine_tune_type == "full":
        for layer in model.layers:
            layer.unfreeze()
    else:
        linear_to_lora_layers(model, -1, job.lora_parameters, use_dora=job.fine_tune_type == "dora")
    return model


def measure(kind: str, training: str, bits: int, directory: Path) -> Step:
    """`directory` holds a tokenizer, and gets the model."""
    config = model_config(kind, bits)
    (directory / "config.json").write_text(json.dumps(config))
    mx.random.seed(7)
    write_weights(directory)
    if kind in FROM_ZERO:
        _fill_zeros(directory / "model.safetensors")
    job = Job.from_spec(
        {**job_settings(training), "sequence_tiling": CHUNK},
        model=str(directory),
        data=str(directory),
        workdir=directory,
        home=directory,
    )
    random = np.random.default_rng(7)
    tokens = random.integers(1, 100, (ROWS, LENGTH), np.int32)
    stock = failure = None
    try:
        expected_loss, expected = _stock_step(directory, job, tokens)
    except Exception as error:
        stock = _line(error)
    try:
        loss, gradients = _our_step(job, tokens)
    except Exception as error:
        failure = _line(error)
    if stock is not None or failure is not None:
        return Step(kind, training, bits, failure=failure, stock=stock)
    difference = abs(loss - expected_loss) / expected_loss
    return Step(kind, training, bits, expected_loss, difference, gradient_difference(gradients, expected))


def _fill_zeros(file: Path) -> None:
    """Random values for floating-point arrays of nothing but zeros."""
    loaded: Any = mx.load(str(file))
    weights = {
        name: value if value.dtype == mx.uint32 or mx.any(value).item() else 0.1 * mx.random.normal(value.shape)
        for name, value in loaded.items()
    }
    mx.eval(weights)
    mx.save_safetensors(str(file), weights)


def _stock_step(directory: Path, job: Job, tokens: Any) -> tuple[float, dict[str, mx.array]]:
    model = _with_second_halves(stock_model(directory, job))
    model.train()
    # mlx-lm's rows end before their padding; these have none.
    lengths = mx.array([[0, LENGTH - 1]] * ROWS)
    (loss, _), gradients = nn.value_and_grad(model, default_loss)(model, mx.array(tokens), lengths)
    mx.eval(loss, gradients)
    return scalar(loss), dict(tree_flatten(gradients))


def _our_step(job: Job, tokens: Any) -> tuple[float, dict[str, mx.array]]:
    model, _ = load_model(job)
    _with_second_halves(model).train()
    targets = ROWS * (LENGTH - 1)
    step = Gradients(model, held=True)
    batch = Batch(tokens, np.asarray([[1, LENGTH]] * ROWS, np.int32), targets)
    with patch.object(chunked, "loss_tokens", lambda tokens, vocabulary: CHUNK):
        loss = step.add(batch)
        found = {name: value / targets for piece in step.pieces() for name, value in piece.items()}
        mx.eval(found)
        # The same once more, applied.
        step.clear()
        step.add(batch)
    step.apply(Updater(job, model), targets)
    mx.eval(model.parameters())
    return loss / targets, found


def _with_second_halves(model: nn.Module) -> nn.Module:
    """Adapters whose second matrix is not zero, so that the first one has gradients."""
    mx.random.seed(11)
    for name, value in sorted(tree_flatten(model.trainable_parameters())):
        if name.endswith("lora_b"):
            model.load_weights([(name, 0.02 * mx.random.normal(value.shape, value.dtype))], strict=False)
    return model


def gradient_difference(found: dict[str, mx.array], expected: dict[str, mx.array]) -> float:
    """The largest distance of a tensor's gradient, relative to its norm; those of next to nothing are noise."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    norms = {name: _norm(value) for name, value in expected.items()}
    least = 1e-3 * math.hypot(*norms.values())
    distances = {name: _norm(found[name] - value.astype(mx.float32)) for name, value in expected.items()}
    return max(distances[name] / max(norm, least) for name, norm in norms.items())


def _norm(array: mx.array) -> float:
    return scalar(mx.linalg.norm(array.astype(mx.float32).reshape(-1)))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def steps(kind: str, directory: Path) -> Iterator[Step]:
    """All of a type."""
    with_optional_packages()
    for bits, training in product(BITS, TRAININGS):
        yield measure(kind, training, bits, directory)


def with_optional_packages() -> None:
    """olmo alone asks whether hf_olmo is there, and uses nothing of it."""
    sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))


def main(kind: str, directory: Path) -> int:
    mx.set_default_device(mx.cpu)
    # As the trainer does on the CPU.
    mx.disable_compile()
    for step in steps(kind, directory):
        print(json.dumps(asdict(step)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
