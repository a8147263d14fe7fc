"""Sublayers of a model's layers (attention, feed-forward networks, mixtures of experts, state-space models, short
convolutions): their matrices, and what they keep for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan.memory.architecture import Matrix, Sublayer


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    norms: int = 0,
    prefix: str = "self_attn",
    out: str = "o_proj",
    fused: bool = False,
    gated: bool = False,
    capped: bool = False,
) -> Sublayer:
    """Grouped-query attention. `norms`: parameters of the norms on queries and keys; `fused`: one "qkv_proj" matrix;
    `gated`: the query projection also produces a gate for the output (Qwen3-Next); `capped`: soft-capped scores (Gemma
    2).

    Without a fused kernel, which training on the CPU does not have, the backward pass needs the scaled queries, the
    keys, the values, and the softmax of every pair of tokens.
    """
    queries, keys = heads * head_dim, kv_heads * head_dim
    if fused:
        projections = [Matrix(f"{prefix}.qkv_proj", hidden, queries + 2 * keys, qkv_bias)]
    else:
        projections = [
            Matrix(f"{prefix}.q_proj", hidden, queries * (2 if gated else 1), qkv_bias),
            Matrix(f"{prefix}.k_proj", hidden, keys, qkv_bias),
            Matrix(f"{prefix}.v_proj", hidden, keys, qkv_bias),
        ]
    return Sublayer(
        matrices=(*projections, Matrix(f"{prefix}.{out}", queries, hidden, out_bias, source="out")),
        unquantized=norms,
        normed=queries + keys if norms else 0,
        kept=queries + 2 * keys + (2 * queries if gated else 0),
        scores=heads * (2 if capped else 1),
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


def gated_mlp(
    hidden: int,
    inner: int,
    *,
    bias: bool = False,
    prefix: str = "mlp",
    names: Sequence[str] = _GATED,
    arrays: int = SILU,
) -> Sublayer:
    """down(activation(gate(x)) · up(x)), as in Llama. `arrays` of the inner size are kept for the backward pass."""
    gate, up, down = names
    return Sublayer(
        matrices=(
            Matrix(f"{prefix}.{gate}", hidden, inner, bias),
            Matrix(f"{prefix}.{up}", hidden, inner, bias),
            Matrix(f"{prefix}.{down}", inner, hidden, bias, source="inner"),
        ),
        kept=arrays * inner,
    )


def fused_gated_mlp(hidden: int, inner: int, *, prefix: str = "mlp", names: Sequence[str]) -> Sublayer:
    """A gated MLP with gate and up in one projection, as in Phi-3."""
    both, down = names
    return Sublayer(
        matrices=(
            Matrix(f"{prefix}.{both}", hidden, 2 * inner),
            Matrix(f"{prefix}.{down}", inner, hidden, source="inner"),
        ),
        kept=SILU * inner,
    )


def two_layer_mlp(
    hidden: int, inner: int, *, bias: bool, prefix: str = "mlp", names: Sequence[str], arrays: int = GELU
) -> Sublayer:
    """down(activation(up(x))), as in Phi."""
    up, down = names
    return Sublayer(
        matrices=(
            Matrix(f"{prefix}.{up}", hidden, inner, bias),
            Matrix(f"{prefix}.{down}", inner, hidden, bias, source="inner"),
        ),
        kept=arrays * inner,
    )


def experts(
    hidden: int, inner: int, count: int, active: int, *, prefix: str = "mlp", router: str = "gate", bias: bool = False
) -> Sublayer:
    """`count` gated MLPs, of which a router picks `active` for each token. Tokens are copied for each expert; the
    results are kept both in expert order and in token order, for the router's gradient."""
    active = min(active, count)
    return Sublayer(
        matrices=(
            Matrix(f"{prefix}.{router}", hidden, count, bias, source="router"),
            Matrix(f"{prefix}.switch_mlp.gate_proj", hidden, inner, bias, count, active),
            Matrix(f"{prefix}.switch_mlp.up_proj", hidden, inner, bias, count, active),
            Matrix(f"{prefix}.switch_mlp.down_proj", inner, hidden, bias, count, active, source="inner"),
        ),
        kept=active * (SILU * inner + 2 * hidden) + count,
    )


def shared_expert(hidden: int, inner: int, *, prefix: str = "mlp") -> Sublayer:
    """A gated MLP that every token passes through in addition to its experts, weighted by a gate (Qwen2-MoE)."""
    network = gated_mlp(hidden, inner, prefix=f"{prefix}.shared_expert")
    gate = Matrix(f"{prefix}.shared_expert_gate", hidden, 1)
    return Sublayer(matrices=(*network.matrices, gate), kept=network.kept + hidden)


_CHUNK = 256
"""Chunk length of Mamba-2, in tokens (mlx_lm/models/ssm.py)."""


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
    """Mamba's selective scan. mlx-lm runs it token by token and keeps each state for the backward pass, before and
    after its input."""
    return Sublayer(
        matrices=(
            Matrix(f"{prefix}.in_proj", hidden, 2 * inner, bias),
            Matrix(f"{prefix}.x_proj", inner, rank + 2 * state, source="x"),
            Matrix(f"{prefix}.dt_proj", rank, inner, bias=True, source="dt"),
            Matrix(f"{prefix}.out_proj", inner, hidden, bias, source="out"),
        ),
        unquantized=inner * (kernel + (1 if conv_bias else 0) + state + 1) + (rank + 2 * state if norms else 0),
        kept=11 * inner,
        kept_float32=2 * inner * state,
    )


def mamba2(
    hidden: int,
    *,
    heads: int,
    inner: int,
    state: int,
    groups: int,
    kernel: int,
    bias: bool,
    out_bias: bool,
    conv_bias: bool,
    norm: bool,
    prefix: str,
) -> Sublayer:
    """Mamba-2, where heads × head dimension = `inner`. Within a chunk it keeps decays and weighted scores for each
    head, and unweighted scores for each group."""
    channels = inner + 2 * groups * state
    return Sublayer(
        matrices=(
            Matrix(f"{prefix}.in_proj", hidden, inner + channels + heads, bias),
            Matrix(f"{prefix}.out_proj", inner, hidden, out_bias, source="out"),
        ),
        unquantized=channels * (kernel + (1 if conv_bias else 0)) + 3 * heads + (inner if norm else 0),
        kept=10 * inner + 4 * channels + heads * state,
        scores=2 * heads + groups,
        window=_CHUNK,
    )


def gated_delta(
    hidden: int, *, key_heads: int, key_dim: int, value_heads: int, value_dim: int, kernel: int, prefix: str
) -> Sublayer:
    """Qwen3-Next's gated delta rule. mlx-lm runs it token by token and keeps each state, decayed and new, for the
    backward pass."""
    keys, values = key_heads * key_dim, value_heads * value_dim
    return Sublayer(
        matrices=(
            Matrix(f"{prefix}.in_proj_qkvz", hidden, 2 * keys + 2 * values),
            Matrix(f"{prefix}.in_proj_ba", hidden, 2 * value_heads),
            Matrix(f"{prefix}.out_proj", values, hidden, source="out"),
        ),
        unquantized=kernel * (2 * keys + values) + 2 * value_heads + value_dim,
        kept=12 * (keys + values),
        kept_float32=2 * values * key_dim,
    )


def short_convolution(hidden: int, kernel: int, *, bias: bool, prefix: str) -> Sublayer:
    """LFM2's gated short convolution."""
    return Sublayer(
        matrices=(
            Matrix(f"{prefix}.in_proj", hidden, 3 * hidden, bias),
            Matrix(f"{prefix}.out_proj", hidden, hidden, bias, source="out"),
        ),
        unquantized=hidden * (kernel + (1 if bias else 0)),
        kept=6 * hidden,
    )
