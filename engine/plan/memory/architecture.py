"""The sizes of a model's matrices, sublayers, layers, embedding and head, and a validating reader for config.json,
which is untrusted input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.errors import InputError
from engine.security.sanitise import plain


@dataclass(frozen=True)
class Matrix:
    """A weight that mlx-lm can quantize and adapt: `outputs` × `inputs`, with an optional bias of `outputs`."""

    name: str
    """Path within the layer: "self_attn.q_proj"."""
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    """Experts, each with its own matrix."""
    active: int = 1
    """Experts that each token passes through."""
    source: str = "in"
    """The array of its sublayer that it multiplies; matrices with the same source share that array."""

    @property
    def weights(self) -> int:
        return self.copies * self.inputs * self.outputs

    @property
    def biases(self) -> int:
        return self.copies * self.outputs if self.bias else 0

    @property
    def parameters(self) -> int:
        return self.weights + self.biases


@dataclass(frozen=True)
class Sublayer:
    """One branch of a layer: attention, a feed-forward network, or a recurrence."""

    matrices: tuple[Matrix, ...]
    unquantized: int = 0
    """Parameters outside the matrices (norms, convolutions, decays), which are never quantized and never adapted."""
    normed: int = 0
    """Elements per token that pass through norms inside the sublayer."""
    kept: int = 0
    """Elements per token, in the model's type, kept for the backward pass in addition to the matrices' inputs."""
    kept_float32: int = 0
    """Elements per token kept in float32 whatever the model's type: the states of a recurrence, one token at a time."""
    scores: int = 0
    """Elements per pair of tokens kept for the backward pass: heads × arrays of the size of the scores."""
    window: int | None = None
    """Most tokens that each token is paired with; None means the whole sequence."""
    head_dim: int | None = None
    """Size of the heads of an attention whose scores MLX need not keep; None where it always does."""
    causal_tokens: int | None = None
    """The longest sequence for which its mask is "causal" and no array: the sliding window; None means any."""
    backward: float = 1.0
    """Working memory of its backward pass over what it keeps."""


@dataclass(frozen=True)
class Layer:
    """One entry of `model.layers`."""

    sublayers: tuple[Sublayer, ...]
    norms: int
    """Parameters of the norms between the sublayers."""
    normed: int
    """Elements per token that pass through those norms."""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for sublayer in self.sublayers for matrix in sublayer.matrices)

    @property
    def unquantized(self) -> int:
        """Parameters outside the matrices."""
        return self.norms + sum(sublayer.unquantized for sublayer in self.sublayers)

    @property
    def parameters(self) -> int:
        return self.unquantized + sum(matrix.parameters for matrix in self.matrices)


@dataclass(frozen=True)
class Architecture:
    """A whole model: its layers, and what comes before and after them."""

    layers: tuple[Layer, ...]
    embedding: Matrix
    head: Matrix | None
    """None when the head is tied to the embedding."""
    last_norm: int


_LARGEST = 2**24
"""Limit of any single size; the largest vocabularies and projections are 2^19."""
_MOST_LAYERS = 2_000
"""No real model has as many."""
Entry = TypeVar("Entry", int, str)


class ConfigReader:
    """Reads one table of a config.json; null counts as not set. Every method raises InputError that names the key."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._table = {name: value for name, value in table.items() if value is not None}

    def with_defaults(self, **defaults: int) -> ConfigReader:
        return ConfigReader(defaults | self._table)

    def get_int(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is set: an integer from 0 to 2^24."""
        for name in names:
            if name in self._table:
                return int(_checked(name, self._table[name], (int,), "a size"))
        if default is None:
            raise cannot_estimate(f"{names[0]} is missing")
        return default

    def get_size(self, *names: str, default: int | None = None) -> int:
        """Like `get_int`, and at least 1."""
        value = self.get_int(*names, default=default)
        if value < 1:
            raise cannot_estimate(f"{names[0]} = {value}: must be at least 1")
        return value

    def get_float(self, name: str, default: float) -> float:
        return float(_checked(name, self._table.get(name, default), (int, float), "a number"))

    def get_flag(self, name: str, default: bool) -> bool:
        return bool(self._table.get(name, default))

    def get_str(self, name: str) -> str | None:
        value = self._table.get(name)
        return value if isinstance(value, str) else None

    def get_table(self, name: str) -> Mapping[str, Any]:
        """A nested table; {} when it is not set."""
        value = self._table.get(name)
        return value if isinstance(value, Mapping) else {}

    def get_list(self, name: str, kind: type[Entry]) -> list[Entry] | None:
        """None when it is not set."""
        value = self._table.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise cannot_estimate(f"{name} is not a list of {'integers' if kind is int else 'strings'}")
        return value

    def get_layer_types(self, name: str) -> list[str] | None:
        """One name for each layer; None when they are not set."""
        count, types = self.layers, self.get_list(name, str)
        if types is not None and len(types) != count:
            raise cannot_estimate(f"{name} has {len(types)} entries for {count} layers")
        return types

    @property
    def layers(self) -> int:
        count = self.get_size("num_hidden_layers")
        if count > _MOST_LAYERS:
            raise cannot_estimate(f"num_hidden_layers = {count}: the limit is {_MOST_LAYERS}")
        return count

    @property
    def hidden(self) -> int:
        """Elements of one token's residual stream."""
        return self.get_size("hidden_size", "d_model")


def _checked(name: str, value: Any, kinds: tuple[type, ...], what: str) -> Any:
    if type(value) not in kinds or not 0 <= value <= _LARGEST:
        raise cannot_estimate(f"{name} = {plain(repr(value))[:60]} is not {what}")
    return value


def cannot_estimate(why: str) -> InputError:
    return InputError(
        "memory cannot be estimated", where="config.json", why=why, todo="use a model that mlx-lm can load"
    )
