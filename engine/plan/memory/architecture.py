"""The sizes of a model's matrices, sublayers, layers, embedding and head, and a validating reader for config.json,
which is untrusted input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

    def adapter(self, rank: int, *, dora: bool = False) -> int:
        """Parameters of its LoRA adapter: lora_a and lora_b, plus the magnitudes with DoRA."""
        pair = self.copies * rank * (self.inputs + self.outputs)
        return pair + (self.outputs if dora else 0)


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


class ConfigReader:
    """Reads one table of a config.json. Every method raises InputError that names the key."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._table = table

    def get_int(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is set: an integer from 0 to 2^24."""
        for name in names:
            value = self._table.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
                raise cannot_estimate(f"{name} = {plain(repr(value))[:60]} is not a size")
            return value
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
        value = self._table.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
            raise cannot_estimate(f"{name} = {plain(repr(value))[:60]} is not a number")
        return float(value)

    def get_flag(self, name: str, default: bool) -> bool:
        value = self._table.get(name)
        return default if value is None else bool(value)

    def get_str(self, name: str) -> str | None:
        value = self._table.get(name)
        return value if isinstance(value, str) else None

    def get_ints(self, name: str) -> list[int] | None:
        value = self._table.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, int) for entry in value):
            raise cannot_estimate(f"{name} is not a list of integers")
        return [int(entry) for entry in value]

    def get_strs(self, name: str, layers: int) -> list[str] | None:
        """A list with one string for each of `layers`; None when it is not set."""
        value = self._table.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise cannot_estimate(f"{name} is not a list of strings")
        if len(value) != layers:
            raise cannot_estimate(f"{name} has {len(value)} entries for {layers} layers")
        return [str(entry) for entry in value]

    def get_table(self, name: str) -> Mapping[str, Any]:
        """A nested table; {} when it is not set."""
        value = self._table.get(name)
        return value if isinstance(value, Mapping) else {}

    def heads(self) -> tuple[int, int]:
        """(attention heads, key-value heads)"""
        heads = self.get_size("num_attention_heads")
        return heads, self.get_size("num_key_value_heads", default=heads)


def cannot_estimate(why: str) -> InputError:
    return InputError(
        "memory cannot be estimated", where="config.json", why=why, todo="use a model that mlx-lm can load"
    )


_MOST_LAYERS = 2_000


def layer_count(keys: ConfigReader, default: int | None = None) -> int:
    """Number of layers, with an upper limit that no real model reaches."""
    count = keys.get_size("num_hidden_layers", default=default)
    if count > _MOST_LAYERS:
        raise cannot_estimate(f"num_hidden_layers = {count}: the limit is {_MOST_LAYERS}")
    return count


def architecture(
    keys: ConfigReader,
    stack: Sequence[Layer],
    *,
    tied: bool,
    base: str = "model",
    embedding: str = "embed_tokens",
    last_norm: int | None = None,
    head_bias: bool = False,
    vocabulary: int | None = None,
) -> Architecture:
    """The model with these layers. `last_norm`: parameters of the last norm, by default the hidden size."""
    hidden = keys.get_size("hidden_size", "d_model")
    vocab_size = vocabulary or keys.get_size("vocab_size")
    return Architecture(
        layers=tuple(stack),
        embedding=Matrix(f"{base}.{embedding}", hidden, vocab_size),
        head=None if tied else Matrix("lm_head", hidden, vocab_size, head_bias),
        last_norm=hidden if last_norm is None else last_norm,
    )
