"""A sequence in tiles has the loss and gradients of the whole one, and less memory at its peak."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.llama import MLP, Attention, TransformerBlock
from mlx_lm.tuner.utils import linear_to_lora_layers

from engine.protocol.partition import FUSED_HEAD_DIMS
from engine.trainer import tiling
from engine.trainer.model import load_model, recompute_layers
from engine.trainer.strategies.loss import loss_sum
from engine.trainer.tiling import in_tiles, tile_layers
from engine.trainer.weights import scalar
from tests.training import kinds
from tests.training.test_update import train
from tests.training.tiny import Tiny, make_job

LENGTH, TILE = 30, 8
TOKENS = mx.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % 70
BOUNDS = mx.array([[11, LENGTH], [1, 17]])
"""A masked prompt that ends within a tile, and padding."""
LLAMA_3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8}  # fmt: skip


@pytest.fixture(autouse=True)
def as_on_the_cpu() -> Iterator[None]:
    """As the trainer does on the CPU."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def made(kind: str, training: str, **own: Any) -> nn.Module:
    architecture = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(5)
    model = architecture.Model(architecture.ModelArgs.from_dict(kinds.config(kind, tied=True) | own))
    model.freeze()
    if training == "full":
        for layer in model.layers:
            layer.unfreeze()
    else:
        linear_to_lora_layers(model, 3, {"rank": 4, "dropout": 0.0, "scale": 2.0}, use_dora=training == "dora")
        for name, value in tree_flatten(model.trainable_parameters()):
            if name.endswith("lora_b"):
                model.load_weights([(name, 0.1 * mx.random.normal(value.shape))], strict=False)
    model.train()
    mx.eval(model.parameters())
    return model


def step(model: nn.Module) -> tuple[float, dict[str, mx.array]]:
    names = [name for name, _ in tree_flatten(model.trainable_parameters())]
    value, gradients = nn.value_and_grad(model, loss_sum)(model, TOKENS, BOUNDS, mx.array(1.0), trained=names)
    flat = dict(tree_flatten(gradients))
    mx.eval(value, flat)
    return scalar(value), flat


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"{kind}, full": (kind, "full", {}) for kind in kinds.OWN},
    "lora": ("llama", "lora", {}),
    "lora, experts": ("mixtral", "lora", {}),
    "dora, scaled rope": ("llama", "dora", {"rope_scaling": LLAMA_3, "layer_types": None}),
}


@pytest.mark.parametrize("recomputed", [False, 2, True], ids=["kept", "two recomputed", "recomputed"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_the_whole_sequence(name: str, recomputed: bool | int) -> None:
    """Windows, prompts and padding included; the model is as it was, and computes the same for validation."""
    kind, training, own = CASES[name]
    model = made(kind, training, **own)
    expected, gradients_of_whole = step(model)
    before = dict(tree_flatten(model.parameters()))
    tile_layers(model.layers, TILE)
    recompute_layers(model.layers, recomputed)
    value, gradients = step(model)
    assert value == pytest.approx(expected, rel=1e-6)
    largest = max(scalar(mx.abs(each).max()) for each in gradients_of_whole.values())
    for parameter, gradient in gradients.items():
        assert scalar(mx.abs(gradient - gradients_of_whole[parameter]).max()) < 1e-6 * largest, parameter
    after = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(after[name], value).item() for name, value in before.items())
    model.eval()
    assert scalar(loss_sum(model, TOKENS, BOUNDS, mx.array(1.0))) == pytest.approx(expected, rel=1e-6)


def test_a_tile_draws_the_same_numbers_again_and_leaves_the_generator_as_it_was() -> None:
    rows = mx.ones((2, 20, 4))

    def dropped(rows: mx.array) -> mx.array:
        return in_tiles(lambda tile, *_: tile * mx.random.bernoulli(0.5, tile.shape), rows, [], TILE)

    mx.random.seed(3)
    output, after = dropped(rows), mx.random.uniform()
    mx.random.seed(3)
    gradient = mx.grad(lambda rows: dropped(rows).sum())(rows)
    assert mx.array_equal(gradient, output).item() and 0 < scalar(output.mean()) < 1
    assert scalar(mx.random.uniform()) == scalar(after)


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The queries of each call of MLX's attention."""
    called: list[int] = []
    whole: Callable[..., mx.array] = tiling._attention

    def counted(queries: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        called.append(queries.shape[-2])
        return whole(queries, *args, **kwargs)

    monkeypatch.setattr(tiling, "_attention", counted)
    return called


def test_attention_whose_gradient_mlx_computes_in_tiles_is_left_to_it(
    queries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not where a window's mask is an array: that of every other layer here."""
    monkeypatch.setattr(tiling, "_fusing_device", lambda: "metal")
    model = made("llama", "lora", head_dim=64)
    assert 64 in FUSED_HEAD_DIMS
    tile_layers(model.layers, TILE)
    mx.eval(model(TOKENS))
    assert queries == [8, 8, 8, 6, LENGTH] * 2
    queries.clear()
    other = made("llama", "lora", head_dim=8)
    tile_layers(other.layers, TILE)
    mx.eval(other(TOKENS))
    assert queries == [8, 8, 8, 6] * 4


def test_the_peak_is_that_of_a_few_tiles() -> None:
    """By MLX's own count of bytes: of attention alone, and of an MLP alone."""

    def peak(compute: Callable[[mx.array], mx.array], rows: mx.array) -> int:
        mx.eval(rows)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(mx.grad(lambda rows: compute(rows).square().sum())(rows))
        return mx.get_peak_memory() - before

    whole, tiled = (made("llama", "full", layer_types=None, intermediate_size=512) for _ in range(2))
    tile_layers(tiled.layers, 32)
    rows = mx.random.normal((1, 1024, 32))
    attend = [lambda rows, model=model: model.layers[0].self_attn(rows, "causal") for model in (tiled, whole)]
    assert peak(attend[0], rows) < 0.4 * peak(attend[1], rows)
    assert peak(tiled.layers[0].mlp, rows) < 0.4 * peak(whole.layers[0].mlp, rows)


@pytest.mark.parametrize("training", ["full", "lora"])
def test_a_projections_gradient_over_many_tokens_is_nearer_to_that_of_float64_in_tiles(training: str) -> None:
    rows, cotangent = mx.random.normal((1, 20_000, 32)), mx.random.normal((1, 20_000, 1))

    def gradient(tile: int | None, number: mx.Dtype) -> np.ndarray:
        model = made("llama", training, layer_types=None)
        model.set_dtype(number)
        if tile is not None:
            tile_layers(model.layers, tile)
        projection = model.layers[-1].self_attn.v_proj
        weighted = lambda module: (module(rows.astype(number)) * cotangent.astype(number)).sum()  # noqa: E731
        gradients = dict(tree_flatten(nn.value_and_grad(projection, weighted)(projection)[1]))
        return np.concatenate([np.array(value, np.float64).ravel() for value in gradients.values()])

    exact, whole, tiled = gradient(None, mx.float64), gradient(None, mx.float32), gradient(512, mx.float32)
    whole_error, tiled_error = (np.linalg.norm(some - exact) / np.linalg.norm(exact) for some in (whole, tiled))
    assert tiled_error < 5e-7 and tiled_error < 0.5 * whole_error, (tiled_error, whole_error)


@pytest.mark.parametrize("strategy", ["data", "local"])
def test_a_rank_that_trains_the_whole_model_recomputes_and_tiles_its_layers(
    tiny: Tiny, tmp_path: Path, strategy: str
) -> None:
    model, _ = load_model(make_job(tiny, tmp_path, strategy=strategy, grad_checkpoint=True, sequence_tiling=16))
    for layer in model.layers:
        for part, whole in ((layer, TransformerBlock), (layer.mlp, MLP), (layer.self_attn, Attention)):
            assert type(part) is not whole and isinstance(part, whole)


def test_a_training_in_tiles_has_the_same_losses(tiny: Tiny, tmp_path: Path) -> None:
    keys = {"mask_prompt": True, "data": str(tiny.chat), "steps_per_report": 1, "fine_tune_type": "lora"}
    whole = train(tiny, tmp_path / "whole", **keys)
    tiled = train(tiny, tmp_path / "tiled", sequence_tiling=16, grad_checkpoint=1, **keys)
    losses = [[event["loss"] for event in run.of("step")] for run in (whole, tiled)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
