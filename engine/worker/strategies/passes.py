"""One section's forward and backward pass, with the parameters that it is given for it."""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
from mlx.utils import tree_unflatten

from ..data import Batch
from .gradients import loss_scale, loss_sum
from .sections import Section

Parameters = Mapping[str, mx.array]


@dataclass(frozen=True)
class Rows:
    """Some rows of a batch as a section gets them."""

    tokens: mx.array
    """[rows, length], with the last target."""
    bounds: mx.array
    """[rows, 2]"""
    scale: float
    """Of the loss."""

    @classmethod
    def of(cls, batch: Batch, chosen: slice = slice(None), *, half: bool = False) -> Rows:
        """`half`: the loss is of float16."""
        scale = loss_scale(batch.targets) if half else 1.0
        return cls(mx.array(batch.tokens[chosen]), mx.array(batch.bounds[chosen]), scale)

    @property
    def inputs(self) -> tuple[int, int]:
        """Rows and length of what the model is given."""
        rows, length = self.tokens.shape
        return rows, length - 1


def forward(section: Section, rows: Rows, hidden: mx.array | None) -> mx.array:
    """What the next section gets; of the last one, the scaled sum of cross-entropies. Not evaluated."""
    if section.last:
        return loss_sum(lambda tokens: section(tokens, hidden), rows.tokens, rows.bounds, mx.array(rows.scale))
    return section(rows.tokens[:, :-1], hidden)


def like_output(section: Section, rows: Rows, hidden: mx.array | None) -> mx.array:
    """Something of the shape and type of what the next section gets. Nothing is computed."""
    # Every section but the first gives what it gets; that one's embeddings alone know their width.
    return forward(section, rows, None) if hidden is None else hidden


def forward_backward(
    section: Section,
    trained: Parameters,
    rows: Rows,
    hidden: mx.array | None,
    cotangent: mx.array,
    *,
    below: bool,
) -> tuple[mx.array, dict[str, mx.array], mx.array | None]:
    """The forward pass's output, the gradients of `trained` (float32, unscaled), and that of `hidden` when something
    `below` is trained. Nothing is evaluated: the output may be while `cotangent`, the gradient with respect to it, is
    still to come; what the backward pass needs is kept until its results are."""
    names = list(trained)
    differentiated = [*trained.values(), *([hidden] if below and hidden is not None else [])]

    def compute(*arguments: mx.array) -> list[mx.array]:
        section.model.update(tree_unflatten(list(zip(names, arguments, strict=False))))
        return [forward(section, rows, arguments[-1] if below else hidden)]

    outputs, gradients = mx.vjp(compute, differentiated, [cotangent])
    section.model.update(tree_unflatten(list(trained.items())))
    flat = {name: gradient.astype(mx.float32) / rows.scale for name, gradient in zip(names, gradients, strict=False)}
    return outputs[0], flat, gradients[-1] if below else None
