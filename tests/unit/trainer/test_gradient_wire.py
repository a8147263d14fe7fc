"""Sums of gradients over ranks: exact in the types that carry them, and in int8 over several updates."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.exchange import INT8_BLOCK
from engine.trainer.collective import Collective
from engine.trainer.gradient_wire import INT4, INT8, BlockQuantization, GradientWire
from tests.training.together import together

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(1, 3 * INT8_BLOCK + 1)


def values(seed: int, size: int, scale: float = 1.0) -> mx.array:
    return mx.array((np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32))


def summed(kind: str, buckets: list[list[mx.array]], *, exact: set[int] | None = None) -> list[list[np.ndarray]]:
    """By rank, the sums of each update; `buckets` by rank and update."""

    def one(collective: Collective) -> list[np.ndarray]:
        wire, found = GradientWire(collective, kind), []
        for number, bucket in enumerate(buckets[collective.rank]):
            wire.start(0, bucket, None, exact=number in (exact or set()))
            total = wire.finish()
            assert total is not None and total.dtype == mx.float32 and wire.finish() is None
            found.append(np.asarray(total))
        return found

    return together(len(buckets), one)


FORMS = pytest.mark.parametrize("form", [INT8, INT4], ids=["int8", "int4"])


@FORMS
@given(SEEDS, SIZES, st.integers(-30, 30))
def test_values_are_within_half_a_step_of_their_block(
    form: BlockQuantization, seed: int, size: int, exponent: int
) -> None:
    mine = values(seed, size, 2.0**exponent)
    encoded = form.encode(mine)
    assert (encoded.dtype, encoded.size) == (mx.uint8, form.nbytes(size))
    off = np.abs(np.asarray(form.decode(encoded, size) - mine))
    greatest = np.abs(np.pad(np.asarray(mine), (0, -size % form.block))).reshape(-1, form.block).max(axis=1)
    assert np.all(off <= np.repeat(greatest, form.block)[:size] / form.levels * 0.501)


@FORMS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@given(SEEDS, SIZES)
def test_what_is_not_finite_stays_so(form: BlockQuantization, bad: float, seed: int, size: int) -> None:
    mine = np.array(values(seed, size))
    mine[seed % size] = bad
    assert not np.isfinite(np.asarray(form.decode(form.encode(mx.array(mine)), size))[seed % size])


@FORMS
def test_zeros_are_exact(form: BlockQuantization) -> None:
    assert np.asarray(form.decode(form.encode(mx.zeros(5)), 5)).tolist() == [0.0] * 5


def test_bytes_of_encoded_values() -> None:
    assert (INT8.nbytes(2**20) / 2**20, INT4.nbytes(2**20) / 2**20) == (1 + 4 / 256, 0.5 + 4 / 64)


@settings(max_examples=20)
@given(st.integers(2, 5), SEEDS, SIZES, st.sampled_from([mx.bfloat16, mx.float16, mx.float32]))
@pytest.mark.parametrize("kind", ["auto", "float32"])
def test_sums_are_in_float32_and_in_the_order_of_the_ranks(
    kind: str, ranks: int, seed: int, size: int, dtype: mx.Dtype
) -> None:
    buckets = [values(seed + rank, size).astype(dtype) for rank in range(ranks)]
    expected = np.asarray(buckets[0].astype(mx.float32))
    for bucket in buckets[1:]:
        expected = expected + np.asarray(bucket.astype(mx.float32))
    for (found,) in summed(kind, [[bucket] for bucket in buckets]):
        assert np.array_equal(found, expected)


@settings(max_examples=20)
@given(st.integers(2, 4), SEEDS, SIZES)
def test_what_int8_rounds_away_is_added_to_the_next_and_exact_updates_leave_none(
    ranks: int, seed: int, size: int
) -> None:
    """Four updates, of which the third is exact: until then everything has come; the fourth is as a first one."""
    buckets = [[values(seed + 10 * rank + update, size) for update in range(4)] for rank in range(ranks)]
    whole = [np.sum([np.asarray(own[update]) for own in buckets], axis=0) for update in range(4)]
    found = summed("int8", buckets, exact={2})
    assert all(np.array_equal(one, other) for ran in found[1:] for one, other in zip(found[0], ran, strict=True))
    # The rest is kept in bfloat16.
    step = max(np.abs(np.asarray(bucket)).max() for own in buckets for bucket in own) / 127
    assert np.allclose(sum(found[0][:3]), sum(whole[:3]), atol=ranks * step / 128)
    fresh = summed("int8", [[own[3]] for own in buckets])
    assert np.array_equal(found[0][3], fresh[0][0])


@pytest.mark.parametrize(
    ("kind", "dtype", "ranks", "sent"),
    [
        ("auto", mx.bfloat16, 3, ("gather", mx.bfloat16)),
        ("auto", mx.float16, 2, ("gather", mx.float16)),
        ("auto", mx.bfloat16, 4, ("sum", mx.float32)),
        ("auto", mx.float32, 2, ("sum", mx.float32)),
        ("float32", mx.bfloat16, 2, ("sum", mx.float32)),
        ("int8", mx.bfloat16, 2, ("gather", mx.uint8)),
    ],
)
def test_the_type_on_the_wire(kind: str, dtype: mx.Dtype, ranks: int, sent: tuple[str, mx.Dtype]) -> None:
    def one(collective: Collective) -> list[tuple[str, mx.Dtype]]:
        seen = []
        for name in ("sum", "gather"):
            started = getattr(collective, f"start_{name}")

            def start(array: mx.array, name: str = name, started: object = started) -> None:
                seen.append((name, array.dtype))
                assert callable(started)
                started(array)

            setattr(collective, f"start_{name}", start)
        wire = GradientWire(collective, kind)
        wire.start(0, mx.ones(INT8_BLOCK, dtype), None, exact=False)
        wire.finish()
        return seen

    assert together(ranks, one) == [[sent]] * ranks


def test_scaled_gradients_of_each_rank_are_divided_by_its_own_scale() -> None:
    def one(collective: Collective) -> list[list[float]]:
        found = []
        for kind in ("auto", "float32", "int8"):
            wire = GradientWire(collective, kind)
            scales = collective.gather_arrays(mx.array(2.0 ** -(collective.rank + 1)))
            wire.start(0, mx.full(2, 1.0, mx.float16), scales, exact=False)
            total = wire.finish()
            assert total is not None
            found.append(np.asarray(total).tolist())
        return found

    for found in together(2, one):
        assert found == [[6.0, 6.0]] * 2 + [pytest.approx([6.0, 6.0])]
