"""Feed-forward networks and mixtures of experts, and what of them waits for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from .parts import Matrix, Part

_GATED = ("gate_proj", "up_proj", "down_proj")


def gated(hidden: int, inner: int, *, bias: bool = False, prefix: str = "mlp", names: Sequence[str] = _GATED) -> Part:
    """down(activation(gate(x)) · up(x)), as in Llama."""
    gate, up, down = names
    return Part(
        matrices=(
            Matrix(f"{prefix}.{gate}", hidden, inner, bias),
            Matrix(f"{prefix}.{up}", hidden, inner, bias),
            Matrix(f"{prefix}.{down}", inner, hidden, bias),
        ),
        held=5 * inner,
    )


def gated_fused(hidden: int, inner: int, *, prefix: str = "mlp", names: Sequence[str]) -> Part:
    """The same, gate and up in one projection, as in Phi-3."""
    both, down = names
    return Part(
        matrices=(Matrix(f"{prefix}.{both}", hidden, 2 * inner), Matrix(f"{prefix}.{down}", inner, hidden)),
        held=5 * inner,
    )


def two_layer(hidden: int, inner: int, *, bias: bool, prefix: str = "mlp", names: Sequence[str]) -> Part:
    """down(activation(up(x))), as in Phi."""
    up, down = names
    return Part(
        matrices=(Matrix(f"{prefix}.{up}", hidden, inner, bias), Matrix(f"{prefix}.{down}", inner, hidden, bias)),
        held=4 * inner,
    )


def experts(
    hidden: int, inner: int, count: int, active: int, *, prefix: str = "mlp", router: str = "gate", bias: bool = False
) -> Part:
    """Of `count` gated networks each token goes through `active`, chosen by a router."""
    active = min(active, count)
    return Part(
        matrices=(
            Matrix(f"{prefix}.{router}", hidden, count, bias),
            Matrix(f"{prefix}.switch_mlp.gate_proj", hidden, inner, bias, count, active),
            Matrix(f"{prefix}.switch_mlp.up_proj", hidden, inner, bias, count, active),
            Matrix(f"{prefix}.switch_mlp.down_proj", inner, hidden, bias, count, active),
        ),
        held=active * (5 * inner + 2 * hidden) + 4 * count,
    )


def shared_expert(hidden: int, inner: int, *, prefix: str = "mlp") -> Part:
    """A gated network that every token goes through beside its experts, weighed by a gate (Qwen2-MoE)."""
    network = gated(hidden, inner, prefix=f"{prefix}.shared_expert")
    gate = Matrix(f"{prefix}.shared_expert_gate", hidden, 1)
    return Part(matrices=(*network.matrices, gate), held=network.held + 2 * hidden)
