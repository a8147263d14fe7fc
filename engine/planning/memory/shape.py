"""The sizes of a model, read from its config.json alone: parameters as mlx-lm makes them, and their bytes as stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.errors import InputError
from engine.security.sanitise import plain

from .keys import Keys, refused
from .kinds import KINDS
from .parts import Layer, Matrix, Skeleton

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_DEFAULT_DTYPE = "bfloat16"
"""Of files that do not say: what mlx-lm converts to, unless told otherwise."""
_BITS = range(2, 9)
_SCALE_BYTES = {"affine": None, "mxfp4": 1, "mxfp8": 1, "nvfp4": 1}
"""Bytes of one group's scale; None: a scale and a bias, each in the model's type."""


@dataclass(frozen=True)
class Quantization:
    """How mlx-lm packs matrices: in groups of the input dimension, each with a scale."""

    bits: int
    group_size: int
    mode: str = "affine"

    def fits(self, matrix: Matrix) -> bool:
        """mlx-lm leaves alone what the group size does not divide."""
        return matrix.inputs % self.group_size == 0


@dataclass(frozen=True)
class ModelShape:
    """What the memory arithmetic needs to know of a model."""

    kind: str
    """Its `model_type`."""
    skeleton: Skeleton
    dtype: str
    """Of the weights that are not packed: "float32", "float16" or "bfloat16"."""
    quantization: Quantization | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a config.json. Raises InputError for a kind that is not known, or sizes that are not there."""
        keys = Keys(config)
        kind = keys.word("model_type")
        if kind is None:
            raise refused("model_type is missing")
        build = KINDS.get(kind)
        if build is None:
            raise InputError(
                f"model_type = {plain(kind)[:60]!r} is not one whose memory can be estimated",
                where="config.json",
                why=f"known are {', '.join(sorted(KINDS))}",
                todo="calibrate: the probes measure it instead",
            )
        return cls(kind, build(keys), _dtype(keys), _quantization(keys))

    @property
    def layers(self) -> int:
        return len(self.skeleton.layers)

    @property
    def hidden(self) -> int:
        """Elements of one token's residual stream."""
        return self.skeleton.embedding.inputs

    @property
    def vocabulary(self) -> int:
        return self.skeleton.embedding.outputs

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding's own matrix."""
        return self.skeleton.head is None

    @property
    def dtype_bytes(self) -> int:
        """Of one unpacked weight and one activation."""
        return _BYTES[self.dtype]

    @cached_property
    def layer_parameters(self) -> tuple[int, ...]:
        """Parameters of each layer."""
        return tuple(layer.parameters for layer in self.skeleton.layers)

    @property
    def outer_parameters(self) -> int:
        """Parameters of the embedding, the last norm and the head."""
        head = self.skeleton.head
        return self.skeleton.embedding.weights + self.skeleton.last_norm + (head.parameters if head else 0)

    @cached_property
    def total_parameters(self) -> int:
        """Unpacked: a quantized model has as many as before."""
        return sum(self.layer_parameters) + self.outer_parameters

    def layer_bytes(self, layer: Layer) -> int:
        """The weights of one layer as stored."""
        return sum(map(self.matrix_bytes, layer.matrices)) + layer.plain * self.dtype_bytes

    def matrix_bytes(self, matrix: Matrix) -> int:
        """One matrix as stored, packed where the model is quantized."""
        packing = self.quantization
        if packing is None or not packing.fits(matrix):
            return matrix.parameters * self.dtype_bytes
        scale = _SCALE_BYTES[packing.mode] or 2 * self.dtype_bytes
        groups = matrix.weights // packing.group_size
        return matrix.weights * packing.bits // 8 + groups * scale + matrix.biases * self.dtype_bytes

    @property
    def embedding_bytes(self) -> int:
        return self.matrix_bytes(self.skeleton.embedding)

    @property
    def head_bytes(self) -> int:
        """The last norm, and the head where it is a matrix of its own."""
        head = self.skeleton.head
        return self.skeleton.last_norm * self.dtype_bytes + (self.matrix_bytes(head) if head else 0)


def _dtype(keys: Keys) -> str:
    text = Keys(keys.table("text_config"))
    words = (keys.word("torch_dtype"), keys.word("dtype"), text.word("torch_dtype"), text.word("dtype"))
    dtype = next((word.removeprefix("torch.") for word in words if word), _DEFAULT_DTYPE)
    if dtype not in _BYTES:
        raise refused(f"torch_dtype = {plain(dtype)[:40]!r} is not one of {', '.join(_BYTES)}")
    return dtype


def _quantization(keys: Keys) -> Quantization | None:
    """mlx-lm's own "quantization"; a foreign quantization_config is unpacked or converted when it is loaded."""
    table = keys.table("quantization")
    if not table:
        return None
    own = Keys(table)
    bits, group_size, mode = own.size("bits"), own.size("group_size"), own.word("mode") or "affine"
    if bits not in _BITS or mode not in _SCALE_BYTES:
        raise refused(f"quantization to {bits} bits, mode {plain(mode)[:20]!r} is not one of MLX's")
    return Quantization(bits, group_size, mode)
