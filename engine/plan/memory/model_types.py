"""The architecture of each `model_type` whose memory can be estimated, following mlx_lm/models/<model_type>.py; the
tests build every one with mlx-lm and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.plan.memory.architecture import Architecture, ConfigReader, Layer, Sublayer, architecture, layer_count
from engine.plan.memory.hybrid_models import (
    falcon_h1,
    granite_hybrid,
    jamba,
    lfm2,
    mamba2_model,
    mamba_model,
    nemotron_h,
    qwen3_next,
)
from engine.plan.memory.sublayers import (
    GATED_GELU,
    SILU,
    attention,
    experts,
    fused_gated_mlp,
    gated_mlp,
    shared_expert,
    two_layer_mlp,
)


@dataclass(frozen=True)
class _Dense:
    """Differences between the Llama-like model types."""

    norms: int = 2
    """Norms of the hidden size in each layer."""
    query_norms: str = ""
    """ "head": one norm per head dimension, "all": over all heads, "": none."""
    qkv_bias: bool | None = None
    """None: use attention_bias of the config."""
    out_bias: bool | None = None
    fused: bool = False
    own_head_dim: bool = True
    """Use head_dim of the config."""
    tied: bool | None = None
    """None: use tie_word_embeddings of the config."""
    tied_by_default: bool = True
    gelu: bool = False
    """GELU instead of SiLU in the MLP."""
    capped: bool = False
    """Soft-capped scores."""


def _dense(kind: _Dense) -> Callable[[ConfigReader], Architecture]:
    def build(keys: ConfigReader) -> Architecture:
        mixer = _attention(keys, kind)
        hidden, inner = keys.get_size("hidden_size"), keys.get_size("intermediate_size")
        if kind.fused:
            network = fused_gated_mlp(hidden, inner, names=("gate_up_proj", "down_proj"))
        else:
            arrays = GATED_GELU if kind.gelu else SILU
            network = gated_mlp(hidden, inner, bias=keys.get_flag("mlp_bias", False), arrays=arrays)
        layer = Layer((mixer, network), kind.norms * hidden, kind.norms * hidden)
        return architecture(keys, [layer] * layer_count(keys), tied=_tied(keys, kind))

    return build


def _attention(keys: ConfigReader, kind: _Dense) -> Sublayer:
    hidden = keys.get_size("hidden_size")
    heads, kv_heads = keys.heads()
    head_dim = keys.get_size("head_dim", default=hidden // heads) if kind.own_head_dim else hidden // heads
    bias = keys.get_flag("attention_bias", False)
    widths = {"head": 2 * head_dim, "all": (heads + kv_heads) * head_dim, "": 0}
    return attention(
        hidden,
        heads,
        kv_heads,
        head_dim,
        qkv_bias=bias if kind.qkv_bias is None else kind.qkv_bias,
        out_bias=bias if kind.out_bias is None else kind.out_bias,
        norms=widths[kind.query_norms],
        fused=kind.fused,
        capped=kind.capped,
    )


def _tied(keys: ConfigReader, kind: _Dense) -> bool:
    return keys.get_flag("tie_word_embeddings", kind.tied_by_default) if kind.tied is None else kind.tied


def _mixture(
    kind: _Dense, names: Mapping[str, str], *, prefix: str = "mlp", router: str = "gate"
) -> Callable[[ConfigReader], Architecture]:
    """Llama-like layers with experts. `names`: the config's keys for inner, count and active."""

    def build(keys: ConfigReader) -> Architecture:
        hidden = keys.get_size("hidden_size")
        mixer = _attention(keys, kind)
        inner, count, active = (keys.get_size(names[name]) for name in ("inner", "count", "active"))
        mixture = [experts(hidden, inner, count, active, prefix=prefix, router=router)]
        if "shared" in names:
            mixture.append(shared_expert(hidden, keys.get_size(names["shared"]), prefix=prefix))
        sparse = Layer((mixer, *mixture), kind.norms * hidden, kind.norms * hidden)
        dense = Layer(
            (mixer, gated_mlp(hidden, keys.get_size("intermediate_size"))), kind.norms * hidden, kind.norms * hidden
        )
        only_dense = set(keys.get_ints("mlp_only_layers") or ()) if "step" in names else set()
        step = keys.get_size(names["step"], default=1) if "step" in names else 1
        stack = [
            sparse if number not in only_dense and (number + 1) % step == 0 else dense
            for number in range(layer_count(keys))
        ]
        return architecture(keys, stack, tied=_tied(keys, kind))

    return build


def _phi(keys: ConfigReader) -> Architecture:
    hidden = keys.get_size("hidden_size", default=2560)
    heads = keys.get_size("num_attention_heads", default=32)
    mixer = attention(
        hidden,
        heads,
        keys.get_size("num_key_value_heads", default=heads),
        hidden // heads,
        qkv_bias=True,
        out_bias=True,
        out="dense",
    )
    network = two_layer_mlp(hidden, keys.get_size("intermediate_size"), bias=True, names=("fc1", "fc2"))
    layer = Layer((mixer, network), 2 * hidden, hidden)
    return architecture(keys, [layer] * layer_count(keys), tied=False, last_norm=2 * hidden, head_bias=True)


def _starcoder2(keys: ConfigReader) -> Architecture:
    hidden = keys.get_size("hidden_size")
    heads, kv_heads = keys.heads()
    mixer = attention(hidden, heads, kv_heads, hidden // heads, qkv_bias=True, out_bias=True)
    network = two_layer_mlp(hidden, keys.get_size("intermediate_size"), bias=True, names=("c_fc", "c_proj"))
    layer = Layer((mixer, network), 4 * hidden, 2 * hidden)
    tied = keys.get_flag("tie_word_embeddings", True)
    return architecture(keys, [layer] * layer_count(keys), tied=tied, last_norm=2 * hidden)


def _gemma3(keys: ConfigReader) -> Architecture:
    """gemma3 has the keys of its text model in text_config, and relies on mlx-lm's defaults."""
    text = ConfigReader(
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            **keys.get_table("text_config"),
            "vocab_size": keys.get_size("vocab_size", default=262_208),
        }
    )
    return _gemma3_text(text)


def _gemma3_text(keys: ConfigReader) -> Architecture:
    hidden = keys.get_size("hidden_size", default=1152)
    head_dim = keys.get_size("head_dim", default=256)
    mixer = attention(
        hidden,
        keys.get_size("num_attention_heads", default=4),
        keys.get_size("num_key_value_heads", default=1),
        head_dim,
        norms=2 * head_dim,
    )
    layer = Layer(
        (mixer, gated_mlp(hidden, keys.get_size("intermediate_size", default=6912), arrays=GATED_GELU)),
        4 * hidden,
        4 * hidden,
    )
    count = layer_count(ConfigReader({"num_hidden_layers": keys.get_size("num_hidden_layers", default=26)}))
    # If the file has no head, mlx-lm creates one from the weights of the embedding.
    return architecture(keys, [layer] * count, tied=True, vocabulary=keys.get_size("vocab_size", default=262_144))


_LLAMA = _dense(_Dense())
_QWEN_EXPERTS = {
    "inner": "moe_intermediate_size",
    "count": "num_experts",
    "active": "num_experts_per_tok",
}
_LOCAL_EXPERTS = {"inner": "intermediate_size", "count": "num_local_experts", "active": "num_experts_per_tok"}

MODEL_TYPES: dict[str, Callable[[ConfigReader], Architecture]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "iquestcoder": _LLAMA,
    "xverse": _LLAMA,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "ministral3": _dense(_Dense(qkv_bias=False, out_bias=False)),
    "olmo2": _dense(_Dense(query_norms="all")),
    "qwen2": _dense(_Dense(qkv_bias=True, out_bias=False, own_head_dim=False)),
    "qwen3": _dense(_Dense(query_norms="head", qkv_bias=False, out_bias=False)),
    "exaone4": _dense(_Dense(query_norms="head", qkv_bias=False, out_bias=False)),
    "gemma": _dense(_Dense(gelu=True, qkv_bias=False, out_bias=False, tied=True)),
    "gemma2": _dense(_Dense(gelu=True, capped=True, norms=4, qkv_bias=False, out_bias=False, tied=True)),
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
    "phi": _phi,
    "phi3": _dense(_Dense(fused=True, own_head_dim=False, qkv_bias=False, out_bias=False, tied_by_default=False)),
    "starcoder2": _starcoder2,
    "mixtral": _mixture(
        _Dense(qkv_bias=False, out_bias=False, own_head_dim=False, tied_by_default=False),
        _LOCAL_EXPERTS,
        prefix="block_sparse_moe",
    ),
    "qwen2_moe": _mixture(
        _Dense(qkv_bias=True, out_bias=False, own_head_dim=False, tied=False),
        {**_QWEN_EXPERTS, "shared": "shared_expert_intermediate_size"},
    ),
    "qwen3_moe": _mixture(
        _Dense(query_norms="head", qkv_bias=False, out_bias=False, tied_by_default=False),
        {**_QWEN_EXPERTS, "step": "decoder_sparse_step"},
    ),
    "olmoe": _mixture(_Dense(query_norms="all"), {**_LOCAL_EXPERTS, "count": "num_experts"}),
    "granitemoe": _mixture(
        _Dense(own_head_dim=False), _LOCAL_EXPERTS, prefix="block_sparse_moe", router="router.layer"
    ),
    "qwen3_next": qwen3_next,
    "jamba": jamba,
    "mamba": mamba_model,
    "falcon_mamba": mamba_model,
    "mamba2": mamba2_model,
    "falcon_h1": falcon_h1,
    "granitemoehybrid": granite_hybrid,
    "lfm2": lfm2,
    "nemotron_h": nemotron_h,
}
