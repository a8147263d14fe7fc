"""Estimates the memory of one training step on one rank, in bytes, and extrapolates the peak at another batch size from
calibration's probes. Activations are counted for MLX's operations without fused kernels, as its CPU build runs them,
but for attention on a Mac's GPU; there the rest is an upper bound.

The peak is the largest of four moments, each with the weights, the optimizer's state and the gradients alive by then:
the gradient of the loss, the backward pass of the layers that keep their activations, that of the recomputed layers,
and the update. Gradients live as in engine.trainer: one rank applies each as it is computed, unless it clips or
accumulates; several ranks keep the sums of all of them until the last has arrived, but not with strategy "local", whose
ranks update as one alone."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Literal

from engine.config.models import FineTuneType
from engine.errors import InputError
from engine.job.traits import PARTITIONED
from engine.measurements import MemoryProbe
from engine.plan.document import MemoryBreakdown
from engine.plan.memory.architecture import Layer, Matrix, Sublayer
from engine.plan.memory.shape import ModelShape
from engine.protocol.exchange import AVERAGING_PIECE, averaging, bucket_elements, exchange
from engine.protocol.job import ELEMENTWISE, Strategy, is_plain, state_bytes, update_elements
from engine.protocol.partition import Fusing, fuses_attention, loss_tokens


@dataclass(frozen=True)
class Workload:
    """One rank's share of a job, whichever framework trains it."""

    fine_tune_type: FineTuneType = "lora"
    num_layers: int = -1
    """Trained layers, counted from the last; -1 means all."""
    lora_rank: int = 8
    lora_keys: tuple[str, ...] | None = None
    """Paths of the matrices that get an adapter; None means every matrix of a trained layer, as in mlx-lm."""
    batch: int = 1
    """Sequences in flight on this rank at once: one micro-batch, or several in a pipeline."""
    sequence: int = 2048
    """Tokens per sequence, padding included."""
    accumulation: int = 1
    """Micro-batches per update; with 2 or more, the accumulated gradients stay in memory beside the next ones."""
    world_size: int = 1


@dataclass(frozen=True)
class RankWorkload(Workload):
    """That of an MLX job."""

    grad_checkpoint: bool | int = False
    """Trained layers of this rank that are recomputed in the backward pass, counted from the first; true means all."""
    sequence_tiling: int = 0
    """Tokens of each sequence that attention and MLPs compute at a time; 0 means all."""
    optimizer: str = "adam"
    optimizer_precision: str = "float32"
    """One of engine.protocol.job.OPTIMIZER_PRECISIONS."""
    moments: str = "float32"
    """One of engine.protocol.job.MOMENTS."""
    clipping: bool = False
    """The norm of all gradients is needed before the first is applied."""
    wire: str = "auto"
    """How strategy data sends gradients, and local changes of weights: "auto", "float32" or "int8"."""
    outer_momentum: bool = True
    """Strategy local keeps the momentum of the averaged changes."""
    strategy: Strategy = "data"
    layers: tuple[int, int] | None = None
    """Layers of a pipeline stage, half-open; None means all of them."""
    fused_attention: Fusing = ""
    """Where it can."""
    forward: Literal["", "measure", "generate"] = ""
    """It trains no layer (`num_layers` is 0), and computes one after the other; to generate, it keeps keys and values,
    which are at most as wide as the model."""
    weight_share: float = 1.0
    """The part of its layers' bytes that it has, where those who generate divide them by their memory."""


@dataclass(frozen=True)
class TrainedParameters:
    """The trained parameters, grouped as the optimizer sees them."""

    tables: tuple[tuple[int, int, int], ...]
    """(copies, rows, columns) of each parameter with two or more dimensions."""
    vectors: int
    """Elements of all one-dimensional parameters."""

    @cached_property
    def _sizes(self) -> list[int]:
        return [copies * rows * columns for copies, rows, columns in self.tables]

    @cached_property
    def parameters(self) -> int:
        return self.vectors + sum(self._sizes)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(self._sizes, default=0)

    def piece(self, room: int) -> int:
        """Elements of a piece of whole parameters with `room` for so many, but at least the largest parameter."""
        return min(self.parameters, max(room, self.largest))

    @property
    def rows_and_columns(self) -> int:
        """Elements of a factored second moment (Adafactor)."""
        return self.vectors + sum(copies * (rows + columns) for copies, rows, columns in self.tables)


@dataclass(frozen=True)
class Activations:
    """Bytes of a micro-batch's activations at the moments that may be the peak."""

    held: int
    """Kept by all layers when the backward pass begins."""
    inputs: int
    """Kept by the recomputed layers alone."""
    working: int
    """Working memory of the backward pass of a layer that kept its activations."""
    recomputing: int
    """The same of a recomputed layer: its activations again, and what their backward pass needs."""
    loss: int
    """Working memory of the gradient of the loss."""
    waiting: int
    """The part of it that is alive during the layers' backward pass."""


FLOAT32_BYTES = 4
_WORKING_WIDTHS = 3
"""Arrays of the layer's width alive in its backward pass beside those of its sublayers."""
_RECOMPUTED, _RECOMPUTED_AT_ONCE = 2.4, 3.6
"""Working memory of a recomputed layer over what it keeps, since it first repeats its forward pass: that, and about as
much again for the backward pass. More where the gradients of several layers are evaluated at once, since MLX then
starts the next ones early: in a pipeline. Measured: 2.2 to 2.7, and 3.6."""
_TILED_SCORES, _TILED_MLP, _TILED_SUMS = 6.0, 3.5, 3
"""Arrays of one tile's scores; working memory of an MLP's tile over what it would keep in full fine-tuning; float32
arrays of its trained parameters, for the sums of their gradients. Measured: MLX allocates the next tiles' while it
computes one."""
_TILE_TOKENS, _TILE_ARRAYS = 1024, 5
"""Queries and keys of one tile, and its arrays: scores, their gradient, both transposed (sdpa_vjp_blocked)."""
_TILE_SUMS = 3
"""Float32 arrays of a tile's heads: parts of the gradients of queries, keys and values; and one in their type."""
_LOSS_ARRAYS = 3
"""Arrays of tokens × vocabulary alive while the gradient of the loss, whose value is known, is computed: logits,
softmax, and its difference from the targets."""
_WAITING_LOSS_ARRAYS = 0
"""Arrays of those still alive during the layers' backward pass."""
_UPDATE_ARRAYS = {"parameter": 5, "float32": 7, "kahan": 12, "stochastic": 12}
_MOMENT_ARRAYS = {"float32": 0, "bfloat16": 18, "8bit": 22}
"""Float32 arrays of a parameter alive at once, gradient included: the larger of the optimizer_precision's and the
moments'. Measured with AdamW on one parameter, without mx.compile, with which there are 3, 3, 7, 12 and 15."""
_WAITING_ARRAYS = 2
"""The same of the other parameters of the piece."""
_AVERAGING_COPIES = 4
"""Encoded copies of a piece alive at once in an averaging on rank 0, beside the one of each rank."""
_AVERAGING_ARRAYS = 5
"""The same of float32 arrays: a parameter's weight, the last averaged one, their difference, its code, the result."""
_REST_BYTES = 2
"""The rest of an element that int8 has rounded away, in bfloat16."""


class Rank:
    """One rank's part of the model and of the job, whichever framework trains it; what does not depend on the batch is
    computed once. Raises InputError for layers that the model does not have."""

    def __init__(self, shape: ModelShape, workload: Workload, layers: tuple[int, int] | None = None) -> None:
        first, end = layers if layers is not None else (0, shape.layers)
        if not 0 <= first < end <= shape.layers:
            raise InputError(f"the model has {shape.layers} layers, not {first}-{end}", where="layer_split")
        self.shape, self.workload = shape, workload
        self.full = workload.fine_tune_type == "full"
        self.is_last = end == shape.layers
        self.layers, self.layer_bytes = shape.architecture.layers[first:end], shape.layer_bytes[first:end]
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
            why, todo = (
                "MLX has no gradients for quantized weights",
                'use fine_tune_type = "lora", or the unquantized model',
            )
            what = "a quantized model cannot be fully fine-tuned"
            raise InputError(what, where="[job] fine_tune_type", why=why, todo=todo)
        matrices = [matrix for layer in self.trained_layers for matrix in layer.matrices]
        if self.full:
            tables = tuple((matrix.copies, matrix.outputs, matrix.inputs) for matrix in matrices)
            unquantized = sum(layer.unquantized for layer in self.trained_layers)
            return TrainedParameters(tables, unquantized + sum(matrix.biases for matrix in matrices))
        if self.workload.lora_keys is not None:
            matrices += self.embedding_and_head
        chosen, rank = adapted(matrices, self.workload), self.workload.lora_rank
        pairs = tuple(
            table
            for matrix in chosen
            for table in ((matrix.copies, matrix.inputs, rank), (matrix.copies, rank, matrix.outputs))
        )
        magnitudes = sum(matrix.outputs for matrix in chosen) if self.workload.fine_tune_type == "dora" else 0
        return TrainedParameters(pairs, magnitudes)


class _Rank(Rank):
    workload: RankWorkload

    def __init__(self, shape: ModelShape, workload: RankWorkload) -> None:
        super().__init__(shape, workload, workload.layers)
        whole = workload.grad_checkpoint is True or workload.strategy == "sharded"
        count = len(self.trained_layers)
        self.recomputed = count if whole else min(workload.grad_checkpoint, count)
        """The first so many of `trained_layers`."""

    @property
    def element_bytes(self) -> int:
        """Bytes of a trained weight, and of its gradient: mlx-lm's adapters are float32, whatever the model's type."""
        return self.shape.dtype_bytes if self.full else FLOAT32_BYTES

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights as stored, adapters included."""
        stored = sum(self.layer_bytes)
        stored += sum(map(self.shape.matrix_bytes, self.embedding_and_head))
        if self.is_last:
            stored += self.shape.architecture.last_norm * self.shape.dtype_bytes
        stored = stored if self.full else stored + self.trained.parameters * FLOAT32_BYTES
        return round(stored * self.workload.weight_share)

    @property
    def _state_bytes(self) -> float:
        """Bytes of the optimizer's state per trained element, without factored moments."""
        workload = self.workload
        moments = {"adam": 2, "adamw": 2, "adafactor": 0}.get(workload.optimizer, 1)
        return state_bytes(workload.optimizer_precision, workload.moments, self.element_bytes, moments)

    @cached_property
    def optimizer_state(self) -> int:
        """Bytes of masters or compensation, and of moments: first and second, a momentum, or factored second ones; of
        what the exchange in int8 has rounded away, in bfloat16; and of the last averaged weights and their momentum."""
        trained, workload = self.trained, self.workload
        state = round(trained.parameters * self._state_bytes)
        if workload.optimizer == "adafactor":
            # Its moments are never in 16 bits or less: they are small.
            in_own_type = workload.optimizer_precision == "parameter"
            state += trained.rows_and_columns * (self.element_bytes if in_own_type else FLOAT32_BYTES)
        if workload.strategy == "local":
            precise = workload.optimizer_precision in ("float32", "kahan")
            copies = 2 if workload.outer_momentum else 1
            return state + trained.parameters * copies * (FLOAT32_BYTES if precise else self.element_bytes)
        return state + (trained.parameters * _REST_BYTES if self.exchanges and workload.wire == "int8" else 0)

    @property
    def exchanges(self) -> bool:
        """Its gradients are summed with those of other ranks' copies."""
        return self.workload.strategy == "data" and self.workload.world_size > 1

    @property
    def share(self) -> int:
        """Ranks that the tensors are divided over."""
        return max(1, self.workload.world_size) if self.workload.strategy == "sharded" else 1

    @cached_property
    def gradients(self) -> int:
        """Bytes of the gradients alive at once before the update: float32 where several were added, but bfloat16 where
        the step rounds the ranks' sums to it; all in their own type where only their norm is missing; none where each
        is applied as it is computed."""
        workload, trained = self.workload, self.trained.parameters
        in_own_type = (workload.optimizer_precision, workload.moments) == ("parameter", "float32")
        if self.exchanges or self.share > 1 or workload.accumulation > 1:
            rounded = workload.accumulation == 1 and in_own_type and self.shape.dtype == "bfloat16"
            return -(-trained * (self.element_bytes if rounded else FLOAT32_BYTES) // self.share)
        return trained * self.element_bytes if workload.strategy in PARTITIONED or workload.clipping else 0

    @cached_property
    def update(self) -> int:
        """Working memory of the update."""
        trained, workload = self.trained, self.workload
        room = update_elements(trained.parameters // self.share)
        arrays = max(_UPDATE_ARRAYS[workload.optimizer_precision], _MOMENT_ARRAYS[workload.moments])
        alone = workload.strategy == "data" and workload.world_size == 1 and workload.accumulation == 1
        # On a GPU.
        whole_step = alone and is_plain(workload.optimizer_precision, workload.moments)
        if workload.optimizer in ELEMENTWISE and trained.largest > room and not whole_step:
            # Its gradient, if all are not there anyway, and its new state beside the old one; what is computed of it.
            beside = self._state_bytes + self.element_bytes * (1 if self.gradients else 2)
            return math.ceil(trained.largest * beside) + room * arrays * FLOAT32_BYTES
        others = trained.piece(room) - trained.largest
        return (trained.largest * arrays + others * _WAITING_ARRAYS) * FLOAT32_BYTES

    @cached_property
    def communication(self) -> int:
        """Buffers of the exchange, bytes. data: two buckets, one computed while the other is sent, all ranks' of it,
        and its sum. sharded: the section that is computed and the next one, gathered whole, and one section's gradients
        with their sums. local, on rank 0, which needs the most: the encoded means of all parameters, all ranks' changes
        of a piece, and of the largest parameter decoded."""
        workload, element_bytes = self.workload, self.element_bytes
        if workload.strategy == "local":
            trained, ranks = self.trained, workload.world_size
            piece = trained.piece(AVERAGING_PIECE)
            encoded = trained.parameters + piece * (ranks + _AVERAGING_COPIES)
            arrays = trained.largest * (ranks + _AVERAGING_ARRAYS)
            return math.ceil(encoded * averaging(workload.wire, ranks).element_bytes) + arrays * FLOAT32_BYTES
        if self.exchanges:
            bucket = self.trained.piece(bucket_elements(self.trained.parameters))
            form = exchange(workload.wire, workload.world_size, element_bytes, workload.accumulation)
            computed = element_bytes if workload.accumulation == 1 else FLOAT32_BYTES
            return round(bucket * (2 * computed + form.received + 2 * FLOAT32_BYTES))
        if self.share == 1:
            return 0
        ends = [self.shape.matrix_bytes(matrix) for matrix in self.embedding_and_head]
        sections = [*ends[:1], *self.layer_bytes, *ends[-1:]]
        gathered = max(here + following for here, following in pairwise(sections))
        frozen = len(self.layers) - len(self.trained_layers)
        reduced = max((layer.parameters for layer in self.layers[frozen:]), default=0) if self.full else 0
        return gathered + reduced * (element_bytes + FLOAT32_BYTES)

    @cached_property
    def _kept(self) -> list[tuple[int, int, float, int, float]]:
        """Bytes per token of each trained layer: all that it keeps, its recurrent states, its adapters' outputs with
        the tiles, its largest scores, and the working memory of its backward pass."""
        # Most layers of a model are one object.
        by_layer = {
            key: (
                kept_per_token(self.shape, layer, self.workload),
                sum(sublayer.kept_float32 for sublayer in layer.sublayers) * FLOAT32_BYTES,
                self._adapter_outputs(layer)
                + _fused_per_token(self.shape, layer, self.workload)
                + _tile_per_token(self.shape, layer, self.workload),
                max(_scores(part, self.workload, self.shape.dtype_bytes) for part in layer.sublayers),
                working_per_token(self.shape, layer, self.workload),
            )
            for key, layer in {id(layer): layer for layer in self.trained_layers}.items()
        }
        return [by_layer[id(layer)] for layer in self.trained_layers]

    def activations(self, batch: int) -> Activations:
        """Layers before the first trained one keep nothing."""
        shape, kept, recomputed = self.shape, self._kept, self.recomputed
        tokens = batch * self.workload.sequence
        one = shape.dtype_bytes
        inputs = recomputed * tokens * shape.hidden * one
        most = max((working for *_, working in kept[recomputed:]), default=0)
        ratio = _RECOMPUTED_AT_ONCE if self.workload.strategy == "pipeline" else _RECOMPUTED
        # The backward pass visits states one token at a time, and frees each one's gradient.
        again = (
            max(ratio * whole, whole + _RECOMPUTED * scores) - states + outputs
            for whole, states, outputs, scores, _ in kept[:recomputed]
        )
        recomputing = max(again, default=0)
        held = inputs + tokens * sum(whole for whole, *_ in kept[recomputed:])
        if self.workload.forward:
            held = tokens * max(kept_per_token(shape, layer, self.workload) for layer in set(self.layers))
        if self.workload.forward == "generate":
            held += round(tokens * 2 * shape.hidden * one * len(self.layers) * self.workload.weight_share)
        loss = waiting = 0
        if self.is_last:
            counted = loss_tokens(tokens, shape.vocabulary)
            last_norm = tokens * shape.hidden * (FLOAT32_BYTES + 2 * one)
            hidden = tokens * shape.hidden * one if counted < tokens else 0
            logits = counted * shape.vocabulary * one
            loss = last_norm + _LOSS_ARRAYS * logits + hidden
            waiting = last_norm + (hidden or _WAITING_LOSS_ARRAYS * logits)
        masks, sums = self._masks(), self._tile_sums()
        working, recomputing = int(tokens * most) + sums, int(tokens * recomputing) + sums
        return Activations(held + masks, inputs + masks, working, recomputing, loss, waiting)

    def _adapter_outputs(self, layer: Layer) -> int:
        """Short-lived float32 outputs of a 16-bit layer's adapters, bytes per token."""
        if self.full or self.shape.dtype_bytes == FLOAT32_BYTES:
            return 0
        one = self.shape.dtype_bytes
        whole = [part for part in layer.sublayers if not (part.by_token and is_tiled(part, self.workload, one))]
        chosen = adapted([matrix for sublayer in whole for matrix in sublayer.matrices], self.workload)
        return sum(matrix.outputs * matrix.active for matrix in chosen) * FLOAT32_BYTES

    def _tile_sums(self) -> int:
        """Bytes of the sums of gradients of a tiled MLP's parameters, where all are trained."""
        one = self.shape.dtype_bytes
        tiled = (
            sum(matrix.parameters for matrix in sublayer.matrices)
            for layer in {id(layer): layer for layer in self.trained_layers}.values()
            for sublayer in layer.sublayers
            if self.full and sublayer.by_token and is_tiled(sublayer, self.workload, one)
        )
        return max(tiled, default=0) * _TILED_SUMS * FLOAT32_BYTES

    def _masks(self) -> int:
        """Bytes of the masks of sliding windows, which take a byte for each pair of tokens: counted where no scores
        are."""
        length, one = self.workload.sequence, self.shape.dtype_bytes
        sublayers = (sublayer for layer in set(self.layers) for sublayer in layer.sublayers if sublayer.scores)
        tiled = (sublayer for sublayer in sublayers if is_tiled(sublayer, self.workload, one))
        return length**2 * any((sublayer.causal_tokens or length) < length for sublayer in tiled)


def kept_per_token(shape: ModelShape, layer: Layer, workload: RankWorkload) -> int:
    """Bytes per token that one trained layer keeps for the backward pass."""
    one = shape.dtype_bytes
    kept = norms(layer, workload, one)
    for sublayer in layer.sublayers:
        if sublayer.by_token and is_tiled(sublayer, workload, one):
            # Its input.
            kept += shape.hidden * one
            continue
        if workload.fine_tune_type == "dora":
            kept += sum(matrix.outputs for matrix in adapted(sublayer.matrices, workload)) * one
        kept += sublayer.kept * one + sublayer.kept_float32 * FLOAT32_BYTES + inputs(sublayer, workload, one)
        kept += _scores(sublayer, workload, one)
    return kept


def working_per_token(shape: ModelShape, layer: Layer, workload: RankWorkload) -> float:
    """Bytes per token of the backward pass of a trained layer, beside what it keeps: whatever is trained, a gradient
    for each array that full fine-tuning would keep, but for recurrent states, which it visits one token at a time; and
    the largest scores once more."""
    one, full = shape.dtype_bytes, replace(workload, fine_tune_type="full")
    gradients = [
        sublayer.backward * (sublayer.kept * one + inputs(sublayer, full, one) + _scores(sublayer, workload, one))
        for sublayer in layer.sublayers
        if not (sublayer.by_token and is_tiled(sublayer, workload, one))
    ]
    scores = max((sublayer.backward * _scores(sublayer, workload, one) for sublayer in layer.sublayers), default=0)
    again = max(scores, _fused_per_token(shape, layer, workload), _tile_per_token(shape, layer, workload))
    return norms(layer, full, one) + sum(gradients) + again + _WORKING_WIDTHS * shape.hidden * one


def is_tiled(sublayer: Sublayer, workload: RankWorkload, one: int) -> bool:
    """It is computed `sequence_tiling` tokens at a time, not by all of the sequence's at once."""
    shorter = 0 < workload.sequence_tiling < workload.sequence and not workload.forward
    return shorter and (sublayer.by_token or (sublayer.head_dim is not None and not is_fused(sublayer, workload, one)))


def _tile_per_token(shape: ModelShape, layer: Layer, workload: RankWorkload) -> float:
    """Bytes per token of the backward pass of a layer's largest sublayer in tiles: of one tile, computed again, and of
    the gradients of all."""
    one, part, most = shape.dtype_bytes, workload.sequence_tiling / workload.sequence, 0.0
    full = replace(workload, fine_tune_type="full")
    for sublayer in layer.sublayers:
        if not is_tiled(sublayer, workload, one):
            continue
        if sublayer.by_token:
            inner = sublayer.backward * (sublayer.kept * one + inputs(sublayer, full, one))
            most = max(most, _TILED_MLP * part * inner + 2 * shape.hidden * one)
        else:
            scores = sublayer.scores * workload.sequence * one
            most = max(most, _TILED_SCORES * part * scores + sublayer.kept * (one + 2 * FLOAT32_BYTES))
    return most


def _fused_per_token(shape: ModelShape, layer: Layer, workload: RankWorkload) -> float:
    """Bytes per token of the largest attention's backward pass in tiles; 0 where none is."""
    one, side = shape.dtype_bytes, min(_TILE_TOKENS, workload.sequence)
    arrays, sums = _TILE_ARRAYS * side * one, _TILE_SUMS * FLOAT32_BYTES + one
    if workload.fused_attention == "cuda":
        # cuDNN's gradient of the queries alone, of all tokens.
        side, arrays, sums = workload.sequence, 0, FLOAT32_BYTES
    heads = [
        sublayer.scores * (arrays + (sublayer.head_dim or 0) * sums)
        for sublayer in layer.sublayers
        if is_fused(sublayer, workload, one)
    ]
    return max(heads, default=0) * side / workload.sequence


def norms(layer: Layer, workload: Workload, one: int) -> int:
    """Bytes per token: a norm is computed in float32 and needs its input; a trained norm needs its output too."""
    normed = layer.normed + sum(sublayer.normed for sublayer in layer.sublayers)
    return normed * (FLOAT32_BYTES + (one if workload.fine_tune_type == "full" else 0))


def is_fused(sublayer: Sublayer, workload: RankWorkload, one: int) -> bool:
    causal = sublayer.causal_tokens is None or workload.sequence <= sublayer.causal_tokens
    return causal and fuses_attention(workload.fused_attention, sublayer.head_dim, workload.sequence, one)


def _scores(sublayer: Sublayer, workload: RankWorkload, one: int) -> int:
    """Bytes per token kept of the scores; where they are not, of their sums' logarithms, and of the output."""
    if is_tiled(sublayer, workload, one):
        return 0
    if is_fused(sublayer, workload, one):
        # Else the input of o_proj, which is kept in this type.
        copied = workload.fine_tune_type != "full" and one < FLOAT32_BYTES
        return sublayer.scores * (FLOAT32_BYTES + (sublayer.head_dim or 0) * one * copied)
    return sublayer.scores * min(workload.sequence, sublayer.window or workload.sequence) * one


def inputs(sublayer: Sublayer, workload: Workload, one: int, copied: int = FLOAT32_BYTES) -> int:
    """Bytes per token of the inputs of trained matrices; `one` is the size of an activation. Full fine-tuning keeps
    each shared array once; with 16-bit weights each adapter makes its own copy, of `copied` bytes for an element:
    adapters are float32."""
    if workload.fine_tune_type == "full":
        return sources(sublayer.matrices) * one
    chosen = adapted(sublayer.matrices, workload)
    ranks = sum(matrix.active for matrix in chosen) * workload.lora_rank * FLOAT32_BYTES
    if one < FLOAT32_BYTES:
        return ranks + sum(matrix.inputs * matrix.active for matrix in chosen) * copied
    return ranks + sources(chosen) * FLOAT32_BYTES


def adapted(matrices: Sequence[Matrix], workload: Workload) -> list[Matrix]:
    return [matrix for matrix in matrices if workload.lora_keys is None or matrix.name in workload.lora_keys]


def sources(matrices: Sequence[Matrix]) -> int:
    """Elements per token of the arrays that the matrices multiply, shared ones once."""
    return sum({matrix.source: matrix.inputs * matrix.active for matrix in matrices}.values())


MOST_SEQUENCES = 2**20
"""Upper limit of the search for the largest batch."""
RESERVE_BYTES = 3 * 2**29
"""Memory of a rank's process beyond MLX's live arrays: up to 1 GiB of freed buffers that the trainer lets MLX cache,
and half a GiB for Python, the tokenizer and the data."""


class MemoryEstimate(MemoryBreakdown):
    before_bytes: int
    """The part of the peak that does not grow with the batch: weights, optimizer state, and the gradients alive at the
    peak of the activations."""
    trainable_parameters: int
    assumption: str


def estimate(shape: ModelShape, workload: RankWorkload) -> MemoryEstimate:
    """Raises InputError for layers that the model does not have, and for what MLX cannot train."""
    return _estimate(_Rank(shape, workload), workload.batch)


def _estimate(rank: _Rank, batch: int) -> MemoryEstimate:
    weights, optimizer = (-(-size // rank.share) for size in (rank.weights, rank.optimizer_state))
    gradients, update, communication = rank.gradients, rank.update, rank.communication
    sizes = rank.activations(batch)
    layers = len(rank.trained_layers)
    # The sums of earlier micro-batches are there from the start; the first one's gradients come with the layers.
    at_start = gradients if rank.workload.accumulation > 1 else 0
    at_recomputing = max(at_start, gradients * (layers - rank.recomputed) // layers) if layers else 0
    # Without sums, gradients are applied while the other layers' sizes are still held.
    applied = 0 if gradients else update
    sharded = communication if rank.share > 1 else 0
    moments = {
        "loss": (at_start, sizes.held + sizes.loss),
        "kept": (at_start, sizes.held + sizes.waiting + max(sizes.working, applied)),
        "recomputed": (at_recomputing, sizes.inputs + sizes.waiting + max(sizes.recomputing, applied)),
        "last": (gradients, sizes.waiting + (sizes.recomputing if rank.recomputed else sizes.working)),
    }
    waiting, largest = max(moments.values(), key=sum)
    backward = weights + optimizer + waiting + largest + sharded
    # An averaging is between two updates.
    waiting_beside = 0 if rank.workload.strategy == "local" else gradients
    exchanged = weights + optimizer + max(gradients + update, waiting_beside + communication)
    layers_alone = max(sizes.held + sizes.working, sizes.inputs + sizes.recomputing)
    return MemoryEstimate(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=layers_alone,
        logits_bytes=max(0, largest - layers_alone),
        communication_bytes=communication,
        update_bytes=update,
        before_bytes=weights + optimizer + waiting,
        peak_bytes=max(backward, exchanged),
        reserve_bytes=RESERVE_BYTES,
        trainable_parameters=rank.trained.parameters,
        assumption=_assumption(rank),
    )


def estimates(shape: ModelShape, workload: RankWorkload) -> Callable[[int], MemoryEstimate]:
    """As `estimate`, for any number of sequences."""
    return partial(_estimate, _Rank(shape, workload))


def largest_batch(needs: Callable[[int], MemoryBreakdown], limit_bytes: int) -> int:
    """Most sequences of a rank that fit `limit_bytes`, reserve included; 0 when not even one fits. `needs`: of so many
    sequences."""
    return bisect_right(range(1, MOST_SEQUENCES + 1), limit_bytes, key=lambda batch: needs(batch).needed_bytes)


def recomputable(shape: ModelShape, workload: RankWorkload) -> int:
    """The rank's trained layers, which `grad_checkpoint` counts; 0 where the strategy recomputes all of them."""
    return 0 if workload.strategy == "sharded" else len(_Rank(shape, workload).trained_layers)


_KEPT = {
    "float32": "float32 masters",
    "kahan": "compensated weights",
    "stochastic": "stochastically rounded weights",
    "parameter": "weights and moments in their own type",
}


def _assumption(rank: _Rank) -> str:
    shape, workload = rank.shape, rank.workload
    quantization = shape.quantization
    stored = quantization.name.replace(" bits", "-bit") if quantization is not None else shape.dtype
    moments = f"moments in {workload.moments.replace('8bit', '8 bits')}"
    kept = [_KEPT[workload.optimizer_precision]] if rank.element_bytes < FLOAT32_BYTES else []
    if workload.optimizer_precision != "parameter" or workload.moments != "float32":
        kept.append(moments)
    count, all_of_them = rank.recomputed, len(rank.trained_layers)
    if workload.forward:
        return f"{stored} weights, nothing is trained"
    worked = f"{count} of {all_of_them} layers recomputed" if count else "all sizes kept"
    tiled = f", in tiles of {workload.sequence_tiling:,} tokens" if workload.sequence_tiling else ""
    return (
        f"{workload.fine_tune_type}, {stored} weights, {workload.optimizer} with {' and '.join(kept) or moments}, "
        f"{worked}{tiled}, {'attention' if workload.fused_attention else 'operations not'} fused"
    )


def peak_from_probes(probes: Sequence[MemoryProbe], batch: int, before_bytes: int) -> int | None:
    """The peak at `batch` sequences, bytes, on the line from `before_bytes` (MemoryEstimate.before_bytes) at batch 0
    through the largest probed batch, and never below the smallest peak: at batch 1 or 2 of full fine-tuning the peak
    may be the optimizer's step, which is not on the sizes' line. None with fewer than two different batches, and where
    the largest one's peak is below `before_bytes`: the line would fall."""
    if len({probe.batch for probe in probes}) < 2:
        return None
    low, *_, high = sorted(probes, key=lambda probe: probe.batch)
    if high.peak_bytes < before_bytes:
        return None
    slope = (high.peak_bytes - before_bytes) / high.batch
    return max(low.peak_bytes, round(high.peak_bytes + slope * (batch - high.batch)))
