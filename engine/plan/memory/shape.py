"""The sizes of a model, from its config.json alone: parameters as mlx-lm creates them, and their bytes as stored; for
these how its weights are packed once mlx-lm has loaded them: by its own `quantization`, or by a `quantization_config`
of others, as mlx_lm.utils.load_model converts it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Final

from engine.errors import InputError
from engine.plan.memory.architecture import Architecture, ConfigReader, Matrix, cannot_estimate
from engine.plan.memory.model_types import MODEL_TYPES
from engine.security.sanitise import plain

OF_LAYER: Final = re.compile(r"(?:^|\.)layers\.(?P<number>[0-9]{1,6})\.(?P<name>.+)$")
"""A path in a whole model, of a module within a layer."""
_BITS: Final = range(2, 9)
_SCALE_BYTES: Final = {"affine": None, "mxfp4": 1, "mxfp8": 1, "nvfp4": 1, "ternary": 0}
"""Bytes of the scale of one group; None means a scale and a bias, both in the model's type."""


@dataclass(frozen=True)
class Packing:
    """Matrices are packed in groups along the input dimension, each with a scale."""

    bits: int
    group_size: int
    mode: str = "affine"

    def matrix_bytes(self, matrix: Matrix, dtype_bytes: int) -> int:
        """Bytes of the packed matrix; its bias is in the model's type."""
        scale = _SCALE_BYTES[self.mode]
        groups = matrix.weights // self.group_size
        packed = matrix.weights * self.bits // 8 + groups * (2 * dtype_bytes if scale is None else scale)
        return packed + matrix.biases * dtype_bytes


_FOREIGN: Final = {
    "awq": Packing(4, 128),
    "gptq": Packing(4, 128),
    "mxfp4": Packing(4, 32, "mxfp4"),
    "mxfp8": Packing(8, 32, "mxfp8"),
    "bitnet": Packing(2, 1, "ternary"),
    "bitsandbytes": Packing(4, 64),
    "bitsandbytes True": Packing(8, 64),
    "modelopt NVFP4": Packing(4, 16, "nvfp4"),
    "fp8 ue8m0 [32, 32]": Packing(8, 32, "mxfp8"),
    "compressed-tensors pack-quantized": Packing(4, 32),
    "compressed-tensors mxfp4-pack-quantized": Packing(4, 32, "mxfp4"),
    "compressed-tensors nvfp4-pack-quantized": Packing(4, 16, "nvfp4"),
}
"""quant_method, with the keys that decide, → how mlx-lm, or of bitsandbytes PyTorch, keeps such weights where no
group_size is given. What is not here is unpacked on loading, as other fp8, or cannot be read."""
_LEFT_OUT: Final = ("modules_to_not_convert", "ignore", "exclude_modules", "llm_int8_skip_modules")
"""Keys of a foreign table that name modules which are not packed."""


@dataclass(frozen=True)
class Quantization:
    """The packing of each matrix of a model."""

    name: str
    """ "4 bits", or the quant_method."""
    packing: Packing
    ends: bool
    """The embedding and the head are packed, too."""
    others: Mapping[str, Packing | None] = field(default_factory=dict)
    """Paths, from `layers` on, of modules that are packed otherwise; None: not packed."""
    left_out: tuple[str, ...] = ()
    """Patterns of paths that are not packed."""

    def of(self, matrix: Matrix, layer: int | None) -> Packing | None:
        """None where it is not packed; mlx-lm skips matrices that the group size does not divide. `layer` is its
        number; None for the embedding and the head."""
        path = matrix.name if layer is None else f"layers.{layer}.{matrix.name}"
        packing = self.others.get(path, self.packing if self.ends or layer is not None else None)
        left_out = any(fnmatchcase(path, pattern) for pattern in self.left_out)
        if packing is None or left_out or matrix.inputs % packing.group_size:
            return None
        return packing


def quantization(config: Mapping[str, Any]) -> Quantization | None:
    """None where no weight is packed. Raises InputError for what MLX does not know."""
    keys = ConfigReader(config)
    if mlx_table := keys.get_table("quantization"):
        others = {
            _path(name): _own({**mlx_table, **entry}) if isinstance(entry, Mapping) else None
            for name, entry in mlx_table.items()
            if isinstance(entry, Mapping) or entry is False
        }
        packing = _own(mlx_table)
        return Quantization(f"{packing.bits} bits", packing, True, others)
    text = ConfigReader(keys.get_table("text_config"))
    table = ConfigReader(keys.get_table("quantization_config") or text.get_table("quantization_config"))
    method = table.get_str("quant_method") or ""
    # Of modelopt's own file, and of the first group of compressed-tensors.
    nested = ConfigReader(table.get_table("quantization"))
    groups = [group for group in table.get_table("config_groups").values() if isinstance(group, Mapping)]
    weights = ConfigReader(ConfigReader(groups[0]).get_table("weights") if groups else {})
    algorithm = table.get_str("quant_algo") or nested.get_str("quant_algo") or table.get_str("format")
    blocks = f"{table.get_str('scale_fmt')} {table.get_list('weight_block_size', int)}"
    eight = f"{method} {table.get_flag('load_in_8bit', False)}"
    candidates = (_FOREIGN.get(key) for key in (f"{method} {algorithm}", f"{method} {blocks}", eight, method))
    foreign = next(filter(None, candidates), None)
    if foreign is None:
        return None
    sizes = (reader.get_int("group_size", default=0) for reader in (table, nested, weights))
    size = next(filter(None, sizes), foreign.group_size)
    given = table.get_int("bits", default=0) or weights.get_int("num_bits", default=0)
    bits = given if given in _BITS and foreign.mode == "affine" else foreign.bits
    left_out = [
        pattern for key in _LEFT_OUT for entry in table.get_list(key, str) or () for pattern in _patterns(entry)
    ]
    return Quantization(method, Packing(bits, size, foreign.mode), False, {}, tuple(left_out))


def quantized_as(config: Mapping[str, Any]) -> str | None:
    """How the weights are quantized once mlx-lm has loaded them; None if they are not."""
    try:
        quantized = quantization(config)
    except InputError:
        return "in an unknown form"
    return None if quantized is None else quantized.name


def _own(table: Mapping[str, Any]) -> Packing:
    keys = ConfigReader(table)
    bits, mode = keys.get_size("bits"), keys.get_str("mode") or "affine"
    if bits not in _BITS or mode not in _SCALE_BYTES:
        raise cannot_estimate(f"quantization to {bits} bits, mode {plain(mode)[:20]!r} is not supported by MLX")
    return Packing(bits, keys.get_size("group_size"), mode)


def _path(name: str) -> str:
    """The path of a module from `layers` on; of the embedding and the head as in a model of text alone."""
    within = OF_LAYER.search(name)
    return f"layers.{within['number']}.{within['name']}" if within else name.removeprefix("language_model.")


def _patterns(text: str) -> tuple[str, str]:
    """A name, or the regular expression behind "re:", of foreign tables as patterns of fnmatch: of the module, and of
    those in it. Only the dots and stars of expressions are read: they come from a file that is not trusted."""
    pattern = text.removeprefix("re:").strip("^$").replace(".*", "*").replace("\\.", ".")[:200]
    pattern = pattern.removeprefix("language_model.").removeprefix("model.")
    return f"*{pattern}", f"*{pattern}.*"


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

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of the weights of each layer as loaded."""
        return tuple(
            sum(self.matrix_bytes(matrix, number) for matrix in layer.matrices) + layer.unquantized * self.dtype_bytes
            for number, layer in enumerate(self.architecture.layers)
        )

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
