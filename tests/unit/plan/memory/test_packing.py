"""Packed weights are counted as mlx-lm holds them once it has loaded them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from engine.plan.memory.estimate import RankWorkload, estimate
from engine.plan.memory.shape import ModelShape, quantization
from engine.plan.planner import make_plan
from tests.unit.plan.clusters import inputs, mac
from tests.unit.plan.memory.tiny import TINY

TINY_LLAMA = TINY["llama"] | {"torch_dtype": "float16"}
NO_ADAPTERS = RankWorkload(lora_keys=("none",))
QWEN2_72B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "intermediate_size": 29_568,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 152_064,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
"""As Qwen2-72B-Instruct-AWQ's config.json has them, but its quantization_config."""


def weights(config: dict[str, Any]) -> int:
    return estimate(ModelShape.from_config(config), NO_ADAPTERS).weights_bytes


def built(config: dict[str, Any]) -> nn.Module:
    mx.set_default_device(mx.cpu)
    kind, arguments = importlib.import_module("mlx_lm.utils")._get_classes(config)
    model: nn.Module = kind(arguments.from_dict(config))
    model.set_dtype(mx.float16)
    return model


def size(model: nn.Module) -> int:
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


@pytest.mark.parametrize("left_out", [{}, {"model.layers.1.mlp.up_proj": False, "lm_head": False}])
def test_layers_with_bits_of_their_own_are_counted_each_with_its_own(left_out: dict[str, bool]) -> None:
    own: dict[str, Any] = {
        "model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 8},
        "model.layers.2.mlp.gate_proj": {"group_size": 64, "bits": 6},
        "model.embed_tokens": {"group_size": 32, "bits": 6},
        **left_out,
    }
    model = built(TINY_LLAMA)

    def predicate(path: str, module: nn.Module) -> Any:
        return own.get(path, hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0)

    nn.quantize(model, group_size=32, bits=4, class_predicate=predicate)
    assert weights(TINY_LLAMA | {"quantization": {"group_size": 32, "bits": 4, **own}}) == size(model)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_an_awq_or_gptq_file_is_counted_as_mlx_lm_loads_it(tmp_path: Path, method: str) -> None:
    """Real files of that form, read by mlx-lm's own load_model."""
    config = TINY_LLAMA | {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 32}}
    arrays: dict[str, mx.array] = {}
    for name, value in tree_flatten(built(TINY_LLAMA).parameters()):
        outputs, inputs_ = value.shape if value.ndim == 2 else (0, 0)
        if ".layers." in name and value.ndim == 2:
            path, groups = name.removesuffix("weight"), inputs_ // 32
            arrays[f"{path}qweight"] = mx.zeros((inputs_, outputs // 8), mx.uint32)
            arrays[f"{path}scales"] = mx.ones((groups, outputs), mx.float16)
            arrays[f"{path}qzeros"] = mx.zeros((groups, outputs // 8), mx.uint32)
        else:
            arrays[name] = value
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded, _ = importlib.import_module("mlx_lm.utils").load_model(tmp_path, lazy=True)
    assert weights(config) == size(loaded)


@pytest.mark.parametrize(
    ("table", "bits", "group_size"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4, 64),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}, 4, 128),
        ({"quant_method": "mxfp4"}, 4, 32),
        ({"quant_method": "mxfp8"}, 8, 32),
        ({"quant_method": "bitnet"}, 2, 1),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}, 8, 32),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4, 16),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}}, 4, 16),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, 4, 32),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, 4, 16),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}},
            },
            4,
            128,
        ),
    ],
)
def test_every_foreign_form_that_mlx_lm_keeps_packed_is_counted_packed(
    table: dict[str, Any], bits: int, group_size: int
) -> None:
    for config in ({"quantization_config": table}, {"text_config": {"quantization_config": table}}):
        found = quantization(config)
        assert found is not None and (found.packing.bits, found.packing.group_size) == (bits, group_size)
    assert weights(QWEN2_72B | {"quantization_config": table}) < 0.6 * weights(QWEN2_72B)


@pytest.mark.parametrize(
    "table",
    [{"quant_method": "fp8"}, {"quant_method": "compressed-tensors", "format": "float-quantized"}, {}, "4bit"],
)
def test_what_mlx_lm_unpacks_is_counted_unpacked(table: Any) -> None:
    assert weights(TINY_LLAMA | {"quantization_config": table}) == weights(TINY_LLAMA)


@pytest.mark.parametrize(
    ("ignored", "paths"),
    [
        (["lm_head"], []),
        (["model.layers.1.mlp.up_proj", "model.layers.*.self_attn"], ["self_attn", "layers.1.mlp.up_proj"]),
        (["re:.*up_proj$", "re:model\\.layers\\.0\\.mlp.*"], ["up_proj", "layers.0.mlp"]),
    ],
)
def test_modules_that_a_foreign_table_leaves_out_are_not_packed(ignored: list[str], paths: list[str]) -> None:
    found = quantization({"quantization_config": {"quant_method": "mxfp4", "ignore": ignored}})
    shape = ModelShape.from_config(TINY["llama"])
    assert found is not None
    for number, layer in enumerate(shape.architecture.layers):
        for matrix in layer.matrices:
            path = f"layers.{number}.{matrix.name}"
            assert (found.of(matrix, number) is None) == any(each in path for each in paths), path
    assert found.of(shape.architecture.embedding, None) is None


def test_qwen2_72b_in_awq_fits_where_its_weights_packed_do() -> None:
    packed = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}}
    plan = make_plan(inputs([mac("max", 0, "Apple M4 Max", 128)], settings={"batch_size": 1}, model=QWEN2_72B | packed))
    assert not plan.refusals
    assert 40e9 < weights(QWEN2_72B | packed) < 43e9, "Hugging Face shows 41.6 GB for its files"
