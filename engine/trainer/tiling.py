"""Sequence tiling, for sequences longer than memory: attention in tiles of queries, and MLPs in tiles of tokens
(TiledMLP of DeepSpeed's ALST), one tile after the other, and each again in the backward pass. The scores and inner
arrays of one tile are in memory at a time. Results differ from those without by rounding alone; but dropout draws other
numbers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

from engine.protocol.partition import Fusing, fuses_attention, fusing_device
from engine.trainer.weights import on_cuda

_MLPS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp", "mlp_block", "moe", "mixer")
"""Names in mlx-lm's layers of what computes each token by itself, where it takes one argument; what takes more is
attention or a recurrence."""
_LINEAR = (nn.Linear, LoRALinear, DoRALinear)
Compute = Callable[[mx.array, Sequence[mx.array], int], mx.array]
"""Takes a tile, what all tiles share, and the number of rows before the tile."""
_attention: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention


def tile_layers(layers: Iterable[nn.Module], tokens: int) -> None:
    """Have `layers`, unfrozen as they will be trained, compute `tokens` of each sequence at a time."""
    for layer in layers:
        for name, part in layer.children().items():
            if not (isinstance(part, nn.Module) and callable(part)):
                continue
            if len(inspect.signature(part.__call__).parameters) > 1:
                replace_call(part, _attending(tokens, _fusing_device()))
                _tile_projections(part, tokens)
            elif name in _MLPS:
                replace_call(part, _tiled(tokens, part))


def _tile_projections(part: nn.Module, tokens: int) -> None:
    """For their gradients alone: a product over all tokens adds one rounding after the other, a sum over tiles few."""
    for projection in part.children().values():
        if isinstance(projection, _LINEAR) and tree_flatten(projection.trainable_parameters()):
            replace_call(projection, _tiled(tokens, projection))


def replace_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replace that of this module, not of its class: `super(type(module), module).__call__` is the one before."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _fusing_device() -> Fusing:
    if mx.default_device() == mx.Device(mx.cpu):
        return ""
    facts = cast("dict[str, Any]", mx.device_info())
    capability = (int(facts.get("compute_capability_major", 0)),)
    return fusing_device("CUDA" if on_cuda() else "GPU", version("mlx"), os.environ, capability)


def _attending(tokens: int, device: Fusing) -> Callable[..., Any]:
    def tiled(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        mask: Any = None,
        sinks: mx.array | None = None,
        **others: Any,
    ) -> mx.array:
        masked = isinstance(mask, mx.array)
        *_, length, head_dim = queries.shape
        fused = not masked and sinks is None and fuses_attention(device, head_dim, length, queries.dtype.size)
        # Scores that the model adds to are of all pairs of tokens anyway.
        if length <= tokens or fused or (masked and mask.dtype != mx.bool_):
            return _attention(queries, keys, values, mask=mask, sinks=sinks, **others)
        ahead = keys.shape[-2] - length

        def compute(tile: mx.array, shared: Sequence[mx.array], start: int) -> mx.array:
            keys, values, *rest = shared
            end, mine = start + tile.shape[-2], mask
            if masked and mask.shape[-2] > 1:
                mine = mask[..., start:end, :]
            elif not masked and mask is not None:
                # Causal: counted from the end of the keys.
                keys, values = (array[..., : ahead + end, :] for array in (keys, values))
            return _attention(tile, keys, values, mask=mine, sinks=rest[0] if rest else None, **others)

        return in_tiles(compute, queries, [keys, values, *([] if sinks is None else [sinks])], tokens)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # What all architectures of mlx-lm call.
        fast: Any = mx.fast
        fast.scaled_dot_product_attention = tiled
        try:
            return super(type(module), module).__call__(*args, **kwargs)
        finally:
            fast.scaled_dot_product_attention = _attention

    return call


def _tiled(tokens: int, part: nn.Module) -> Callable[..., mx.array]:
    """The call of `part`, which computes each token by itself."""
    trained = [name for name, _ in tree_flatten(part.trainable_parameters())]

    def call(module: nn.Module, rows: mx.array) -> mx.array:
        whole: Callable[[mx.array], mx.array] = super(type(module), module).__call__
        if rows.shape[-2] <= tokens:
            return whole(rows)
        parameters = dict(tree_flatten(module.parameters()))
        values = [parameters[name] for name in trained]

        def compute(tile: mx.array, shared: Sequence[mx.array], _: int) -> mx.array:
            module.update(tree_unflatten(list(zip(trained, shared, strict=True))))
            output = whole(tile)
            module.update(tree_unflatten(list(zip(trained, values, strict=True))))
            return output

        return in_tiles(compute, rows, values, tokens)

    return call


def in_tiles(compute: Compute, rows: mx.array, shared: Sequence[mx.array], tokens: int) -> mx.array:
    """`compute` of `rows` [..., length, width], `tokens` of the length at a time."""
    tiles = [(start, (..., slice(start, start + tokens), slice(None))) for start in range(0, rows.shape[-2], tokens)]
    generator: Any = mx.random.state
    drawn: list[mx.array] = []

    @mx.custom_function
    def tiled(inputs: list[mx.array]) -> mx.array:
        rows, *shared = inputs
        outputs: list[mx.array] = []
        for start, tile in tiles:
            drawn.append(mx.array(generator[0]))
            outputs.append(compute(mx.depends(rows[tile], outputs[-1:]), shared, start))
        return mx.concatenate(outputs, axis=-2)

    @tiled.vjp
    def gradients(primals: Any, cotangent: mx.array, _: Any) -> list[mx.array]:
        rows, *shared = primals
        below = list[mx.array]()
        # In float32: sums of many tiles in 16 bits would be less exact than one product.
        sums = [mx.zeros(value.shape) for value in shared]
        after = mx.array(generator[0])
        for (start, tile), state in zip(tiles, drawn, strict=True):
            generator[0][:] = state
            # One after the other: else those of all could be in memory at once.
            inputs = [mx.depends(rows[tile], [*below[-1:], *sums]), *shared]
            again = lambda mine, *shared, start=start: [compute(mine, shared, start)]  # noqa: E731
            _, (gradient, *others) = mx.vjp(again, inputs, [cotangent[tile]])
            below.append(gradient)
            sums = [before + other for before, other in zip(sums, others, strict=True)]
        generator[0][:] = after
        typed = [total.astype(value.dtype) for total, value in zip(sums, shared, strict=True)]
        return [mx.concatenate(below, axis=-2), *typed]

    output: Any = tiled([rows, *shared])
    return cast(mx.array, output)
