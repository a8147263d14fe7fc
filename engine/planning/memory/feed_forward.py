"""Feed-forward networks and mixtures of experts, and what of them waits for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from .parts import Matrix, Part

_GATED = ("gate_proj", "up_proj", "down_proj")
SILU = 4
"""Arrays of the inner size: gate, sigmoid(gate), their product, and up."""
GELU = 5
"""Of the tanh approximation: the input, its half and its cube's part, the tanh, and one more than that."""
GATED_GELU = 6
"""With up."""
RELU_SQUARED = 2
"""The input and its positive part."""


def gated(
    hidden: int,
    inner: int,
    *,
    bias: bool = False,
    prefix: str = "mlp",
    names: Sequence[str] = _GATED,
    arrays: int = SILU,
) -> Part:
    """down(activation(gate(x)) · up(x)), as in Llama. `arrays` of the inner size wait for the backward pass."""
    gate, up, down = names
    return Part(
        matrices=(
            Matrix(f"{prefix}.{gate}", hidden, inner, bias),
            Matrix(f"{prefix}.{up}", hidden, inner, bias),
            Matrix(f"{prefix}.{down}", inner, hidden, bias, source="inner"),
        ),
        held=arrays * inner,
    )


def gated_fused(hidden: int, inner: int, *, prefix: str = "mlp", names: Sequence[str]) -> Part:
    """The same, gate and up in one projection, as in Phi-3."""
    both, down = names
    return Part(
        matrices=(
            Matrix(f"{prefix}.{both}", hidden, 2 * inner),
            Matrix(f"{prefix}.{down}", inner, hidden, source="inner"),
        ),
        held=SILU * inner,
    )


def two_layer(
    hidden: int, inner: int, *, bias: bool, prefix: str = "mlp", names: Sequence[str], arrays: int = GELU
) -> Part:
    """down(activation(up(x))), as in Phi."""
    up, down = names
    return Part(
        matrices=(
            Matrix(f"{prefix}.{up}", hidden, inner, bias),
            Matrix(f"{prefix}.{down}", inner, hidden, bias, source="inner"),
        ),
        held=arrays * inner,
    )


def experts(
    hidden: int, inner: int, count: int, active: int, *, prefix: str = "mlp", router: str = "gate", bias: bool = False
) -> Part:
    """Of `count` gated networks each token goes through `active`, chosen by a router. The tokens are gathered, a copy
    for each expert; their results wait as they come and in the tokens' order again, for the router's gradient."""
    active = min(active, count)
    return Part(
        matrices=(
            Matrix(f"{prefix}.{router}", hidden, count, bias, source="router"),
            Matrix(f"{prefix}.switch_mlp.gate_proj", hidden, inner, bias, count, active),
            Matrix(f"{prefix}.switch_mlp.up_proj", hidden, inner, bias, count, active),
            Matrix(f"{prefix}.switch_mlp.down_proj", inner, hidden, bias, count, active, source="inner"),
        ),
        held=active * (SILU * inner + 2 * hidden) + count,
    )


def shared_expert(hidden: int, inner: int, *, prefix: str = "mlp") -> Part:
    """A gated network that every token goes through beside its experts, weighed by a gate (Qwen2-MoE)."""
    network = gated(hidden, inner, prefix=f"{prefix}.shared_expert")
    gate = Matrix(f"{prefix}.shared_expert_gate", hidden, 1)
    return Part(matrices=(*network.matrices, gate), held=network.held + hidden)
