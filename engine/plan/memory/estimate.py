"""Estimates the memory of one training step on one rank, in bytes, and extrapolates the peak at another batch size from
calibration's probes. Activations are counted for MLX's operations without fused kernels, as its CPU build runs them;
for a Mac's GPU that is an upper bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from engine.errors import InputError
from engine.measurements import MemoryProbe
from engine.plan.document import MemoryBreakdown
from engine.plan.memory.architecture import Layer, Matrix, Sublayer
from engine.plan.memory.shape import ModelShape


@dataclass(frozen=True)
class RankWorkload:
    """One rank's share of a job."""

    fine_tune_type: Literal["lora", "dora", "full"] = "lora"
    num_layers: int = -1
    """Trained layers, counted from the last; -1 means all."""
    lora_rank: int = 8
    lora_keys: tuple[str, ...] | None = None
    """Paths of the matrices that get an adapter; None means every matrix of a trained layer, as in mlx-lm."""
    batch: int = 1
    """Sequences in flight on this rank at once: one micro-batch, or several in a pipeline."""
    sequence: int = 2048
    """Tokens per sequence, padding included."""
    grad_checkpoint: bool = False
    optimizer: str = "adam"
    optimizer_precision: Literal["float32", "parameter"] = "float32"
    strategy: Literal["data", "sharded", "pipeline"] = "data"
    world_size: int = 1
    layers: tuple[int, int] | None = None
    """Layers of a pipeline stage, half-open; None means all of them."""
    accumulation: int = 1
    """Micro-batches per update; with 2 or more, the accumulated gradients stay in memory beside the next ones."""


@dataclass(frozen=True)
class TrainedParameters:
    """The trained parameters, grouped as the optimizer sees them."""

    tables: tuple[tuple[int, int, int], ...]
    """(copies, rows, columns) of each parameter with two or more dimensions."""
    vectors: int
    """Elements of all one-dimensional parameters."""

    @property
    def parameters(self) -> int:
        return self.vectors + sum(copies * rows * columns for copies, rows, columns in self.tables)

    @property
    def rows_and_columns(self) -> int:
        """Elements of a factored second moment (Adafactor)."""
        return self.vectors + sum(copies * (rows + columns) for copies, rows, columns in self.tables)


_FLOAT32_BYTES = 4
_WORKING = 1.0
"""Working memory of a layer's backward pass over what the layer keeps: one gradient for each kept array. Recurrent
states do not count: the backward pass visits them one token at a time and frees each gradient."""
_RECOMPUTED = 2.75
"""The same ratio under gradient checkpointing, which first repeats the layer's forward pass: what the layer keeps, as
much again for the backward pass, and three quarters of the next layer, which MLX starts early. Measured at three model
sizes: 2.75 to 2.80."""
_LOSS_ARRAYS = 6
"""Arrays of tokens × vocabulary alive while the gradient of the loss is computed: logits, logits minus their maximum,
exponentials, softmax, scattered targets, and their sum."""
_WAITING_LOSS_ARRAYS = 2
"""Arrays of those still alive during the layers' backward pass, since the value of the loss is computed last."""


class _Rank:
    """One rank's part of the model and of the job; what does not depend on the batch is computed once. Raises
    InputError for layers that the model does not have."""

    def __init__(self, shape: ModelShape, workload: RankWorkload) -> None:
        first, end = workload.layers if workload.layers is not None else (0, shape.layers)
        if not 0 <= first < end <= shape.layers:
            raise InputError(f"the model has {shape.layers} layers, not {first}-{end}", where="layer_split")
        self.shape, self.workload = shape, workload
        self.full = workload.fine_tune_type == "full"
        self.is_last = end == shape.layers
        self.layers = shape.architecture.layers[first:end]
        # mlx-lm trains the model's last layers.
        first_trained = 0 if workload.num_layers < 0 else max(0, shape.layers - workload.num_layers)
        self.trained_layers = self.layers[max(first_trained - first, 0) :]
        self.embedding_and_head: list[Matrix] = []
        """The embedding on the first stage, the head on the last; a tied matrix is on both."""
        if first == 0 or (self.is_last and shape.tied):
            self.embedding_and_head.append(shape.architecture.embedding)
        if self.is_last and shape.architecture.head is not None:
            self.embedding_and_head.append(shape.architecture.head)

    @cached_property
    def trained(self) -> TrainedParameters:
        """Raises InputError for full fine-tuning of quantized weights."""
        if self.full and self.shape.quantization is not None:
            raise InputError(
                "a quantized model cannot be fully fine-tuned",
                where="[job] fine_tune_type",
                why="MLX has no gradients for quantized weights",
                todo='use fine_tune_type = "lora", or the unquantized model',
            )
        matrices = [matrix for layer in self.trained_layers for matrix in layer.matrices]
        if self.full:
            tables = tuple((matrix.copies, matrix.outputs, matrix.inputs) for matrix in matrices)
            unquantized = sum(layer.unquantized for layer in self.trained_layers)
            return TrainedParameters(tables, unquantized + sum(matrix.biases for matrix in matrices))
        if self.workload.lora_keys is not None:
            matrices += self.embedding_and_head
        chosen, rank = _adapted(matrices, self.workload), self.workload.lora_rank
        pairs = tuple(
            table
            for matrix in chosen
            for table in ((matrix.copies, matrix.inputs, rank), (matrix.copies, rank, matrix.outputs))
        )
        magnitudes = sum(matrix.outputs for matrix in chosen) if self.workload.fine_tune_type == "dora" else 0
        return TrainedParameters(pairs, magnitudes)

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights as stored, adapters included."""
        stored = sum(map(self.shape.layer_bytes, self.layers))
        stored += sum(map(self.shape.matrix_bytes, self.embedding_and_head))
        if self.is_last:
            stored += self.shape.architecture.last_norm * self.shape.dtype_bytes
        # mlx-lm's adapters are float32, whatever the model's type.
        return stored if self.full else stored + self.trained.parameters * _FLOAT32_BYTES

    @cached_property
    def optimizer_state(self) -> int:
        """Bytes of float32 masters, and of moments: first and second, a momentum, or factored second ones."""
        trained = self.trained
        in_16_bits = self.full and self.shape.dtype_bytes < _FLOAT32_BYTES
        in_float32 = self.workload.optimizer_precision == "float32"
        masters = trained.parameters * _FLOAT32_BYTES if in_16_bits and in_float32 else 0
        name = self.workload.optimizer
        moments = trained.parameters * (2 if name in ("adam", "adamw") else 1)
        if name == "adafactor":
            moments = trained.rows_and_columns
        return masters + moments * (self.shape.dtype_bytes if in_16_bits and not in_float32 else _FLOAT32_BYTES)

    @cached_property
    def largest_gathered_layer(self) -> int:
        """Bytes of the largest layer fully gathered: its weights, and its gradient before the scatter."""
        frozen = len(self.layers) - len(self.trained_layers)
        return max(
            self.shape.layer_bytes(layer) + (layer.parameters * _FLOAT32_BYTES if self.full and number >= frozen else 0)
            for number, layer in enumerate(self.layers)
        )

    @cached_property
    def _kept(self) -> list[tuple[int, int, int]]:
        """Bytes per token of each trained layer: all that it keeps, its recurrent states, its adapters' outputs."""
        return [
            (
                kept_per_token(self.shape, layer, self.workload),
                sum(sublayer.kept_float32 for sublayer in layer.sublayers) * _FLOAT32_BYTES,
                self._adapter_outputs(layer),
            )
            for layer in self.trained_layers
        ]

    def activations(self, batch: int) -> tuple[int, int]:
        """Bytes (of the layers: kept by all of them, plus the working memory of the largest; added by the head and the
        loss at the peak, whichever of the two moments is larger). Layers before the first trained one keep nothing."""
        shape, kept = self.shape, self._kept
        tokens = batch * self.workload.sequence
        one = shape.dtype_bytes
        most = tokens * max((whole - states for whole, states, _ in kept), default=0)
        if self.workload.grad_checkpoint:
            held = len(kept) * tokens * shape.hidden * one
            largest = tokens * max((whole for whole, _, _ in kept), default=0)
            transient = tokens * max((outputs for _, _, outputs in kept), default=0)
            working = int((_RECOMPUTED - _WORKING) * largest + _WORKING * most) + transient
        else:
            held, working = tokens * sum(whole for whole, _, _ in kept), int(_WORKING * most)
        if not self.is_last:
            return held + working, 0
        last_norm = tokens * shape.hidden * (_FLOAT32_BYTES + 2 * one)
        vocabulary = tokens * shape.vocabulary * one
        backward = working + _WAITING_LOSS_ARRAYS * vocabulary
        loss = _LOSS_ARRAYS * vocabulary
        return held + working, last_norm + max(backward, loss) - working

    def _adapter_outputs(self, layer: Layer) -> int:
        """Short-lived float32 outputs of a 16-bit layer's adapters, bytes per token."""
        if self.full or self.shape.dtype_bytes == _FLOAT32_BYTES:
            return 0
        chosen = _adapted(layer.matrices, self.workload)
        return sum(matrix.outputs * matrix.active for matrix in chosen) * _FLOAT32_BYTES


def kept_per_token(shape: ModelShape, layer: Layer, workload: RankWorkload) -> int:
    """Bytes per token that one trained layer keeps for the backward pass."""
    one = shape.dtype_bytes
    normed = layer.normed + sum(sublayer.normed for sublayer in layer.sublayers)
    # A norm is computed in float32 and needs its input; a trained norm needs its output too.
    kept = normed * (_FLOAT32_BYTES + (one if workload.fine_tune_type == "full" else 0))
    for sublayer in layer.sublayers:
        kept += sublayer.kept * one + sublayer.kept_float32 * _FLOAT32_BYTES + _inputs(sublayer, workload, one)
        kept += sublayer.scores * min(workload.sequence, sublayer.window or workload.sequence) * one
    return kept


def _inputs(sublayer: Sublayer, workload: RankWorkload, one: int) -> int:
    """Bytes per token of the inputs of trained matrices; `one` is the size of an activation. Full fine-tuning keeps
    each shared array once; with 16-bit weights each adapter makes its own float32 copy, since mlx-lm's adapters are
    float32."""
    if workload.fine_tune_type == "full":
        return _sources(sublayer.matrices) * one
    chosen = _adapted(sublayer.matrices, workload)
    ranks = sum(matrix.active for matrix in chosen) * workload.lora_rank * _FLOAT32_BYTES
    if workload.fine_tune_type == "dora":
        ranks += sum(matrix.outputs for matrix in chosen) * one
    if one < _FLOAT32_BYTES:
        return ranks + sum(matrix.inputs * matrix.active for matrix in chosen) * _FLOAT32_BYTES
    return ranks + _sources(chosen) * _FLOAT32_BYTES


def _adapted(matrices: Sequence[Matrix], workload: RankWorkload) -> list[Matrix]:
    return [matrix for matrix in matrices if workload.lora_keys is None or matrix.name in workload.lora_keys]


def _sources(matrices: Sequence[Matrix]) -> int:
    """Elements per token of the arrays that the matrices multiply, shared ones once."""
    return sum({matrix.source: matrix.inputs * matrix.active for matrix in matrices}.values())


_UPDATE_COPIES = 2
"""Working memory of the optimizer's step, in multiples of the gradients: the mean gradients sliced out of the flat
buckets, and as much again of new moments and weights before the old ones are freed."""
MOST_SEQUENCES = 2**20
"""Upper limit of the search for the largest batch."""
RESERVE_BYTES = 3 * 2**29
"""Memory of a rank's process beyond MLX's live arrays: up to 1 GiB of freed buffers that the trainer lets MLX cache,
and half a GiB for Python, the tokenizer and the data."""


class MemoryEstimate(MemoryBreakdown):
    before_bytes: int
    """Weights, optimizer state, and the gradients alive at the peak of the activations."""
    trainable_parameters: int
    assumption: str

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state, which do not depend on the batch."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def estimate(shape: ModelShape, workload: RankWorkload) -> MemoryEstimate:
    """Raises InputError for layers that the model does not have, and for what MLX cannot train."""
    return _estimate(_Rank(shape, workload), workload.batch)


def _estimate(rank: _Rank, batch: int) -> MemoryEstimate:
    workload = rank.workload
    share = max(1, workload.world_size) if workload.strategy == "sharded" else 1
    state = (rank.weights, rank.trained.parameters * _FLOAT32_BYTES, rank.optimizer_state)
    weights, gradients, optimizer = (-(-each // share) for each in state)
    activations, logits = rank.activations(batch)
    gathered = rank.largest_gathered_layer if share > 1 else 0
    summed = gradients if workload.strategy == "data" and workload.world_size > 1 else 0
    update = _UPDATE_COPIES * gradients
    # When the backward pass starts there are no gradients of this micro-batch yet. With checkpointing every layer needs
    # the same working memory, so the peak comes later: measured when half of the gradients exist.
    waiting = gradients * (workload.accumulation > 1) + gradients // 2 * workload.grad_checkpoint
    before = weights + optimizer + waiting
    backward = before + activations + logits + gathered
    return MemoryEstimate(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        logits_bytes=logits,
        communication_bytes=summed + gathered,
        update_bytes=update,
        before_bytes=before,
        peak_bytes=max(backward, weights + optimizer + gradients + summed + update),
        reserve_bytes=RESERVE_BYTES,
        trainable_parameters=rank.trained.parameters,
        assumption=_assumption(rank.shape, workload),
    )


def largest_batch(shape: ModelShape, workload: RankWorkload, limit_bytes: int) -> int:
    """Most sequences of a rank that fit `limit_bytes`, reserve included; 0 when not even one fits."""
    rank = _Rank(shape, workload)

    def needed(batch: int) -> int:
        return _estimate(rank, batch).needed_bytes

    return bisect_right(range(1, MOST_SEQUENCES + 1), limit_bytes, key=needed)


def _assumption(shape: ModelShape, workload: RankWorkload) -> str:
    packing = shape.quantization
    stored = f"{packing.bits}-bit" if packing else shape.dtype
    kept = (
        "float32 masters and moments" if workload.optimizer_precision == "float32" else "moments in the weights' type"
    )
    worked = "gradient checkpointing" if workload.grad_checkpoint else "all activations kept"
    return (
        f"{workload.fine_tune_type}, {stored} weights, float32 gradients, {workload.optimizer} with {kept}, {worked}, "
        "operations not fused"
    )


def peak_from_probes(probes: Sequence[MemoryProbe], batch: int, before_bytes: int) -> int | None:
    """The peak at `batch` sequences, bytes, on the line from `before_bytes` (MemoryEstimate.before_bytes) at batch 0
    through the largest probed batch, and never below the smallest peak: at batch 1 or 2 of full fine-tuning the peak
    may be the optimizer's step, which is not on the activations' line. None with fewer than two different batches."""
    if len({probe.batch for probe in probes}) < 2:
        return None
    low, *_, high = sorted(probes, key=lambda probe: probe.batch)
    slope = max(0.0, (high.peak_bytes - before_bytes) / high.batch)
    return max(low.peak_bytes, round(high.peak_bytes + slope * (batch - high.batch)))
