"""Tiny models of each splittable architecture, with random weights."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx import nn

from engine.protocol.partition import SPLITTABLE_MODULES

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 70,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
_MINISTRAL = {
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "sliding_window": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 8,
    },
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "mixtral": _EXPERTS,
    "ministral3": _MINISTRAL,
    "mistral3": {},
    "smollm3": {"no_rope_layer_interval": 2},
}
assert set(OWN) == set(SPLITTABLE_MODULES)


def config(kind: str, *, tied: bool) -> dict[str, Any]:
    """config.json of the kind."""
    own = {**_COMMON, **OWN[kind], "model_type": kind, "tie_word_embeddings": tied}
    if kind == "mistral3":
        return {"model_type": kind, "text_config": {**own, "model_type": "llama"}, "tie_word_embeddings": tied}
    return own


def model(kind: str, *, tied: bool, seed: int = 5) -> nn.Module:
    """Random float32 weights, evaluated."""
    architecture = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)
    made: nn.Module = architecture.Model(architecture.ModelArgs.from_dict(config(kind, tied=tied)))
    mx.eval(made.parameters())
    return made
