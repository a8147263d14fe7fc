"""The arithmetic of the stored forms: what is exact is exact, what is rounded has the right mean and bound."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.trainer.optimizer_state import compensated, decode_8bit, encode_8bit, rounded, split_remainder
from engine.trainer.weights import scalar

SEEDS = st.integers(0, 2**32 - 1)
DRAWS = 2**16


def patterns(seed: int, lowest: int, highest: int, count: int = 4096) -> mx.array:
    """Random float32 values of both signs, of all bits, with exponents from 2^lowest to below 2^highest."""
    dice = np.random.default_rng(seed)
    bits = (dice.integers(lowest + 127, highest + 127, count) << 23) | dice.integers(0, 2**23, count)
    return mx.array((bits | dice.integers(0, 2, count) << 31).astype(np.uint32)).view(mx.float32)


def same_bits(one: mx.array, other: mx.array) -> bool:
    return bool(mx.array_equal(one.view(mx.uint32), other.view(mx.uint32)).item())


def key(seed: int, update: int = 0) -> mx.array:
    return mx.concatenate([mx.random.key(seed), mx.array([update], mx.uint32)])


@given(SEEDS)
def test_bfloat16_and_its_remainder_hold_every_bit_of_float32(seed: int) -> None:
    value = patterns(seed, -126, 127)
    assert same_bits(compensated(*split_remainder(value, mx.bfloat16)), value)


@given(SEEDS)
def test_float16_and_its_remainder_hold_every_bit_in_its_normal_range(seed: int) -> None:
    value = patterns(seed, -14, 15)
    assert same_bits(compensated(*split_remainder(value, mx.float16)), value)


@given(SEEDS)
def test_below_float16s_normal_range_the_remainder_holds_the_rest_to_2_40(seed: int) -> None:
    value = patterns(seed, -40, -14)
    weight, remainder = split_remainder(value, mx.float16)
    assert scalar(mx.abs(compensated(weight, remainder) - value).max()) <= 2.0**-40


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 2.0 - 2.0**-23, -(2.0 - 2.0**-11)])
def test_ties_and_powers_of_two_are_exact_too(dtype: mx.Dtype, value: float) -> None:
    single = mx.array([value])
    assert same_bits(compensated(*split_remainder(single, dtype)), single)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_compensated_weight_is_the_nearest(dtype: mx.Dtype) -> None:
    """Random bits hardly ever are a tie, which alone is rounded otherwise."""
    value = patterns(1, -14, 15)
    assert mx.array_equal(split_remainder(value, dtype)[0], value.astype(dtype)).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@given(SEEDS)
def test_stochastic_rounding_takes_one_of_the_two_neighbours(dtype: mx.Dtype, seed: int) -> None:
    value = patterns(seed, -14, 15)
    result = rounded(value, dtype, key(seed))
    digits = 7 if dtype == mx.bfloat16 else 10
    magnitude, found = mx.abs(value), mx.abs(result.astype(mx.float32))
    spacing = mx.power(2.0, mx.floor(mx.log2(magnitude)) - digits)
    assert mx.all(mx.abs(found - magnitude) < spacing * (1 + 1e-5)).item()
    # A value that the type holds stays.
    assert mx.array_equal(rounded(result.astype(mx.float32), dtype, key(seed + 1)), result).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("value", [1.0 + 2.0**-12, -3.3, 1e-3, 6e-6])
def test_stochastic_rounding_has_the_right_mean_and_depends_on_the_key_alone(dtype: mx.Dtype, value: float) -> None:
    exact = mx.full((DRAWS,), value)
    result = rounded(exact, dtype, key(5))
    neighbours = sorted(set(np.asarray(result.astype(mx.float32)).tolist()))
    assert len(neighbours) == 2 and neighbours[0] < exact[0].item() < neighbours[1]
    # Five standard deviations of the mean of so many draws.
    tolerance = 5 * (neighbours[1] - neighbours[0]) / 2 / math.sqrt(DRAWS)
    assert abs(np.asarray(result.astype(mx.float32), np.float64).mean() - exact[0].item()) < tolerance
    assert mx.array_equal(rounded(exact, dtype, key(5)), result).item()
    assert not mx.array_equal(rounded(exact, dtype, key(6)), result).item()


def test_stochastic_rounding_lets_small_steps_add_up() -> None:
    """Each is a tenth of bfloat16's spacing at 1: after a thousand, independent draws would stray by 9 spacings."""
    weight, step = mx.ones((4096,), mx.bfloat16), 2.0**-7 / 10
    for update in range(1000):
        weight = rounded(weight.astype(mx.float32) + step, mx.bfloat16, key(5, update))
    spacings = (np.asarray(weight.astype(mx.float32), np.float64) - 1) * 2**7
    assert spacings.mean() == pytest.approx(100, rel=0.01)
    assert spacings.std() < 3


@given(SEEDS, st.integers(1, 300), st.floats(1e-12, 1e3))
def test_a_first_moment_of_8_bits_is_within_one_level(seed: int, size: int, largest: float) -> None:
    value = largest * mx.random.normal((size,), key=mx.random.key(seed))
    codes, scales = encode_8bit(value, key(seed), second=False)
    assert (codes.dtype, codes.shape, scales.shape) == (mx.int8, (size,), (-(-size // 64),))
    scale = mx.repeat(scales, 64)[:size]
    # The levels are k² / 127² of the largest: the one above |value| is less than this away.
    bound = scale * (2 * mx.sqrt(mx.abs(value) / scale) / 127 + 1 / 127**2) * 1.001
    assert mx.all(mx.abs(decode_8bit(codes, scales) - value) <= bound).item()


@given(SEEDS, st.integers(1, 300), st.floats(1e-9, 1e3))
def test_a_second_moment_of_8_bits_keeps_small_values_above_zero(seed: int, size: int, largest: float) -> None:
    """Over 18 decades. In a block below 5e-29, whose root is nothing beside Adam's epsilon, the least level is 0."""
    value = largest * mx.power(10.0, mx.random.uniform(-18, 0, (size,), key=mx.random.key(seed)))
    codes, scales = encode_8bit(value, key(seed), second=True)
    assert (codes.dtype, codes.shape) == (mx.uint8, (size,))
    found, scale = decode_8bit(codes, scales), mx.repeat(scales, 64)[:size]
    assert mx.all(codes > 0).item()
    root = mx.power(value / scale, 0.25)
    above, below = mx.square(mx.square(root + 1 / 255)), mx.square(mx.square(mx.maximum(root - 1 / 255, 0)))
    assert mx.all((found <= scale * above * 1.001) & (found >= scale * below * 0.999)).item()


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("share", [0.5, 1e-2, 3e-6])
def test_8_bits_have_the_right_mean(second: bool, share: float) -> None:
    values = np.full((DRAWS // 64, 64), share, np.float32)
    values[:, 0] = 1
    found = decode_8bit(*encode_8bit(mx.array(values), key(3), second=second))
    drawn = np.asarray(found, np.float64)[:, 1:]
    tolerance = 5 * drawn.std() / math.sqrt(drawn.size)
    assert abs(drawn.mean() - share) < tolerance + 1e-7 * share
    assert np.array_equal(np.asarray(found)[:, 0], values[:, 0])


@pytest.mark.parametrize("second", [False, True])
def test_zeros_stay_zeros(second: bool) -> None:
    value = mx.zeros((130,))
    codes, scales = encode_8bit(value, key(1), second=second)
    assert mx.array_equal(decode_8bit(codes, scales), value).item()
