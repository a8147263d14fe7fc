"""Sublayers of a model's layers (attention, feed-forward networks, mixtures of experts, state-space models, short
convolutions): their matrices, and what they keep for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.plan.memory.architecture import ConfigReader, Matrix, Sublayer


@dataclass(frozen=True)
class Attention:
    """How the grouped-query attention of a model type differs from Llama's."""

    head_dim: str = "own"
    """ "own": head_dim of the config, by default an equal part of the hidden size; "required": head_dim of the config;
    "even": always an equal part."""
    query_norms: str = ""
    """Norms on queries and keys. "head": one per head dimension, "all": over all heads, "": none."""
    qkv_bias: bool | None = None
    """None: use attention_bias of the config."""
    out_bias: bool | None = None
    fused: bool = False
    """One "qkv_proj" matrix."""
    gated: bool = False
    """The query projection also produces a gate for the output (Qwen3-Next)."""
    capped: bool = False
    """Soft-capped scores (Gemma 2)."""
    prefix: str = "self_attn"
    out: str = "o_proj"


def attention(config: ConfigReader, kind: Attention) -> Sublayer:
    """Without a fused kernel, which training on the CPU does not have, the backward pass needs the scaled queries, the
    keys, the values, and the softmax of every pair of tokens."""
    hidden, heads = config.hidden, config.get_size("num_attention_heads")
    kv_heads = config.get_size("num_key_value_heads", default=heads)
    head_dim = hidden // heads
    if kind.head_dim != "even":
        head_dim = config.get_size("head_dim", default=None if kind.head_dim == "required" else head_dim)
    bias = config.get_flag("attention_bias", False)
    qkv_bias, out_bias = (bias if explicit is None else explicit for explicit in (kind.qkv_bias, kind.out_bias))
    queries, keys = heads * head_dim, kv_heads * head_dim
    widths = {"qkv_proj": queries + 2 * keys}
    if not kind.fused:
        widths = {"q_proj": queries * (2 if kind.gated else 1), "k_proj": keys, "v_proj": keys}
    return Sublayer(
        matrices=(
            *(Matrix(f"{kind.prefix}.{name}", hidden, width, qkv_bias) for name, width in widths.items()),
            Matrix(f"{kind.prefix}.{kind.out}", queries, hidden, out_bias, source="out"),
        ),
        unquantized={"head": 2 * head_dim, "all": queries + keys, "": 0}[kind.query_norms],
        normed=queries + keys if kind.query_norms else 0,
        kept=queries + 2 * keys + (2 * queries if kind.gated else 0),
        scores=heads * (2 if kind.capped else 1),
        head_dim=None if kind.capped else head_dim,
    )


_GATED = ("gate_proj", "up_proj", "down_proj")
SILU = 4
"""Arrays of the inner size: gate, sigmoid(gate), their product, and up."""
GELU = 5
"""Arrays of the tanh approximation: the input, half of it, its cubic term, the tanh, and 1 + tanh."""
GATED_GELU = 6
"""GELU, and up."""
RELU_SQUARED = 2
"""Arrays: the input and its positive part."""


def mlp(
    hidden: int,
    inner: int,
    names: Sequence[str] = _GATED,
    *,
    bias: bool = False,
    prefix: str = "mlp",
    arrays: int = 0,
    fused: bool = False,
) -> Sublayer:
    """down(activation(gate(x)) · up(x)), as in Llama; with two `names` and `fused` the same with gate and up in one
    projection, as in Phi-3, else down(activation(up(x))), as in Phi. `arrays` of the inner size are kept for the
    backward pass, by default those of the gated SiLU or of GELU."""
    *inward, down = names
    return Sublayer(
        matrices=(
            *(Matrix(f"{prefix}.{name}", hidden, inner * (2 if fused else 1), bias) for name in inward),
            Matrix(f"{prefix}.{down}", inner, hidden, bias, source="inner"),
        ),
        kept=(arrays or (SILU if fused or len(inward) == 2 else GELU)) * inner,
    )


def experts(hidden: int, inner: int, count: int, active: int, *, prefix: str = "mlp", router: str = "gate") -> Sublayer:
    """`count` gated MLPs, of which a router picks `active` for each token. Tokens are copied for each expert; the
    results are kept both in expert order and in token order, for the router's gradient."""
    active = min(active, count)
    gate, up, down = (f"{prefix}.switch_mlp.{name}" for name in _GATED)
    return Sublayer(
        matrices=(
            Matrix(f"{prefix}.{router}", hidden, count, source="router"),
            Matrix(gate, hidden, inner, copies=count, active=active),
            Matrix(up, hidden, inner, copies=count, active=active),
            Matrix(down, inner, hidden, copies=count, active=active, source="inner"),
        ),
        kept=active * (SILU * inner + 2 * hidden) + count,
        # Measured: by their gradients, its copies are no longer needed.
        backward=0.7,
    )


def shared_expert(hidden: int, inner: int) -> Sublayer:
    """A gated MLP that every token passes through in addition to its experts, weighted by a gate (Qwen2-MoE)."""
    network = mlp(hidden, inner, prefix="mlp.shared_expert")
    gate = Matrix("mlp.shared_expert_gate", hidden, 1)
    return Sublayer(matrices=(*network.matrices, gate), kept=network.kept + hidden)


def mamba(
    hidden: int,
    inner: int,
    *,
    state: int,
    rank: int,
    kernel: int,
    bias: bool,
    conv_bias: bool,
    norms: bool,
    prefix: str,
) -> Sublayer:
    """Mamba's selective scan. mlx-lm runs it token by token and keeps each state, before and after its input."""
    return Sublayer(
        matrices=(
            Matrix(f"{prefix}.in_proj", hidden, 2 * inner, bias),
            Matrix(f"{prefix}.x_proj", inner, rank + 2 * state, source="x"),
            Matrix(f"{prefix}.dt_proj", rank, inner, bias=True, source="dt"),
            Matrix(f"{prefix}.out_proj", inner, hidden, bias, source="out"),
        ),
        unquantized=inner * (kernel + conv_bias + state + 1) + (rank + 2 * state if norms else 0),
        kept=11 * inner,
        kept_float32=2 * inner * state,
    )


@dataclass(frozen=True)
class Mamba2:
    """The keys of Mamba-2 in a model type's config.json, and where it differs otherwise."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    inner: str | None = None
    """None: heads × head_dim."""
    state: tuple[str, ...] = ("mamba_d_state",)
    groups: str = "mamba_n_groups"
    default_groups: int | None = None
    kernel: str = "mamba_d_conv"
    bias: str = "mamba_proj_bias"
    out_bias: str | None = None
    """None: the same as `bias`."""
    conv_bias: str = "mamba_conv_bias"
    default_conv_bias: bool = True
    norm: str | None = None
    """A flag of the config; None: there is always a norm."""
    prefix: str = "mamba"


_CHUNK = 256
"""Chunk length of Mamba-2, in tokens (mlx_lm/models/ssm.py)."""


def mamba2(config: ConfigReader, keys: Mamba2) -> Sublayer:
    """Within a chunk it keeps decays and weighted scores for each head, and unweighted scores for each group."""
    hidden, heads = config.hidden, config.get_size(keys.heads)
    inner = config.get_size(keys.inner) if keys.inner is not None else heads * config.get_size(keys.head_dim)
    state, groups = config.get_size(*keys.state), config.get_size(keys.groups, default=keys.default_groups)
    channels = inner + 2 * groups * state
    kernel, bias = config.get_size(keys.kernel), config.get_flag(keys.bias, False)
    out_bias = config.get_flag(keys.out_bias or keys.bias, False)
    conv_bias = config.get_flag(keys.conv_bias, keys.default_conv_bias)
    norm = keys.norm is None or config.get_flag(keys.norm, False)
    return Sublayer(
        matrices=(
            Matrix(f"{keys.prefix}.in_proj", hidden, inner + channels + heads, bias),
            Matrix(f"{keys.prefix}.out_proj", inner, hidden, out_bias, source="out"),
        ),
        unquantized=channels * (kernel + conv_bias) + 3 * heads + (inner if norm else 0),
        kept=10 * inner + 4 * channels + heads * state,
        scores=2 * heads + groups,
        window=_CHUNK,
        # Measured: its arrays are used and freed one after the other.
        backward=0.25,
    )


def gated_delta(config: ConfigReader) -> Sublayer:
    """Qwen3-Next's gated delta rule. mlx-lm runs it token by token and keeps each state, decayed and new."""
    hidden, key_heads = config.hidden, config.get_size("linear_num_key_heads")
    key_dim = config.get_size("linear_key_head_dim")
    value_heads, value_dim = config.get_size("linear_num_value_heads"), config.get_size("linear_value_head_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    return Sublayer(
        matrices=(
            Matrix("linear_attn.in_proj_qkvz", hidden, 2 * keys + 2 * values),
            Matrix("linear_attn.in_proj_ba", hidden, 2 * value_heads),
            Matrix("linear_attn.out_proj", values, hidden, source="out"),
        ),
        unquantized=config.get_size("linear_conv_kernel_dim") * (2 * keys + values) + 2 * value_heads + value_dim,
        kept=12 * (keys + values),
        kept_float32=2 * values * key_dim,
    )


def short_convolution(config: ConfigReader) -> Sublayer:
    """LFM2's gated short convolution."""
    hidden, kernel, bias = config.hidden, config.get_size("conv_L_cache"), config.get_flag("conv_bias", False)
    return Sublayer(
        matrices=(
            Matrix("conv.in_proj", hidden, 3 * hidden, bias),
            Matrix("conv.out_proj", hidden, hidden, bias, source="out"),
        ),
        unquantized=hidden * (kernel + bias),
        kept=6 * hidden,
    )
