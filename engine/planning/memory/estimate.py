"""Bytes of one training step on one rank, by the arithmetic of the trainer (engine/worker): an estimate, not a fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict

from engine.errors import InputError

from .activations import activations
from .ask import MemoryAsk
from .shape import ModelShape
from .trained import Trained, outer, trained, trained_layers

__all__ = ["MOST_SEQUENCES", "RESERVE_BYTES", "MemoryAsk", "MemoryEstimate", "estimate", "largest_batch"]

_FLOAT32 = 4
_UPDATE_COPIES = 2
"""Gradients' sizes that the optimizer's step works with: the mean gradients, cut out of the sums, and as much again of
new moments and weights before the old ones are gone."""
MOST_SEQUENCES = 2**20
"""More are never asked for: where this many fit, this is the answer."""
RESERVE_BYTES = 3 * 2**29
"""What a rank's process holds beside MLX's live arrays: up to 1 GiB of freed buffers that the trainer lets MLX keep,
and half a GiB for Python, the tokenizer and the data."""


class MemoryEstimate(BaseModel):
    """Where a rank's memory goes."""

    model_config = ConfigDict(frozen=True)

    weights_bytes: int
    """As stored, with adapters."""
    gradients_bytes: int
    """Sums of float32, in flat buckets."""
    optimizer_bytes: int
    """Float32 masters of what has 16 bits, and the optimizer's moments."""
    activations_bytes: int
    """What the backward pass waits for, and works with, without the logits."""
    logits_bytes: int
    """The head's output and its loss: several arrays of batch × sequence × vocabulary."""
    communication_bytes: int
    """Sums over the ranks beside the own ones (data), or one layer gathered whole (sharded)."""
    update_bytes: int
    """What the optimizer's step works with."""
    before_bytes: int
    """Weights, optimizer, and those gradients that wait while the activations are at their most."""
    peak_bytes: int
    """MLX's own peak: the larger of the backward pass's and the update's, each with the state that is there then."""
    reserve_bytes: int
    """Of the process, outside MLX's live arrays."""
    trainable_parameters: int
    total_parameters: int
    """Of this rank's layers, with adapters; not divided where they are sharded."""
    assumption: str

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and moments: what is there whatever the batch."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def needed_bytes(self) -> int:
        """The peak and the reserve: what a node must be able to give."""
        return self.peak_bytes + self.reserve_bytes


@dataclass(frozen=True)
class _State:
    """One rank's before it is sharded, bytes."""

    weights: int
    gradients: int
    optimizer: int


def estimate(shape: ModelShape, ask: MemoryAsk) -> MemoryEstimate:
    """The memory of one rank. Raises InputError for layers that the model has not, and for what MLX cannot train."""
    stage = _stage(shape, ask)
    learned = trained(shape, ask, stage)
    state = _state(shape, ask, stage, learned)
    share = max(1, ask.world_size) if ask.strategy == "sharded" else 1
    weights, gradients, optimizer = (-(-each // share) for each in (state.weights, state.gradients, state.optimizer))
    worked = activations(shape, ask, stage)
    gathered = _gathered(shape, ask, stage) if share > 1 else 0
    summed = gradients if ask.strategy == "data" and ask.world_size > 1 else 0
    update = _UPDATE_COPIES * gradients
    # When the backward pass begins there is no gradient of this micro-batch yet. Checkpointing works with as much at
    # each layer: its highest moment comes on the way, measured at half of the gradients.
    waiting = gradients * (ask.accumulation > 1) + gradients // 2 * ask.grad_checkpoint
    before = weights + optimizer + waiting
    backward = before + worked.layers + worked.logits + gathered
    return MemoryEstimate(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=worked.layers,
        logits_bytes=worked.logits,
        communication_bytes=summed + gathered,
        update_bytes=update,
        before_bytes=before,
        peak_bytes=max(backward, weights + optimizer + gradients + summed + update),
        reserve_bytes=RESERVE_BYTES,
        trainable_parameters=learned.parameters,
        total_parameters=_parameters(shape, stage) + (0 if ask.fine_tune_type == "full" else learned.parameters),
        assumption=_assumption(shape, ask),
    )


def largest_batch(shape: ModelShape, ask: MemoryAsk, limit_bytes: int) -> int | None:
    """The most sequences of a rank that fit `limit_bytes` with the reserve; None when not even one does."""

    def fits(batch: int) -> bool:
        return estimate(shape, replace(ask, batch=batch)).needed_bytes <= limit_bytes

    if not fits(1):
        return None
    low, high = 1, 2
    while high <= MOST_SEQUENCES and fits(high):
        low, high = high, 2 * high
    high = min(high, MOST_SEQUENCES + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _stage(shape: ModelShape, ask: MemoryAsk) -> range:
    first, end = ask.layers if ask.layers is not None else (0, shape.layers)
    if not 0 <= first < end <= shape.layers:
        raise InputError(f"layers {first}-{end} are not among the model's {shape.layers}", where="layer_split")
    return range(first, end)


def _state(shape: ModelShape, ask: MemoryAsk, stage: range, learned: Trained) -> _State:
    count = learned.parameters
    whole = ask.fine_tune_type == "full"
    weights = sum(shape.layer_bytes(shape.skeleton.layers[number]) for number in stage)
    weights += sum(map(shape.matrix_bytes, outer(shape, stage)))
    if stage.stop == shape.layers:
        weights += shape.skeleton.last_norm * shape.dtype_bytes
    if not whole:
        # mlx-lm's adapters are float32, whatever the model's type.
        weights += count * _FLOAT32
    in_16_bits = whole and shape.dtype_bytes < _FLOAT32
    kept = ask.optimizer_precision == "float32"
    masters = count * _FLOAT32 if in_16_bits and kept else 0
    moment_bytes = shape.dtype_bytes if in_16_bits and not kept else _FLOAT32
    return _State(weights, count * _FLOAT32, masters + _moments(ask.optimizer, learned) * moment_bytes)


def _moments(optimizer: str, learned: Trained) -> int:
    """Elements that the optimizer keeps: first and second moments, a momentum, or factored second moments."""
    name = optimizer.lower()
    if name == "adafactor":
        return learned.rows_and_columns
    return learned.parameters * (2 if name in ("adam", "adamw") else 1)


def _gathered(shape: ModelShape, ask: MemoryAsk, stage: range) -> int:
    """The largest layer whole: its weights, and its gradient before that is divided."""
    learned = trained_layers(shape, ask, stage)
    whole = ask.fine_tune_type == "full"
    return max(
        shape.layer_bytes(layer) + (layer.parameters * _FLOAT32 if whole and number in learned else 0)
        for number, layer in ((number, shape.skeleton.layers[number]) for number in stage)
    )


def _parameters(shape: ModelShape, stage: range) -> int:
    last_norm = shape.skeleton.last_norm if stage.stop == shape.layers else 0
    around = sum(matrix.parameters for matrix in outer(shape, stage)) + last_norm
    return around + sum(shape.layer_parameters[number] for number in stage)


def _assumption(shape: ModelShape, ask: MemoryAsk) -> str:
    packing = shape.quantization
    stored = f"{packing.bits}-bit" if packing else shape.dtype
    kept = "float32 masters and moments" if ask.optimizer_precision == "float32" else "moments in the weights' type"
    worked = "gradient checkpointing" if ask.grad_checkpoint else "all activations kept"
    return (
        f"{ask.fine_tune_type}, {stored} weights, float32 gradients, {ask.optimizer} with {kept}, {worked}, "
        "operations not fused"
    )
