"""The files of a tiny Llama, made without MLX: whatever examines a model's folder takes it for whole, and mlx-lm loads
its weights, all zeros."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod

TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "rms_norm_eps": 1e-6,
}


def safetensors(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """A file of zeros in 16 bits."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at := at + size]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def llama_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Of a model with as many heads for keys as for queries, and a tied head."""
    hidden, inner, words, layers = (
        int(str(config[name])) for name in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    )
    layer: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"},
        **{f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (words, hidden), **shapes, "model.norm.weight": (hidden,)}


def llama_files(config: Mapping[str, object] = TINY_LLAMA) -> dict[str, bytes]:
    """File → content; its tokenizer is none."""
    weights = safetensors(llama_shapes(config))
    return {"config.json": json.dumps(config).encode(), "tokenizer.json": b"{}", "model.safetensors": weights}
