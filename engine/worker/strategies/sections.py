"""A model cut into sections of contiguous layers, each of which runs by itself: for sharded and pipeline training.

A section is the architecture's own code with the other parts left out, so that masks, windows and names are its own:
a layer that is elsewhere passes on what it gets. Sections of one model share their parts with it.
"""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx import nn

from ..job import JobError
from ..layers import KINDS


class Elsewhere(nn.Module):  # type: ignore[misc]  # mlx.nn has no types
    """Stands for a part that is in another section: passes on what it gets, and has no parameters."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        if hasattr(part, "use_sliding"):
            # The model chooses each layer's mask by it.
            self.use_sliding = part.use_sliding

    def __call__(self, hidden: mx.array, *_: Any, **__: Any) -> mx.array:
        return hidden


class Section:
    """The layers from `start` to before `end`; with the embeddings when it is the first, with norm and head when it is
    the last."""

    def __init__(self, model: nn.Module, start: int, end: int, *, first: bool, last: bool) -> None:
        """Raises JobError for a model that cannot be cut."""
        names = _path(model)
        self.first, self.last = first, last
        self.model = _copied(model)
        """With the whole model's names for its own parameters, and no others."""
        holder = self.model
        for name in names:
            setattr(holder, name, _copied(getattr(holder, name)))
            if name != names[-1]:
                holder = getattr(holder, name)
        self._trunk = trunk = getattr(holder, names[-1])
        tied = not hasattr(holder, "lm_head")
        trunk.layers = [layer if start <= index < end else Elsewhere(layer) for index, layer in enumerate(trunk.layers)]
        if not (first or (last and tied)):
            trunk.embed_tokens = Elsewhere(trunk.embed_tokens)
        if not last:
            trunk.norm = Elsewhere(trunk.norm)
            if not tied:
                holder.lm_head = Elsewhere(holder.lm_head)

    def __call__(self, tokens: mx.array, hidden: mx.array | None = None) -> mx.array:
        """`tokens` [rows, length]; `hidden` [rows, length, width] from the section before, None for the first one's.
        The same for the next section, or logits [rows, length, vocabulary] of the last."""
        whole = self.model if self.last else self._trunk
        output: mx.array = whole(tokens, input_embeddings=hidden)
        return output


def check(model: nn.Module, strategy: str) -> None:
    """Raises JobError for an architecture that `strategy` cannot cut."""
    kind = type(model).__module__.rsplit(".", 1)[-1]
    if kind not in KINDS:
        raise JobError(
            f"[job] strategy = {strategy!r} does not divide models of kind {kind} (it does {', '.join(KINDS)} and what "
            'mlx-lm runs as one of these): train it with strategy = "data"'
        )
    _path(model)


def _path(model: nn.Module) -> list[str]:
    """The attributes that lead to the part with embed_tokens, layers and norm."""
    names = ["language_model", "model"] if hasattr(model, "language_model") else ["model"]
    trunk = model
    for name in names:
        trunk = getattr(trunk, name, None)
    if not all(hasattr(trunk, part) for part in ("embed_tokens", "layers", "norm")):
        raise JobError(f"a model of kind {type(model).__module__} has no embed_tokens, layers and norm to be cut at")
    return names


def _copied(module: nn.Module) -> Any:
    """`module` with the same parts, of which others can be put in their place."""
    copied = copy.copy(module)
    copied._no_grad = set(module._no_grad)
    return copied
