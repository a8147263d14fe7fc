"""Models with different kinds of layers: attention, state-space models, linear attention and convolutions."""

from __future__ import annotations

import math

from engine.plan.memory.architecture import (
    Architecture,
    ConfigReader,
    Layer,
    Matrix,
    Sublayer,
    architecture,
    cannot_estimate,
    layer_count,
)
from engine.plan.memory.sublayers import (
    RELU_SQUARED,
    attention,
    experts,
    fused_gated_mlp,
    gated_delta,
    gated_mlp,
    mamba,
    mamba2,
    shared_expert,
    short_convolution,
    two_layer_mlp,
)


def qwen3_next(keys: ConfigReader) -> Architecture:
    hidden = keys.get_size("hidden_size")
    heads, kv_heads = keys.heads()
    head_dim = keys.get_size("head_dim")
    bias = keys.get_flag("attention_bias", False)
    full = attention(hidden, heads, kv_heads, head_dim, qkv_bias=bias, out_bias=bias, norms=2 * head_dim, gated=True)
    linear = gated_delta(
        hidden,
        key_heads=keys.get_size("linear_num_key_heads"),
        key_dim=keys.get_size("linear_key_head_dim"),
        value_heads=keys.get_size("linear_num_value_heads"),
        value_dim=keys.get_size("linear_value_head_dim"),
        kernel=keys.get_size("linear_conv_kernel_dim"),
        prefix="linear_attn",
    )
    sparse = (
        experts(
            hidden,
            keys.get_size("moe_intermediate_size"),
            keys.get_int("num_experts"),
            keys.get_size("num_experts_per_tok"),
        ),
        shared_expert(hidden, keys.get_size("shared_expert_intermediate_size")),
    )
    dense = (gated_mlp(hidden, keys.get_size("intermediate_size")),)
    interval, step = (
        keys.get_size("full_attention_interval", default=4),
        keys.get_size("decoder_sparse_step", default=1),
    )
    only_dense = set(keys.get_ints("mlp_only_layers") or ())
    stack = []
    for number in range(layer_count(keys)):
        mixer = full if (number + 1) % interval == 0 else linear
        is_sparse = number not in only_dense and keys.get_int("num_experts") > 0 and (number + 1) % step == 0
        stack.append(Layer((mixer, *(sparse if is_sparse else dense)), 2 * hidden, 2 * hidden))
    return architecture(keys, stack, tied=keys.get_flag("tie_word_embeddings", False))


def jamba(keys: ConfigReader) -> Architecture:
    hidden = keys.get_size("hidden_size")
    heads, kv_heads = keys.heads()
    full = attention(hidden, heads, kv_heads, hidden // heads)
    recurrent = mamba(
        hidden,
        keys.get_size("mamba_expand") * hidden,
        state=keys.get_size("mamba_d_state"),
        rank=_time_rank(keys, "mamba_dt_rank", hidden),
        kernel=keys.get_size("mamba_d_conv"),
        bias=keys.get_flag("mamba_proj_bias", False),
        conv_bias=keys.get_flag("mamba_conv_bias", True),
        norms=True,
        prefix="mamba",
    )
    inner, count = keys.get_size("intermediate_size"), keys.get_size("num_experts", default=1)
    dense = gated_mlp(hidden, inner, prefix="feed_forward")
    sparse = experts(
        hidden, inner, count, keys.get_size("num_experts_per_tok", default=1), prefix="feed_forward", router="router"
    )
    number_of_layers = layer_count(keys)
    types = keys.get_strs("layers_block_type", number_of_layers)
    if types is None:
        offset, period = keys.get_int("attn_layer_offset"), keys.get_size("attn_layer_period")
        types = ["attention" if number % period == offset else "mamba" for number in range(number_of_layers)]
    offset, period = keys.get_int("expert_layer_offset"), keys.get_size("expert_layer_period")
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
    return architecture(keys, stack, tied=keys.get_flag("tie_word_embeddings", True))


def mamba_model(keys: ConfigReader) -> Architecture:
    """mamba and falcon_mamba; older files use other names for the sizes."""
    hidden = keys.get_size("hidden_size", "d_model")
    recurrent = mamba(
        hidden,
        keys.get_size("intermediate_size", "d_inner"),
        state=keys.get_size("state_size", "d_state"),
        rank=_time_rank(keys, "time_step_rank", hidden),
        kernel=keys.get_size("conv_kernel", "d_conv"),
        bias=keys.get_flag("use_bias", keys.get_flag("bias", False)),
        conv_bias=keys.get_flag("use_conv_bias", keys.get_flag("conv_bias", True)),
        norms=False,
        prefix="mixer",
    )
    layer = Layer((recurrent,), hidden, hidden)
    tied = keys.get_flag("tie_word_embeddings", True)
    return architecture(keys, [layer] * layer_count(keys), tied=tied, base="backbone", embedding="embeddings")


def mamba2_model(keys: ConfigReader) -> Architecture:
    hidden, heads = keys.get_size("hidden_size"), keys.get_size("num_heads")
    recurrent = mamba2(
        hidden,
        heads=heads,
        inner=heads * keys.get_size("head_dim"),
        state=keys.get_size("ssm_state_size", "state_size"),
        groups=keys.get_size("n_groups"),
        kernel=keys.get_size("conv_kernel"),
        bias=keys.get_flag("use_bias", False),
        out_bias=keys.get_flag("use_bias", False),
        conv_bias=keys.get_flag("use_conv_bias", True),
        norm=True,
        prefix="mixer",
    )
    layer = Layer((recurrent,), hidden, hidden)
    tied = keys.get_flag("tie_word_embeddings", True)
    return architecture(keys, [layer] * layer_count(keys), tied=tied, base="backbone", embedding="embeddings")


def falcon_h1(keys: ConfigReader) -> Architecture:
    """Attention and Mamba-2 side by side in every layer."""
    hidden, heads = keys.get_size("hidden_size"), keys.get_size("mamba_n_heads")
    bias = keys.get_flag("attention_bias", False)
    side = attention(hidden, *keys.heads(), keys.get_size("head_dim"), qkv_bias=bias, out_bias=bias)
    recurrent = mamba2(
        hidden,
        heads=heads,
        inner=keys.get_size("mamba_d_ssm"),
        state=keys.get_size("mamba_d_state"),
        groups=keys.get_size("mamba_n_groups", default=1),
        kernel=keys.get_size("mamba_d_conv"),
        bias=keys.get_flag("mamba_proj_bias", False),
        out_bias=keys.get_flag("projectors_bias", False),
        conv_bias=keys.get_flag("mamba_conv_bias", True),
        norm=keys.get_flag("mamba_rms_norm", False),
        prefix="mamba",
    )
    network = gated_mlp(
        hidden, keys.get_size("intermediate_size"), bias=keys.get_flag("mlp_bias", False), prefix="feed_forward"
    )
    layer = Layer((recurrent, side, network), 2 * hidden, 2 * hidden)
    return architecture(keys, [layer] * layer_count(keys), tied=keys.get_flag("tie_word_embeddings", True))


def granite_hybrid(keys: ConfigReader) -> Architecture:
    hidden = keys.get_size("hidden_size")
    heads, kv_heads = keys.heads()
    bias = keys.get_flag("attention_bias", False)
    number_of_layers = layer_count(keys)
    types = keys.get_strs("layer_types", number_of_layers)
    if types is None:
        raise cannot_estimate("layer_types is missing")
    full = attention(hidden, heads, kv_heads, hidden // heads, qkv_bias=bias, out_bias=bias)
    inner, count = keys.get_size("intermediate_size"), keys.get_int("num_local_experts", default=0)
    if count:
        network: tuple[Sublayer, ...] = (
            experts(
                hidden,
                inner,
                count,
                keys.get_size("num_experts_per_tok"),
                prefix="block_sparse_moe",
                router="router.layer",
            ),
            fused_gated_mlp(
                hidden,
                keys.get_size("shared_intermediate_size"),
                prefix="shared_mlp",
                names=("input_linear", "output_linear"),
            ),
        )
    else:
        network = (gated_mlp(hidden, inner, bias=keys.get_flag("mlp_bias", False)),)
    mixers = {"attention": full}
    if "mamba" in types:
        mixers["mamba"] = _granite_mamba(keys, hidden)
    if unknown := set(types) - set(mixers):
        raise cannot_estimate(f"layer_types holds {sorted(unknown)[0][:40]!r}")
    stack = [Layer((mixers[kind], *network), 2 * hidden, 2 * hidden) for kind in types]
    return architecture(keys, stack, tied=keys.get_flag("tie_word_embeddings", True))


def _granite_mamba(keys: ConfigReader, hidden: int) -> Sublayer:
    heads, bias = keys.get_size("mamba_n_heads"), keys.get_flag("mamba_proj_bias", False)
    return mamba2(
        hidden,
        heads=heads,
        inner=heads * keys.get_size("mamba_d_head"),
        state=keys.get_size("mamba_d_state"),
        groups=keys.get_size("mamba_n_groups"),
        kernel=keys.get_size("mamba_d_conv"),
        bias=bias,
        out_bias=bias,
        conv_bias=keys.get_flag("mamba_conv_bias", False),
        norm=True,
        prefix="mamba",
    )


def lfm2(keys: ConfigReader) -> Architecture:
    hidden = keys.get_size("hidden_size")
    heads, kv_heads = keys.heads()
    number_of_layers = layer_count(keys)
    attending = keys.get_ints("full_attn_idxs")
    if attending is None:
        types = keys.get_strs("layer_types", number_of_layers)
        if types is None:
            raise cannot_estimate("full_attn_idxs and layer_types are missing")
        attending = [number for number, kind in enumerate(types) if kind == "full_attention"]
    inner = keys.get_size("block_ff_dim", "intermediate_size")
    if keys.get_flag("block_auto_adjust_ff_dim", True):
        multiple = keys.get_size("block_multiple_of")
        inner = int(keys.get_float("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        inner = multiple * math.ceil(inner / multiple)
    head_dim = hidden // heads
    full = attention(hidden, heads, kv_heads, head_dim, norms=2 * head_dim, out="out_proj")
    convolution = short_convolution(
        hidden, keys.get_size("conv_L_cache"), bias=keys.get_flag("conv_bias", False), prefix="conv"
    )
    network = gated_mlp(
        keys.get_size("block_dim", "hidden_size"), inner, prefix="feed_forward", names=("w1", "w3", "w2")
    )
    stack = [
        Layer((full if number in attending else convolution, network), 2 * hidden, 2 * hidden)
        for number in range(number_of_layers)
    ]
    return architecture(keys, stack, tied=True)


def nemotron_h(keys: ConfigReader) -> Architecture:
    """One sublayer per layer, by the letters of the pattern: M for Mamba-2, * for attention, - for an MLP, E for
    experts."""
    hidden = keys.get_size("hidden_size")
    letters = _nemotron_letters(keys)
    sublayers = {letter: _nemotron_sublayer(keys, letter, hidden) for letter in set(letters)}
    stack = [Layer((sublayers[letter],), hidden, hidden) for letter in letters]
    return architecture(keys, stack, tied=False, base="backbone", embedding="embeddings")


_NEMOTRON_TYPES = {
    "full_attention": "*",
    "linear_attention": "M",
    "moe": "E",
    "mlp": "-",
    "attention": "*",
    "mamba": "M",
    "conv": "M",
}


def _nemotron_letters(keys: ConfigReader) -> str:
    pattern = keys.get_str("hybrid_override_pattern")
    if pattern is None:
        types = (
            keys.get_strs("layers_block_type", layer_count(keys))
            or keys.get_strs("layer_types", layer_count(keys))
            or []
        )
        pattern = "".join(_NEMOTRON_TYPES.get(kind, "?") for kind in types)
    if not pattern or set(pattern) - set("M*-E"):
        raise cannot_estimate("hybrid_override_pattern names no layers, or unknown ones")
    return pattern


def _nemotron_sublayer(keys: ConfigReader, letter: str, hidden: int) -> Sublayer:
    if letter == "*":
        heads, kv_heads = keys.heads()
        bias = keys.get_flag("attention_bias", False)
        head_dim = keys.get_size("head_dim", default=hidden // heads)
        return attention(hidden, heads, kv_heads, head_dim, qkv_bias=bias, out_bias=bias, prefix="mixer")
    if letter == "M":
        heads, bias = keys.get_size("mamba_num_heads"), keys.get_flag("mamba_proj_bias", False)
        return mamba2(
            hidden,
            heads=heads,
            inner=heads * keys.get_size("mamba_head_dim"),
            state=keys.get_size("ssm_state_size"),
            groups=keys.get_size("n_groups"),
            kernel=keys.get_size("conv_kernel"),
            bias=bias,
            out_bias=bias,
            conv_bias=keys.get_flag("use_conv_bias", True),
            norm=True,
            prefix="mixer",
        )
    bias, names = keys.get_flag("mlp_bias", False), ("up_proj", "down_proj")
    if letter == "-":
        return two_layer_mlp(
            hidden, keys.get_size("intermediate_size"), bias=bias, prefix="mixer", names=names, arrays=RELU_SQUARED
        )
    return _nemotron_experts(keys, hidden, bias)


def _nemotron_experts(keys: ConfigReader, hidden: int, bias: bool) -> Sublayer:
    count, inner = keys.get_size("n_routed_experts"), keys.get_size("moe_intermediate_size")
    active, latent = keys.get_size("num_experts_per_tok"), keys.get_int("moe_latent_size", default=0)
    width = latent or hidden
    matrices = [
        Matrix("mixer.switch_mlp.fc1", width, inner, False, count, active),
        Matrix("mixer.switch_mlp.fc2", inner, width, False, count, active, source="inner"),
    ]
    if keys.get_int("n_shared_experts", default=0):
        names = ("up_proj", "down_proj")
        shared = two_layer_mlp(
            hidden,
            keys.get_size("moe_shared_expert_intermediate_size"),
            bias=bias,
            prefix="mixer.shared_experts",
            names=names,
            arrays=RELU_SQUARED,
        )
        matrices += shared.matrices
    if latent:
        matrices.append(Matrix("mixer.fc1_latent_proj", hidden, latent, bias, source="residual"))
        matrices.append(Matrix("mixer.fc2_latent_proj", latent, hidden, bias, source="latent"))
    return Sublayer(
        matrices=tuple(matrices), unquantized=count * (hidden + 1), kept=active * (RELU_SQUARED * inner + 2 * width)
    )


def _time_rank(keys: ConfigReader, name: str, hidden: int) -> int:
    return math.ceil(hidden / 16) if keys.get_str(name) == "auto" else keys.get_size(name)
