"""Bytes of one training step on one rank, by the arithmetic of the trainer (engine/worker): an estimate, not a fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict

from engine.errors import InputError

from .parts import Layer
from .shape import ModelShape

_FLOAT32 = 4
_BUCKET_BYTES = 64 * 2**20
"""The trainer's gradient buckets (engine/worker/strategies/gradients.py)."""
RESERVE_BYTES = 3 * 2**29
"""What a rank's process holds beside MLX's live arrays: up to 1 GiB of freed buffers that the trainer lets MLX keep,
and half a GiB for Python, the tokenizer and the data."""


@dataclass(frozen=True)
class MemoryAsk:
    """One rank's share of a job."""

    fine_tune_type: Literal["lora", "dora", "full"] = "lora"
    num_layers: int = -1
    """Layers that are trained, from the last one; -1 is all."""
    lora_rank: int = 8
    lora_keys: tuple[str, ...] | None = None
    """Paths of the matrices that get an adapter; None is every matrix of a layer, as in mlx-lm."""
    batch: int = 1
    """Sequences of this rank in one micro-batch."""
    sequence: int = 2048
    """Tokens of each, padded."""
    grad_checkpoint: bool = False
    optimizer: str = "adam"
    optimizer_precision: Literal["float32", "parameter"] = "float32"
    strategy: Literal["data", "sharded", "pipeline"] = "data"
    world_size: int = 1
    layers: tuple[int, int] | None = None
    """A pipeline stage's layers, half-open; None is all of them."""
    accumulation: int = 1
    """Micro-batches of an update: from 2 on, the sums so far wait beside the next gradients."""


class MemoryEstimate(BaseModel):
    """Where a rank's memory goes."""

    model_config = ConfigDict(frozen=True)

    weights_bytes: int
    """As stored, with adapters."""
    gradients_bytes: int
    """Float32, in flat buckets."""
    optimizer_bytes: int
    """Float32 masters of what has 16 bits, and the optimizer's moments."""
    activations_bytes: int
    """What the backward pass waits for, and works with, without the logits."""
    logits_bytes: int
    """The head's output and its loss: several arrays of batch × sequence × vocabulary."""
    communication_bytes: int
    """Sums of the ranks' gradients beside the own ones, or a gathered layer."""
    update_bytes: int
    """What the optimizer's step works with."""
    reserve_bytes: int
    """Of the process, outside MLX's live arrays."""
    trainable_parameters: int
    total_parameters: int
    assumption: str

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and moments: what is there whatever the batch."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        """MLX's own peak: the larger of the backward pass's and the update's."""
        step = self.activations_bytes + self.logits_bytes
        return self.state_bytes + max(step, self.communication_bytes + self.update_bytes)

    @property
    def needed_bytes(self) -> int:
        """The peak and the reserve: what a node must be able to give."""
        return self.peak_bytes + self.reserve_bytes


def estimate(shape: ModelShape, ask: MemoryAsk) -> MemoryEstimate:
    """The memory of one rank. Raises InputError for layers that the model has not."""
    stage = _stage(shape, ask)
    share = ask.world_size if ask.strategy == "sharded" else 1
    trained = _trained(shape, ask, stage)
    adapters = sum(_adapters(layer, ask) for layer in trained) if ask.fine_tune_type != "full" else 0
    trainable = adapters or sum(_unfrozen(shape, layer) for layer in trained)
    in_16_bits = 0 if adapters or shape.dtype_bytes == 4 else trainable
    weights = sum(shape.layer_bytes(shape.skeleton.layers[number]) for number in stage)
    weights += _outer_bytes(shape, stage) + adapters * _FLOAT32
    kept_float32 = ask.optimizer_precision == "float32"
    moment_bytes = _FLOAT32 if kept_float32 or not in_16_bits else shape.dtype_bytes
    moments = int(trainable * _moments(ask.optimizer)) * moment_bytes
    masters = in_16_bits * _FLOAT32 if kept_float32 else 0
    gradients = trainable * _FLOAT32
    several = ask.world_size > 1
    communication = gradients if several and ask.strategy == "data" else 0
    if several and ask.strategy == "sharded":
        communication = max(shape.layer_bytes(shape.skeleton.layers[number]) for number in stage)
    tokens = ask.batch * ask.sequence
    activations = sum(_held(shape, shape.skeleton.layers[number], ask) for number in stage)
    last = stage[-1] == shape.layers - 1
    return MemoryEstimate(
        weights_bytes=weights // share,
        gradients_bytes=gradients // share,
        optimizer_bytes=(masters + moments) // share,
        activations_bytes=activations,
        logits_bytes=tokens * shape.vocabulary * (3 * shape.dtype_bytes) if last else 0,
        communication_bytes=communication,
        update_bytes=2 * gradients // share,
        reserve_bytes=RESERVE_BYTES,
        trainable_parameters=trainable,
        total_parameters=sum(shape.layer_parameters[number] for number in stage) + adapters,
        assumption=_assumption(shape, ask),
    )


def largest_batch(shape: ModelShape, ask: MemoryAsk, limit_bytes: int) -> int | None:
    """The most sequences of a rank that fit `limit_bytes` with the reserve; None when not even one does."""

    def fits(batch: int) -> bool:
        return estimate(shape, replace(ask, batch=batch)).needed_bytes <= limit_bytes

    if not fits(1):
        return None
    low, high = 1, 2
    while high < 2**20 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _stage(shape: ModelShape, ask: MemoryAsk) -> range:
    first, end = ask.layers if ask.layers is not None else (0, shape.layers)
    if not 0 <= first < end <= shape.layers:
        raise InputError(f"layers {first}-{end} are not among the model's {shape.layers}", where="layer_split")
    return range(first, end)


def _trained(shape: ModelShape, ask: MemoryAsk, stage: range) -> Sequence[Layer]:
    begin = 0 if ask.num_layers < 0 else max(0, shape.layers - ask.num_layers)
    return [shape.skeleton.layers[number] for number in stage if number >= begin]


def _adapters(layer: Layer, ask: MemoryAsk) -> int:
    dora = ask.fine_tune_type == "dora"
    keys = ask.lora_keys
    return sum(
        matrix.adapter(ask.lora_rank, dora=dora) for matrix in layer.matrices if keys is None or matrix.name in keys
    )


def _unfrozen(shape: ModelShape, layer: Layer) -> int:
    """Parameters that full fine-tuning trains: a packed matrix stays frozen in MLX, with its bias."""
    packing = shape.quantization
    open_ = [matrix.parameters for matrix in layer.matrices if packing is None or not packing.fits(matrix)]
    return layer.plain + sum(open_)


def _outer_bytes(shape: ModelShape, stage: range) -> int:
    """Embedding on the first stage, head on the last; a tied embedding is on both."""
    first, last = stage[0] == 0, stage[-1] == shape.layers - 1
    embedding = shape.embedding_bytes if first or (last and shape.tied) else 0
    return embedding + (shape.head_bytes if last else 0)


def _moments(optimizer: str) -> float:
    """Arrays of the parameters' size that the optimizer keeps."""
    return {"adam": 2.0, "adamw": 2.0, "muon": 1.0, "sgd": 1.0}.get(optimizer.lower(), 0.0)


def _held(shape: ModelShape, layer: Layer, ask: MemoryAsk) -> int:
    tokens = ask.batch * ask.sequence
    elements = 4 * shape.hidden + sum(part.held for part in layer.parts)
    scores = sum(part.scores * part.copies_of_scores for part in layer.parts) * ask.sequence
    if ask.grad_checkpoint:
        elements, scores = shape.hidden, 0
    return tokens * (elements + scores) * shape.dtype_bytes


def _assumption(shape: ModelShape, ask: MemoryAsk) -> str:
    kept = "float32 masters and moments" if ask.optimizer_precision == "float32" else "moments in the weights' type"
    return f"{ask.fine_tune_type}, {shape.dtype} weights, float32 gradients, {kept}, {ask.optimizer}"
