"""A tiny config.json of each model type of the installed mlx-lm: the fields of its module's ModelArgs, with the sizes
of SIZES, and those of OWN where a type needs others.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

import mlx_lm.models
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

LAYERS = 4
_PARTS = {
    *("activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils", "ssm"),
    "switch_layers",
}
"""Modules of mlx_lm.models which are no model types."""

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim", "block_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"), LAYERS),
    **dict.fromkeys(("intermediate_size", "n_inner", "ff_intermediate_size", "mlp_hidden_size", "block_ff_dim"), 128),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"), 64),
    **dict.fromkeys(("moe_hidden_size",), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads"), 4),
    **dict.fromkeys(("num_swa_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups"), 2),
    **dict.fromkeys(("num_swa_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "hidden_size_per_head", "swa_head_dim", "kv_channels", "global_head_dim"), 16),
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "swa_v_head_dim"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("vocab_size", "num_vocab", "embedding_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "block_size", "model_max_length"), 256),
    "original_max_position_embeddings": 128,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), 1e-5),
    **dict.fromkeys(("layernorm_epsilon", "post_norm_eps"), 1e-5),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "swa_rope_theta", "rope_local_base_freq"), 10_000.0),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "num_shared_expert", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "moe_layer_freq", "decoder_sparse_step"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("norm_topk_prob", "use_qk_norm", "qk_norm", "use_conv_bias"), True),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "tie_word_embeddings"), False),
    **dict.fromkeys(("conv_bias", "post_norm", "mamba_proj_bias"), False),
    **dict.fromkeys(("scoring_func", "moe_router_score_func"), "sigmoid"),
    **dict.fromkeys(("routed_scaling_factor", "logits_scaling", "embedding_multiplier", "residual_multiplier"), 1.0),
    **dict.fromkeys(("scale_depth", "scale_emb"), 1.0),
    "topk_method": "noaux_tc",
    "attention_multiplier": 0.25,
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 0.5),
    "rotary_dim": 8,
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), 8),
    **dict.fromkeys(("sliding_window_pattern", "full_attention_interval", "layer_group_size"), 2),
    **dict.fromkeys(("linear_num_value_heads", "mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "n_groups", "mamba_n_groups", "group_norm_size"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("state_size",), 16),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 32),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "short_conv_kernel_size"), 4),
    **dict.fromkeys(("index_n_heads",), 2),
    **dict.fromkeys(("index_head_dim",), 16),
    **dict.fromkeys(("index_topk",), 4),
}
"""Field → its value, for every type that has it."""

_MIXED = ["sliding_attention", "full_attention"] * 2
_DENSE_FIRST = ["dense", "sparse", "sparse", "sparse"]
_YARN = {"rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 128, "type": "yarn"}
_SCALED = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
_LLAMA_4 = {"rope_theta": 10_000.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}
_LINEAR = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3]}
_MAMBA = {"time_step_rank": 8, "num_heads": 4, "head_dim": 32, "time_step_limit": [0.0, 100.0]}
_LFM2 = {
    "conv_L_cache": 3,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": [1, 3],
    "use_expert_bias": True,
}
_LONGCAT = {"zero_expert_type": "identity", "zero_expert_num": 1, "mla_scale_q_lora": True, "mla_scale_kv_lora": True}
_SPARSE_INDEX = {"index_block_size": 4, "index_topk_blocks": 2, "index_n_heads": 2, "rope_parameters": None}
_HADAMARD = {"block": 0, "embedding": False, "dtype": "float16"}

OWN: dict[str, dict[str, Any]] = {
    "Klear": {"mlp_only_layers": [1]},
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": _MIXED},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2},
    "bailing_hybrid": {"num_key_value_heads": 4},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
    },
    "deepseek_v2": {"rope_scaling": _SCALED, "topk_method": "greedy"},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG", "layer_types": _MIXED},
    "exaone_moe": {"layer_types": _MIXED, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gear": {"layer_types": [*_MIXED[:2], "conv", "conv"]},
    "gemma3n.TextConfig": {
        "layer_types": _MIXED,
        "num_kv_shared_layers": 2,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 32,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 32,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10_000.0}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_conv_bias": True},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 2,
    },
    "kimi_k3.TextArgs": {"linear_attn_config": _LINEAR},
    "kimi_linear": {"linear_attn_config": _LINEAR},
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "llama": {"layer_types": _MIXED},
    "llama4.TextArgs": {
        "attention_chunk_size": 8,
        "interleave_moe_layer_step": 2,
        "rope_scaling": None,
        "num_experts_per_tok": 1,
    },
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0]},
    "longcat_flash": {**_LONGCAT, "attention_method": "MLA"},
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2},
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "mellum": {
        "layer_types": _MIXED,
        "rope_parameters": {kind: {"rope_theta": 10_000.0, "rope_type": "default"} for kind in _MIXED},
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "minicpm": {"dim_model_base": 32},
    "minicpm3": {"dim_model_base": 32, "rope_scaling": {"original_max_position_embeddings": 128}},
    "minimax_m3_vl.TextArgs": {
        **_SPARSE_INDEX,
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_freq": [0, 1, 1, 1],
    },
    "ministral3": {"layer_types": _MIXED, "rope_parameters": _LLAMA_4},
    "mistral4": {"rope_parameters": _LLAMA_4},
    "muse_spark": {"audio_config": {"out_hidden_size": 64}},
    "muse_spark.TextArgs": {
        "num_shared_experts": 0,
        "layer_types": _MIXED,
        "rope_parameters": {"rope_theta": 10_000.0},
        "layer_rope_theta": [10_000.0] * LAYERS,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.5,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
        ]
    },
    "nemotron_h": {"hybrid_override_pattern": "M*-E"},
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "layer_types": ["linear_attention", "full_attention"] * 2},
    "openelm": {
        "ffn_dim_divisor": 32,
        "ffn_multipliers": [1.0, 2.0, 3.0, 4.0],
        "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
    },
    "phi3small": {
        "vocab_size": 100_352,
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
    },
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": f"model.layers.{layer}.mlp.gate_proj", **_HADAMARD} for layer in range(LAYERS)],
        "text_config": {"hidden_size": 128, "num_experts": 0},
    },
    "qwen3_5": {"text_config": {"num_experts": 0}},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen3_next": {"mlp_only_layers": [1]},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    "rwkv7": {"a_low_rank_dim": 32, "v_low_rank_dim": 32, "gate_low_rank_dim": 32, "decay_low_rank_dim": 32},
    "spark2_5": {"rope_parameters": {kind: {"rope_theta": 10_000.0} for kind in _MIXED}},
}
"""Model type → its own values, beside `model_type`."""

TEXT: dict[str, str] = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n.TextConfig",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_k3.TextArgs",
    "kimi_vl": "kimi_vl.TextArgs",
    "lfm2-vl": "lfm2",
    "llama4": "llama4.TextArgs",
    "minimax_m3_vl": "minimax_m3_vl.TextArgs",
    "mistral3": "ministral3",
    "llava": "llama",
    "muse_spark": "muse_spark.TextArgs",
    "pixtral": "llama",
    "prism_hadamard_qwen35": "qwen3_5.TextModelArgs",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_5": "qwen3_5.TextModelArgs",
    "qwen3_5_moe": "qwen3_5.TextModelArgs",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""Model type → the type, or the class, of its text_config."""


FROM_ZERO = ("rwkv7", "talkie")
"""Types whose parameters begin at zero where that leaves no gradients, or no loss, to compare."""


def model_types() -> list[str]:
    """All that the installed mlx-lm loads."""
    modules = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)} - _PARTS
    return sorted(modules | set(MODEL_REMAPPING) | {kind for kind, _ in MODEL_ARCHITECTURE_REMAPPING})


def tiny_config(kind: str) -> dict[str, Any]:
    """config.json of the type. Raises KeyError for a field that has no value."""
    module = MODEL_REMAPPING.get(kind, kind)
    text = TEXT.get(kind, TEXT.get(module))
    config = _filled(
        f"{module}.ModelArgs",
        {"model_type": kind, **({"text_config": {}} if text else {}), **OWN.get(kind, OWN.get(module, {}))},
    )
    if text:
        own = {"model_type": text.partition(".")[0], **OWN.get(text, {}), **config["text_config"]}
        config["text_config"] = _filled(text if "." in text else f"{text}.ModelArgs", own)
    return config


def _filled(name: str, own: dict[str, Any]) -> dict[str, Any]:
    module, _, kind = name.rpartition(".")
    fields = dataclasses.fields(getattr(importlib.import_module(f"mlx_lm.models.{module}"), kind))
    values = {**SIZES, **own}
    missing = [
        field.name
        for field in fields
        if field.default is field.default_factory is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise KeyError(f"{name}: no value of {', '.join(missing)} in tests/bench/tiny_models.py")
    return {**{field.name: values[field.name] for field in fields if field.name in values}, **own}
