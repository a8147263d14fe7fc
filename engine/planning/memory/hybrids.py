"""Kinds whose layers are not all alike: attention beside state-space models, linear attention or convolutions."""

from __future__ import annotations

import math

from .attention import attention
from .feed_forward import RELU_SQUARED, experts, gated, gated_fused, shared_expert, two_layer
from .keys import Keys, refused
from .parts import Layer, Matrix, Part, Skeleton
from .recurrent import gated_delta, mamba, mamba2, short_convolution
from .stack import layers, skeleton


def qwen3_next(keys: Keys) -> Skeleton:
    hidden = keys.size("hidden_size")
    heads, kv_heads = keys.heads()
    head_dim = keys.size("head_dim")
    bias = keys.flag("attention_bias", False)
    full = attention(hidden, heads, kv_heads, head_dim, qkv_bias=bias, out_bias=bias, norms=2 * head_dim, gated=True)
    linear = gated_delta(
        hidden,
        key_heads=keys.size("linear_num_key_heads"),
        key_dim=keys.size("linear_key_head_dim"),
        value_heads=keys.size("linear_num_value_heads"),
        value_dim=keys.size("linear_value_head_dim"),
        kernel=keys.size("linear_conv_kernel_dim"),
        prefix="linear_attn",
    )
    sparse = (
        experts(
            hidden, keys.size("moe_intermediate_size"), keys.whole("num_experts"), keys.size("num_experts_per_tok")
        ),
        shared_expert(hidden, keys.size("shared_expert_intermediate_size")),
    )
    dense = (gated(hidden, keys.size("intermediate_size")),)
    interval, step = keys.size("full_attention_interval", default=4), keys.size("decoder_sparse_step", default=1)
    only_dense = set(keys.whole_list("mlp_only_layers") or ())
    stack = []
    for number in range(layers(keys)):
        mixer = full if (number + 1) % interval == 0 else linear
        is_sparse = number not in only_dense and keys.whole("num_experts") > 0 and (number + 1) % step == 0
        stack.append(Layer((mixer, *(sparse if is_sparse else dense)), 2 * hidden, 2 * hidden))
    return skeleton(keys, stack, tied=keys.flag("tie_word_embeddings", False))


def jamba(keys: Keys) -> Skeleton:
    hidden = keys.size("hidden_size")
    heads, kv_heads = keys.heads()
    full = attention(hidden, heads, kv_heads, hidden // heads)
    recurrent = mamba(
        hidden,
        keys.size("mamba_expand") * hidden,
        state=keys.size("mamba_d_state"),
        rank=_time_rank(keys, "mamba_dt_rank", hidden),
        kernel=keys.size("mamba_d_conv"),
        bias=keys.flag("mamba_proj_bias", False),
        conv_bias=keys.flag("mamba_conv_bias", True),
        norms=True,
        prefix="mamba",
    )
    inner, count = keys.size("intermediate_size"), keys.size("num_experts", default=1)
    dense = gated(hidden, inner, prefix="feed_forward")
    sparse = experts(
        hidden, inner, count, keys.size("num_experts_per_tok", default=1), prefix="feed_forward", router="router"
    )
    number_of_layers = layers(keys)
    types = keys.words("layers_block_type", number_of_layers)
    if types is None:
        offset, period = keys.whole("attn_layer_offset"), keys.size("attn_layer_period")
        types = ["attention" if number % period == offset else "mamba" for number in range(number_of_layers)]
    offset, period = keys.whole("expert_layer_offset"), keys.size("expert_layer_period")
    stack = [
        Layer(
            (
                full if kind == "attention" else recurrent,
                sparse if count > 1 and (number + offset) % period == 0 else dense,
            ),
            2 * hidden,
            2 * hidden,
        )
        for number, kind in enumerate(types)
    ]
    return skeleton(keys, stack, tied=keys.flag("tie_word_embeddings", True))


def mamba_model(keys: Keys) -> Skeleton:
    """mamba and falcon_mamba; the older files name their sizes otherwise."""
    hidden = keys.size("hidden_size", "d_model")
    recurrent = mamba(
        hidden,
        keys.size("intermediate_size", "d_inner"),
        state=keys.size("state_size", "d_state"),
        rank=_time_rank(keys, "time_step_rank", hidden),
        kernel=keys.size("conv_kernel", "d_conv"),
        bias=keys.flag("use_bias", keys.flag("bias", False)),
        conv_bias=keys.flag("use_conv_bias", keys.flag("conv_bias", True)),
        norms=False,
        prefix="mixer",
    )
    layer = Layer((recurrent,), hidden, hidden)
    tied = keys.flag("tie_word_embeddings", True)
    return skeleton(keys, [layer] * layers(keys), tied=tied, base="backbone", embedding="embeddings")


def mamba2_model(keys: Keys) -> Skeleton:
    hidden, heads = keys.size("hidden_size"), keys.size("num_heads")
    recurrent = mamba2(
        hidden,
        heads=heads,
        inner=heads * keys.size("head_dim"),
        state=keys.size("ssm_state_size", "state_size"),
        groups=keys.size("n_groups"),
        kernel=keys.size("conv_kernel"),
        bias=keys.flag("use_bias", False),
        out_bias=keys.flag("use_bias", False),
        conv_bias=keys.flag("use_conv_bias", True),
        norm=True,
        prefix="mixer",
    )
    layer = Layer((recurrent,), hidden, hidden)
    tied = keys.flag("tie_word_embeddings", True)
    return skeleton(keys, [layer] * layers(keys), tied=tied, base="backbone", embedding="embeddings")


def falcon_h1(keys: Keys) -> Skeleton:
    """Attention and Mamba-2 side by side in every layer."""
    hidden, heads = keys.size("hidden_size"), keys.size("mamba_n_heads")
    bias = keys.flag("attention_bias", False)
    side = attention(hidden, *keys.heads(), keys.size("head_dim"), qkv_bias=bias, out_bias=bias)
    recurrent = mamba2(
        hidden,
        heads=heads,
        inner=keys.size("mamba_d_ssm"),
        state=keys.size("mamba_d_state"),
        groups=keys.size("mamba_n_groups", default=1),
        kernel=keys.size("mamba_d_conv"),
        bias=keys.flag("mamba_proj_bias", False),
        out_bias=keys.flag("projectors_bias", False),
        conv_bias=keys.flag("mamba_conv_bias", True),
        norm=keys.flag("mamba_rms_norm", False),
        prefix="mamba",
    )
    network = gated(hidden, keys.size("intermediate_size"), bias=keys.flag("mlp_bias", False), prefix="feed_forward")
    layer = Layer((recurrent, side, network), 2 * hidden, 2 * hidden)
    return skeleton(keys, [layer] * layers(keys), tied=keys.flag("tie_word_embeddings", True))


def granite_hybrid(keys: Keys) -> Skeleton:
    hidden = keys.size("hidden_size")
    heads, kv_heads = keys.heads()
    bias = keys.flag("attention_bias", False)
    number_of_layers = layers(keys)
    types = keys.words("layer_types", number_of_layers)
    if types is None:
        raise refused("layer_types is missing")
    full = attention(hidden, heads, kv_heads, hidden // heads, qkv_bias=bias, out_bias=bias)
    inner, count = keys.size("intermediate_size"), keys.whole("num_local_experts", default=0)
    if count:
        network: tuple[Part, ...] = (
            experts(
                hidden,
                inner,
                count,
                keys.size("num_experts_per_tok"),
                prefix="block_sparse_moe",
                router="router.layer",
            ),
            gated_fused(
                hidden,
                keys.size("shared_intermediate_size"),
                prefix="shared_mlp",
                names=("input_linear", "output_linear"),
            ),
        )
    else:
        network = (gated(hidden, inner, bias=keys.flag("mlp_bias", False)),)
    mixers = {"attention": full}
    if "mamba" in types:
        mixers["mamba"] = _granite_mamba(keys, hidden)
    if unknown := set(types) - set(mixers):
        raise refused(f"layer_types holds {sorted(unknown)[0][:40]!r}")
    stack = [Layer((mixers[kind], *network), 2 * hidden, 2 * hidden) for kind in types]
    return skeleton(keys, stack, tied=keys.flag("tie_word_embeddings", True))


def _granite_mamba(keys: Keys, hidden: int) -> Part:
    heads, bias = keys.size("mamba_n_heads"), keys.flag("mamba_proj_bias", False)
    return mamba2(
        hidden,
        heads=heads,
        inner=heads * keys.size("mamba_d_head"),
        state=keys.size("mamba_d_state"),
        groups=keys.size("mamba_n_groups"),
        kernel=keys.size("mamba_d_conv"),
        bias=bias,
        out_bias=bias,
        conv_bias=keys.flag("mamba_conv_bias", False),
        norm=True,
        prefix="mamba",
    )


def lfm2(keys: Keys) -> Skeleton:
    hidden = keys.size("hidden_size")
    heads, kv_heads = keys.heads()
    number_of_layers = layers(keys)
    attending = keys.whole_list("full_attn_idxs")
    if attending is None:
        types = keys.words("layer_types", number_of_layers)
        if types is None:
            raise refused("full_attn_idxs and layer_types are missing")
        attending = [number for number, kind in enumerate(types) if kind == "full_attention"]
    inner = keys.size("block_ff_dim", "intermediate_size")
    if keys.flag("block_auto_adjust_ff_dim", True):
        multiple = keys.size("block_multiple_of")
        inner = int(keys.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        inner = multiple * math.ceil(inner / multiple)
    head_dim = hidden // heads
    full = attention(hidden, heads, kv_heads, head_dim, norms=2 * head_dim, out="out_proj")
    convolution = short_convolution(
        hidden, keys.size("conv_L_cache"), bias=keys.flag("conv_bias", False), prefix="conv"
    )
    network = gated(keys.size("block_dim", "hidden_size"), inner, prefix="feed_forward", names=("w1", "w3", "w2"))
    stack = [
        Layer((full if number in attending else convolution, network), 2 * hidden, 2 * hidden)
        for number in range(number_of_layers)
    ]
    return skeleton(keys, stack, tied=True)


def nemotron_h(keys: Keys) -> Skeleton:
    """One branch a layer, as the pattern's letters say: M for Mamba-2, * for attention, - for a network, E experts."""
    hidden = keys.size("hidden_size")
    parts: dict[str, Part] = {}
    letters = _nemotron_letters(keys)
    for letter in set(letters):
        parts[letter] = _nemotron_part(keys, letter, hidden)
    stack = [Layer((parts[letter],), hidden, hidden) for letter in letters]
    return skeleton(keys, stack, tied=False, base="backbone", embedding="embeddings")


_NEMOTRON_TYPES = {
    "full_attention": "*",
    "linear_attention": "M",
    "moe": "E",
    "mlp": "-",
    "attention": "*",
    "mamba": "M",
    "conv": "M",
}


def _nemotron_letters(keys: Keys) -> str:
    pattern = keys.word("hybrid_override_pattern")
    if pattern is None:
        types = keys.words("layers_block_type", layers(keys)) or keys.words("layer_types", layers(keys)) or []
        pattern = "".join(_NEMOTRON_TYPES.get(kind, "?") for kind in types)
    if not pattern or set(pattern) - set("M*-E"):
        raise refused("hybrid_override_pattern names no layers, or unknown ones")
    return pattern


def _nemotron_part(keys: Keys, letter: str, hidden: int) -> Part:
    if letter == "*":
        heads, kv_heads = keys.heads()
        bias = keys.flag("attention_bias", False)
        head_dim = keys.size("head_dim", default=hidden // heads)
        return attention(hidden, heads, kv_heads, head_dim, qkv_bias=bias, out_bias=bias, prefix="mixer")
    if letter == "M":
        heads, bias = keys.size("mamba_num_heads"), keys.flag("mamba_proj_bias", False)
        return mamba2(
            hidden,
            heads=heads,
            inner=heads * keys.size("mamba_head_dim"),
            state=keys.size("ssm_state_size"),
            groups=keys.size("n_groups"),
            kernel=keys.size("conv_kernel"),
            bias=bias,
            out_bias=bias,
            conv_bias=keys.flag("use_conv_bias", True),
            norm=True,
            prefix="mixer",
        )
    bias, names = keys.flag("mlp_bias", False), ("up_proj", "down_proj")
    if letter == "-":
        return two_layer(
            hidden, keys.size("intermediate_size"), bias=bias, prefix="mixer", names=names, arrays=RELU_SQUARED
        )
    return _nemotron_experts(keys, hidden, bias)


def _nemotron_experts(keys: Keys, hidden: int, bias: bool) -> Part:
    count, inner = keys.size("n_routed_experts"), keys.size("moe_intermediate_size")
    active, latent = keys.size("num_experts_per_tok"), keys.whole("moe_latent_size", default=0)
    width = latent or hidden
    matrices = [
        Matrix("mixer.switch_mlp.fc1", width, inner, False, count, active),
        Matrix("mixer.switch_mlp.fc2", inner, width, False, count, active, source="inner"),
    ]
    if keys.whole("n_shared_experts", default=0):
        names = ("up_proj", "down_proj")
        shared = two_layer(
            hidden,
            keys.size("moe_shared_expert_intermediate_size"),
            bias=bias,
            prefix="mixer.shared_experts",
            names=names,
            arrays=RELU_SQUARED,
        )
        matrices += shared.matrices
    if latent:
        matrices.append(Matrix("mixer.fc1_latent_proj", hidden, latent, bias, source="residual"))
        matrices.append(Matrix("mixer.fc2_latent_proj", latent, hidden, bias, source="latent"))
    return Part(matrices=tuple(matrices), plain=count * (hidden + 1), held=active * (RELU_SQUARED * inner + 2 * width))


def _time_rank(keys: Keys, name: str, hidden: int) -> int:
    return math.ceil(hidden / 16) if keys.word(name) == "auto" else keys.size(name)
