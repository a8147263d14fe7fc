"""Each kind of model that mlx-lm trains, as its `model_type` names it: which parts its layers have.

Counted after mlx_lm/models/<kind>.py; the tests build every kind there and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .attention import attention
from .feed_forward import GATED_GELU, SILU, experts, gated, gated_fused, shared_expert, two_layer
from .hybrids import falcon_h1, granite_hybrid, jamba, lfm2, mamba2_model, mamba_model, nemotron_h, qwen3_next
from .keys import Keys
from .parts import Layer, Part, Skeleton
from .stack import layers, skeleton


@dataclass(frozen=True)
class _Dense:
    """What sets the Llama-like kinds apart."""

    norms: int = 2
    """Norms of the hidden size in each layer."""
    query_norms: str = ""
    """ "head": one norm per head dimension, "all": over all heads, "": none."""
    qkv_bias: bool | None = None
    """None: as the config's attention_bias says."""
    out_bias: bool | None = None
    fused: bool = False
    own_head_dim: bool = True
    """Whether the config's head_dim counts."""
    tied: bool | None = None
    """None: as the config says, else True."""
    tied_by_default: bool = True
    gelu: bool = False
    """The network's activation; else silu."""
    capped: bool = False
    """Whether the scores are soft-capped."""


def _dense(kind: _Dense) -> Callable[[Keys], Skeleton]:
    def build(keys: Keys) -> Skeleton:
        part = _attention(keys, kind)
        hidden, inner = keys.size("hidden_size"), keys.size("intermediate_size")
        if kind.fused:
            network = gated_fused(hidden, inner, names=("gate_up_proj", "down_proj"))
        else:
            arrays = GATED_GELU if kind.gelu else SILU
            network = gated(hidden, inner, bias=keys.flag("mlp_bias", False), arrays=arrays)
        layer = Layer((part, network), kind.norms * hidden, kind.norms * hidden)
        return skeleton(keys, [layer] * layers(keys), tied=_tied(keys, kind))

    return build


def _attention(keys: Keys, kind: _Dense) -> Part:
    hidden = keys.size("hidden_size")
    heads, kv_heads = keys.heads()
    head_dim = keys.size("head_dim", default=hidden // heads) if kind.own_head_dim else hidden // heads
    bias = keys.flag("attention_bias", False)
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


def _tied(keys: Keys, kind: _Dense) -> bool:
    return keys.flag("tie_word_embeddings", kind.tied_by_default) if kind.tied is None else kind.tied


def _mixture(
    kind: _Dense, names: Mapping[str, str], *, prefix: str = "mlp", router: str = "gate"
) -> Callable[[Keys], Skeleton]:
    """Llama-like layers with experts. `names`: which keys of the config hold inner, count and active."""

    def build(keys: Keys) -> Skeleton:
        hidden = keys.size("hidden_size")
        part = _attention(keys, kind)
        inner, count, active = (keys.size(names[name]) for name in ("inner", "count", "active"))
        mixture = [experts(hidden, inner, count, active, prefix=prefix, router=router)]
        if "shared" in names:
            mixture.append(shared_expert(hidden, keys.size(names["shared"]), prefix=prefix))
        sparse = Layer((part, *mixture), kind.norms * hidden, kind.norms * hidden)
        dense = Layer((part, gated(hidden, keys.size("intermediate_size"))), kind.norms * hidden, kind.norms * hidden)
        only_dense = set(keys.whole_list("mlp_only_layers") or ()) if "step" in names else set()
        step = keys.size(names["step"], default=1) if "step" in names else 1
        stack = [
            sparse if number not in only_dense and (number + 1) % step == 0 else dense for number in range(layers(keys))
        ]
        return skeleton(keys, stack, tied=_tied(keys, kind))

    return build


def _phi(keys: Keys) -> Skeleton:
    hidden = keys.size("hidden_size", default=2560)
    heads = keys.size("num_attention_heads", default=32)
    part = attention(
        hidden,
        heads,
        keys.size("num_key_value_heads", default=heads),
        hidden // heads,
        qkv_bias=True,
        out_bias=True,
        out="dense",
    )
    network = two_layer(hidden, keys.size("intermediate_size"), bias=True, names=("fc1", "fc2"))
    layer = Layer((part, network), 2 * hidden, hidden)
    return skeleton(keys, [layer] * layers(keys), tied=False, last_norm=2 * hidden, head_bias=True)


def _starcoder2(keys: Keys) -> Skeleton:
    hidden = keys.size("hidden_size")
    heads, kv_heads = keys.heads()
    part = attention(hidden, heads, kv_heads, hidden // heads, qkv_bias=True, out_bias=True)
    network = two_layer(hidden, keys.size("intermediate_size"), bias=True, names=("c_fc", "c_proj"))
    layer = Layer((part, network), 4 * hidden, 2 * hidden)
    tied = keys.flag("tie_word_embeddings", True)
    return skeleton(keys, [layer] * layers(keys), tied=tied, last_norm=2 * hidden)


def _gemma3(keys: Keys) -> Skeleton:
    """gemma3 holds its text model's keys in text_config; with mlx-lm's defaults, which the files rely on."""
    text = Keys(
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            **keys.table("text_config"),
            "vocab_size": keys.size("vocab_size", default=262_208),
        }
    )
    return _gemma3_text(text)


def _gemma3_text(keys: Keys) -> Skeleton:
    hidden = keys.size("hidden_size", default=1152)
    head_dim = keys.size("head_dim", default=256)
    part = attention(
        hidden,
        keys.size("num_attention_heads", default=4),
        keys.size("num_key_value_heads", default=1),
        head_dim,
        norms=2 * head_dim,
    )
    layer = Layer(
        (part, gated(hidden, keys.size("intermediate_size", default=6912), arrays=GATED_GELU)), 4 * hidden, 4 * hidden
    )
    count = layers(Keys({"num_hidden_layers": keys.size("num_hidden_layers", default=26)}))
    # mlx-lm makes a head of its own from the embedding's weights where the file has none.
    return skeleton(keys, [layer] * count, tied=True, vocabulary=keys.size("vocab_size", default=262_144))


_LLAMA = _dense(_Dense())
_QWEN_EXPERTS = {
    "inner": "moe_intermediate_size",
    "count": "num_experts",
    "active": "num_experts_per_tok",
}
_LOCAL_EXPERTS = {"inner": "intermediate_size", "count": "num_local_experts", "active": "num_experts_per_tok"}

KINDS: dict[str, Callable[[Keys], Skeleton]] = {
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
