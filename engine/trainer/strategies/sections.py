"""A model cut into sections of contiguous layers, for sharded and pipeline training: each runs by itself, the
architecture's own code with the other parts left out, so that masks, windows and names are unchanged. A layer of
another section passes its input through. Sections of one model share their parts with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from engine.protocol.job import JobError
from engine.protocol.partition import SPLITTABLE_MODULES
from engine.trainer.strategies.loss import Rows, loss_sum, shallow_copy


class PassThrough(nn.Module):  # type: ignore[misc]  # mlx.nn has no types
    """Takes the place of a module that is in another section: returns its input, and has no parameters."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        if hasattr(part, "use_sliding"):
            # The model selects each layer's mask by it.
            self.use_sliding = part.use_sliding

    def __call__(self, hidden: mx.array, *_: Any, **__: Any) -> mx.array:
        return hidden


class Section:
    """The layers from `start` to before `end`; the first has the embeddings too, the last norm and head."""

    def __init__(self, model: nn.Module, start: int, end: int, *, first: bool, last: bool) -> None:
        """Raises JobError for a model that cannot be split."""
        names = _trunk_path(model)
        self.first, self.last = first, last
        self.model = shallow_copy(model)
        """Its parameters have the names of the whole model's."""
        holder = self.model
        for name in names:
            setattr(holder, name, shallow_copy(getattr(holder, name)))
            if name != names[-1]:
                holder = getattr(holder, name)
        self._trunk = trunk = getattr(holder, names[-1])
        tied = not hasattr(holder, "lm_head")
        trunk.layers = [
            layer if start <= index < end else PassThrough(layer) for index, layer in enumerate(trunk.layers)
        ]
        if not (first or (last and tied)):
            trunk.embed_tokens = PassThrough(trunk.embed_tokens)
        if not last:
            trunk.norm = PassThrough(trunk.norm)
            if not tied:
                holder.lm_head = PassThrough(holder.lm_head)

    def __call__(
        self, tokens: mx.array, hidden: mx.array | None = None, cache: Sequence[Any] | None = None
    ) -> mx.array:
        """`tokens` [rows, length]; `hidden` [rows, length, width] from the previous section, None for the first;
        `cache`: mlx-lm's of each of the model's layers. Returns the next section's `hidden`, or the last one's logits
        [rows, length, vocabulary]."""
        whole = self.model if self.last else self._trunk
        output: mx.array = whole(tokens, cache=cache, input_embeddings=hidden)
        return output

    def forward(self, rows: Rows, hidden: mx.array | None, trained: Collection[str] | None = None) -> mx.array:
        """The next section's `hidden`, or the last one's scaled sum of cross-entropies. Not evaluated. `trained`: the
        parameters of which the gradients will be computed; None: without gradients."""
        if self.last:
            scale = mx.array(rows.scale)
            return loss_sum(self.model, rows.tokens, rows.bounds, scale, trained=trained, input_embeddings=hidden)
        return self(rows.tokens[:, :-1], hidden)

    def forward_backward(
        self, trained: Mapping[str, mx.array], rows: Rows, hidden: mx.array | None, cotangent: mx.array, *, below: bool
    ) -> tuple[mx.array, dict[str, mx.array], mx.array | None]:
        """The forward pass's output, the gradients of `trained` (unscaled, of their types, but float32 for float16),
        and that of `hidden` if a section `below` is trained. Lazy: the output can be evaluated before its gradient,
        `cotangent`, has arrived; what the backward pass needs is kept until its results are."""
        names = list(trained)
        differentiated = [*trained.values(), *([hidden] if below and hidden is not None else [])]

        def compute(*arguments: mx.array) -> list[mx.array]:
            self.model.update(tree_unflatten(list(zip(names, arguments, strict=False))))
            return [self.forward(rows, arguments[-1] if below else hidden, names)]

        outputs, gradients = mx.vjp(compute, differentiated, [cotangent])
        self.model.update(tree_unflatten(list(trained.items())))
        flat = {name: _unscaled(gradient, rows.scale) for name, gradient in zip(names, gradients, strict=False)}
        return outputs[0], flat, gradients[-1] if below else None


def _unscaled(gradient: mx.array, scale: float) -> mx.array:
    if gradient.dtype == mx.float16:
        gradient = gradient.astype(mx.float32)
    # A division by 1 would read and write all of it once more.
    return gradient if scale == 1 else gradient / scale


def check_splittable(model: nn.Module, strategy: str) -> None:
    """Raises JobError for an architecture that `strategy` does not support."""
    kind = type(model).__module__.rsplit(".", 1)[-1]
    if kind not in SPLITTABLE_MODULES:
        raise JobError(
            f"[job] strategy = {strategy!r} does not support models of type {kind}, only "
            f"{', '.join(SPLITTABLE_MODULES)} and those that mlx-lm runs as one of them: use "
            'strategy = "data"'
        )


def _trunk_path(model: nn.Module) -> list[str]:
    """The attributes that lead to the module with embed_tokens, layers and norm."""
    names = ["language_model", "model"] if hasattr(model, "language_model") else ["model"]
    trunk = model
    for name in names:
        trunk = getattr(trunk, name, None)
    if not all(hasattr(trunk, part) for part in ("embed_tokens", "layers", "norm")):
        raise JobError(f"a model of {type(model).__module__} has no embed_tokens, layers and norm to split it at")
    return names
