"""State-space models, linear attention and short convolutions, and what of them waits for the backward pass."""

from __future__ import annotations

from .parts import Matrix, Part

_CHUNK = 256
"""Tokens between which Mamba-2 has scores, as mlx-lm cuts the sequence (mlx_lm/models/ssm.py)."""


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
) -> Part:
    """Mamba's selective scan. mlx-lm runs it one token after the other: each state waits
    for the backward pass, before and after its input."""
    return Part(
        matrices=(
            Matrix(f"{prefix}.in_proj", hidden, 2 * inner, bias),
            Matrix(f"{prefix}.x_proj", inner, rank + 2 * state, source="x"),
            Matrix(f"{prefix}.dt_proj", rank, inner, bias=True, source="dt"),
            Matrix(f"{prefix}.out_proj", inner, hidden, bias, source="out"),
        ),
        plain=inner * (kernel + (1 if conv_bias else 0) + state + 1) + (rank + 2 * state if norms else 0),
        held=11 * inner,
        held_float32=2 * inner * state,
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
) -> Part:
    """Mamba-2: heads × head dimension = `inner`, with scores between the tokens of a chunk: decays and weighed
    scores of each head, bare scores of each group."""
    channels = inner + 2 * groups * state
    return Part(
        matrices=(
            Matrix(f"{prefix}.in_proj", hidden, inner + channels + heads, bias),
            Matrix(f"{prefix}.out_proj", inner, hidden, out_bias, source="out"),
        ),
        plain=channels * (kernel + (1 if conv_bias else 0)) + 3 * heads + (inner if norm else 0),
        held=10 * inner + 4 * channels + heads * state,
        scores=2 * heads + groups,
        window=_CHUNK,
    )


def gated_delta(
    hidden: int, *, key_heads: int, key_dim: int, value_heads: int, value_dim: int, kernel: int, prefix: str
) -> Part:
    """Qwen3-Next's gated delta rule, one token after the other: each state waits for the backward pass,
    decayed and new."""
    keys, values = key_heads * key_dim, value_heads * value_dim
    return Part(
        matrices=(
            Matrix(f"{prefix}.in_proj_qkvz", hidden, 2 * keys + 2 * values),
            Matrix(f"{prefix}.in_proj_ba", hidden, 2 * value_heads),
            Matrix(f"{prefix}.out_proj", values, hidden, source="out"),
        ),
        plain=kernel * (2 * keys + values) + 2 * value_heads + value_dim,
        held=12 * (keys + values),
        held_float32=2 * values * key_dim,
    )


def short_convolution(hidden: int, kernel: int, *, bias: bool, prefix: str) -> Part:
    """LFM2's gated convolution over a few tokens."""
    return Part(
        matrices=(
            Matrix(f"{prefix}.in_proj", hidden, 3 * hidden, bias),
            Matrix(f"{prefix}.out_proj", hidden, hidden, bias, source="out"),
        ),
        plain=hidden * (kernel + (1 if bias else 0)),
        held=6 * hidden,
    )
