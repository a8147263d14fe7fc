"""The sizes of a model, from its config.json alone: parameters as mlx-lm creates them, and their bytes as stored."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import InputError
from engine.plan.memory.architecture import Architecture, ConfigReader, Matrix, cannot_estimate
from engine.plan.memory.model_types import MODEL_TYPES
from engine.plan.memory.packing import Quantization, quantization
from engine.security.sanitise import plain

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_DEFAULT_DTYPE = "bfloat16"
"""For files without a dtype: mlx-lm converts to it by default."""


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
            what = f"model_type = {plain(model_type)[:60]!r} is not supported by the memory estimate"
            why, todo = (
                f"supported: {', '.join(sorted(MODEL_TYPES))}",
                "run `flightdeck calibrate`, which measures it instead",
            )
            raise InputError(what, where="config.json", why=why, todo=todo)
        return cls(build(keys), _dtype(keys), quantization(config))

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

    def layer_bytes(self, number: int) -> int:
        """Bytes of the weights of one layer as loaded."""
        layer = self.architecture.layers[number]
        packed = sum(self.matrix_bytes(matrix, number) for matrix in layer.matrices)
        return packed + layer.unquantized * self.dtype_bytes

    def matrix_bytes(self, matrix: Matrix, layer: int | None = None) -> int:
        """Bytes of one matrix as loaded, packed if the model is quantized. `layer` is its number; None for the
        embedding and the head."""
        packing = self.quantization.of(matrix, layer) if self.quantization is not None else None
        return (
            matrix.parameters * self.dtype_bytes if packing is None else packing.matrix_bytes(matrix, self.dtype_bytes)
        )


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
