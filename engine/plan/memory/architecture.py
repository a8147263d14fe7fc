"""The sizes of a model's matrices, sublayers, layers, embedding and head; a validating reader for config.json, which is
untrusted input; and the sublayers that models are made of (attention, feed-forward networks, mixtures of experts,
state-space models, short convolutions), with what they keep for the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    by_token: bool = False
    """Each token is computed by itself, so that it can be done in tiles of tokens; attention with a `head_dim` in tiles
    of queries."""


@dataclass(frozen=True)
class Layer:
    """One entry of `model.layers`."""

    sublayers: tuple[Sublayer, ...]
    norms: int
    """Parameters of the norms between the sublayers."""
    normed: int
    """Elements per token that pass through those norms."""

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for sublayer in self.sublayers for matrix in sublayer.matrices)

    @cached_property
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


@dataclass(frozen=True)
class Attention:
    """How the grouped-query attention of a model type differs from Llama's."""

    head_dim: str = "own"
    """ "own": head_dim of the config, by default an equal part of the hidden size; "required": head_dim of the config;
    "even": always an equal part."""
    query_norms: str = ""
    """Norms on queries and keys. "head": one per head dimension, "all": over all heads, "": none."""
    qkv_bias: bool | None = None
    """None: use attention_bias of the config."""
    out_bias: bool | None = None
    fused: bool = False
    """One "qkv_proj" matrix."""
    gated: bool = False
    """The query projection also produces a gate for the output (Qwen3-Next)."""
    capped: bool = False
    """Soft-capped scores (Gemma 2)."""
    prefix: str = "self_attn"
    out: str = "o_proj"


def attention(config: ConfigReader, kind: Attention) -> Sublayer:
    """Without a fused kernel, which training on the CPU does not have, the backward pass needs the scaled queries, the
    keys, the values, and the softmax of every pair of tokens."""
    hidden, heads = config.hidden, config.get_size("num_attention_heads")
    kv_heads = config.get_size("num_key_value_heads", default=heads)
    head_dim = hidden // heads
    if kind.head_dim != "even":
        head_dim = config.get_size("head_dim", default=None if kind.head_dim == "required" else head_dim)
    bias = config.get_flag("attention_bias", False)
    qkv_bias, out_bias = (bias if explicit is None else explicit for explicit in (kind.qkv_bias, kind.out_bias))
    queries, keys = heads * head_dim, kv_heads * head_dim
    widths = {"qkv_proj": queries + 2 * keys}
    if not kind.fused:
        widths = {"q_proj": queries * (2 if kind.gated else 1), "k_proj": keys, "v_proj": keys}
    return Sublayer(
        matrices=(
            *(Matrix(f"{kind.prefix}.{name}", hidden, width, qkv_bias) for name, width in widths.items()),
            Matrix(f"{kind.prefix}.{kind.out}", queries, hidden, out_bias, source="out"),
        ),
        unquantized={"head": 2 * head_dim, "all": queries + keys, "": 0}[kind.query_norms],
        normed=queries + keys if kind.query_norms else 0,
        kept=queries + 2 * keys + (2 * queries if kind.gated else 0),
        scores=heads * (2 if kind.capped else 1),
        head_dim=None if kind.capped else head_dim,
    )


_GATED = ("gate_proj", "up_proj", "down_proj")
SILU = 4
"""Arrays of the inner size: gate, sigmoid(gate), their product, and up."""
GELU = 5
"""Arrays of the tanh approximation: the input, half of it, its cubic term, the tanh, and 1 + tanh."""
GATED_GELU = 6
"""GELU, and up."""
RELU_SQUARED = 2
"""Arrays: the input and its positive part."""


def mlp(
    hidden: int,
    inner: int,
    names: Sequence[str] = _GATED,
    *,
    bias: bool = False,
    prefix: str = "mlp",
    arrays: int = 0,
    fused: bool = False,
) -> Sublayer:
    """down(activation(gate(x)) · up(x)), as in Llama; with two `names` and `fused` the same with gate and up in one
    projection, as in Phi-3, else down(activation(up(x))), as in Phi. `arrays` of the inner size are kept for the
    backward pass, by default those of the gated SiLU or of GELU."""
    *inward, down = names
    return Sublayer(
        matrices=(
            *(Matrix(f"{prefix}.{name}", hidden, inner * (2 if fused else 1), bias) for name in inward),
            Matrix(f"{prefix}.{down}", inner, hidden, bias, source="inner"),
        ),
        kept=(arrays or (SILU if fused or len(inward) == 2 else GELU)) * inner,
        by_token=True,
    )


def experts(hidden: int, inner: int, count: int, active: int, *, prefix: str = "mlp", router: str = "gate") -> Sublayer:
    """`count` gated MLPs, of which a router picks `active` for each token. Tokens are copied for each expert; the
    results are kept both in expert order and in token order, for the router's gradient."""
    active = min(active, count)
    gate, up, down = (f"{prefix}.switch_mlp.{name}" for name in _GATED)
    return Sublayer(
        matrices=(
            Matrix(f"{prefix}.{router}", hidden, count, source="router"),
            Matrix(gate, hidden, inner, copies=count, active=active),
            Matrix(up, hidden, inner, copies=count, active=active),
            Matrix(down, inner, hidden, copies=count, active=active, source="inner"),
        ),
        kept=active * (SILU * inner + 2 * hidden) + count,
        # Measured: by their gradients, its copies are no longer needed.
        backward=0.7,
        by_token=True,
    )


def shared_expert(hidden: int, inner: int) -> Sublayer:
    """A gated MLP that every token passes through in addition to its experts, weighted by a gate (Qwen2-MoE)."""
    network = mlp(hidden, inner, prefix="mlp.shared_expert")
    gate = Matrix("mlp.shared_expert_gate", hidden, 1)
    return Sublayer(matrices=(*network.matrices, gate), kept=network.kept + hidden, by_token=True)


def mamba(
    hidden: int,
    inner: int,
    *,
    state: int,
    rank: int,
    kernel: int,
    bias: bool,
    conv_bias: bool,
    norms: bool,
    prefix: str,
) -> Sublayer:
    """Mamba's selective scan. mlx-lm runs it token by token and keeps each state, before and after its input."""
    return Sublayer(
        matrices=(
            Matrix(f"{prefix}.in_proj", hidden, 2 * inner, bias),
            Matrix(f"{prefix}.x_proj", inner, rank + 2 * state, source="x"),
            Matrix(f"{prefix}.dt_proj", rank, inner, bias=True, source="dt"),
            Matrix(f"{prefix}.out_proj", inner, hidden, bias, source="out"),
        ),
        unquantized=inner * (kernel + conv_bias + state + 1) + (rank + 2 * state if norms else 0),
        kept=11 * inner,
        kept_float32=2 * inner * state,
    )


@dataclass(frozen=True)
class Mamba2:
    """The keys of Mamba-2 in a model type's config.json, and where it differs otherwise."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    inner: str | None = None
    """None: heads × head_dim."""
    state: tuple[str, ...] = ("mamba_d_state",)
    groups: str = "mamba_n_groups"
    default_groups: int | None = None
    kernel: str = "mamba_d_conv"
    bias: str = "mamba_proj_bias"
    out_bias: str | None = None
    """None: the same as `bias`."""
    conv_bias: str = "mamba_conv_bias"
    default_conv_bias: bool = True
    norm: str | None = None
    """A flag of the config; None: there is always a norm."""
    prefix: str = "mamba"


_CHUNK = 256
"""Chunk length of Mamba-2, in tokens (mlx_lm/models/ssm.py)."""


def mamba2(config: ConfigReader, keys: Mamba2) -> Sublayer:
    """Within a chunk it keeps decays and weighted scores for each head, and unweighted scores for each group."""
    hidden, heads = config.hidden, config.get_size(keys.heads)
    inner = config.get_size(keys.inner) if keys.inner is not None else heads * config.get_size(keys.head_dim)
    state, groups = config.get_size(*keys.state), config.get_size(keys.groups, default=keys.default_groups)
    channels = inner + 2 * groups * state
    kernel, bias = config.get_size(keys.kernel), config.get_flag(keys.bias, False)
    out_bias = config.get_flag(keys.out_bias or keys.bias, False)
    conv_bias = config.get_flag(keys.conv_bias, keys.default_conv_bias)
    norm = keys.norm is None or config.get_flag(keys.norm, False)
    return Sublayer(
        matrices=(
            Matrix(f"{keys.prefix}.in_proj", hidden, inner + channels + heads, bias),
            Matrix(f"{keys.prefix}.out_proj", inner, hidden, out_bias, source="out"),
        ),
        unquantized=channels * (kernel + conv_bias) + 3 * heads + (inner if norm else 0),
        kept=10 * inner + 4 * channels + heads * state,
        scores=2 * heads + groups,
        window=_CHUNK,
        # Measured: its arrays are used and freed one after the other.
        backward=0.25,
    )


def gated_delta(config: ConfigReader) -> Sublayer:
    """Qwen3-Next's gated delta rule. mlx-lm runs it token by token and keeps each state, decayed and new."""
    hidden, key_heads = config.hidden, config.get_size("linear_num_key_heads")
    key_dim = config.get_size("linear_key_head_dim")
    value_heads, value_dim = config.get_size("linear_num_value_heads"), config.get_size("linear_value_head_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    return Sublayer(
        matrices=(
            Matrix("linear_attn.in_proj_qkvz", hidden, 2 * keys + 2 * values),
            Matrix("linear_attn.in_proj_ba", hidden, 2 * value_heads),
            Matrix("linear_attn.out_proj", values, hidden, source="out"),
        ),
        unquantized=config.get_size("linear_conv_kernel_dim") * (2 * keys + values) + 2 * value_heads + value_dim,
        kept=12 * (keys + values),
        kept_float32=2 * values * key_dim,
    )


def short_convolution(config: ConfigReader) -> Sublayer:
    """LFM2's gated short convolution."""
    hidden, kernel, bias = config.hidden, config.get_size("conv_L_cache"), config.get_flag("conv_bias", False)
    return Sublayer(
        matrices=(
            Matrix("conv.in_proj", hidden, 3 * hidden, bias),
            Matrix("conv.out_proj", hidden, hidden, bias, source="out"),
        ),
        unquantized=hidden * (kernel + bias),
        kept=6 * hidden,
    )
