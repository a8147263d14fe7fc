"""The loss of a batch, a sum and not a mean.

With a large vocabulary the logits are the largest arrays of a step, and their gradient needs several of that size. So
they are computed in chunks of tokens, and a chunk's gradient at once, while its logits are there: the head's product is
not done a second time in the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from engine.protocol.partition import cuda_width, loss_tokens
from engine.trainer.weights import on_cuda
from engine.training.data import Batch


@dataclass(frozen=True)
class Rows:
    """Some rows of a batch, as a model's input."""

    tokens: mx.array
    """[rows, length], including the last target."""
    bounds: mx.array
    """[rows, 2]"""
    scale: float
    """Factor of the loss: 1, but for means and float16."""

    @classmethod
    def of(cls, batch: Batch, chosen: slice = slice(None), *, half: bool = False, mean: bool = False) -> Rows:
        """`half`: for a model of float16. `mean`: for the mean over the batch's targets, instead of a sum."""
        targets = max(batch.targets, 1)
        scale = 1 / targets if mean else 1.0
        if half:
            # A sum over thousands of tokens leaves float16's range; a power of two near the mean loses no bit.
            scale = 2.0 ** -(targets - 1).bit_length()
        tokens = batch.tokens[chosen]
        if on_cuda():
            tokens = np.pad(tokens, ((0, 0), (0, 1 + cuda_width(tokens.shape[1] - 1) - tokens.shape[1])))
        return cls(mx.array(tokens), mx.array(batch.bounds[chosen]), scale)

    @property
    def inputs(self) -> tuple[mx.array, mx.array, mx.array]:
        """The arguments of `loss_sum`."""
        return self.tokens, self.bounds, mx.array(self.scale)


def loss_sum(
    model: nn.Module,
    tokens: mx.array,
    bounds: mx.array,
    scale: mx.array,
    *,
    trained: Collection[str] | None = None,
    **inputs: mx.array | None,
) -> mx.array:
    """The sum of the targets' cross-entropies times `scale`, a float32 scalar; 0 without targets, the tokens from
    bounds[:, 0] to before bounds[:, 1]. `trained`: the parameters, by name, with respect to which it will be
    differentiated; None: it will not be. `inputs`: the model's other arguments."""
    targets = tokens[:, 1:]
    position = mx.arange(1, targets.shape[1] + 1)
    mask = mx.logical_and(position >= bounds[:, 0:1], position < bounds[:, 1:])
    logits, head = _run(model, tokens[:, :-1], inputs)
    size = loss_tokens(targets.size, logits.shape[-1])
    if head is None or size >= targets.size:
        return _masked_sum(logits, targets, mask) * scale
    # The logits in one piece are not among the results, and so never evaluated.
    del logits
    return _ChunkedLoss(head, targets.reshape(-1), mask.reshape(-1), scale, size)(trained)


def _masked_sum(logits: mx.array, targets: mx.array, mask: mx.array) -> mx.array:
    entropies = nn.losses.cross_entropy(logits, targets)
    return mx.where(mask, entropies, 0).astype(mx.float32).sum()


class _Head:
    """Takes the place of a model's last module: calls it, and keeps what it got and what it returned."""

    def __init__(self, module: nn.Module, name: str, call: Callable[[mx.array], mx.array]) -> None:
        self.module, self.name, self.call = module, name, call
        self.hidden: mx.array | None = None
        self.logits: mx.array | None = None

    def __call__(self, hidden: mx.array) -> mx.array:
        self.hidden, self.logits = hidden, self.call(hidden)
        return self.logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _run(model: nn.Module, tokens: mx.array, inputs: dict[str, mx.array | None]) -> tuple[mx.array, _Head | None]:
    """The logits, not evaluated; and the head that returned them, unless the model changes what its head returns (as
    with soft-capping) or has another structure: this is seen at each call, so that no list of architectures is needed.
    """
    path = _head_path(model)
    if path is None:
        return model(tokens, **inputs), None
    root = holder = shallow_copy(model)
    for name in path[:-1]:
        holder[name] = shallow_copy(holder[name])
        holder = holder[name]
    module = holder[path[-1]]
    if path[-1] == "lm_head":
        holder[path[-1]] = head = _Head(module, ".".join(path), module)
    else:
        # Embeddings that are the head as well are called for both.
        holder[path[-1]] = shallow_copy(module)
        holder[path[-1]].as_linear = head = _Head(module, ".".join(path), module.as_linear)
    logits = root(tokens, **inputs)
    return logits, head if logits is head.logits else None


def _head_path(model: nn.Module) -> list[str] | None:
    """The modules that lead to the head, or to embeddings that can be one; of those that the model holds, as an
    attribute may be a property that leads elsewhere (`model` of mlx-lm's Qwen3.5)."""
    modules = dict(model.named_modules())
    for path in ("lm_head", "model.embed_tokens", "language_model.lm_head", "language_model.model.embed_tokens"):
        if hasattr(modules.get(path), "__call__" if path.endswith("lm_head") else "as_linear"):
            return path.split(".")
    return None


class _ChunkedLoss:
    """The same sum, with the logits of `size` tokens at a time."""

    def __init__(self, head: _Head, targets: mx.array, mask: mx.array, scale: mx.array, size: int) -> None:
        assert head.hidden is not None
        self._head = head
        self._hidden = head.hidden.reshape(-1, head.hidden.shape[-1])
        self._targets, self._mask, self._scale = targets, mask, scale
        self._chunks = [slice(start, start + size) for start in range(0, targets.size, size)]

    def __call__(self, trained: Collection[str] | None) -> mx.array:
        if trained is None:
            total = mx.array(0.0)
            for chunk in self._chunks:
                total = total + self._sum(mx.depends(self._hidden[chunk], total), chunk)
            return total
        prefix = self._head.name + "."
        parameters = dict(tree_flatten(self._head.module.parameters()))
        names = [name for name in parameters if prefix + name in trained]
        head = {name: parameters[name] for name in names}

        @mx.custom_function
        def compute(*differentiated: mx.array) -> Any:
            return self._with_gradients(names, *differentiated)

        @compute.vjp
        def multiply(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
            return [gradient * cotangents[0].astype(gradient.dtype) for gradient in outputs[1:]]

        outputs: Any = compute(self._hidden, *head.values())
        self._head.module.update(tree_unflatten(list(head.items())))
        loss: mx.array = outputs[0]
        return loss

    def _with_gradients(self, names: list[str], hidden: mx.array, *parameters: mx.array) -> list[mx.array]:
        """The sum, and its gradients with respect to `hidden` and to the head's `parameters`, which have `names`."""

        def compute(differentiated: list[mx.array], chunk: slice) -> mx.array:
            rows, *weights = differentiated
            self._head.module.update(tree_unflatten(list(zip(names, weights, strict=True))))
            return self._sum(rows, chunk)

        differentiate = mx.value_and_grad(compute)
        total, below = mx.array(0.0), list[mx.array]()
        sums = [mx.zeros(parameter.shape) for parameter in parameters]
        for chunk in self._chunks:
            # One after the other: else the logits of all could be in memory at once.
            rows = mx.depends(hidden[chunk], [total, *below[-1:], *sums])
            loss, (gradient, *others) = differentiate([rows, *parameters], chunk)
            total = total + loss
            below.append(gradient)
            # In float32: sums of many chunks in 16 bits would be less exact than one product.
            sums = [before + other for before, other in zip(sums, others, strict=True)]
        typed = [value.astype(parameter.dtype) for value, parameter in zip(sums, parameters, strict=True)]
        return [total, mx.concatenate(below), *typed]

    def _sum(self, rows: mx.array, chunk: slice) -> mx.array:
        return _masked_sum(self._head.call(rows), self._targets[chunk], self._mask[chunk]) * self._scale


def shallow_copy(module: nn.Module) -> Any:
    """A copy that shares the submodules, which can be replaced in it."""
    copied = copy.copy(module)
    copied._no_grad = set(module._no_grad)
    return copied
