"""The architecture of each `model_type` whose memory can be estimated, following mlx_lm/models/<model_type>.py; the
tests build every one with mlx-lm and compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.plan.memory.architecture import (
    GATED_GELU,
    RELU_SQUARED,
    SILU,
    Architecture,
    Attention,
    ConfigReader,
    Layer,
    Mamba2,
    Matrix,
    Sublayer,
    attention,
    cannot_estimate,
    experts,
    gated_delta,
    mamba,
    mamba2,
    mlp,
    shared_expert,
    short_convolution,
)  # fmt: skip

_NO_BIAS = Attention(qkv_bias=False, out_bias=False)
_EVEN_NO_BIAS = Attention("even", qkv_bias=False, out_bias=False)
_NEMOTRON_MAMBA2 = Mamba2(
    heads="mamba_num_heads", head_dim="mamba_head_dim", state=("ssm_state_size",), groups="n_groups",
    kernel="conv_kernel", conv_bias="use_conv_bias", prefix="mixer",
)  # fmt: skip


def _layer(hidden: int, *sublayers: Sublayer, norms: int = 2) -> Layer:
    """A layer with `norms` RMS norms of the hidden size."""
    return Layer(sublayers, norms * hidden, norms * hidden)


def _model(
    config: ConfigReader,
    layers: Sequence[Layer],
    *,
    tied: bool,
    embedding: str = "model.embed_tokens",
    last_norm: int | None = None,
) -> Architecture:
    """`last_norm`: parameters of the last norm, by default the hidden size."""
    hidden, vocabulary = config.hidden, config.get_size("vocab_size")
    sliding = _sliding_layers(config)
    windowed = {id(layer): _windowed(layer, config) for layer in layers} if sliding else {}
    return Architecture(
        layers=tuple(windowed[id(layer)] if number in sliding else layer for number, layer in enumerate(layers)),
        embedding=Matrix(embedding, hidden, vocabulary),
        head=None if tied else Matrix("lm_head", hidden, vocabulary),
        last_norm=hidden if last_norm is None else last_norm,
    )


def _sliding_layers(config: ConfigReader) -> set[int]:
    """The layers whose attention has a sliding window, by the forms in which mlx-lm reads them."""
    types, text = config.get_list("layer_types", str) or [], config.get_str("sliding_window_pattern")
    if text:
        return {number for number in range(config.layers) if text[number % len(text)] == "L"}
    every = 0 if types or text is not None else config.get_int("sliding_window_pattern", default=0)
    if every:
        return set(range(config.layers)) - set(range(every - 1, config.layers, every))
    return {number for number, kind in enumerate(types) if kind == "sliding_attention"}


def _windowed(layer: Layer, config: ConfigReader) -> Layer:
    window = config.get_int("sliding_window", default=0)
    return replace(layer, sublayers=tuple(replace(sublayer, causal_tokens=window) for sublayer in layer.sublayers))


def _tied(config: ConfigReader, default: bool = True) -> bool:
    return config.get_flag("tie_word_embeddings", default)


@dataclass(frozen=True)
class _Experts:
    """The config's keys of a mixture of experts, and the names of its matrices."""

    inner: str = "moe_intermediate_size"
    count: str = "num_experts"
    shared: str | None = None
    """The inner size of the shared expert."""
    steps: bool = False
    """mlp_only_layers and decoder_sparse_step say which layers have experts."""
    prefix: str = "mlp"
    router: str = "gate"


@dataclass(frozen=True)
class _Llama:
    """How a model type differs from Llama."""

    attention: Attention
    norms: int = 2
    """Norms of the hidden size in each layer."""
    tied: bool | None = None
    """None: use tie_word_embeddings of the config."""
    tied_by_default: bool = True
    arrays: int = SILU
    """Arrays of the MLP's activation."""
    experts: _Experts | None = None

    def architecture(self, config: ConfigReader) -> Architecture:
        mixer, hidden, inner = attention(config, self.attention), config.hidden, config.get_size("intermediate_size")
        mlp_bias = self.experts is None and config.get_flag("mlp_bias", False)
        dense = mlp(hidden, inner, bias=mlp_bias, arrays=self.arrays)
        if self.attention.fused:
            dense = mlp(hidden, inner, ("gate_up_proj", "down_proj"), fused=True)
        layers = [_layer(hidden, mixer, dense, norms=self.norms)] * config.layers
        if self.experts is not None:
            with_experts = _layer(hidden, mixer, *self._mixture(config, self.experts), norms=self.norms)
            sparse = _sparse_layers(config) if self.experts.steps else range(len(layers))
            layers = [with_experts if number in sparse else layer for number, layer in enumerate(layers)]
        tied = _tied(config, self.tied_by_default) if self.tied is None else self.tied
        return _model(config, layers, tied=tied)

    def _mixture(self, config: ConfigReader, keys: _Experts) -> list[Sublayer]:
        sizes = (config.get_size(name) for name in (keys.inner, keys.count, "num_experts_per_tok"))
        mixture = [experts(config.hidden, *sizes, prefix=keys.prefix, router=keys.router)]
        if keys.shared is not None:
            mixture.append(shared_expert(config.hidden, config.get_size(keys.shared)))
        return mixture


def _sparse_layers(config: ConfigReader) -> set[int]:
    """The layers that have experts, as Qwen's keys say."""
    step, only_dense = config.get_size("decoder_sparse_step", default=1), config.get_list("mlp_only_layers", int)
    return set(range(step - 1, config.layers, step)) - set(only_dense or ())


def _phi(config: ConfigReader) -> Architecture:
    config = config.with_defaults(hidden_size=2560, num_attention_heads=32)
    hidden = config.hidden
    mixer = attention(config, Attention("even", qkv_bias=True, out_bias=True, out="dense"))
    network = mlp(hidden, config.get_size("intermediate_size"), ("fc1", "fc2"), bias=True)
    layer = Layer((mixer, network), 2 * hidden, hidden)
    model = _model(config, [layer] * config.layers, tied=True, last_norm=2 * hidden)
    return replace(model, head=Matrix("lm_head", hidden, config.get_size("vocab_size"), bias=True))


def _starcoder2(config: ConfigReader) -> Architecture:
    hidden = config.hidden
    mixer = attention(config, Attention("even", qkv_bias=True, out_bias=True))
    network = mlp(hidden, config.get_size("intermediate_size"), ("c_fc", "c_proj"), bias=True)
    layer = Layer((mixer, network), 4 * hidden, 2 * hidden)
    return _model(config, [layer] * config.layers, tied=_tied(config), last_norm=2 * hidden)


def _gemma3(config: ConfigReader) -> Architecture:
    """gemma3 has the keys of its text model in text_config, and relies on mlx-lm's defaults."""
    vocabulary = config.get_size("vocab_size", default=262_208)
    if not config.get_table("text_config"):
        raise cannot_estimate("text_config is missing")
    text = ConfigReader({**config.get_table("text_config"), "vocab_size": vocabulary})
    return _gemma3_text(text.with_defaults(num_attention_heads=8, num_key_value_heads=4))


def _gemma3_text(config: ConfigReader) -> Architecture:
    config = config.with_defaults(
        hidden_size=1152, head_dim=256, num_attention_heads=4, num_key_value_heads=1, intermediate_size=6912,
        num_hidden_layers=26, vocab_size=262_144, sliding_window=512, sliding_window_pattern=6,
    )  # fmt: skip
    mixer = attention(config, Attention(query_norms="head", qkv_bias=False, out_bias=False))
    network = mlp(config.hidden, config.get_size("intermediate_size"), arrays=GATED_GELU)
    # If the file has no head, mlx-lm creates one from the weights of the embedding.
    return _model(config, [_layer(config.hidden, mixer, network, norms=4)] * config.layers, tied=True)


def _qwen3_next(config: ConfigReader) -> Architecture:
    hidden = config.hidden
    full = attention(config, Attention("required", query_norms="head", gated=True))
    linear = gated_delta(config)
    count = config.get_int("num_experts")
    inner, active = config.get_size("moe_intermediate_size"), config.get_size("num_experts_per_tok")
    shared = shared_expert(hidden, config.get_size("shared_expert_intermediate_size"))
    mixture = (experts(hidden, inner, count, active), shared)
    dense = mlp(hidden, config.get_size("intermediate_size"))
    interval = config.get_size("full_attention_interval", default=4)
    sparse = _sparse_layers(config) if count else ()
    layers = [
        _layer(hidden, full if (number + 1) % interval == 0 else linear, *(mixture if number in sparse else (dense,)))
        for number in range(config.layers)
    ]
    return _model(config, layers, tied=_tied(config, default=False))


def _jamba(config: ConfigReader) -> Architecture:
    hidden = config.hidden
    mixers = {
        "attention": attention(config, _EVEN_NO_BIAS),
        "mamba": mamba(
            hidden,
            config.get_size("mamba_expand") * hidden,
            state=config.get_size("mamba_d_state"),
            rank=_time_rank(config, "mamba_dt_rank"),
            kernel=config.get_size("mamba_d_conv"),
            bias=config.get_flag("mamba_proj_bias", False),
            conv_bias=config.get_flag("mamba_conv_bias", True),
            norms=True,
            prefix="mamba",
        ),
    }
    inner, count = config.get_size("intermediate_size"), config.get_size("num_experts", default=1)
    active = config.get_size("num_experts_per_tok", default=1)
    dense = mlp(hidden, inner, prefix="feed_forward")
    sparse = experts(hidden, inner, count, active, prefix="feed_forward", router="router")
    types = config.get_layer_types("layers_block_type")
    if types is None:
        offset, period = config.get_int("attn_layer_offset"), config.get_size("attn_layer_period")
        types = ["attention" if number % period == offset else "mamba" for number in range(config.layers)]
    offset, period = config.get_int("expert_layer_offset"), config.get_size("expert_layer_period")
    networks = [sparse if count > 1 and (number + offset) % period == 0 else dense for number in range(len(types))]
    mixed = [mixers["attention" if kind == "attention" else "mamba"] for kind in types]
    layers = [_layer(hidden, mixer, network) for mixer, network in zip(mixed, networks, strict=True)]
    return _model(config, layers, tied=_tied(config))


def _mamba(config: ConfigReader) -> Architecture:
    """mamba and falcon_mamba; older files use other names for the sizes."""
    mixer = mamba(
        config.hidden,
        config.get_size("intermediate_size", "d_inner"),
        state=config.get_size("state_size", "d_state"),
        rank=_time_rank(config, "time_step_rank"),
        kernel=config.get_size("conv_kernel", "d_conv"),
        bias=config.get_flag("use_bias", config.get_flag("bias", False)),
        conv_bias=config.get_flag("use_conv_bias", config.get_flag("conv_bias", True)),
        norms=False,
        prefix="mixer",
    )
    return _recurrent(config, mixer)


def _time_rank(config: ConfigReader, name: str) -> int:
    return math.ceil(config.hidden / 16) if config.get_str(name) == "auto" else config.get_size(name)


def _mamba2(config: ConfigReader) -> Architecture:
    keys = replace(_NEMOTRON_MAMBA2, heads="num_heads", head_dim="head_dim", bias="use_bias")
    return _recurrent(config, mamba2(config, replace(keys, state=("ssm_state_size", "state_size"))))


def _recurrent(config: ConfigReader, mixer: Sublayer) -> Architecture:
    layers = [_layer(config.hidden, mixer, norms=1)] * config.layers
    return _model(config, layers, tied=_tied(config), embedding="backbone.embeddings")


def _falcon_h1(config: ConfigReader) -> Architecture:
    """Attention and Mamba-2 side by side in every layer."""
    hidden = config.hidden
    side = attention(config, Attention("required"))
    keys = Mamba2(inner="mamba_d_ssm", default_groups=1, out_bias="projectors_bias", norm="mamba_rms_norm")
    inner, bias = config.get_size("intermediate_size"), config.get_flag("mlp_bias", False)
    layer = _layer(hidden, mamba2(config, keys), side, mlp(hidden, inner, bias=bias, prefix="feed_forward"))
    return _model(config, [layer] * config.layers, tied=_tied(config))


def _granite_hybrid(config: ConfigReader) -> Architecture:
    hidden = config.hidden
    types = config.get_layer_types("layer_types")
    if types is None:
        raise cannot_estimate("layer_types is missing")
    inner, count = config.get_size("intermediate_size"), config.get_int("num_local_experts", default=0)
    network: tuple[Sublayer, ...] = (mlp(hidden, inner, bias=config.get_flag("mlp_bias", False)),)
    if count:
        active, shared = config.get_size("num_experts_per_tok"), config.get_size("shared_intermediate_size")
        network = (
            experts(hidden, inner, count, active, prefix="block_sparse_moe", router="router.layer"),
            mlp(hidden, shared, ("input_linear", "output_linear"), prefix="shared_mlp", fused=True),
        )
    mixers = {"attention": attention(config, Attention("even"))}
    if "mamba" in types:
        mixers["mamba"] = mamba2(config, Mamba2(default_conv_bias=False))
    if unknown := set(types) - set(mixers):
        raise cannot_estimate(f"layer_types holds {sorted(unknown)[0][:40]!r}")
    return _model(config, [_layer(hidden, mixers[kind], *network) for kind in types], tied=_tied(config))


def _lfm2(config: ConfigReader) -> Architecture:
    hidden = config.hidden
    attending = config.get_list("full_attn_idxs", int)
    if attending is None:
        types = config.get_layer_types("layer_types")
        if types is None:
            raise cannot_estimate("full_attn_idxs and layer_types are missing")
        attending = [number for number, kind in enumerate(types) if kind == "full_attention"]
    inner = config.get_size("block_ff_dim", "intermediate_size")
    if config.get_flag("block_auto_adjust_ff_dim", True):
        multiple = config.get_size("block_multiple_of")
        inner = int(config.get_float("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        inner = multiple * math.ceil(inner / multiple)
    full = attention(config, replace(_EVEN_NO_BIAS, query_norms="head", out="out_proj"))
    convolution = short_convolution(config)
    network = mlp(config.get_size("block_dim", "hidden_size"), inner, ("w1", "w3", "w2"), prefix="feed_forward")
    mixers = [full if number in attending else convolution for number in range(config.layers)]
    return _model(config, [_layer(hidden, mixer, network) for mixer in mixers], tied=True)


_NEMOTRON_TYPES = {
    "full_attention": "*", "linear_attention": "M", "moe": "E", "mlp": "-", "attention": "*", "mamba": "M", "conv": "M",
}  # fmt: skip


def _nemotron_h(config: ConfigReader) -> Architecture:
    """One sublayer per layer, by the pattern's letters: M for Mamba-2, * for attention, - for an MLP, E for experts."""
    letters = config.get_str("hybrid_override_pattern")
    if letters is None:
        types = config.get_layer_types("layers_block_type") or config.get_layer_types("layer_types") or []
        letters = "".join(_NEMOTRON_TYPES.get(kind, "?") for kind in types)
    if not letters or set(letters) - set("M*-E"):
        raise cannot_estimate("hybrid_override_pattern names no layers, or unknown ones")
    layers = {letter: _layer(config.hidden, _nemotron_sublayer(config, letter), norms=1) for letter in set(letters)}
    return _model(config, [layers[letter] for letter in letters], tied=False, embedding="backbone.embeddings")


def _nemotron_sublayer(config: ConfigReader, letter: str) -> Sublayer:
    if letter == "*":
        return attention(config, Attention(prefix="mixer"))
    if letter == "M":
        return mamba2(config, _NEMOTRON_MAMBA2)
    if letter == "-":
        return _nemotron_mlp(config, "intermediate_size", "mixer")
    return _nemotron_experts(config)


def _nemotron_mlp(config: ConfigReader, inner: str, prefix: str) -> Sublayer:
    names, bias = ("up_proj", "down_proj"), config.get_flag("mlp_bias", False)
    return mlp(config.hidden, config.get_size(inner), names, bias=bias, prefix=prefix, arrays=RELU_SQUARED)


def _nemotron_experts(config: ConfigReader) -> Sublayer:
    hidden, bias = config.hidden, config.get_flag("mlp_bias", False)
    count, inner = config.get_size("n_routed_experts"), config.get_size("moe_intermediate_size")
    active, latent = config.get_size("num_experts_per_tok"), config.get_int("moe_latent_size", default=0)
    width = latent or hidden
    matrices = [
        Matrix("mixer.switch_mlp.fc1", width, inner, copies=count, active=active),
        Matrix("mixer.switch_mlp.fc2", inner, width, copies=count, active=active, source="inner"),
    ]
    if config.get_int("n_shared_experts", default=0):
        matrices += _nemotron_mlp(config, "moe_shared_expert_intermediate_size", "mixer.shared_experts").matrices
    if latent:
        matrices.append(Matrix("mixer.fc1_latent_proj", hidden, latent, bias, source="residual"))
        matrices.append(Matrix("mixer.fc2_latent_proj", latent, hidden, bias, source="latent"))
    return Sublayer(
        matrices=tuple(matrices),
        unquantized=count * (hidden + 1),
        kept=active * (RELU_SQUARED * inner + 2 * width),
        by_token=True,
    )


_LLAMA = _Llama(Attention()).architecture
_QWEN3 = _Llama(Attention(query_norms="head", qkv_bias=False, out_bias=False))
_QWEN2 = _Llama(Attention("even", qkv_bias=True, out_bias=False))
_GEMMA = _Llama(_NO_BIAS, arrays=GATED_GELU, tied=True)
_OLMO = _Llama(Attention(query_norms="all"))
_BLOCK_SPARSE = _Experts("intermediate_size", "num_local_experts", prefix="block_sparse_moe")

MODEL_TYPES: dict[str, Callable[[ConfigReader], Architecture]] = {
    **dict.fromkeys(("llama", "mistral", "iquestcoder", "xverse", "smollm3", "granite"), _LLAMA),
    "ministral3": _Llama(_NO_BIAS).architecture,
    "olmo2": _OLMO.architecture,
    "qwen2": _QWEN2.architecture,
    **dict.fromkeys(("qwen3", "exaone4"), _QWEN3.architecture),
    "gemma": _GEMMA.architecture,
    "gemma2": replace(_GEMMA, attention=replace(_NO_BIAS, capped=True), norms=4).architecture,
    "gemma3": _gemma3, "gemma3_text": _gemma3_text, "phi": _phi, "starcoder2": _starcoder2,
    "phi3": _Llama(replace(_EVEN_NO_BIAS, fused=True), tied_by_default=False).architecture,
    "mixtral": _Llama(_EVEN_NO_BIAS, tied_by_default=False, experts=_BLOCK_SPARSE).architecture,
    "qwen2_moe": replace(_QWEN2, tied=False, experts=_Experts(shared="shared_expert_intermediate_size")).architecture,
    "qwen3_moe": replace(_QWEN3, tied_by_default=False, experts=_Experts(steps=True)).architecture,
    "olmoe": replace(_OLMO, experts=_Experts("intermediate_size")).architecture,
    "granitemoe": _Llama(Attention("even"), experts=replace(_BLOCK_SPARSE, router="router.layer")).architecture,
    "qwen3_next": _qwen3_next, "jamba": _jamba, "mamba": _mamba, "falcon_mamba": _mamba, "mamba2": _mamba2,
    "falcon_h1": _falcon_h1, "granitemoehybrid": _granite_hybrid, "lfm2": _lfm2, "nemotron_h": _nemotron_h,
}  # fmt: skip
