"""What the forward pass leaves for the backward pass, and what that works with, bytes.

Counted by MLX's operations without fused kernels, as its CPU build runs them: each array that a gradient needs. A Mac's
fused kernels (attention, norms, cross-entropy) hold less, so that for the GPU the figure is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from .ask import MemoryAsk
from .parts import Layer, Matrix, Part
from .shape import ModelShape
from .trained import adapted, trained_layers

_FLOAT32 = 4
_WORKING = 1.0
"""A layer's backward pass works with as much again as the layer holds: a gradient for each array that waited. Not for
the states of a recurrence, through which it goes one token after the other: each gradient is gone with its token."""
_RECOMPUTED = 2.75
"""The same under gradient checkpointing, where the layer's forward pass is made again first: what it then holds, as
much for the backward pass, and three quarters of the layer whose turn is next, which MLX already begins. Measured at
three sizes: 2.75 to 2.80."""
_LOSS_ARRAYS = 6
"""Arrays of tokens × vocabulary while the loss's gradient is made: logits, less their maximum, exponentials, softmax,
the targets' scatter, their sum."""
_WAITING_LOSS_ARRAYS = 2
"""Of those, what still waits while the layers are gone through backwards: the loss's value is computed last."""


@dataclass(frozen=True)
class Activations:
    """One rank's, bytes."""

    layers: int
    """Held by the layers, and the most that one of them works with."""
    logits: int
    """What the head and the loss have beside it at that moment, or more when theirs is the larger moment."""


def activations(shape: ModelShape, ask: MemoryAsk, stage: range) -> Activations:
    """Of all layers of the stage. Layers before the first trained one keep nothing."""
    tokens = ask.batch * ask.sequence
    one = shape.dtype_bytes
    learned = [shape.skeleton.layers[number] for number in trained_layers(shape, ask, stage)]
    whole = [tokens * kept_per_token(shape, layer, ask) for layer in learned]
    most = max((tokens * _worked_per_token(shape, layer, ask) for layer in learned), default=0)
    passing = max((_passing(shape, layer, ask) for layer in learned), default=0)
    if ask.grad_checkpoint:
        held = len(learned) * tokens * shape.hidden * one
        working = int((_RECOMPUTED - _WORKING) * max(whole, default=0) + _WORKING * most) + passing
    else:
        held, working = sum(whole), int(_WORKING * most)
    if stage.stop < shape.layers:
        return Activations(held + working, 0)
    last_norm = tokens * shape.hidden * (_FLOAT32 + 2 * one)
    vocabulary = tokens * shape.vocabulary * one
    backward = working + _WAITING_LOSS_ARRAYS * vocabulary
    loss = _LOSS_ARRAYS * vocabulary
    return Activations(held + working, last_norm + max(backward, loss) - working)


def kept_per_token(shape: ModelShape, layer: Layer, ask: MemoryAsk, *, fused: bool = False) -> int:
    """Bytes that one trained layer keeps of each token for the backward pass. `fused`: attention's kernel makes the
    scores again, as a GPU's can, and none are kept."""
    one = shape.dtype_bytes
    normed = layer.normed + sum(part.normed for part in layer.parts)
    # A norm is computed in float32 and needs its input; when it is trained, the normed values too.
    kept = normed * (_FLOAT32 + (one if ask.fine_tune_type == "full" else 0))
    for part in layer.parts:
        kept += part.held * one + part.held_float32 * _FLOAT32 + _inputs(shape, part, ask)
        if not fused:
            kept += part.scores * min(ask.sequence, part.window or ask.sequence) * one
    return kept


def _worked_per_token(shape: ModelShape, layer: Layer, ask: MemoryAsk) -> int:
    """Bytes that the backward pass of one layer works with for each token."""
    states = sum(part.held_float32 for part in layer.parts) * _FLOAT32
    return kept_per_token(shape, layer, ask) - states


def _inputs(shape: ModelShape, part: Part, ask: MemoryAsk) -> int:
    """Inputs of trained matrices per token: each array once, for a whole matrix's gradient; in 16 bits, each adapter
    makes a float32 copy of its own, since mlx-lm's adapters are float32."""
    one = shape.dtype_bytes
    if ask.fine_tune_type == "full":
        return sum(_sources(part.matrices).values()) * one
    chosen = [matrix for matrix in part.matrices if adapted(matrix, ask)]
    ranks = sum(matrix.active for matrix in chosen) * ask.lora_rank * _FLOAT32
    if ask.fine_tune_type == "dora":
        ranks += sum(matrix.outputs for matrix in chosen) * one
    if one < _FLOAT32:
        return ranks + sum(matrix.inputs * matrix.active for matrix in chosen) * _FLOAT32
    return ranks + sum(_sources(chosen).values()) * _FLOAT32


def _sources(matrices: tuple[Matrix, ...] | list[Matrix]) -> dict[str, int]:
    """Each array that matrices are applied to, with its elements per token."""
    return {matrix.source: matrix.inputs * matrix.active for matrix in matrices}


def _passing(shape: ModelShape, layer: Layer, ask: MemoryAsk) -> int:
    """Float32 outputs of a layer's adapters in 16 bits, which are soon gone."""
    if ask.fine_tune_type == "full" or shape.dtype_bytes == _FLOAT32:
        return 0
    outputs = sum(matrix.outputs * matrix.active for matrix in layer.matrices if adapted(matrix, ask))
    return ask.batch * ask.sequence * outputs * _FLOAT32
