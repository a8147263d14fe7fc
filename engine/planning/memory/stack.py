"""What every model has around its layers: the embedding, the last norm, the head."""

from __future__ import annotations

from collections.abc import Sequence

from .keys import Keys, refused
from .parts import Layer, Matrix, Skeleton

_MOST_LAYERS = 2_000


def layers(keys: Keys, default: int | None = None) -> int:
    """How many layers; more than any model has are refused."""
    count = keys.size("num_hidden_layers", default=default)
    if count > _MOST_LAYERS:
        raise refused(f"num_hidden_layers = {count}: at most {_MOST_LAYERS}")
    return count


def skeleton(
    keys: Keys,
    stack: Sequence[Layer],
    *,
    tied: bool,
    base: str = "model",
    embedding: str = "embed_tokens",
    last_norm: int | None = None,
    head_bias: bool = False,
    vocabulary: int | None = None,
) -> Skeleton:
    """The model of these layers. `last_norm`: its parameters, the hidden size unless said otherwise."""
    hidden = keys.size("hidden_size", "d_model")
    words = vocabulary or keys.size("vocab_size")
    return Skeleton(
        layers=tuple(stack),
        embedding=Matrix(f"{base}.{embedding}", hidden, words),
        head=None if tied else Matrix("lm_head", hidden, words, head_bias),
        last_norm=hidden if last_norm is None else last_norm,
    )
