"""Which parameters a job trains on one rank: adapters, or whole layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.errors import InputError

from .ask import MemoryAsk
from .parts import Layer, Matrix
from .shape import ModelShape


@dataclass(frozen=True)
class Trained:
    """The trained parameters, as the optimizer sees them."""

    tables: tuple[tuple[int, int, int], ...]
    """Parameters of two dimensions or more: how many of them, rows, columns."""
    vectors: int
    """Parameters of one dimension, elements."""

    @property
    def parameters(self) -> int:
        return self.vectors + sum(copies * rows * columns for copies, rows, columns in self.tables)

    @property
    def rows_and_columns(self) -> int:
        """Elements of a factored second moment (Adafactor)."""
        return self.vectors + sum(copies * (rows + columns) for copies, rows, columns in self.tables)


def adapted(matrix: Matrix, ask: MemoryAsk) -> bool:
    """Whether mlx-lm gives this matrix an adapter; None for its keys means every matrix of a trained layer."""
    return ask.fine_tune_type != "full" and (ask.lora_keys is None or matrix.name in ask.lora_keys)


def trained_layers(shape: ModelShape, ask: MemoryAsk, stage: range) -> range:
    """Those of the stage's layers that are trained: the model's last ones."""
    first = 0 if ask.num_layers < 0 else max(0, shape.layers - ask.num_layers)
    return range(min(max(stage.start, first), stage.stop), stage.stop)


def trained(shape: ModelShape, ask: MemoryAsk, stage: range) -> Trained:
    """What the rank of these layers trains. Raises InputError for full fine-tuning of packed weights."""
    layers = [shape.skeleton.layers[number] for number in trained_layers(shape, ask, stage)]
    if ask.fine_tune_type == "full":
        if shape.quantization is not None:
            raise InputError(
                "full fine-tuning of a quantized model",
                where="[job] fine_tune_type",
                why="MLX has no gradient for packed weights",
                todo='use fine_tune_type = "lora", or the model before it was quantized',
            )
        return _whole(layers)
    matrices = [matrix for layer in layers for matrix in layer.matrices if adapted(matrix, ask)]
    matrices += [matrix for matrix in outer(shape, stage) if ask.lora_keys is not None and adapted(matrix, ask)]
    rank = ask.lora_rank
    tables = [
        table
        for matrix in matrices
        for table in ((matrix.copies, matrix.inputs, rank), (matrix.copies, rank, matrix.outputs))
    ]
    magnitudes = sum(matrix.outputs for matrix in matrices) if ask.fine_tune_type == "dora" else 0
    return Trained(tuple(tables), magnitudes)


def outer(shape: ModelShape, stage: range) -> Iterator[Matrix]:
    """The embedding on the first stage, the head on the last; where they are one matrix it is on both."""
    first, last = stage.start == 0, stage.stop == shape.layers
    if first or (last and shape.tied):
        yield shape.skeleton.embedding
    if last and shape.skeleton.head is not None:
        yield shape.skeleton.head


def _whole(layers: list[Layer]) -> Trained:
    tables = tuple((matrix.copies, matrix.outputs, matrix.inputs) for layer in layers for matrix in layer.matrices)
    vectors = sum(layer.plain + sum(matrix.biases for matrix in layer.matrices) for layer in layers)
    return Trained(tables, vectors)
