"""Attention in its variants, and what of it waits for the backward pass."""

from __future__ import annotations

from .parts import Matrix, Part


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
) -> Part:
    """Grouped-query attention. `norms`: parameters of norms on queries and keys; `fused`: one projection "qkv_proj";
    `gated`: the query projection makes a gate of the output too (Qwen3-Next); `capped`: soft-capped scores (Gemma 2).

    Without a fused kernel, and in training there is none on the CPU, the backward pass needs the scaled queries, the
    keys, the values, and the softmax of each pair of tokens.
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
    return Part(
        matrices=(*projections, Matrix(f"{prefix}.{out}", queries, hidden, out_bias, source="out")),
        plain=norms,
        normed=queries + keys if norms else 0,
        held=queries + 2 * keys + (2 * queries if gated else 0),
        scores=heads * (2 if capped else 1),
    )
