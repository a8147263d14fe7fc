"""Memory sizes that users of Macs report for full fine-tuning, recomputed from public configurations.

They are not the trainer's arithmetic (engine.plan.memory.estimate) but a rule of thumb: bytes per parameter, plus the
activations of one micro-batch without attention's scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.plan.memory.architecture import Layer
from engine.plan.memory.estimate import RankWorkload, kept_per_token
from engine.plan.memory.shape import ModelShape

TOKENS = 2_048
"""Length of one sequence, mlx-lm's default."""
RULE_BYTES = 12
"""Per parameter: weights, gradients and two moments of 16 bits, and float32 masters."""
CHEAP_BYTES = 10
"""Per parameter: weights and two moments of 16 bits, float32 gradients (optimizer_precision = "parameter")."""
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}


@dataclass(frozen=True)
class KnownSize:
    """One reported size."""

    name: str
    """As users call it."""
    model: str
    """The public model it is computed for."""
    config: Mapping[str, Any]
    """The relevant part of its config.json."""
    reported_gb: int
    """10⁹ bytes."""
    grad_checkpoint: bool = False
    bytes_per_parameter: int = RULE_BYTES

    @property
    def assumption(self) -> str:
        kept = "gradient checkpointing" if self.grad_checkpoint else "all activations kept"
        return f"{self.bytes_per_parameter} bytes per parameter, {TOKENS:,} tokens, {kept}, fused attention"


QWEN3_4B = {
    **QWEN3,
    "hidden_size": 2_560,
    "num_hidden_layers": 36,
    "intermediate_size": 9_728,
    "num_attention_heads": 32,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3_14B = {
    **QWEN3,
    "hidden_size": 5_120,
    "num_hidden_layers": 40,
    "intermediate_size": 17_408,
    "num_attention_heads": 40,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_32B = {
    **QWEN3,
    "hidden_size": 5_120,
    "num_hidden_layers": 64,
    "intermediate_size": 25_600,
    "num_attention_heads": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
KNOWN_SIZES = (
    KnownSize(
        "4B",
        "Qwen3-4B",
        QWEN3_4B,
        58,
    ),
    KnownSize(
        "7B",
        "Qwen2.5-7B",
        {
            "model_type": "qwen2",
            "hidden_size": 3_584,
            "num_hidden_layers": 28,
            "intermediate_size": 18_944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152_064,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        104,
    ),
    KnownSize(
        "14B",
        "Qwen3-14B",
        QWEN3_14B,
        198,
    ),
    KnownSize(
        "30B",
        "Qwen3-30B-A3B",
        {
            **QWEN3,
            "model_type": "qwen3_moe",
            "hidden_size": 2_048,
            "num_hidden_layers": 48,
            "intermediate_size": 6_144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        410,
    ),
    KnownSize("32B", "Qwen3-32B", QWEN3_32B, 448),
    KnownSize("32B", "Qwen3-32B", QWEN3_32B, 320, grad_checkpoint=True, bytes_per_parameter=CHEAP_BYTES),
)


def _fused(layer: Layer) -> Layer:
    """The layer where attention's kernel recomputes the scores, as a GPU's can."""
    return replace(layer, sublayers=tuple(replace(sublayer, scores=0) for sublayer in layer.sublayers))


def known_bytes(size: KnownSize) -> int:
    """The figure under its assumption: parameters × bytes, and what the layers keep of the tokens; with checkpointing
    only the layers' inputs, and what one layer keeps while its turn is on."""
    shape = ModelShape.from_config(size.config)
    ask = RankWorkload(fine_tune_type="full")
    kept = [kept_per_token(shape, _fused(layer), ask) for layer in shape.architecture.layers]
    inputs = shape.layers * shape.hidden * shape.dtype_bytes
    per_token = inputs + max(kept) if size.grad_checkpoint else sum(kept)
    return shape.total_parameters * size.bytes_per_parameter + TOKENS * per_token
