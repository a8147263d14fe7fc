"""A model's shape, read from its config alone, is that of the model which mlx-lm builds from the same config."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from engine.errors import InputError
from engine.plan.memory.architecture import Matrix
from engine.plan.memory.estimate import RankWorkload, estimate
from engine.plan.memory.model_types import MODEL_TYPES
from engine.plan.memory.shape import ModelShape
from tests.unit.plan.memory.tiny import TINY

CONFIGS = pytest.mark.parametrize("config", TINY.values(), ids=TINY.keys())


def mlx_lm(module: str) -> Any:
    """A module of mlx-lm's. To import the first one takes a second, which only the worker of these tests spends."""
    return importlib.import_module(f"mlx_lm.{module}")


def linear_to_lora_layers(*args: Any, **kwargs: Any) -> None:
    mlx_lm("tuner.utils").linear_to_lora_layers(*args, **kwargs)


def built(config: dict[str, Any]) -> Any:
    """The model as mlx-lm loads it, on the CPU."""
    mx.set_default_device(mx.cpu)
    model_class, arguments = mlx_lm("utils")._get_classes(config)
    # Building a gemma3 writes into its config.
    model = model_class(arguments.from_dict({key: dict(v) if isinstance(v, dict) else v for key, v in config.items()}))
    if config["model_type"].startswith("gemma3"):
        # What load_model does when the file has no head of its own, as no file of this kind has.
        getattr(model, "language_model", model).sanitize({})
    return model


def count(tree: Any) -> int:
    return sum(value.size for _, value in tree_flatten(tree))


def size(tree: Any) -> int:
    return sum(value.nbytes for _, value in tree_flatten(tree))


def test_every_kind_is_built() -> None:
    assert {config["model_type"] for config in TINY.values()} == set(MODEL_TYPES)


@CONFIGS
def test_parameters_are_the_models(config: dict[str, Any]) -> None:
    model, shape = built(config), ModelShape.from_config(config)
    assert [layer.parameters for layer in shape.architecture.layers] == [
        count(layer.parameters()) for layer in model.layers
    ]
    assert shape.total_parameters == count(model.parameters())


@CONFIGS
def test_what_is_estimated_in_tiles_of_tokens_is_what_the_trainer_computes_so(config: dict[str, Any]) -> None:
    model, shape = built(config), ModelShape.from_config(config)
    tiling = importlib.import_module("engine.trainer.tiling")
    tiling.tile_layers(model.layers, 4)
    mlp = tiling._tiled(4, nn.Linear(1, 1)).__qualname__
    for layer, real in zip(shape.architecture.layers, model.layers, strict=True):
        names = {matrix.name.split(".")[0] for part in layer.sublayers if part.by_token for matrix in part.matrices}
        calls = {name: vars(type(part)).get("__call__") for name, part in real.children().items()}
        assert {name for name, call in calls.items() if getattr(call, "__qualname__", "") == mlp} == names


@CONFIGS
def test_matrices_are_the_models(config: dict[str, Any]) -> None:
    model, shape = built(config), ModelShape.from_config(config)
    for layer, real in zip(shape.architecture.layers, model.layers, strict=True):
        assert {matrix.name: (matrix.copies, matrix.outputs, matrix.inputs) for matrix in layer.matrices} == {
            name: (*([1] * (3 - module.weight.ndim)), *module.weight.shape)
            for name, module in real.named_modules()
            if isinstance(module, nn.Linear | mlx_lm("models.switch_layers").SwitchLinear)
        }
    outer = dict(model.named_modules())
    for matrix in (shape.architecture.embedding, shape.architecture.head):
        assert matrix is None or any(name.endswith(matrix.name) for name in outer)


@CONFIGS
@pytest.mark.parametrize("fine_tune_type", ["lora", "full"])
@pytest.mark.parametrize("layers", [-1, 1])
def test_trained_parameters_are_the_models(config: dict[str, Any], fine_tune_type: Any, layers: int) -> None:
    model, shape = built(config), ModelShape.from_config(config)
    model.freeze()
    if fine_tune_type == "lora":
        linear_to_lora_layers(model, layers, {"rank": 4, "scale": 1.0, "dropout": 0.0})
    else:
        for layer in model.layers[-max(layers, 0) :]:
            layer.unfreeze()
    ask = RankWorkload(fine_tune_type=fine_tune_type, num_layers=layers, lora_rank=4)
    assert estimate(shape, ask).trainable_parameters == count(model.trainable_parameters())
    assert estimate(shape, ask).weights_bytes == size(model.parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi"])
def test_dora_adds_a_magnitude_per_output(kind: str) -> None:
    model, shape = built(TINY[kind]), ModelShape.from_config(TINY[kind])
    model.freeze()
    linear_to_lora_layers(model, -1, {"rank": 4, "scale": 1.0, "dropout": 0.0}, use_dora=True)
    ask = RankWorkload(fine_tune_type="dora", lora_rank=4)
    assert estimate(shape, ask).trainable_parameters == count(model.trainable_parameters())


def test_adapters_of_named_matrices_only() -> None:
    keys = ("self_attn.q_proj", "mlp.down_proj")
    model, shape = built(TINY["qwen3"]), ModelShape.from_config(TINY["qwen3"])
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 1.0, "dropout": 0.0, "keys": list(keys)})
    ask = RankWorkload(num_layers=2, lora_rank=4, lora_keys=keys)
    assert estimate(shape, ask).trainable_parameters == count(model.trainable_parameters())


@CONFIGS
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_the_models(config: dict[str, Any], bits: int) -> None:
    model = built(config)
    model.set_dtype(mx.bfloat16)
    nn.quantize(
        model,
        group_size=32,
        bits=bits,
        class_predicate=lambda _, module: hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0,
    )
    packed = {"quantization": {"group_size": 32, "bits": bits}, "torch_dtype": "bfloat16"}
    if "text_config" in config:
        packed["text_config"] = {**config["text_config"], "torch_dtype": "bfloat16"}
    shape = ModelShape.from_config({**config, **packed})
    model.freeze()
    linear_to_lora_layers(model, -1, {"rank": 4, "scale": 1.0, "dropout": 0.0})
    expected = estimate(shape, RankWorkload(lora_rank=4))
    assert expected.weights_bytes == size(model.parameters())
    assert expected.trainable_parameters == count(model.trainable_parameters())


def test_a_quantized_model_cannot_be_trained_whole() -> None:
    shape = ModelShape.from_config({**TINY["llama"], "quantization": {"group_size": 32, "bits": 4}})
    with pytest.raises(InputError, match="no gradients for quantized weights"):
        estimate(shape, RankWorkload(fine_tune_type="full"))


def test_adapters_beyond_the_layers() -> None:
    keys = ("model.embed_tokens", "lm_head")
    model, shape = built(TINY["llama"]), ModelShape.from_config(TINY["llama"])
    model.freeze()
    linear_to_lora_layers(model, -1, {"rank": 4, "scale": 1.0, "dropout": 0.0, "keys": list(keys)})
    ask = RankWorkload(lora_rank=4, lora_keys=keys)
    assert estimate(shape, ask).trainable_parameters == count(model.trainable_parameters())


def test_a_matrix_as_stored() -> None:
    shape = ModelShape.from_config({**TINY["llama"], "torch_dtype": "bfloat16"})
    assert shape.matrix_bytes(Matrix("q", 64, 32, bias=True)) == 2 * (64 * 32 + 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "perceptron"}, "'perceptron'"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size = 'big'"),
        ({"hidden_size": -64}, "hidden_size = -64"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"torch_dtype": "float8"}, "'float8'"),
        ({"quantization": {"bits": 40, "group_size": 64}}, "40 bits"),
        ({"model_type": "\x1b[2Jlla\nma"}, "lla"),
    ],
)
def test_an_invalid_config_is_one_clear_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        ModelShape.from_config({**TINY["llama"], **change})
    line = str(refusal.value)
    assert message in line
    assert "\n" not in line and "\x1b" not in line
