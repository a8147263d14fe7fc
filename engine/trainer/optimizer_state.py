"""The forms in which an optimizer's state is kept between updates: `optimizer_precision` and `moments`.

An update decodes a parameter and its moments to float32, takes the optimizer's step, and encodes the results:

- "kahan": a 16-bit weight and an int16 remainder. In bfloat16 they hold every bit of a float32 master, in float16 every
  bit of one in its normal range.
- "stochastic": a weight of 16 bits that is rounded up with the probability that makes its mean exact.
- moments "bfloat16": rounded like that, since a second moment that loses 0.1 % per update would round back to itself.
- moments "8bit": blocks of 64 (MOMENT_BLOCK) over their largest magnitude, a first moment as the signed square root
  (int8), a second moment as the fourth root (uint8): levels are close where values are small, down to 6e-5 and 2e-10 of
  the largest. Rounded so that the mean of the value is exact. Blockwise quantization: Dettmers et al., 8-bit Optimizers
  via Block-wise Quantization (2021).

Random bits are a function of a key: the same at each repetition, on every rank. From one update to the next an
element's are shifted by the golden ratio (Weyl's sequence): of n roundings of a value that lies a share p above its
lower neighbour, p n go up but for very few, where independent ones would stray by the root of n."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from engine.protocol.job import AUTO, MOMENT_BLOCK, Job

COMPENSATION = "compensation"
SCALE = "_scale"
"""After the name of an 8-bit moment: its scales, float32, one per block."""

_SECOND_MOMENTS = {"adam": ("v",), "adamw": ("v",), "adafactor": ("exp_avg_sq",)}
"""By optimizer, the moments of the parameter's shape that are means of squares: never negative."""
_EXPONENT = 0x7F800000
"""A float32's bits of the exponent."""
_SPACING = {mx.bfloat16: (2.0**-7, 2.0**-126), mx.float16: (2.0**-10, 2.0**-24)}
"""By type: the distance of neighbouring values from 1 to 2, and the least one (of bfloat16's normal numbers)."""
_GOLDEN = 40503
"""The golden ratio's fraction of 2^16."""
_FIRST_LEVELS, _SECOND_LEVELS = 127, 255


@dataclass(frozen=True)
class StateForm:
    """How one job keeps trained weights and moments. `stored` arrays are named by moment, COMPENSATION and SCALE."""

    precision: str
    moments: str
    second_moments: tuple[str, ...]

    @classmethod
    def of(cls, job: Job) -> StateForm:
        precision, moments = ("float32" if key == AUTO else key for key in (job.optimizer_precision, job.moments))
        return cls(precision, moments, _SECOND_MOMENTS.get(job.optimizer, ()))

    def keep(self, weight: mx.array) -> mx.array:
        """The weight between updates: a float32 master, or itself."""
        return weight.astype(mx.float32) if self.precision == "float32" else weight

    def computed(self, dtype: mx.Dtype) -> mx.Dtype:
        """The type in which the step of a parameter of `dtype` is computed."""
        return dtype if self.precision == "parameter" and self.moments == "float32" else mx.float32

    def summed(self, dtype: mx.Dtype) -> mx.Dtype:
        """The type of sums over the ranks until the step: bfloat16 if that rounds them to it; float16 has no room."""
        return mx.bfloat16 if self.computed(dtype) == mx.bfloat16 else mx.float32

    def initial(self, weight: mx.array, moments: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Stored arrays for `moments` that are all zero, and no compensation; lazy."""
        stored: dict[str, mx.array] = {}
        for name, value in moments.items():
            kind = self._kind(value, weight.shape)
            if kind == "8bit":
                stored[name] = mx.zeros(value.shape, mx.uint8 if name in self.second_moments else mx.int8)
                stored[name + SCALE] = mx.zeros(-(-value.size // MOMENT_BLOCK))
            else:
                stored[name] = value.astype(mx.bfloat16) if kind == "bfloat16" else value
        if self._compensates(weight.dtype):
            stored[COMPENSATION] = mx.zeros(weight.shape, mx.int16)
        return stored

    def decode(self, kept: mx.array, stored: Mapping[str, mx.array]) -> tuple[mx.array, dict[str, mx.array]]:
        """The parameter and its moments, in the type of the step."""
        moments = {}
        for name, value in stored.items():
            if value.dtype in (mx.int8, mx.uint8):
                moments[name] = decode_8bit(value, stored[name + SCALE])
            elif name != COMPENSATION and not name.endswith(SCALE):
                moments[name] = value.astype(mx.float32) if self.moments == "bfloat16" else value
        if COMPENSATION in stored:
            return compensated(kept, stored[COMPENSATION]), moments
        return kept.astype(self.computed(kept.dtype)), moments

    def encode(
        self, parameter: mx.array, moments: Mapping[str, mx.array], dtype: mx.Dtype, key: mx.array
    ) -> tuple[mx.array, dict[str, mx.array]]:
        """The weight of `dtype` to keep, and what is stored. `key`: uint32 [3], two of it, and the update's number."""
        stored: dict[str, mx.array] = {}
        if self._compensates(dtype):
            kept, stored[COMPENSATION] = split_remainder(parameter, dtype)
        elif self.precision == "stochastic" and dtype in _SPACING:
            kept = rounded(parameter, dtype, key)
        else:
            kept = parameter if self.precision == "float32" else parameter.astype(dtype)
        for number, (name, value) in enumerate(moments.items(), 1):
            kind = self._kind(value, parameter.shape)
            if kind == "8bit":
                # One after the other: each takes several float32 arrays of this size.
                after = mx.depends(value, [kept, *stored.values()])
                second = name in self.second_moments
                stored[name], stored[name + SCALE] = encode_8bit(after, _numbered(key, number), second=second)
            else:
                stored[name] = rounded(value, mx.bfloat16, _numbered(key, number)) if kind == "bfloat16" else value
        return kept, stored

    def _compensates(self, dtype: mx.Dtype) -> bool:
        return self.precision == "kahan" and dtype in _SPACING

    def _kind(self, moment: mx.array, shape: tuple[int, ...]) -> str:
        """Factored moments are small, and stay as they are."""
        return self.moments if moment.shape == shape else "float32"


def sliced(stored: Mapping[str, mx.array], part: slice) -> dict[str, mx.array]:
    """The arrays stored of a `part` of a parameter's elements, flat; it begins at a multiple of MOMENT_BLOCK."""
    blocks = slice(part.start // MOMENT_BLOCK, -(-part.stop // MOMENT_BLOCK))
    return {kind: value.reshape(-1)[blocks if kind.endswith(SCALE) else part] for kind, value in stored.items()}


def split_remainder(value: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """A float32 `value` as its nearest value in `dtype` and the rest, int16: see `compensated`."""
    if dtype == mx.bfloat16:
        # A tie is rounded away from zero: to even, some rest would be 2^15, which int16 lacks.
        bits = value.view(mx.uint32)
        upper = (bits + 0x8000) >> 16
        return upper.astype(mx.uint16).view(mx.bfloat16), (bits - (upper << 16)).view(mx.int32).astype(mx.int16)
    weight = value.astype(dtype)
    return weight, mx.round((value - weight.astype(mx.float32)) / _remainder_unit(weight)).astype(mx.int16)


def compensated(weight: mx.array, remainder: mx.array) -> mx.array:
    """The float32 value of `split_remainder`: bit for bit, but below float16's normal range to 2^-40."""
    if weight.dtype == mx.bfloat16:
        upper = weight.view(mx.uint16).astype(mx.uint32) << 16
        return (upper + remainder.astype(mx.int32).view(mx.uint32)).view(mx.float32)
    return weight.astype(mx.float32) + remainder.astype(mx.float32) * _remainder_unit(weight)


def _remainder_unit(weight: mx.array) -> mx.array:
    """A float16's remainder is at most half its spacing, 2^-11 of its power of two. One that was rounded up to a power
    of two has bits of the remainder down to 2^-24; one more keeps every value below 2^15."""
    return mx.maximum(_power(weight.astype(mx.float32)), 2.0**-14) * 2.0**-25


def _power(value: mx.array) -> mx.array:
    """The largest power of two in a float32's magnitude; 0 below the normal range."""
    return (value.view(mx.uint32) & _EXPONENT).view(mx.float32)


def rounded(value: mx.array, dtype: mx.Dtype, key: mx.array) -> mx.array:
    """A float32 `value` as one of its two neighbours in `dtype` (16 bits), whose mean over all keys it is."""
    relative, least = _SPACING[dtype]
    spacing = mx.maximum(_power(value) * relative, least)
    # bfloat16 drops 16 bits and float16 13, below at most 11: the sum is exact in float32 with as many random ones.
    unit = _uniform(key, value, 16 if dtype == mx.bfloat16 else 13)
    return (mx.floor(value / spacing + unit) * spacing).astype(dtype)


def encode_8bit(value: mx.array, key: mx.array, *, second: bool) -> tuple[mx.array, mx.array]:
    """Codes (of the shape of `value`: uint8 for a `second` moment, else int8) and the scale of each block, float32."""
    blocks = _blocks(mx.abs(value))
    scales = blocks.max(axis=1)
    share = (blocks / mx.where(scales > 0, scales, 1.0)[:, None]).reshape(-1)[: value.size].reshape(value.shape)
    unit = _uniform(key, value, 16)
    if second:
        target = share * _SECOND_LEVELS**4
        lower = mx.floor(mx.sqrt(mx.sqrt(target)))
        here, above = mx.square(mx.square(lower)), mx.square(mx.square(lower + 1))
        code = mx.minimum(lower + (unit * (above - here) < target - here), _SECOND_LEVELS)
        # At zero, the step of a small first moment would be divided by epsilon alone.
        return mx.maximum(code, value > 0).astype(mx.uint8), scales
    target = share * _FIRST_LEVELS**2
    lower = mx.floor(mx.sqrt(target))
    code = mx.minimum(lower + (unit * (2 * lower + 1) < target - mx.square(lower)), _FIRST_LEVELS)
    return (code * mx.sign(value)).astype(mx.int8), scales


def decode_8bit(codes: mx.array, scales: mx.array) -> mx.array:
    """The moment of `encode_8bit`, float32."""
    levels = codes.astype(mx.float32)
    if codes.dtype == mx.uint8:
        values, most = mx.square(mx.square(levels)), float(_SECOND_LEVELS**4)
    else:
        values, most = levels * mx.abs(levels), float(_FIRST_LEVELS**2)
    return (_blocks(values) * (scales / most)[:, None]).reshape(-1)[: codes.size].reshape(codes.shape)


def _blocks(value: mx.array) -> mx.array:
    """[blocks, MOMENT_BLOCK]; the last is filled up with zeros."""
    flat = value.reshape(-1)
    missing = -flat.size % MOMENT_BLOCK
    return (mx.pad(flat, (0, missing)) if missing else flat).reshape(-1, MOMENT_BLOCK)


def _numbered(key: mx.array, number: int) -> mx.array:
    """Another key for each number."""
    return key + mx.array([number * 0x9E3779B9 % 2**32, 0, 0], mx.uint32)


def _uniform(key: mx.array, like: mx.array, bits: int) -> mx.array:
    """Multiples of 2^-bits from 0 to below 1, float32, of the shape of `like`; at most 16 bits."""
    # A split is the cheapest way to random bits: 64 of them, for four elements.
    words = mx.random.split(key[:2], -(-like.size // 4)).view(mx.uint16).reshape(-1)[: like.size].reshape(like.shape)
    shifted = words + (key[2] * _GOLDEN).astype(mx.uint16)
    return (shifted >> (16 - bits)).astype(mx.float32) * 2.0**-bits
