"""The sizes of a model, read from its config.json alone: parameters as mlx-lm creates them, and their bytes as
stored."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import InputError
from engine.plan.memory.architecture import Architecture, ConfigReader, Layer, Matrix, cannot_estimate
from engine.plan.memory.model_types import MODEL_TYPES
from engine.security.sanitise import plain

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_DEFAULT_DTYPE = "bfloat16"
"""For files without a dtype: mlx-lm converts to it by default."""
_BITS = range(2, 9)
_SCALE_BYTES = {"affine": None, "mxfp4": 1, "mxfp8": 1, "nvfp4": 1}
"""Bytes of the scale of one group; None means a scale and a bias, both in the model's type."""


@dataclass(frozen=True)
class Quantization:
    """mlx-lm packs matrices in groups along the input dimension, each with a scale."""

    bits: int
    group_size: int
    mode: str = "affine"

    def fits(self, matrix: Matrix) -> bool:
        """mlx-lm skips matrices that the group size does not divide."""
        return matrix.inputs % self.group_size == 0


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the memory estimate needs."""

    architecture: Architecture
    dtype: str
    """Type of the unquantized weights: "float32", "float16" or "bfloat16"."""
    quantization: Quantization | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a config.json. Raises InputError for an unknown model_type, and for missing sizes."""
        keys = ConfigReader(config)
        model_type = keys.get_str("model_type")
        if model_type is None:
            raise cannot_estimate("model_type is missing")
        build = MODEL_TYPES.get(model_type)
        if build is None:
            raise InputError(
                f"model_type = {plain(model_type)[:60]!r} is not supported by the memory estimate",
                where="config.json",
                why=f"supported: {', '.join(sorted(MODEL_TYPES))}",
                todo="run `flightdeck calibrate`, which measures it instead",
            )
        return cls(build(keys), _dtype(keys), _quantization(keys))

    @property
    def layers(self) -> int:
        return len(self.architecture.layers)

    @property
    def hidden(self) -> int:
        """Elements of one token's residual stream."""
        return self.architecture.embedding.inputs

    @property
    def vocabulary(self) -> int:
        return self.architecture.embedding.outputs

    @property
    def tied(self) -> bool:
        return self.architecture.head is None

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one unquantized weight, and of one activation."""
        return _BYTES[self.dtype]

    @property
    def total_parameters(self) -> int:
        """Parameters before quantization, of the embedding, the last norm and the head too."""
        model = self.architecture
        head = model.head.parameters if model.head else 0
        return sum(layer.parameters for layer in model.layers) + model.embedding.weights + model.last_norm + head

    def layer_bytes(self, layer: Layer) -> int:
        """Bytes of the weights of one layer as stored."""
        return sum(map(self.matrix_bytes, layer.matrices)) + layer.unquantized * self.dtype_bytes

    def matrix_bytes(self, matrix: Matrix) -> int:
        """Bytes of one matrix as stored, packed if the model is quantized."""
        packing = self.quantization
        if packing is None or not packing.fits(matrix):
            return matrix.parameters * self.dtype_bytes
        scale = _SCALE_BYTES[packing.mode] or 2 * self.dtype_bytes
        groups = matrix.weights // packing.group_size
        return matrix.weights * packing.bits // 8 + groups * scale + matrix.biases * self.dtype_bytes


def trained_element_bytes(config: Mapping[str, Any] | None, fine_tune_type: str) -> int:
    """Bytes of one trained weight, and of its gradient, of a model with this config.json: mlx-lm's adapters are
    float32, and so is what is not known."""
    if fine_tune_type == "full" and config is not None:
        with contextlib.suppress(InputError):
            return _BYTES[_dtype(ConfigReader(config))]
    return _BYTES["float32"]


def _dtype(keys: ConfigReader) -> str:
    text = ConfigReader(keys.get_table("text_config"))
    names = (keys.get_str("torch_dtype"), keys.get_str("dtype"), text.get_str("torch_dtype"), text.get_str("dtype"))
    dtype = next((name.removeprefix("torch.") for name in names if name), _DEFAULT_DTYPE)
    if dtype not in _BYTES:
        raise cannot_estimate(f"torch_dtype = {plain(dtype)[:40]!r} is not one of {', '.join(_BYTES)}")
    return dtype


def _quantization(keys: ConfigReader) -> Quantization | None:
    """mlx-lm's own "quantization" table; a foreign quantization_config is unpacked or converted on loading."""
    table = keys.get_table("quantization")
    if not table:
        return None
    own = ConfigReader(table)
    bits, group_size, mode = own.get_size("bits"), own.get_size("group_size"), own.get_str("mode") or "affine"
    if bits not in _BITS or mode not in _SCALE_BYTES:
        raise cannot_estimate(f"quantization to {bits} bits, mode {plain(mode)[:20]!r} is not supported by MLX")
    return Quantization(bits, group_size, mode)
