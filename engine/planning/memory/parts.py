"""What a model is made of, as sizes: matrices, the parts of a layer, layers. Counted as mlx-lm builds the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Matrix:
    """A weight that mlx-lm can quantize and adapt: `outputs` × `inputs`, and a bias of `outputs`."""

    name: str
    """Its path in the layer, "self_attn.q_proj"."""
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    """Experts, each with a matrix of its own."""
    active: int = 1
    """Experts that one token goes through."""
    source: str = "in"
    """Which array of its part it is applied to: matrices of one source share it."""

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
        """Parameters of its LoRA adapter: lora_a and lora_b, and DoRA's magnitudes."""
        pair = self.copies * rank * (self.inputs + self.outputs)
        return pair + (self.outputs if dora else 0)


@dataclass(frozen=True)
class Part:
    """Attention, a feed-forward network, a recurrence: one branch of a layer."""

    matrices: tuple[Matrix, ...]
    plain: int = 0
    """Parameters outside the matrices: norms, convolutions, decays. Never quantized, never adapted."""
    normed: int = 0
    """Elements per token that go through norms inside the part."""
    held: int = 0
    """Elements per token, in the model's type, that wait for the backward pass beside the matrices' inputs."""
    held_float32: int = 0
    """The same, in float32 whatever the model's type: the states of a recurrence, made one token after the other."""
    scores: int = 0
    """Elements per pair of tokens that wait for the backward pass: heads × arrays of the scores' size."""
    window: int | None = None
    """Tokens that each token is paired with at most; None is the whole sequence."""


@dataclass(frozen=True)
class Layer:
    """One of `model.layers`."""

    parts: tuple[Part, ...]
    norms: int
    """Parameters of the norms between the parts."""
    normed: int
    """Elements per token that go through those norms."""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for part in self.parts for matrix in part.matrices)

    @property
    def plain(self) -> int:
        """Parameters outside the matrices."""
        return self.norms + sum(part.plain for part in self.parts)

    @property
    def parameters(self) -> int:
        return self.plain + sum(matrix.parameters for matrix in self.matrices)


@dataclass(frozen=True)
class Skeleton:
    """A whole model: `layers`, and what lies before and after them."""

    layers: tuple[Layer, ...]
    embedding: Matrix
    head: Matrix | None
    """None: the embedding is used a second time."""
    last_norm: int
